//! Which region a key is at home in, and how one gateway tells another that it forwards.
//!
//! Rendezvous hashing: every region gets a weight for the key, and the highest has it. All gateways that know
//! the same names agree, without talking; a region more takes an even part from each other, and nothing moves
//! between those. **The hash must never change**: two gateways that disagree would each be home, each with a database
//! of its own, and the key would have two effects. It is SHA-256, and a test pins its results.

use std::time::{Duration, SystemTime};

use hmac::{Hmac, KeyInit as _, Mac as _};
use http::{HeaderName, HeaderValue};
use sha2::{Digest as _, Sha256};

use super::config::{RegionConfig, RegionsConfig};

/// On a request that one gateway forwards to the key's home.
pub(super) const HOP: HeaderName = HeaderName::from_static("pgonce-region-hop");

/// How far the clocks of two gateways may be apart.
const MINUTES_APART_MAX: u64 = 2;

/// All regions, seen from one.
#[derive(Debug, Clone)]
pub(super) struct Regions {
    own: String,
    list: Vec<RegionConfig>,
    signer: Hmac<Sha256>,
}

/// What names a key everywhere, hashed.
struct Place([u8; 32]);

impl Place {
    fn of(tenant: &str, scope: &str, key: &str) -> Self {
        let mut hash = Sha256::new();
        for part in ["pgonce region key 1", tenant, scope, key] {
            hash.update(length(part));
            hash.update(part);
        }
        Self(hash.finalize().into())
    }

    fn weight(&self, region: &str) -> [u8; 32] {
        let mut hash = Sha256::new();
        hash.update(length(region));
        hash.update(region);
        hash.update(self.0);
        hash.finalize().into()
    }
}

/// Before each part, so that "ab" and "c" is not "a" and "bc".
fn length(part: &str) -> [u8; 8] {
    (part.len() as u64).to_be_bytes()
}

impl Regions {
    /// Of a checked configuration. None cannot happen there: HMAC takes keys of any length.
    pub(super) fn new(config: &RegionsConfig) -> Option<Self> {
        let signer = Hmac::new_from_slice(config.secret.expose()).ok()?;
        Some(Self { own: config.own.clone(), list: config.list.clone(), signer })
    }

    /// Where the key is at home. None: here.
    pub(super) fn home(&self, tenant: &str, scope: &str, key: &str) -> Option<&RegionConfig> {
        let place = Place::of(tenant, scope, key);
        let home = self.list.iter().max_by_key(|region| place.weight(&region.name))?;
        (home.name != self.own).then_some(home)
    }

    /// What a request carries that is forwarded to its key's home.
    pub(super) fn hop(
        &self,
        home: &RegionConfig,
        tenant: &str,
        scope: &str,
        key: &str,
        now: SystemTime,
    ) -> Option<HeaderValue> {
        let minute = minute(now);
        let signature = self.signed(&home.name, &Place::of(tenant, scope, key), minute).finalize().into_bytes();
        let hex: String = signature.iter().map(|byte| format!("{byte:02x}")).collect();
        HeaderValue::try_from(format!("{}:{minute}:{hex}", home.name)).ok()
    }

    /// Whether another gateway forwarded this request here, for this tenant and key, just now. Nobody else can make
    /// such a header, so the tenant in it is one that the other gateway has verified. A request that was forwarded is
    /// never forwarded again: where its key is not at home here either, the gateways' files differ, and it is refused.
    pub(super) fn is_hop(&self, value: &HeaderValue, tenant: &str, scope: &str, key: &str, now: SystemTime) -> bool {
        let Some((home, minute_sent, signature)) = value.to_str().ok().and_then(parts) else { return false };
        let is_recent = minute(now).abs_diff(minute_sent) <= MINUTES_APART_MAX;
        let mac = self.signed(home, &Place::of(tenant, scope, key), minute_sent);
        // Compared in constant time.
        mac.verify_slice(&signature).is_ok() && is_recent && home == self.own
    }

    fn signed(&self, home: &str, place: &Place, minute: u64) -> Hmac<Sha256> {
        let mut mac = self.signer.clone();
        mac.update(b"pgonce region hop 1");
        mac.update(&length(home));
        mac.update(home.as_bytes());
        mac.update(&place.0);
        mac.update(&minute.to_be_bytes());
        mac
    }
}

fn minute(now: SystemTime) -> u64 {
    now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs() / 60
}

fn parts(text: &str) -> Option<(&str, u64, [u8; 32])> {
    let mut parts = text.split(':');
    let (home, minute, hex, None) = (parts.next()?, parts.next()?.parse().ok()?, parts.next()?, parts.next()) else {
        return None;
    };
    let is_hex = hex.len() == 64 && hex.bytes().all(|c| c.is_ascii_hexdigit());
    let mut signature = [0; 32];
    for (at, byte) in signature.iter_mut().enumerate().filter(|_| is_hex) {
        *byte = u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).ok()?;
    }
    is_hex.then_some((home, minute, signature))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on should stop, loudly")]
mod tests {
    use std::collections::BTreeMap;

    use http::Uri;

    use super::super::config::Secret;
    use super::*;

    fn regions(own: &str, names: &[&str], secret: &str) -> Regions {
        let list =
            names.iter().map(|name| RegionConfig { name: (*name).to_owned(), url: Uri::from_static("http://h") });
        Regions::new(&RegionsConfig {
            own: own.to_owned(),
            list: list.collect(),
            secret: Secret::new(secret),
            tls: Default::default(),
        })
        .unwrap()
    }

    /// The name of the home, from wherever it is asked.
    fn home(names: &[&str], tenant: &str, scope: &str, key: &str) -> String {
        let seen_from_elsewhere = regions("elsewhere", names, "secret");
        seen_from_elsewhere.home(tenant, scope, key).unwrap().name.clone()
    }

    /// Computed apart from this code, with Python's hashlib.
    #[test]
    fn the_hash_never_changes() {
        let names = ["eu", "us", "ap"];
        let homes: Vec<_> = (0..12).map(|key| home(&names, "t", "orders", &format!("k{key}"))).collect();
        assert_eq!(homes, PINNED, "a change here splits the homes of keys in use");
    }

    const PINNED: [&str; 12] = ["eu", "us", "ap", "us", "eu", "us", "eu", "ap", "us", "ap", "eu", "us"];

    #[test]
    fn parts_of_a_name_do_not_run_together() {
        let names: Vec<String> = (0..64).map(|number| format!("r{number}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let first = home(&names, "ab", "c", "d");
        assert!(
            [home(&names, "a", "bc", "d"), home(&names, "ab", "cd", ""), home(&names, "", "abc", "d")]
                .iter()
                .any(|other| *other != first)
        );
    }

    #[test]
    fn a_region_more_moves_its_part_and_nothing_else() {
        const KEYS: usize = 4000;
        let before = ["a", "b", "c", "d"];
        let after = ["e", "d", "c", "b", "a"];
        let mut counts: BTreeMap<String, usize> = BTreeMap::new();
        let mut moved = 0;
        for key in 0..KEYS {
            let key = format!("key-{key}");
            let (old, new) = (home(&before, "t", "s", &key), home(&after, "t", "s", &key));
            if old != new {
                assert_eq!(new, "e", "keys move to the new region only, whatever the order of the list");
                moved += 1;
            }
            *counts.entry(new).or_default() += 1;
        }
        assert!((700..=900).contains(&moved), "a fifth of {KEYS}: {moved}");
        assert!(counts.values().all(|count| (700..=900).contains(count)), "{counts:?}");
    }

    #[test]
    fn exactly_one_is_home() {
        let names = ["eu", "us"];
        for key in ["1", "2", "3", "4"] {
            let homes = names.iter().filter(|own| regions(own, &names, "s").home("t", "s", key).is_none()).count();
            assert_eq!(homes, 1);
        }
    }

    #[test]
    fn a_hop_is_for_one_key_one_home_and_now() {
        let names = ["eu", "us"];
        let (eu, us) = (regions("eu", &names, "secret"), regions("us", &names, "secret"));
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
        let to_us = eu.hop(&us.list[1], "t", "s", "k", now).unwrap();
        assert!(us.is_hop(&to_us, "t", "s", "k", now));
        assert!(us.is_hop(&to_us, "t", "s", "k", now + Duration::from_secs(120)), "clocks differ");
        assert!(us.is_hop(&to_us, "t", "s", "k", now - Duration::from_secs(120)), "either way");
        assert!(!us.is_hop(&to_us, "t", "s", "k", now + Duration::from_secs(300)));
        assert!(!us.is_hop(&to_us, "other", "s", "k", now));
        assert!(!us.is_hop(&to_us, "t", "s", "other", now));
        assert!(!eu.is_hop(&to_us, "t", "s", "k", now), "it is for another home");
        assert!(!regions("us", &names, "guess").is_hop(&to_us, "t", "s", "k", now));
        let text = to_us.to_str().unwrap();
        let minute = format!(":{}:", minute(now) + 1);
        let bad = [
            "",
            "us",
            "us:1:",
            "us:x:00",
            &format!("{text}:"),
            &text[..text.len() - 1],
            &format!("us:{}:{}", 16_666, "é".repeat(32)),
        ];
        for bad in bad.iter().copied().chain([text.replace(":16666:", &minute).as_str(), &text.replace("us:", "eu:")]) {
            assert!(!us.is_hop(&HeaderValue::try_from(bad).unwrap(), "t", "s", "k", now), "{bad}");
        }
    }
}
