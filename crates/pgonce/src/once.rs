//! The door: a pool of connections, the schema checked, and intents.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use deadpool::managed::{PoolError, Timeouts};
use tokio_postgres::types::{ToSql, Type};

use crate::direct::Policies;
use crate::inbox::Inbox;
use crate::intent::Intent;
use crate::observe::{Counts, Tally};
use crate::outbox::Waker;
use crate::pool::{Connection, Connector, Manager, Pool, Pooled};
use crate::queue::Queue;
use crate::retry::Breaker;
use crate::settings::Settings;
use crate::sql::Call;
use crate::{Error, migrate, observe};

/// A connection to a PostgreSQL with the schema `once`. Cheap to clone; clones share one pool.
#[derive(Debug, Clone)]
pub struct Once {
    pub(crate) shared: Arc<Shared>,
}

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) pool: Pool,
    pub(crate) settings: Settings,
    pub(crate) tally: Tally,
    /// Set where the login may use the direct statements.
    pub(crate) direct: Option<Policies>,
    pub(crate) waker: Waker,
    breaker: Breaker,
    seen: Seen,
}

impl Once {
    /// Connects with default settings and checks that the schema is there and fits.
    ///
    /// # Errors
    /// Where the database cannot be reached, or its schema is missing or newer in a way that breaks this version.
    pub async fn connect(url: &str) -> Result<Self, Error> {
        Self::with_settings(Settings::from_url(url)).await
    }

    /// Connects with the given settings.
    ///
    /// # Errors
    /// As [`Once::connect`].
    pub async fn with_settings(settings: Settings) -> Result<Self, Error> {
        let (config, tls, pgbouncer) = settings.resolve()?;
        let manager = Manager { config, tls: Connector(tls), pgbouncer };
        let pool = Pool::builder(manager)
            .max_size(settings.pool_max.max(1))
            // The connection that was used last: its statements and its task are warm.
            .queue_mode(deadpool::managed::QueueMode::Lifo)
            .runtime(deadpool::Runtime::Tokio1)
            .timeouts(Timeouts {
                wait: Some(settings.pool_wait),
                create: Some(settings.connect_timeout),
                recycle: Some(Duration::from_secs(5)),
            })
            .build()
            .map_err(|error| Error::Invalid(format!("the pool cannot be built: {error}")))?;
        let every = settings.tally_every;
        let connection = pool.get().await.map_err(|error| match error {
            PoolError::Backend(error) => Error::Database(error),
            PoolError::Timeout(_) => Error::Away { reason: "no connection in time".into() },
            error => Error::Invalid(format!("no connection: {error}")),
        })?;
        migrate::check(&connection.client).await?;
        let direct = match settings.direct {
            Some(direct) => direct,
            None => may_go_direct(&connection.client).await?,
        };
        drop(connection);
        let shared = Arc::new(Shared {
            pool,
            settings,
            tally: Tally::default(),
            direct: direct.then(Policies::default),
            waker: Waker::default(),
            breaker: Breaker::new(5, Duration::from_secs(1)),
            seen: Seen::default(),
        });
        let once = Self { shared };
        if !every.is_zero() {
            once.flush_tallies(every);
        }
        Ok(once)
    }

    /// Names an intent: the operation, and the key that every retry repeats.
    pub fn intent(&self, scope: impl Into<String>, key: impl Into<String>) -> Intent<'_> {
        Intent::new(self, scope.into(), key.into())
    }

    /// Names a consumer of messages: who applies them, the same in every process.
    pub fn consumer(&self, name: impl Into<String>) -> Inbox<'_> {
        Inbox::new(self, name.into())
    }

    /// Names a queue of jobs.
    pub fn queue(&self, name: impl Into<String>) -> Queue<'_> {
        Queue::new(self, name.into())
    }

    /// A connection of the pool, for whatever else the service does in this database.
    ///
    /// # Errors
    /// `Error::Overloaded` where none is free in time; `Error::Database` where none can be made.
    pub(crate) async fn connection(&self) -> Result<Pooled, Error> {
        let breaker = &self.shared.breaker;
        if let Some(retry_after) = breaker.refuses_for() {
            return Err(Error::Overloaded { retry_after });
        }
        let started = Instant::now();
        let got = self.shared.pool.get().await;
        metrics::histogram!("pgonce_pool_wait_seconds").record(started.elapsed().as_secs_f64());
        match got {
            Ok(connection) => {
                breaker.succeeded();
                Ok(connection)
            }
            Err(PoolError::Timeout(_)) => {
                breaker.failed();
                Err(Error::Overloaded { retry_after: self.shared.settings.pool_wait })
            }
            Err(PoolError::Backend(error)) => Err(Error::Database(error)),
            Err(error) => Err(Error::Invalid(format!("the pool is unusable: {error}"))),
        }
    }

    /// How many connections there are and how many callers wait for one.
    #[must_use]
    pub fn pool_status(&self) -> PoolStatus {
        let status = self.shared.pool.status();
        PoolStatus { connections: status.size, idle: status.available, waiting: status.waiting }
    }

    /// Writes the counts of answers given since the last time into the database (`once.suppression`).
    ///
    /// # Errors
    /// Where the database cannot be reached; the counts of this flush are then lost.
    pub async fn flush_tally(&self) -> Result<(), Error> {
        let counts = self.shared.tally.take();
        if counts.is_empty() {
            return Ok(());
        }
        flush(&*self.connection().await?, counts).await
    }

    async fn count_uncertain(&self) -> Result<(), Error> {
        observe::uncertain(self.connection().await?.call(Call::CountUncertain, &[]).await?.try_get(0)?);
        Ok(())
    }

    /// Removes intents and records of the inbox that are past their window, at most so many of each, and says how many went;
    /// call it until it is 0. For services that purge by themselves; `pgonce purge` does it from outside. Needs the role `once_ops`.
    ///
    /// # Errors
    /// `Error::Database` where the login may not.
    pub async fn purge(&self, limit: i32) -> Result<u64, Error> {
        let connection = self.connection().await?;
        let mut total = 0;
        for (call, what) in [(Call::Purge, "intents"), (Call::PurgeInbox, "inbox")] {
            let rows: i64 = connection.call(call, &[(&limit, Type::INT4)]).await?.try_get(0)?;
            let rows = u64::try_from(rows).unwrap_or_default();
            observe::purged(what, rows);
            total += rows;
        }
        Ok(total)
    }

    fn flush_tallies(&self, every: Duration) {
        // Weak: the task ends with the last clone.
        let shared = Arc::downgrade(&self.shared);
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(every).await;
                let Some(shared) = shared.upgrade() else { return };
                let once = Self { shared };
                if let Err(error) = once.flush_tally().await {
                    tracing::debug!(%error, "counts of answers not flushed");
                }
                if let Err(error) = once.count_uncertain().await {
                    tracing::debug!(%error, "uncertain intents not counted");
                }
            }
        });
    }
}

/// Adds counts of answers to those in the database.
pub(crate) async fn flush(connection: &Connection, counts: Counts) -> Result<(), Error> {
    for (tenant, scopes) in counts {
        for (scope, kinds) in scopes {
            let kinds = serde_json::to_value(kinds)?;
            let parameters: [(&(dyn ToSql + Sync), Type); 3] =
                [(&scope, Type::TEXT), (&kinds, Type::JSONB), (&tenant, Type::TEXT)];
            connection.call(Call::Tally, &parameters).await?;
        }
    }
    Ok(())
}

/// The privileges that the role `once_direct` gives.
async fn may_go_direct(client: &tokio_postgres::Client) -> Result<bool, Error> {
    let sql = "SELECT has_table_privilege('once.intent', 'SELECT') AND has_table_privilege('once.intent', 'INSERT')
                  AND has_table_privilege('once.scope', 'SELECT') AND has_function_privilege('once.policy(text, text)', 'EXECUTE')
                  AND has_table_privilege('once.outbox', 'INSERT')";
    Ok(client.query_typed_one(sql, &[]).await?.try_get(0)?)
}

/// The pool, at a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolStatus {
    /// Connections that exist.
    pub connections: usize,
    /// Of them idle.
    pub idle: usize,
    /// Callers that wait.
    pub waiting: usize,
}

impl Shared {
    pub(crate) fn has_seen(&self, hash: u64) -> bool {
        self.seen.0[Seen::slot(hash)].load(Ordering::Relaxed) == hash
    }

    pub(crate) fn note_seen(&self, hash: u64) {
        self.seen.0[Seen::slot(hash)].store(hash, Ordering::Relaxed);
    }
}

/// Intents that this process saw succeed, by hash, lossy: for them a read comes before a transaction.
/// Only a hint about which question to ask first; the answer is always the database's.
#[derive(Debug)]
struct Seen(Box<[AtomicU64]>);

impl Seen {
    const SLOTS: usize = 1 << 15;

    fn slot(hash: u64) -> usize {
        usize::try_from(hash >> 49).unwrap_or_default() % Self::SLOTS
    }
}

impl Default for Seen {
    fn default() -> Self {
        Self((0..Self::SLOTS).map(|_| AtomicU64::new(0)).collect())
    }
}
