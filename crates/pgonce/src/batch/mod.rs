//! Leased intents of many callers, gathered into few calls.
//!
//! Callers wait in lanes; whenever a connection of the lane is free, a worker takes everything that waits there and
//! sends it as one set-based call. There is no timer: one caller alone finds a connection idle and makes its call
//! itself, and batches form by themselves while the connections are busy.

mod asks;
mod calls;
mod keep;
mod lane;
mod orphans;
mod rows;
mod tasks;
mod turn;
mod waits;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use deadpool::managed::{PoolError, Timeouts};
use tokio::sync::oneshot;
use tokio_postgres::types::{ToSql, Type};
use uuid::Uuid;

use crate::claim::{Answer, Claim, IntentName, fail_parameters, interval, release_parameters, resolve_parameters};
use crate::observe::{self, Tally};
use crate::pool::{Connector, Manager, Pool, Pooled};
use crate::retry::{Budget, RetryPolicy};
use crate::settings::Settings;
use crate::sql::Call;
use crate::sqlstate::{Verdict, is_disconnect, verdict_of};
use crate::{Error, migrate, once};

use asks::Ask;
use keep::Keeper;
pub use keep::Kept;
use lane::Lane;
use orphans::Orphans;
use tasks::{Completion, Task};
use waits::Waits;

/// Limits of a [`Batcher`].
#[derive(Debug, Clone)]
pub struct BatchSettings {
    /// Connections that claim and look.
    pub claim_connections: usize,
    /// Connections that complete and renew: their own, so that neither ever queues behind claims.
    pub complete_connections: usize,
    /// Intents in one call at most; the database takes 1,000.
    pub batch_max: usize,
    /// Callers that may wait, for claims and for completions each; beyond it `Error::Overloaded`.
    pub queue_max: usize,
    /// How long a claim or a look may take, waiting included.
    pub claim_deadline: Duration,
    /// How long a completion is tried.
    pub deadline: Duration,
}

impl Default for BatchSettings {
    fn default() -> Self {
        Self {
            claim_connections: 2,
            complete_connections: 2,
            batch_max: 128,
            queue_max: 10_000,
            claim_deadline: Duration::from_secs(2),
            deadline: Duration::from_secs(10),
        }
    }
}

/// What a claim or a look found.
#[derive(Debug)]
pub struct Observed {
    /// The claim, as [`crate::claim`] tells it.
    pub claim: Claim,
    /// How long the answer may be repeated, by the database's clock; None: for ever, or there is no answer.
    pub expires_in: Option<Duration>,
    /// A moment before the database was asked: a lease counted from here ends no later than the database's.
    pub asked_at: Instant,
}

/// What became of a completion.
#[derive(Debug, Clone, PartialEq)]
pub enum Recorded {
    /// It is recorded.
    Now {
        /// How long the answer may be repeated; None: for ever.
        expires_in: Option<Duration>,
    },
    /// Success was recorded under this claim before: by the work itself, in its own transaction, or by an
    /// earlier sending of this very completion. What is stored counts.
    Before {
        /// What is stored.
        answer: Answer,
        /// How long it may be repeated; None: for ever.
        expires_in: Option<Duration>,
    },
}

/// Leased intents of many callers, gathered into few calls. Cheap to clone; clones share everything. The
/// tasks behind it end with the last clone, after what was handed over is done.
#[derive(Debug, Clone)]
pub struct Batcher(Arc<Handle>);

/// Closes the lanes with the last clone.
#[derive(Debug)]
struct Handle {
    core: Arc<Core>,
    keeper: Arc<Keeper>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.core.asks.close();
        self.core.tasks.close();
        self.keeper.close();
    }
}

/// What the workers share.
#[derive(Debug)]
struct Core {
    asks: Arc<Lane<Ask>>,
    tasks: Arc<Lane<Task>>,
    /// Where calls go on whose callers have left.
    runtime: tokio::runtime::Handle,
    manager: Manager,
    /// For single calls, which may wait for a row: completions never queue behind one.
    side: Pool,
    orphans: Orphans,
    waits: Waits,
    tally: Tally,
    claimed_by: Option<String>,
    connect_timeout: Duration,
    batch: BatchSettings,
}

const DEADLINE_MAX: Duration = Duration::from_secs(86_400);
/// Connections for single calls.
const SIDE_CONNECTIONS: usize = 2;
/// How long a single call waits for a row before it lets others through and tries again.
const SIDE_LOCK_TIMEOUT: Duration = Duration::from_secs(1);
/// How long it may take: behind a pooler in transaction mode the server does not know of the limit above.
const SIDE_CALL_MAX: Duration = Duration::from_secs(3);

impl Batcher {
    /// Connects, checks the schema, and starts the workers on the current runtime. From then on lost
    /// connections are made again.
    ///
    /// # Errors
    /// As [`crate::Once::connect`].
    pub async fn connect(settings: Settings, batch: BatchSettings) -> Result<Self, Error> {
        if batch.batch_max == 0 || batch.batch_max > 1000 {
            return Err(Error::Invalid("batch_max is between 1 and 1000".into()));
        }
        if batch.claim_deadline > DEADLINE_MAX || batch.deadline > DEADLINE_MAX {
            return Err(Error::Invalid("claim_deadline and deadline are at most a day".into()));
        }
        let (config, tls, pgbouncer) = settings.resolve()?;
        let manager = Manager { config, tls: Connector(tls), pgbouncer };
        let side = side_pool(&settings)?;
        let connection = side.get().await.map_err(|error| match error {
            PoolError::Backend(error) => Error::Database(error),
            error => Error::Away { reason: error.to_string() },
        })?;
        migrate::check(&connection.client).await?;
        drop(connection);
        let core = Arc::new(Core {
            asks: Arc::new(Lane::new(batch.queue_max, batch.claim_connections.max(1))),
            tasks: Arc::new(Lane::new(batch.queue_max, batch.complete_connections.max(1))),
            runtime: tokio::runtime::Handle::current(),
            manager,
            orphans: Orphans::start(side.clone()),
            side,
            waits: Waits::default(),
            tally: Tally::default(),
            claimed_by: settings.claimed_by.clone(),
            connect_timeout: settings.connect_timeout,
            batch,
        });
        for _ in 0..core.batch.claim_connections.max(1) {
            tokio::spawn(turn::work::<Ask>(Arc::clone(&core)));
        }
        for _ in 0..core.batch.complete_connections.max(1) {
            tokio::spawn(turn::work::<Task>(Arc::clone(&core)));
        }
        tokio::spawn(turn::watch(Arc::clone(&core.asks)));
        tokio::spawn(turn::watch(Arc::clone(&core.tasks)));
        if !settings.tally_every.is_zero() {
            flush_tallies(&core, settings.tally_every);
        }
        let keeper = Keeper::start(Arc::clone(&core.tasks));
        Ok(Self(Arc::new(Handle { core, keeper })))
    }

    /// Claims an intent with a lease, under a claim id of the caller's choice: a new random one for every
    /// claim, never used again. Never waits for a rival.
    ///
    /// A claim whose answer was lost is sent again with the same id, so it is had once. If this future is
    /// dropped, or gives up at its deadline, a claim that was made after all is given back.
    ///
    /// # Errors
    /// `Error::Conflict` for another payload under the same key; `Error::Refused` for a name out of its
    /// limits; `Error::Overloaded` and `Error::Away` where there was no answer in time. Nothing may be run.
    pub async fn claim(&self, name: &IntentName, claim_id: Uuid) -> Result<Observed, Error> {
        self.ask(name, Some(claim_id)).await?.ok_or_else(|| Error::Schema("a claim without its kind [P4099]".into()))
    }

    /// What a claim would observe, without claiming. None: it could be owned.
    ///
    /// # Errors
    /// As [`Batcher::claim`].
    pub async fn peek(&self, name: &IntentName) -> Result<Option<Observed>, Error> {
        self.ask(name, None).await
    }

    async fn ask(&self, name: &IntentName, claim_id: Option<Uuid>) -> Result<Option<Observed>, Error> {
        let core = &self.0.core;
        let (reply, answer) = oneshot::channel();
        let overloaded = || Error::Overloaded { retry_after: self.queue_wait().max(Duration::from_millis(100)) };
        let Some(handed) = turn::hand_over(core, Ask::new(name.clone(), claim_id, reply), answer) else {
            return Err(overloaded());
        };
        match handed.answer(core.batch.claim_deadline).await {
            Some(told) => told.open(),
            None => Err(match core.asks.trouble() {
                Some(reason) => Error::Away { reason },
                None => overloaded(),
            }),
        }
    }

    /// Records success under the claim's fence. Tried again until [`BatchSettings::deadline`] whatever
    /// happens to the connection, also if this future is dropped.
    ///
    /// # Errors
    /// `Error::LeaseLost` where the claim is not the current one; `Error::FailedBefore` where a failure was
    /// recorded under it; `Error::Refused` for an answer that cannot be stored; `Error::InDoubt` where the
    /// database did not say in time.
    pub async fn succeed(&self, name: &IntentName, claim_id: Uuid, answer: Answer) -> Result<Recorded, Error> {
        let core = &self.0.core;
        let (reply, recorded) = oneshot::channel();
        let completion = Completion::new(name.clone(), claim_id, answer, core.batch.deadline, reply);
        let Some(handed) = turn::hand_over(core, Task::Complete(Box::new(completion)), recorded) else {
            return Err(Error::InDoubt { reason: "too many completions wait; this one was not sent".into() });
        };
        let in_doubt = || Error::InDoubt {
            reason: core.tasks.trouble().unwrap_or_else(|| "the database did not answer in time".into()),
        };
        match handed.answer(core.batch.deadline).await {
            Some(recorded) => recorded,
            None => Err(in_doubt()),
        }
    }

    /// Records a failure under the claim's fence: nothing was done.
    ///
    /// # Errors
    /// `Error::LeaseLost` where the claim is not the current one; `Error::Away` and others that are retryable
    /// where the database did not say in time: the failure may or may not be recorded.
    pub async fn fail(
        &self,
        name: &IntentName,
        claim_id: Uuid,
        retryable: bool,
        code: &str,
        message: &str,
    ) -> Result<(), Error> {
        match self.single(Call::Fail, &fail_parameters(name, &claim_id, &retryable, &code, &message)).await {
            // An earlier sending got through: the row is not processing any more, and says whose it is.
            (Err(Error::LeaseLost), true) if self.is_settled(name, &claim_id).await? => {}
            (told, _) => _ = told?,
        }
        observe::settled(&name.scope, if retryable { "failed_retryable" } else { "failed_final" });
        Ok(())
    }

    /// Ends a claim whose owner does not know whether the effect happened, at once, by the scope's `stale`
    /// policy. Returns the new status: `failed_retryable` (it may run again), `failed_final` (and the attempts are
    /// used up), `uncertain`; `succeeded` where the probe, or the work's own transaction, says so.
    ///
    /// # Errors
    /// As [`Batcher::fail`]. `Error::LeaseLost` also where an earlier sending got through and its answer was
    /// lost: the claim is over either way, and [`Batcher::peek`] tells what became of the intent.
    pub async fn doubt(&self, name: &IntentName, claim_id: Uuid, code: &str, message: &str) -> Result<String, Error> {
        let parameters: [(&(dyn ToSql + Sync), Type); 6] = [
            (&name.scope, Type::TEXT),
            (&name.key, Type::TEXT),
            (&claim_id, Type::UUID),
            (&code, Type::TEXT),
            (&message, Type::TEXT),
            (&name.tenant, Type::TEXT),
        ];
        let status: String = self.single(Call::Doubt, &parameters).await.0?.try_get(0)?;
        observe::doubted(&name.scope, &status);
        Ok(status)
    }

    /// Gives the claim back as if it had never been made: nothing was done under it.
    ///
    /// # Errors
    /// As [`Batcher::fail`].
    pub async fn release(&self, name: &IntentName, claim_id: Uuid) -> Result<(), Error> {
        match self.single(Call::Release, &release_parameters(name, &claim_id)).await {
            (Err(Error::LeaseLost), true) => Ok(()), // given back by an earlier sending, or lost: not held either way
            (told, _) => told.map(|_| ()),
        }
    }

    /// Decides about an intent that is uncertain, as an operator would, with the evidence of a probe. Needs the
    /// role `once_ops`.
    ///
    /// # Errors
    /// `Error::Database` where there is nothing to settle, or the login may not.
    pub async fn settle(
        &self,
        name: &IntentName,
        verdict: &str,
        actor: &str,
        reason: &str,
        answer: Answer,
    ) -> Result<(), Error> {
        let parameters: [(&(dyn ToSql + Sync), Type); 9] = [
            (&name.scope, Type::TEXT),
            (&name.key, Type::TEXT),
            (&verdict, Type::TEXT),
            (&actor, Type::TEXT),
            (&reason, Type::TEXT),
            (&answer.code, Type::INT4),
            (&answer.headers, Type::JSONB),
            (&answer.body, Type::BYTEA),
            (&name.tenant, Type::TEXT),
        ];
        self.single(Call::Settle, &parameters).await.0?;
        Ok(())
    }

    /// Declares a scope's rules (`once.define_scope`); the same rules again write nothing.
    ///
    /// # Errors
    /// `Error::Database` with P4020 for a policy that cannot be.
    pub async fn define_scope(&self, scope: &str, policy: &serde_json::Value) -> Result<(), Error> {
        self.single(Call::DefineScope, &[(&scope, Type::TEXT), (policy, Type::JSONB)]).await.0?;
        Ok(())
    }

    /// The rules that a scope was given, as the database has them; none where nobody defined it. To be compared with
    /// what they were: whoever defines the scope replaces them.
    ///
    /// # Errors
    /// As [`Batcher::fail`].
    pub async fn scope_rules(&self, scope: &str) -> Result<Option<serde_json::Value>, Error> {
        Ok(self.single(Call::ScopeRules, &[(&scope, Type::TEXT)]).await.0?.try_get(0)?)
    }

    /// What tells this database from every other one, also from a copy that was restored from its dump.
    ///
    /// # Errors
    /// As [`Batcher::fail`].
    pub async fn database_id(&self) -> Result<String, Error> {
        Ok(self.single(Call::DatabaseId, &[]).await.0?.try_get(0)?)
    }

    /// Whether an outcome is recorded under the claim.
    async fn is_settled(&self, name: &IntentName, claim_id: &Uuid) -> Result<bool, Error> {
        let wait = interval(SIDE_LOCK_TIMEOUT);
        let row = self.single(Call::Resolve, &resolve_parameters(name, claim_id, &wait)).await.0?;
        Ok(row.try_get::<_, Option<bool>>(0)?.unwrap_or(false))
    }

    /// A call that goes alone, tried again until the deadline. Also told: whether an earlier sending may have
    /// got through.
    async fn single(
        &self,
        call: Call,
        parameters: &[(&(dyn ToSql + Sync), Type)],
    ) -> (Result<tokio_postgres::Row, Error>, bool) {
        let policy = RetryPolicy {
            attempts_max: u32::MAX,
            deadline: self.0.core.batch.deadline,
            pause_max: Duration::from_millis(200),
            ..RetryPolicy::default()
        };
        let mut budget = Budget::new(&policy);
        let mut sent_before = false;
        loop {
            let error = match get(&self.0.core.side).await {
                Ok(connection) => {
                    // Dirty until it answered: nobody else gets a connection that is still at it.
                    connection.dirty.store(true, Ordering::SeqCst);
                    let limit = SIDE_CALL_MAX.min(budget.left());
                    let called = tokio::time::timeout(limit, connection.call(call, parameters)).await;
                    connection.dirty.store(called.is_err(), Ordering::SeqCst);
                    match called {
                        Ok(Ok(row)) => return (Ok(row), sent_before),
                        // Fenced: sent twice it does what it does once.
                        Ok(Err(error)) => {
                            let broken = is_disconnect(&error);
                            sent_before |= broken;
                            match verdict_of(&error) {
                                _ if broken => Error::Away { reason: crate::error::describe(&error) },
                                Verdict::Again | Verdict::Later | Verdict::InDoubt => Error::from(error),
                                _ => return (Err(error.into()), sent_before),
                            }
                        }
                        Err(_) => {
                            sent_before = true;
                            Error::Away { reason: "the database did not answer in time".into() }
                        }
                    }
                }
                Err(error) => error,
            };
            if !budget.pause(None).await {
                return (Err(error), sent_before);
            }
        }
    }

    /// Keeps a lease: renewed by one task for all, until what is returned is dropped. `lease` is what the
    /// claim was given, `claimed_at` a moment before it was asked for ([`Observed::asked_at`]).
    pub fn keep(&self, name: &IntentName, claim_id: Uuid, lease: Duration, claimed_at: Instant) -> Kept {
        Keeper::keep(&self.0, name.clone(), claim_id, lease, claimed_at)
    }

    /// How long callers waited for a connection that claims, lately: the 99th percentile, or the wait of the
    /// first in the queue where that is longer. For load shedding.
    #[must_use]
    pub fn queue_wait(&self) -> Duration {
        self.0.core.waits.p99().max(self.0.core.asks.oldest())
    }

    /// Whether the database answers.
    pub async fn is_ready(&self) -> bool {
        let (reply, answer) = oneshot::channel();
        if self.0.core.tasks.push(Task::Ping(Instant::now(), reply)).is_err() {
            return false;
        }
        matches!(tokio::time::timeout(Duration::from_secs(1), answer).await, Ok(Ok(())))
    }
}

/// A small pool for single calls.
fn side_pool(settings: &Settings) -> Result<Pool, Error> {
    let mut settings = settings.clone();
    settings.lock_timeout = settings.lock_timeout.min(SIDE_LOCK_TIMEOUT);
    let (config, tls, pgbouncer) = settings.resolve()?;
    Pool::builder(Manager { config, tls: Connector(tls), pgbouncer })
        .max_size(SIDE_CONNECTIONS)
        .runtime(deadpool::Runtime::Tokio1)
        .timeouts(Timeouts {
            wait: Some(settings.pool_wait),
            create: Some(settings.connect_timeout),
            recycle: Some(Duration::from_secs(5)),
        })
        .build()
        .map_err(|error| Error::Invalid(format!("the pool cannot be built: {error}")))
}

async fn get(pool: &Pool) -> Result<Pooled, Error> {
    pool.get().await.map_err(|error| Error::Away {
        reason: match error {
            PoolError::Backend(error) => crate::error::describe(&error),
            error => error.to_string(),
        },
    })
}

fn flush_tallies(core: &Arc<Core>, every: Duration) {
    // Weak: the task ends with the last worker.
    let core = Arc::downgrade(core);
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(every).await;
            let Some(core) = core.upgrade() else { return };
            let counts = core.tally.take();
            if counts.is_empty() {
                continue;
            }
            let flushed = match get(&core.side).await {
                Ok(connection) => once::flush(&connection, counts).await,
                Err(error) => Err(error),
            };
            if let Err(error) = flushed {
                tracing::debug!(%error, "counts of answers not flushed");
            }
        }
    });
}
