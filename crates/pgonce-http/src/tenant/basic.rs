//! A tenant by user and password.

use std::collections::HashMap;
use std::str::FromStr as _;
use std::sync::atomic::{AtomicUsize, Ordering};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chacha20poly1305::aead::Generate as _;
use hmac::{Hmac, KeyInit as _, Mac as _};
use http::HeaderMap;
use http::header::AUTHORIZATION;
use quick_cache::sync::Cache;
use sha2::Sha256;
use tokio::sync::Semaphore;

use super::{TenantConfigError, TenantError, after_scheme, header_text, is_tenant, refused};

/// How many verified credentials are remembered.
const REMEMBERED_MAX: usize = 10_000;
/// How many passwords may wait to be verified.
const WAITING_MAX: usize = 32;
/// The highest cost that htpasswd writes; beyond, one password takes many seconds.
const COST_MAX: u32 = 17;

/// Users and their passwords' bcrypt hashes, as `htpasswd -B` writes them.
///
/// bcrypt is slow by design, so a pair that was right is remembered (keyed by a secret of this process, not as
/// it is), and few are verified at a time. An unknown user takes as long as a wrong password; give all users
/// the same cost, or the time tells them apart.
pub struct BasicUsers {
    hashes: HashMap<String, String>,
    /// What the password of an unknown user is compared with.
    decoy: String,
    verified: Cache<[u8; 32], ()>,
    secret: Hmac<Sha256>,
    turns: Semaphore,
    waiting: AtomicUsize,
}

impl std::fmt::Debug for BasicUsers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BasicUsers").field("users", &self.hashes.len()).finish_non_exhaustive()
    }
}

impl BasicUsers {
    /// Reads the text of a file that `htpasswd -B` wrote: `user:hash` lines, comments with `#`.
    ///
    /// # Errors
    /// With the number of the first line that is not so, or where there is no user.
    pub fn parse(text: &str) -> Result<Self, TenantConfigError> {
        let mut hashes = HashMap::new();
        let mut cost_max = 0;
        for (number, line) in (1..).zip(text.lines()) {
            let line = line.trim_end();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let wrong = |what: &str| TenantConfigError(format!("password file, line {number}: {what}"));
            let (user, hash) = line.split_once(':').ok_or_else(|| wrong("expected user:hash"))?;
            if !is_tenant(user) {
                return Err(wrong("the user is empty, longer than 255 bytes, or has control characters"));
            }
            let cost = bcrypt::HashParts::from_str(hash).map(|parts| parts.get_cost()).unwrap_or_default();
            if !(4..=COST_MAX).contains(&cost) {
                return Err(wrong("not a bcrypt hash of cost 4 to 17: write it with htpasswd -B"));
            }
            cost_max = cost_max.max(cost);
            if hashes.insert(user.to_owned(), hash.to_owned()).is_some() {
                return Err(wrong("the user is there twice"));
            }
        }
        if hashes.is_empty() {
            return Err(TenantConfigError("password file: no user in it".into()));
        }
        let key = chacha20poly1305::Key::try_generate()
            .map_err(|error| TenantConfigError(format!("the system gives no random bytes: {error}")))?;
        let secret = Hmac::<Sha256>::new_from_slice(&key)
            .map_err(|error| TenantConfigError(format!("the process's secret: {error}")))?;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(Self {
            hashes,
            decoy: format!("$2y${cost_max:02}${}", ".".repeat(53)),
            verified: Cache::new(REMEMBERED_MAX),
            secret,
            turns: Semaphore::new((cores / 2).max(1)),
            waiting: AtomicUsize::new(0),
        })
    }

    pub(super) async fn tenant(&self, headers: &HeaderMap) -> Result<String, TenantError> {
        let text = header_text(headers, &AUTHORIZATION)?.ok_or(TenantError::Missing)?;
        let encoded = after_scheme(text, "Basic").ok_or(TenantError::Missing)?;
        let pair = STANDARD.decode(encoded).ok().and_then(|pair| String::from_utf8(pair).ok());
        let pair = pair.ok_or_else(|| refused("the credentials are not base64 of UTF-8"))?;
        let (user, password) = pair.split_once(':').ok_or_else(|| refused("the credentials have no colon"))?;
        if pair.chars().any(char::is_control) {
            return Err(refused("the credentials have control characters"));
        }
        match self.verify(user, password).await? {
            true => Ok(user.to_owned()),
            // Nothing here says whether there is such a user.
            false => Err(refused("unknown user or wrong password")),
        }
    }

    async fn verify(&self, user: &str, password: &str) -> Result<bool, TenantError> {
        let mut mac = self.secret.clone();
        mac.update(&(user.len() as u64).to_be_bytes());
        mac.update(user.as_bytes());
        mac.update(password.as_bytes());
        let remembered: [u8; 32] = mac.finalize().into_bytes().into();
        if self.verified.get(&remembered).is_some() {
            return Ok(true);
        }
        let _waits = Waits::enter(&self.waiting)?;
        let _turn = self.turns.acquire().await.map_err(|_| TenantError::Busy)?;
        let known = self.hashes.get(user);
        let (hash, password) = (known.unwrap_or(&self.decoy).clone(), password.to_owned());
        let same = tokio::task::spawn_blocking(move || bcrypt::verify(password, &hash)).await;
        let right = known.is_some() && matches!(same, Ok(Ok(true)));
        if right {
            self.verified.insert(remembered, ());
        }
        Ok(right)
    }
}

/// A place among those who wait, given back however the wait ends.
struct Waits<'a>(&'a AtomicUsize);

impl<'a> Waits<'a> {
    fn enter(waiting: &'a AtomicUsize) -> Result<Self, TenantError> {
        let place = Self(waiting);
        match waiting.fetch_add(1, Ordering::AcqRel) < WAITING_MAX {
            true => Ok(place),
            false => Err(TenantError::Busy),
        }
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on should stop, loudly")]
mod tests {
    use std::sync::Arc;

    use futures_util::future::join_all;
    use http::HeaderValue;

    use super::*;
    use crate::tenant::{PeerIdentity, TenantSource};

    /// `htpasswd -nbB -C 4`: acme with "open sesame", zoë with "a:b".
    fn users() -> Arc<BasicUsers> {
        let hash =
            |password: &str| bcrypt::hash_with_result(password, 4).unwrap().format_for_version(bcrypt::Version::TwoY);
        let text = format!("# users\nacme:{}\n\nzoë:{}\r\n", hash("open sesame"), hash("a:b"));
        Arc::new(BasicUsers::parse(&text).unwrap())
    }

    async fn of(users: &Arc<BasicUsers>, credentials: &[u8]) -> Result<String, TenantError> {
        sent(users, &format!("bAsIc {}", STANDARD.encode(credentials))).await
    }

    async fn sent(users: &Arc<BasicUsers>, value: &str) -> Result<String, TenantError> {
        let headers = HeaderMap::from_iter([(AUTHORIZATION, HeaderValue::from_str(value).unwrap())]);
        TenantSource::Basic(Arc::clone(users)).tenant(&headers, &PeerIdentity::default()).await
    }

    #[tokio::test]
    async fn the_user_is_the_tenant_where_the_password_is_right() {
        let users = users();
        for _ in 0..2 {
            assert_eq!(of(&users, b"acme:open sesame").await.unwrap(), "acme");
            assert_eq!(of(&users, "zoë:a:b".as_bytes()).await.unwrap(), "zoë");
        }
        assert_eq!(users.verified.len(), 2, "right ones are remembered");
        for wrong in ["acme:Open sesame", "acme:", "acme:a:b", "rival:open sesame", ":", "acme", "acme:open sesame\0x"]
        {
            assert_eq!(of(&users, wrong.as_bytes()).await, Err(TenantError::Refused), "{wrong:?}");
        }
        // What is remembered is the pair: no other split of the same text.
        assert_eq!(of(&users, b"acm:eopen sesame").await, Err(TenantError::Refused));
        assert_eq!(users.verified.len(), 2, "wrong ones are not");
        assert_eq!(of(&users, b"acme\xff:open sesame").await, Err(TenantError::Refused));
        assert_eq!(sent(&users, "Basic %%%").await, Err(TenantError::Refused));
        assert_eq!(sent(&users, "Bearer abc").await, Err(TenantError::Missing));
        let nothing = TenantSource::Basic(users).tenant(&HeaderMap::new(), &PeerIdentity::default()).await;
        assert_eq!(nothing, Err(TenantError::Missing));
    }

    #[tokio::test]
    async fn an_unknown_user_costs_as_much_as_a_wrong_password() {
        let users = users();
        assert_eq!(bcrypt::HashParts::from_str(&users.decoy).unwrap().get_cost(), 4, "it costs as much as a user's");
        assert!(bcrypt::verify("x", &users.decoy).is_ok(), "it is verified, not refused at once");
    }

    #[tokio::test]
    async fn a_flood_of_new_passwords_is_bounded_and_leaves_the_remembered_alone() {
        let users = users();
        of(&users, b"acme:open sesame").await.unwrap();
        // Nobody gets a turn until everybody has come.
        let turns = users.turns.acquire_many(u32::try_from(users.turns.available_permits()).unwrap()).await.unwrap();
        let busy = AtomicUsize::new(0);
        let flood = (0..200).map(async |n| match of(&users, format!("acme:guess {n}").as_bytes()).await {
            Err(TenantError::Busy) => _ = busy.fetch_add(1, Ordering::AcqRel),
            answer => assert_eq!(answer, Err(TenantError::Refused)),
        });
        let meanwhile = async {
            assert_eq!(of(&users, b"acme:open sesame").await.unwrap(), "acme");
            let refused = async || busy.load(Ordering::Acquire) == 200 - WAITING_MAX;
            pgonce_testkit::eventually("all but those who may wait are refused", refused).await;
            drop(turns);
        };
        tokio::join!(join_all(flood), meanwhile);
        assert_eq!(busy.into_inner(), 200 - WAITING_MAX, "beyond the limit nobody waits");
        assert_eq!(users.waiting.load(Ordering::Acquire), 0, "and every place is given back");
    }

    #[test]
    fn a_bad_file_is_told_by_line() {
        let error = |text: &str| BasicUsers::parse(text).unwrap_err().to_string();
        let good = "$2y$05$PT/kWdqYQ5o5dfhS2rTwJe6Sx4n9GJXJvIWVxk4LGc4t1K/Hw9Bzq";
        assert!(error("").contains("no user"));
        assert!(error(&format!("a:{good}\nno colon")).contains("line 2"));
        assert!(error(&format!(":{good}")).contains("line 1: the user"));
        assert!(error("a:$apr1$xyz$abc").contains("bcrypt"), "other hashes are not verified");
        assert!(error(&format!("a:{}", good.replace("$05$", "$31$"))).contains("cost"), "hours a password");
        assert!(error(&format!("a:{good}\na:{good}")).contains("line 2: the user is there twice"));
        assert!(!error("a:secret").contains("secret"), "what the file says is not repeated");
    }
}
