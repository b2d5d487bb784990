//! What is written to Redis, and how much of what comes back is believed: all of it or nothing.
//!
//! Version, MAC, fingerprint, length of the head, head (JSON), body. The MAC is over all of that and the intent's
//! name, which is not in the value: a value that was copied to another intent's key does not verify, and raw keys
//! stay out of Redis. With a secret, nobody without it can write a value that is believed; without one the MAC is a
//! checksum, and whoever can write to that Redis can forge answers.

use std::time::{Duration, Instant};

use hmac::{Hmac, KeyInit as _, Mac as _};
use pgonce::{Answer, Fingerprint};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

use super::{CacheConfigError, Id, Replay};

const VERSION: u8 = 1;
const MAC_BYTES: usize = 32;
/// The key where there is no secret. Never to be changed without the version.
const CHECKSUM: &[u8] = b"pgonce replay cache 1: a checksum, no secret";
/// The shortest secret.
const SECRET_BYTES_MIN: usize = 32;

/// Writes and reads values.
#[derive(Clone)]
pub(super) struct Envelopes(Hmac<Sha256>);

/// All but the fingerprint and the body.
#[derive(Serialize, Deserialize)]
struct Head {
    code: Option<i32>,
    /// JSON in JSON: a JSON null and no headers at all are two things.
    headers: Option<String>,
    has_body: bool,
    result_type: Option<String>,
    result_id: Option<String>,
    /// How much longer the row lives than this value, in milliseconds; none: for ever.
    beyond_ms: Option<u64>,
}

impl Envelopes {
    pub(super) fn new(secret: Option<&[u8]>) -> Result<Self, CacheConfigError> {
        if secret.is_some_and(|secret| secret.len() < SECRET_BYTES_MIN) {
            return Err(CacheConfigError(format!("a secret needs {SECRET_BYTES_MIN} bytes or more")));
        }
        let mac = Hmac::new_from_slice(secret.unwrap_or(CHECKSUM));
        mac.map(Self).map_err(|error| CacheConfigError(format!("the secret: {error}")))
    }

    fn mac(&self, id: &Id, rest: &[u8]) -> Hmac<Sha256> {
        let mut mac = self.0.clone();
        mac.update(&[VERSION]);
        mac.update(&id.0);
        mac.update(rest);
        mac
    }

    /// The value that is to live for `lifetime`, from `now` on.
    pub(super) fn write(&self, id: &Id, replay: &Replay, now: Instant, lifetime: Duration) -> Option<Vec<u8>> {
        let Answer { code, headers, body, result_type, result_id } = &replay.answer;
        let beyond = replay.fresh_at(now).map(|fresh_for| fresh_for.saturating_sub(lifetime));
        let head = serde_json::to_vec(&Head {
            code: *code,
            headers: headers.as_ref().map(ToString::to_string),
            has_body: body.is_some(),
            result_type: result_type.clone(),
            result_id: result_id.clone(),
            beyond_ms: beyond.map(|beyond| u64::try_from(beyond.as_millis()).unwrap_or(u64::MAX)),
        })
        .ok()?;
        let mut value = vec![VERSION];
        value.extend_from_slice(&[0; MAC_BYTES]);
        value.extend_from_slice(&replay.fingerprint.0);
        value.extend_from_slice(&u32::try_from(head.len()).ok()?.to_be_bytes());
        value.extend_from_slice(&head);
        value.extend_from_slice(body.as_deref().unwrap_or_default());
        let mac = self.mac(id, &value[1 + MAC_BYTES..]).finalize().into_bytes();
        value[1..=MAC_BYTES].copy_from_slice(&mac);
        Some(value)
    }

    /// What a value says that still lives for `ttl`, from `now` on. None: it was not written by us for this intent.
    pub(super) fn read(&self, id: &Id, value: &[u8], now: Instant, ttl: Duration) -> Option<Replay> {
        let (&VERSION, rest) = value.split_first()? else { return None };
        let (mac, rest) = rest.split_at_checked(MAC_BYTES)?;
        self.mac(id, rest).verify_slice(mac).ok()?;
        let (fingerprint, rest) = rest.split_first_chunk::<32>()?;
        let (length, rest) = rest.split_first_chunk::<4>()?;
        let (head, body) = rest.split_at_checked(usize::try_from(u32::from_be_bytes(*length)).ok()?)?;
        let head: Head = serde_json::from_slice(head).ok()?;
        let headers = head.headers.map(|text| serde_json::from_str(&text)).transpose().ok()?;
        let answer = Answer {
            code: head.code,
            headers,
            body: head.has_body.then(|| body.to_vec()),
            result_type: head.result_type,
            result_id: head.result_id,
        };
        let fresh_for = head.beyond_ms.map(|beyond| ttl.saturating_add(Duration::from_millis(beyond)));
        Some(Replay::new(Fingerprint(*fingerprint), answer, fresh_for, now))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on should stop, loudly")]
mod tests {
    use serde_json::json;

    use super::super::tests::replay;
    use super::*;

    const TTL: Duration = Duration::from_secs(10);

    #[test]
    fn what_is_written_is_read_again_to_the_byte() {
        let envelopes = Envelopes::new(Some(&[7; 32])).unwrap();
        let (id, now) = (Id::of("acme", "pay", "k"), Instant::now());
        let full = Answer {
            code: Some(201),
            headers: Some(json!([["x", "ÿ\u{0}"], [":sealed", "k1"]])),
            body: Some((0..=255).collect()),
            result_type: Some("order".into()),
            result_id: Some(String::new()),
        };
        let answers = [
            full.clone(),
            Answer::default(),
            Answer { headers: Some(json!(null)), body: Some(vec![]), ..Answer::default() },
            Answer { headers: Some(json!({"n": 1.5e300, "i": u64::MAX})), ..full },
        ];
        for answer in answers {
            let told = Replay { answer, ..replay(b"", None) };
            let value = envelopes.write(&id, &told, now, TTL).unwrap();
            let read = envelopes.read(&id, &value, now, TTL).unwrap();
            assert_eq!((&read.answer, read.fingerprint), (&told.answer, told.fingerprint));
            assert_eq!(read.fresh_at(now), None);
        }
    }

    #[test]
    fn the_rows_life_goes_on_beyond_the_values() {
        let envelopes = Envelopes::new(None).unwrap();
        let (id, told) = (Id::of("", "s", "k"), replay(b"x", Some(Duration::from_secs(3600))));
        let value = envelopes.write(&id, &told, told.asked_at, Duration::from_secs(600)).unwrap();
        let read = envelopes.read(&id, &value, told.asked_at, Duration::from_secs(60)).unwrap();
        assert_eq!(read.fresh_at(told.asked_at), Some(Duration::from_secs(3060)), "540 s later");
    }

    #[test]
    fn nothing_else_is_believed() {
        let now = Instant::now();
        let (envelopes, id) = (Envelopes::new(Some(&[7; 32])).unwrap(), Id::of("acme", "pay", "k"));
        let value = envelopes.write(&id, &replay(b"body", None), now, TTL).unwrap();
        let read = |envelopes: &Envelopes, id: &Id, value: &[u8]| envelopes.read(id, value, now, TTL);
        assert!(read(&envelopes, &id, &value).is_some());
        for at in 0..value.len() {
            let mut lie = value.clone();
            lie[at] ^= 1;
            assert_eq!(read(&envelopes, &id, &lie), None, "byte {at}");
            assert_eq!(read(&envelopes, &id, &value[..at]), None, "cut at {at}");
        }
        assert_eq!(read(&envelopes, &id, &[value.as_slice(), b"x"].concat()), None);
        for other in [Id::of("rival", "pay", "k"), Id::of("acme", "refund", "k"), Id::of("acme", "pay", "k2")] {
            assert_eq!(read(&envelopes, &other, &value), None, "another intent's");
        }
        for secret in [None, Some([8; 32].as_slice())] {
            assert_eq!(read(&Envelopes::new(secret).unwrap(), &id, &value), None, "another secret");
        }
        assert!(Envelopes::new(Some(&[7; 31])).is_err());
        // Rightly signed, and still not as we write it.
        for rest in [b"".as_slice(), &[0; 31], &[0; 36], &[[0; 32].as_slice(), &[0xff; 4], b"{}"].concat()] {
            let mac = envelopes.mac(&id, rest).finalize().into_bytes();
            assert_eq!(read(&envelopes, &id, &[&[VERSION], mac.as_slice(), rest].concat()), None);
        }
    }
}
