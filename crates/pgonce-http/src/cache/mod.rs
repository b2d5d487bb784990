//! Replays without asking PostgreSQL: in this process, and in a Redis or Valkey that gateways share.
//!
//! A cache only ever repeats what PostgreSQL said: a terminal row, its fingerprint, and how long it lives. It
//! decides nothing. Whatever goes wrong with one is a miss, which is counted and logged, and PostgreSQL answers.
//!
//! No wall clock of ours is in it. The database says how long the row still lives, memory counts that down by the
//! monotonic clock, and Redis by its own clock.

mod circuit;
mod envelope;
mod memory;
mod redis;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use pgonce::{Answer, Fingerprint};
use sha2::{Digest as _, Sha256};
use tokio::sync::OnceCell;

pub use redis::RedisSettings;

use memory::Memory;
use redis::Redis;

/// The terminal row of an intent that succeeded, as PostgreSQL has it.
#[derive(Debug, Clone, PartialEq)]
pub struct Replay {
    /// What pinned the payload: another one is a conflict, not a replay.
    pub fingerprint: Fingerprint,
    /// The answer as it is stored; a sealed body stays sealed.
    pub answer: Answer,
    fresh_for: Option<Duration>,
    asked_at: Instant,
}

impl Replay {
    /// What the database told. `fresh_for` is how long the row still lives, by the database's clock (none: for
    /// ever); `asked_at` was taken **before** the database was asked, so that no cache outlives the row.
    #[must_use]
    pub fn new(fingerprint: Fingerprint, answer: Answer, fresh_for: Option<Duration>, asked_at: Instant) -> Self {
        Self { fingerprint, answer, fresh_for, asked_at }
    }

    /// How long the row still lives at least; none: for ever.
    #[must_use]
    pub fn fresh_for(&self) -> Option<Duration> {
        self.fresh_at(Instant::now())
    }

    fn fresh_at(&self, now: Instant) -> Option<Duration> {
        self.fresh_for.map(|fresh_for| fresh_for.saturating_sub(now.saturating_duration_since(self.asked_at)))
    }

    /// How long a cache may keep it.
    fn lifetime(&self, now: Instant, max: Duration) -> Duration {
        self.fresh_at(now).map_or(max, |fresh_for| fresh_for.min(max))
    }

    /// About how much memory it takes.
    fn bytes(&self) -> usize {
        let text = |text: &Option<String>| text.as_ref().map_or(0, String::len);
        let Answer { code: _, headers, body, result_type, result_id } = &self.answer;
        let headers = headers.as_ref().map_or(0, json_bytes);
        size_of::<Self>() + headers + body.as_ref().map_or(0, Vec::len) + text(result_type) + text(result_id)
    }
}

fn json_bytes(value: &serde_json::Value) -> usize {
    use serde_json::Value::{Array, Object, String};
    size_of_val(value)
        + match value {
            String(text) => text.len(),
            Array(items) => items.iter().map(json_bytes).sum(),
            Object(members) => members.iter().map(|(name, value)| name.len() + json_bytes(value)).sum(),
            _ => 0,
        }
}

/// An intent, as caches name it: SHA-256 over its database, tenant, scope and key, each behind its length. No raw key
/// leaves the process by it, and it has one size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Id([u8; 32]);

/// Names the intents of one database. Two that share a Redis do not answer for each other.
#[derive(Debug, Clone)]
struct Names(Sha256);

impl Names {
    fn of_database(database: &str) -> Self {
        Self(with(Sha256::new(), database))
    }

    fn id(&self, tenant: &str, scope: &str, key: &str) -> Id {
        Id([tenant, scope, key].into_iter().fold(self.0.clone(), with).finalize().into())
    }
}

fn with(mut hash: Sha256, part: &str) -> Sha256 {
    hash.update((part.len() as u64).to_be_bytes());
    hash.update(part);
    hash
}

#[cfg(test)]
impl Id {
    fn of(tenant: &str, scope: &str, key: &str) -> Self {
        Names::of_database("").id(tenant, scope, key)
    }
}

/// Which caches there are, and their limits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheSettings {
    /// The capacity of the cache in this process, in bytes; 0: none.
    pub memory_bytes: u64,
    /// How long a cache keeps anything at most, however long its row lives.
    pub lifetime_max: Duration,
    /// The shared cache.
    pub redis: Option<RedisSettings>,
}

impl Default for CacheSettings {
    fn default() -> Self {
        Self { memory_bytes: 64 * 1024 * 1024, lifetime_max: Duration::from_secs(600), redis: None }
    }
}

/// What is wrong with the settings of a cache.
#[derive(Debug, thiserror::Error)]
#[error("cache: {0}")]
pub struct CacheConfigError(String);

/// The caches of a gateway: memory before Redis.
#[derive(Debug)]
pub struct Caches {
    names: Names,
    memory: Option<Memory>,
    redis: Option<Redis>,
    lifetime_max: Duration,
    flights: Flights,
}

impl Caches {
    /// Opens them for what one database holds (see `Batcher::database_id`). A Redis that is away is no error: it is
    /// connected to in the background, now and whenever it comes back. Needs a Tokio runtime.
    ///
    /// # Errors
    /// Where a setting is wrong.
    pub fn new(settings: CacheSettings, database: &str) -> Result<Self, CacheConfigError> {
        let CacheSettings { memory_bytes, lifetime_max, redis } = settings;
        let memory = (memory_bytes > 0).then(|| Memory::new(memory_bytes)).transpose()?;
        let redis = redis.map(|redis| Redis::new(redis, lifetime_max)).transpose()?;
        Ok(Self { names: Names::of_database(database), memory, redis, lifetime_max, flights: Flights::default() })
    }

    /// What is known of an intent. Its fingerprint is still to be compared.
    pub async fn get(&self, tenant: &str, scope: &str, key: &str) -> Option<Arc<Replay>> {
        let id = self.names.id(tenant, scope, key);
        if let Some(memory) = &self.memory {
            let found = memory.get(&id, Instant::now());
            count("memory", if found.is_some() { "hit" } else { "miss" });
            if found.is_some() {
                return found;
            }
        }
        let redis = self.redis.as_ref()?;
        let flight = self.flights.join(id);
        let landed = flight.cell.get_or_init(async || {
            let (replay, until) = redis.get(&id).await?;
            let replay = Arc::new(replay);
            if let Some(memory) = &self.memory {
                memory.put(id, Arc::clone(&replay), until);
            }
            Some(replay)
        });
        landed.await.clone()
    }

    /// Keeps what PostgreSQL **has committed**; nothing else may be put here. Never waits: what Redis does not take
    /// in time is dropped.
    pub fn put(&self, tenant: &str, scope: &str, key: &str, replay: impl Into<Arc<Replay>>) {
        let (id, replay, now) = (self.names.id(tenant, scope, key), replay.into(), Instant::now());
        let lifetime = replay.lifetime(now, self.lifetime_max);
        if let Some(memory) = &self.memory {
            memory.put(id, Arc::clone(&replay), now + lifetime);
        }
        if let Some(redis) = &self.redis {
            redis.put(id, replay);
        }
    }

    /// The same for the shared cache only: for what this process will hardly be asked for.
    pub fn put_shared(&self, tenant: &str, scope: &str, key: &str, replay: impl Into<Arc<Replay>>) {
        if let Some(redis) = &self.redis {
            redis.put(self.names.id(tenant, scope, key), replay.into());
        }
    }
}

/// `pgonce_cache_requests_total`; see docs/reference/metrics.md.
fn count(cache: &'static str, result: &'static str) {
    metrics::counter!("pgonce_cache_requests_total", "cache" => cache, "result" => result).increment(1);
}

/// What is being read from Redis right now: whoever asks for the same intent waits for the same answer.
#[derive(Debug, Default)]
struct Flights(Mutex<HashMap<Id, Awaited>>);

#[derive(Debug, Default)]
struct Awaited {
    cell: Landing,
    by: usize,
}

type Landing = Arc<OnceCell<Option<Arc<Replay>>>>;

impl Flights {
    fn join(&self, id: Id) -> Flight<'_> {
        let mut flights = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let awaited = flights.entry(id).or_default();
        awaited.by += 1;
        Flight { flights: self, id, cell: Arc::clone(&awaited.cell) }
    }
}

/// One who waits. If the one who reads goes away, another reads: the cell sees to that.
struct Flight<'a> {
    flights: &'a Flights,
    id: Id,
    cell: Landing,
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        let mut flights = self.flights.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(awaited) = flights.get_mut(&self.id).filter(|awaited| Arc::ptr_eq(&awaited.cell, &self.cell)) else {
            return;
        };
        awaited.by -= 1;
        // Over once it has landed: who comes later reads anew. And when the last one gives up.
        if awaited.by == 0 || self.cell.initialized() {
            flights.remove(&self.id);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on should stop, loudly")]
mod tests {
    use pgonce::fingerprint_bytes;

    use super::*;

    pub(super) fn replay(body: &[u8], fresh_for: Option<Duration>) -> Replay {
        let answer = Answer { code: Some(201), body: Some(body.to_vec()), ..Answer::default() };
        Replay::new(fingerprint_bytes(b"payload", "", ""), answer, fresh_for, Instant::now())
    }

    #[test]
    fn names_do_not_flow_into_each_other() {
        let all = [
            Id::of("a", "b", "c"),
            Id::of("ab", "", "c"),
            Id::of("", "ab", "c"),
            Id::of("a", "bc", ""),
            Id::of("b", "a", "c"),
            Names::of_database("x").id("a", "b", "c"),
            Names::of_database("y").id("a", "b", "c"),
        ];
        for (at, id) in all.iter().enumerate() {
            assert!(!all[..at].contains(id), "{at}");
        }
    }

    #[test]
    fn life_counts_down_from_before_the_question() {
        let asked_at = Instant::now();
        let at = |seconds| asked_at + Duration::from_secs(seconds);
        let secs = Duration::from_secs;
        let replay = Replay { asked_at, ..replay(b"", Some(secs(100))) };
        assert_eq!(replay.fresh_at(at(30)), Some(secs(70)));
        assert_eq!(replay.lifetime(at(30), secs(600)), secs(70));
        assert_eq!(replay.lifetime(at(30), secs(10)), secs(10), "never longer than the cap");
        assert_eq!(replay.lifetime(at(101), secs(10)), Duration::ZERO);
        let permanent = Replay { fresh_for: None, ..replay };
        assert_eq!((permanent.fresh_at(at(30)), permanent.lifetime(at(30), secs(10))), (None, secs(10)));
    }

    #[tokio::test]
    async fn a_flight_that_is_given_up_is_taken_over_and_leaves_nothing() {
        let (flights, id) = (Flights::default(), Id::of("", "s", "k"));
        let (first, second) = (flights.join(id), flights.join(id));
        assert!(Arc::ptr_eq(&first.cell, &second.cell));
        let never = first.cell.get_or_init(std::future::pending);
        assert!(tokio::time::timeout(Duration::ZERO, never).await.is_err());
        drop(first);
        let landed = second.cell.get_or_init(async || Some(Arc::new(replay(b"x", None)))).await;
        assert!(landed.is_some());
        assert!(flights.join(id).cell.initialized(), "still there until somebody has left");
        assert!(flights.0.lock().unwrap().is_empty());
        assert!(!flights.join(id).cell.initialized(), "who comes later reads anew");
        drop(second);
        drop((flights.join(id), flights.join(id)));
        assert!(flights.0.lock().unwrap().is_empty(), "given up by all");
    }
}
