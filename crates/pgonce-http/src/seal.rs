//! Stored bodies, unreadable to whoever can read the database or a cache: XChaCha20-Poly1305.
//!
//! A sealed body opens only as the answer that it was: tenant, scope, key, fingerprint and response code are
//! bound to it, so a row that was copied under another name, or whose code was changed, does not open. The key's
//! id is stored beside the body, so keys can be replaced: new bodies are sealed with the current one, and the
//! others still open what they sealed.

use std::collections::HashMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chacha20poly1305::aead::{Aead as _, Generate as _, KeyInit as _, Payload};
use chacha20poly1305::{XChaCha20Poly1305, XNonce};
use pgonce::IntentName;

/// The first byte of a sealed body: how the rest is laid out. After it the nonce, then ciphertext and tag.
const VERSION: u8 = 1;
const NONCE_BYTES: usize = 24;
const TAG_BYTES: usize = 16;
/// The longest id of a key.
const KEY_ID_BYTES_MAX: usize = 64;

/// A secret key of 32 bytes.
#[derive(Clone)]
pub struct SealKey(XChaCha20Poly1305);

impl std::fmt::Debug for SealKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SealKey")
    }
}

impl SealKey {
    /// From its 32 bytes.
    #[must_use]
    pub fn new(bytes: &[u8; 32]) -> Self {
        Self(XChaCha20Poly1305::new(bytes.into()))
    }

    /// From base64 or hex of 32 bytes, as `openssl rand -base64 32` and `openssl rand -hex 32` write them.
    ///
    /// # Errors
    /// Where it is neither; what was given is not repeated.
    pub fn parse(text: &str) -> Result<Self, KeyringError> {
        let text = text.trim();
        let bytes = if text.len() == 64 && text.is_ascii() {
            (0..64).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).ok()).collect()
        } else {
            STANDARD.decode(text).ok()
        };
        match bytes.and_then(|bytes| <[u8; 32]>::try_from(bytes).ok()) {
            Some(bytes) => Ok(Self::new(&bytes)),
            None => Err(KeyringError::KeyMalformed),
        }
    }
}

/// What is wrong with a keyring.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeyringError {
    /// A key is not 32 bytes, in base64 or hex.
    #[error("a sealing key is 32 bytes in base64 or hex: openssl rand -base64 32 makes one")]
    KeyMalformed,
    /// An id does not fit where it is stored.
    #[error("the id of a sealing key is 1 to 64 visible ASCII characters without spaces")]
    IdMalformed,
    /// Two keys have this id.
    #[error("two sealing keys have the id {0}")]
    IdTwice(String),
    /// The current id has no key.
    #[error("there is no sealing key with the id {0}, which is to be the current one")]
    CurrentUnknown(String),
}

/// Why a body was not sealed or cannot be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SealError {
    /// It was sealed with a key that is not here.
    #[error(
        "the effect is done, and its response cannot be read: it was sealed with the key {key_id}, which is not in \
         the keyring; add the key"
    )]
    KeyUnknown {
        /// The key's id.
        key_id: String,
    },
    /// Another key, another intent, another code, or changed bytes.
    #[error(
        "the effect is done, and its response cannot be read: the sealed bytes, or the row they belong to, were \
         changed, or the key with this id is another one than the one that sealed them"
    )]
    Damaged,
    /// No random bytes, or a body beyond the cipher's limit of 256 GiB.
    #[error("the response could not be sealed; it must not be stored as it is")]
    NotSealed,
}

/// A sealed body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sealed {
    /// Which key opens it.
    pub key_id: String,
    /// Version, nonce, ciphertext and tag.
    pub bytes: Vec<u8>,
}

/// The keys that open, and the one that seals.
#[derive(Debug, Clone)]
pub struct Keyring {
    current: String,
    keys: HashMap<String, SealKey>,
}

impl Keyring {
    /// Keys by id, of which one is current.
    ///
    /// # Errors
    /// See [`KeyringError`].
    pub fn new(
        current: impl Into<String>,
        keys: impl IntoIterator<Item = (String, SealKey)>,
    ) -> Result<Self, KeyringError> {
        let mut ring = Self { current: current.into(), keys: HashMap::new() };
        for (id, key) in keys {
            if !(1..=KEY_ID_BYTES_MAX).contains(&id.len()) || !id.bytes().all(|byte| byte.is_ascii_graphic()) {
                return Err(KeyringError::IdMalformed);
            }
            if ring.keys.insert(id.clone(), key).is_some() {
                return Err(KeyringError::IdTwice(id));
            }
        }
        match ring.keys.contains_key(&ring.current) {
            true => Ok(ring),
            false => Err(KeyringError::CurrentUnknown(ring.current)),
        }
    }

    /// Seals a body as the answer of this intent, with this code.
    ///
    /// # Errors
    /// [`SealError::NotSealed`].
    pub fn seal(&self, name: &IntentName, code: Option<i32>, body: &[u8]) -> Result<Sealed, SealError> {
        let key = self.keys.get(&self.current).ok_or(SealError::NotSealed)?;
        let nonce = XNonce::try_generate().map_err(|_| SealError::NotSealed)?;
        let aad = associated(&self.current, name, code);
        let sealed = key.0.encrypt(&nonce, Payload { msg: body, aad: &aad }).map_err(|_| SealError::NotSealed)?;
        let mut bytes = Vec::with_capacity(1 + NONCE_BYTES + sealed.len());
        bytes.push(VERSION);
        bytes.extend_from_slice(&nonce);
        bytes.extend_from_slice(&sealed);
        Ok(Sealed { key_id: self.current.clone(), bytes })
    }

    /// Opens a body as the answer of this intent, with this code.
    ///
    /// # Errors
    /// See [`SealError`]: the effect is done in any case.
    pub fn open(&self, key_id: &str, name: &IntentName, code: Option<i32>, bytes: &[u8]) -> Result<Vec<u8>, SealError> {
        let key = self.keys.get(key_id).ok_or_else(|| SealError::KeyUnknown { key_id: key_id.to_owned() })?;
        let Some((&VERSION, rest)) = bytes.split_first() else { return Err(SealError::Damaged) };
        if rest.len() < NONCE_BYTES + TAG_BYTES {
            return Err(SealError::Damaged);
        }
        let (nonce, sealed) = rest.split_at(NONCE_BYTES);
        let nonce = XNonce::try_from(nonce).map_err(|_| SealError::Damaged)?;
        let aad = associated(key_id, name, code);
        key.0.decrypt(&nonce, Payload { msg: sealed, aad: &aad }).map_err(|_| SealError::Damaged)
    }
}

/// What a body is bound to, each part behind its length, so that no part can flow into the next.
fn associated(key_id: &str, name: &IntentName, code: Option<i32>) -> Vec<u8> {
    let code = code.map(i32::to_be_bytes);
    let parts: [&[u8]; 7] = [
        b"pgonce response 1",
        key_id.as_bytes(),
        name.tenant.as_bytes(),
        name.scope.as_bytes(),
        name.key.as_bytes(),
        &name.fingerprint.0,
        code.as_ref().map_or(&[], |code| code.as_slice()),
    ];
    let mut out = Vec::new();
    for part in parts {
        out.extend_from_slice(&(part.len() as u64).to_be_bytes());
        out.extend_from_slice(part);
    }
    out
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on should stop, loudly")]
mod tests {
    use pgonce::fingerprint_bytes;

    use super::*;

    const BODY: &[u8] = b"{\"card\":\"4242\"}";

    fn name() -> IntentName {
        IntentName {
            tenant: "acme".into(),
            scope: "pay".into(),
            key: "k-1".into(),
            fingerprint: fingerprint_bytes(b"1", "", ""),
        }
    }

    fn ring(current: &str, keys: &[(&str, u8)]) -> Keyring {
        Keyring::new(current, keys.iter().map(|(id, byte)| ((*id).to_owned(), SealKey::new(&[*byte; 32])))).unwrap()
    }

    #[test]
    fn what_was_sealed_opens_and_shows_nothing() {
        let ring = ring("a", &[("a", 1)]);
        for body in [b"".as_slice(), BODY, &[0; 100_000]] {
            let sealed = ring.seal(&name(), Some(201), body).unwrap();
            assert_eq!(ring.open(&sealed.key_id, &name(), Some(201), &sealed.bytes).unwrap(), body);
            assert_eq!(sealed.bytes.len(), 1 + NONCE_BYTES + body.len() + TAG_BYTES);
            let again = ring.seal(&name(), Some(201), body).unwrap();
            assert_ne!(again.bytes, sealed.bytes, "no two are alike: nonces are random");
        }
        let sealed = ring.seal(&name(), None, BODY).unwrap();
        assert!(!sealed.bytes.windows(4).any(|window| window == b"4242"));
        assert_eq!(ring.open("a", &name(), None, &sealed.bytes).unwrap(), BODY);
    }

    #[test]
    fn it_opens_as_nobody_elses_answer() {
        let ring = ring("a", &[("a", 1), ("b", 1)]);
        let sealed = ring.seal(&name(), Some(201), BODY).unwrap().bytes;
        let other = |change: fn(&mut IntentName)| {
            let mut name = name();
            change(&mut name);
            name
        };
        let names = [
            other(|name| name.tenant = "rival".into()),
            other(|name| name.scope = "refund".into()),
            other(|name| name.key = "k-2".into()),
            other(|name| name.fingerprint = fingerprint_bytes(b"2", "", "")),
            // The same letters, split elsewhere.
            other(|name| (name.tenant, name.scope) = ("acmep".into(), "ay".into())),
            other(|name| (name.scope, name.key) = ("payk".into(), "-1".into())),
        ];
        for name in names {
            assert!(matches!(ring.open("a", &name, Some(201), &sealed), Err(SealError::Damaged)), "{name:?}");
        }
        for code in [Some(200), Some(0), None] {
            assert!(matches!(ring.open("a", &name(), code, &sealed), Err(SealError::Damaged)), "{code:?}");
        }
        assert!(matches!(ring.open("b", &name(), Some(201), &sealed), Err(SealError::Damaged)), "another key's name");
        assert_eq!(ring.open("a", &name(), Some(201), &sealed).unwrap(), BODY);
    }

    #[test]
    fn a_changed_or_shortened_body_does_not_open() {
        let ring = ring("a", &[("a", 1)]);
        let sealed = ring.seal(&name(), Some(201), BODY).unwrap().bytes;
        for at in 0..sealed.len() {
            let mut tampered = sealed.clone();
            tampered[at] ^= 1;
            assert!(matches!(ring.open("a", &name(), Some(201), &tampered), Err(SealError::Damaged)), "byte {at}");
            assert!(
                matches!(ring.open("a", &name(), Some(201), &sealed[..at]), Err(SealError::Damaged)),
                "cut at {at}"
            );
        }
        let longer = [sealed.as_slice(), b"x"].concat();
        assert!(matches!(ring.open("a", &name(), Some(201), &longer), Err(SealError::Damaged)));
        assert!(matches!(ring.open("a", &name(), Some(201), BODY), Err(SealError::Damaged)), "never sealed");
    }

    #[test]
    fn keys_rotate() {
        let before = ring("2025", &[("2025", 1)]);
        let old = before.seal(&name(), Some(201), BODY).unwrap();
        let after = ring("2026", &[("2025", 1), ("2026", 2)]);
        let new = after.seal(&name(), Some(201), BODY).unwrap();
        assert_eq!((old.key_id.as_str(), new.key_id.as_str()), ("2025", "2026"));
        assert_eq!(after.open(&old.key_id, &name(), Some(201), &old.bytes).unwrap(), BODY, "old keys still open");
        assert_eq!(after.open(&new.key_id, &name(), Some(201), &new.bytes).unwrap(), BODY);
        let error = before.open(&new.key_id, &name(), Some(201), &new.bytes).unwrap_err();
        assert!(matches!(&error, SealError::KeyUnknown { key_id } if key_id == "2026"));
        assert!(error.to_string().contains("the effect is done"));
        let impostor = ring("2025", &[("2025", 9)]);
        let error = impostor.open(&old.key_id, &name(), Some(201), &old.bytes).unwrap_err();
        assert!(matches!(error, SealError::Damaged), "another key under the same id");
    }

    #[test]
    fn keyrings_are_checked() {
        let key = || SealKey::new(&[1; 32]);
        let new = |current: &str, ids: &[&str]| Keyring::new(current, ids.iter().map(|id| ((*id).to_owned(), key())));
        assert!(matches!(new("a", &["b"]), Err(KeyringError::CurrentUnknown(_))));
        assert!(matches!(new("a", &["a", "a"]), Err(KeyringError::IdTwice(_))));
        assert!(matches!(new("", &[""]), Err(KeyringError::IdMalformed)));
        assert!(matches!(new("a b", &["a b"]), Err(KeyringError::IdMalformed)));
        assert!(matches!(new("é", &["é"]), Err(KeyringError::IdMalformed)));
        assert!(new("a", &["a", "b"]).is_ok());
        let ring = ring("a", &[("a", 0xab)]);
        let sealed = ring.seal(&name(), None, BODY).unwrap();
        for text in ["q6urq6urq6urq6urq6urq6urq6urq6urq6urq6urq6s=\n", &"ab".repeat(32), &"AB".repeat(32)] {
            let same = Keyring::new("a", [("a".to_owned(), SealKey::parse(text).unwrap())]).unwrap();
            assert_eq!(same.open("a", &name(), None, &sealed.bytes).unwrap(), BODY, "{text}");
        }
        for text in ["", "abc", &"ab".repeat(31), &"zz".repeat(32), "c2hvcnQ="] {
            let error = SealKey::parse(text).unwrap_err().to_string();
            assert!(text.is_empty() || !error.contains(text));
        }
        assert!(!format!("{ring:?}").contains("171"), "keys are not shown");
    }
}
