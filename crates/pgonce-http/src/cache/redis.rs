//! Replays in a Redis or Valkey that several gateways share. Redis 6.2 or newer, one node; TLS with
//! `rediss://`.
//!
//! Redis is never waited for longer than its timeout, nor asked while it keeps failing, and nothing that it says is
//! believed unless the MAC verifies (see [`super::envelope`]). Writes go through a bounded queue and are dropped
//! rather than waited for.

use std::sync::Arc;
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, RedisError, Value};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::task::AbortHandle;
use tokio::time::timeout;

use super::circuit::Circuit;
use super::envelope::Envelopes;
use super::{CacheConfigError, Id, Replay, count};

/// How many writes may wait, and how many bytes.
const WAITING_MAX: usize = 1000;
const WAITING_BYTES_MAX: usize = 32 * 1024 * 1024;
/// How many writes travel together.
const BATCH_MAX: usize = 64;
/// Writes are waited for by nobody, so they may take longer than reads.
const WRITE_MAX: Duration = Duration::from_secs(1);
const CONNECT_MAX: Duration = Duration::from_secs(1);
/// Between two attempts to connect: doubling from the first to the second.
const RECONNECT: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// A Redis, and how it is used.
#[derive(Clone, PartialEq, Eq)]
pub struct RedisSettings {
    /// `redis://…`, or `rediss://…` for TLS.
    pub url: String,
    /// What values are signed with, 32 bytes or more, the same for all gateways. Without it, whoever can write to
    /// this Redis can forge answers.
    pub secret: Option<Vec<u8>>,
    /// What the names of keys begin with.
    pub prefix: String,
    /// How long a request waits for Redis.
    pub timeout: Duration,
    /// The largest value that is written or read, in bytes.
    pub value_bytes_max: usize,
}

impl RedisSettings {
    /// A Redis with the defaults: no secret, prefix `pgonce:replay:`, 20 ms, 8 MiB.
    #[must_use]
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            secret: None,
            prefix: "pgonce:replay:".into(),
            timeout: Duration::from_millis(20),
            value_bytes_max: 8 * 1024 * 1024,
        }
    }
}

impl std::fmt::Debug for RedisSettings {
    /// Without the URL, which may hold a password, and without the secret.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RedisSettings")
            .field("prefix", &self.prefix)
            .field("timeout", &self.timeout)
            .field("value_bytes_max", &self.value_bytes_max)
            .finish_non_exhaustive()
    }
}

/// The connection, as the task that keeps it sees it.
#[derive(Clone)]
enum Link {
    /// Not known yet: worth a short wait.
    Connecting,
    Up {
        connection: MultiplexedConnection,
        generation: u64,
    },
    /// The last attempt failed.
    Away,
}

/// Why Redis gave nothing, as the metric calls it.
#[derive(Debug, thiserror::Error)]
enum Nothing {
    #[error("not there")]
    Miss,
    #[error("left alone after failures")]
    Skipped,
    #[error("no answer in time")]
    Timeout,
    #[error("{reason}")]
    Error { reason: String, cut: bool },
    #[error("what it holds was not written by us for this intent")]
    Invalid,
}

impl Nothing {
    fn result(&self) -> &'static str {
        match self {
            Self::Miss => "miss",
            Self::Skipped => "skipped",
            Self::Timeout => "timeout",
            Self::Error { .. } => "error",
            Self::Invalid => "invalid",
        }
    }
}

impl From<RedisError> for Nothing {
    fn from(error: RedisError) -> Self {
        match error.is_timeout() {
            true => Self::Timeout,
            // An error that Redis answers with says nothing against the connection.
            false => Self::Error { reason: error.to_string(), cut: error.is_unrecoverable_error() },
        }
    }
}

struct Job {
    id: Id,
    replay: Arc<Replay>,
    _bytes: OwnedSemaphorePermit,
}

/// The shared cache.
pub(super) struct Redis {
    shared: Arc<Shared>,
    jobs: mpsc::Sender<Job>,
    bytes: Arc<Semaphore>,
    tasks: [AbortHandle; 2],
}

struct Shared {
    settings: RedisSettings,
    lifetime_max: Duration,
    envelopes: Envelopes,
    circuit: Circuit,
    link: watch::Sender<Link>,
}

impl std::fmt::Debug for Redis {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Redis").field("settings", &self.shared.settings).finish_non_exhaustive()
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

impl Redis {
    pub(super) fn new(settings: RedisSettings, lifetime_max: Duration) -> Result<Self, CacheConfigError> {
        // The library's message may repeat the URL.
        let client = Client::open(settings.url.as_str())
            .map_err(|error| CacheConfigError(format!("not a Redis URL ({})", error.category())))?;
        let shared = Arc::new(Shared {
            envelopes: Envelopes::new(settings.secret.as_deref())?,
            settings,
            lifetime_max,
            circuit: Circuit::new(),
            link: watch::Sender::new(Link::Connecting),
        });
        if shared.settings.secret.is_none() {
            tracing::warn!("the Redis cache has no secret: whoever can write to that Redis can forge answers");
        }
        let (jobs, waiting) = mpsc::channel(WAITING_MAX);
        let keeper = tokio::spawn(keep_connected(Arc::clone(&shared), client));
        let writer = tokio::spawn(write_all(Arc::clone(&shared), waiting));
        let tasks = [keeper.abort_handle(), writer.abort_handle()];
        Ok(Self { shared, jobs, bytes: Arc::new(Semaphore::new(WAITING_BYTES_MAX)), tasks })
    }

    /// What is there, and until when it may be kept.
    pub(super) async fn get(&self, id: &Id) -> Option<(Replay, Instant)> {
        match self.shared.read(id).await {
            Ok(found) => {
                count("redis", "hit");
                Some(found)
            }
            Err(nothing) => {
                count("redis", nothing.result());
                None
            }
        }
    }

    pub(super) fn put(&self, id: Id, replay: Arc<Replay>) {
        let bytes = replay.bytes();
        if bytes > self.shared.settings.value_bytes_max {
            return;
        }
        let room =
            u32::try_from(bytes).ok().and_then(|bytes| Arc::clone(&self.bytes).try_acquire_many_owned(bytes).ok());
        let taken = room.is_some_and(|room| self.jobs.try_send(Job { id, replay, _bytes: room }).is_ok());
        if !taken {
            count_writes("dropped", 1);
        }
    }
}

fn count_writes(result: &'static str, number: usize) {
    metrics::counter!("pgonce_cache_writes_total", "cache" => "redis", "result" => result).increment(number as u64);
}

impl Shared {
    fn key(&self, id: &Id) -> String {
        use std::fmt::Write as _;
        let mut key = String::with_capacity(self.settings.prefix.len() + 64);
        key.push_str(&self.settings.prefix);
        for byte in id.0 {
            let _ = write!(key, "{byte:02x}");
        }
        key
    }

    async fn read(&self, id: &Id) -> Result<(Replay, Instant), Nothing> {
        // Before the question: what Redis says of the time left was true later.
        let now = Instant::now();
        // No more of the value than we would write: the MAC of a longer one does not verify. Its time to live before
        // and after: somebody may write in between, and the shorter one is true of either value. MULTI would do, but
        // a full Redis refuses it.
        let mut pipe = redis::pipe();
        let (key, last_byte) = (self.key(id), self.settings.value_bytes_max.saturating_sub(1));
        pipe.ignore_errors();
        pipe.cmd("PTTL").arg(&key).cmd("GETRANGE").arg(&key).arg(0).arg(last_byte).cmd("PTTL").arg(&key);
        let ask = async |mut connection: MultiplexedConnection| {
            let answer: Vec<Value> = pipe.query_async(&mut connection).await?;
            self.believe(id, &answer, now)
        };
        self.attempt(self.settings.timeout, ask).await
    }

    fn believe(&self, id: &Id, answer: &[Value], now: Instant) -> Result<(Replay, Instant), Nothing> {
        let (value, ttl) = match answer {
            [Value::Int(before), Value::BulkString(value), Value::Int(after)] => (value, *before.min(after)),
            // A list or a hash under our name.
            [_, Value::ServerError(error), _] if error.code() == "WRONGTYPE" => return Err(Nothing::Invalid),
            [_, Value::ServerError(error), _] => {
                return Err(Nothing::Error { reason: error.code().to_owned(), cut: false });
            }
            _ => return Err(Nothing::Invalid),
        };
        // -2: nothing there; -1: it would stay for ever, and we never write such.
        let ttl = match ttl {
            -2 | 0 => return Err(Nothing::Miss),
            ttl => Duration::from_millis(u64::try_from(ttl).map_err(|_| Nothing::Invalid)?),
        };
        let replay = self.envelopes.read(id, value, now, ttl).ok_or(Nothing::Invalid)?;
        Ok((replay, now + ttl.min(self.lifetime_max)))
    }

    /// One request, if it is worth it; its outcome goes into the circuit.
    async fn attempt<T>(
        &self,
        limit: Duration,
        ask: impl AsyncFnOnce(MultiplexedConnection) -> Result<T, Nothing>,
    ) -> Result<T, Nothing> {
        if !self.circuit.allows(Instant::now()) {
            return Err(Nothing::Skipped);
        }
        let mut used = None;
        let outcome = timeout(limit, async {
            let (connection, generation) = self.connection().await?;
            used = Some(generation);
            ask(connection).await
        });
        let outcome = outcome.await.unwrap_or(Err(Nothing::Timeout));
        match &outcome {
            Err(failure @ (Nothing::Timeout | Nothing::Error { .. })) => {
                let open = self.circuit.failed(Instant::now());
                // A connection that was cut is of no use; one that is silent may be half open, and a new one shows it.
                if let Some(generation) = used
                    && (open || matches!(failure, Nothing::Error { cut: true, .. }))
                {
                    self.give_up(generation);
                }
                self.warn(failure);
            }
            // It answered: a lie is no failure.
            Err(Nothing::Invalid) => {
                self.circuit.succeeded();
                self.warn(&Nothing::Invalid);
            }
            Ok(_) | Err(Nothing::Miss | Nothing::Skipped) => self.circuit.succeeded(),
        }
        outcome
    }

    /// Nobody uses this connection any more, and another one is made.
    fn give_up(&self, broken: u64) {
        self.link.send_if_modified(|link| {
            let ours = matches!(link, Link::Up { generation, .. } if *generation == broken);
            if ours {
                *link = Link::Connecting;
            }
            ours
        });
    }

    async fn connection(&self) -> Result<(MultiplexedConnection, u64), Nothing> {
        let mut link = self.link.subscribe();
        let known = link.wait_for(|link| !matches!(link, Link::Connecting)).await;
        match known.as_deref() {
            Ok(Link::Up { connection, generation }) => Ok((connection.clone(), *generation)),
            _ => Err(Nothing::Error { reason: "no connection".into(), cut: false }),
        }
    }

    fn warn(&self, nothing: &Nothing) {
        if let Some(not_logged) = self.circuit.warns(Instant::now()) {
            tracing::warn!(reason = %nothing, not_logged, "the Redis cache does not help; PostgreSQL answers instead");
        }
    }

    /// Writes a batch in two round trips. Each value's end is told in Redis's own time, asked for first: a relative
    /// one would count from whenever Redis gets to read it, however late, and the value could outlive its row.
    async fn write(&self, jobs: &[Job]) -> Result<usize, Nothing> {
        let write = async |mut connection: MultiplexedConnection| {
            let (seconds, micros): (u64, u64) = redis::cmd("TIME").query_async(&mut connection).await?;
            let now = Instant::now();
            let redis_now = Duration::from_secs(seconds) + Duration::from_micros(micros);
            let mut pipe = redis::pipe();
            let mut written = 0;
            for Job { id, replay, .. } in jobs {
                let lifetime = replay.lifetime(now, self.lifetime_max);
                let value = self.envelopes.write(id, replay, now, lifetime);
                let Some(value) = value.filter(|value| value.len() <= self.settings.value_bytes_max) else { continue };
                let until = u64::try_from((redis_now + lifetime).as_millis()).unwrap_or(u64::MAX);
                if !lifetime.is_zero() {
                    pipe.cmd("SET").arg(self.key(id)).arg(value).arg("PXAT").arg(until).ignore();
                    written += 1;
                }
            }
            if written > 0 {
                pipe.exec_async(&mut connection).await?;
            }
            Ok(written)
        };
        self.attempt(WRITE_MAX, write).await
    }
}

/// Connects, and connects again whenever a connection turns out to be broken.
async fn keep_connected(shared: Arc<Shared>, client: Client) {
    // The timeouts are our own: they are for the whole of an attempt.
    let config = AsyncConnectionConfig::new().set_connection_timeout(None).set_response_timeout(None);
    let mut link = shared.link.subscribe();
    let mut pause = RECONNECT.0;
    for generation in 1.. {
        let connected = timeout(CONNECT_MAX, client.get_multiplexed_async_connection_with_config(&config)).await;
        let failure = match connected {
            Ok(Ok(connection)) => {
                pause = RECONNECT.0;
                shared.link.send_replace(Link::Up { connection, generation });
                let _ = link.wait_for(|link| !matches!(link, Link::Up { .. })).await;
                continue;
            }
            Ok(Err(error)) => Nothing::from(error),
            Err(_) => Nothing::Timeout,
        };
        shared.link.send_replace(Link::Away);
        shared.warn(&failure);
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(RECONNECT.1);
    }
}

async fn write_all(shared: Arc<Shared>, mut waiting: mpsc::Receiver<Job>) {
    let mut jobs = Vec::with_capacity(BATCH_MAX);
    while waiting.recv_many(&mut jobs, BATCH_MAX).await > 0 {
        match shared.write(&jobs).await {
            Ok(written) => count_writes("written", written),
            Err(Nothing::Skipped) => count_writes("dropped", jobs.len()),
            Err(_) => count_writes("error", jobs.len()),
        }
        jobs.clear();
    }
}
