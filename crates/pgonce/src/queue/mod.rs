//! Jobs: work that is enqueued with an effect, and done later, each once. The rules are in `sql/functions/queue/`.

mod desk;
mod group;
mod outside;
mod schedule;
mod tx;
mod worker;

use std::time::{Duration, SystemTime};

use serde::Serialize;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{GenericClient, Row};
use uuid::Uuid;

pub use self::tx::JobTx;
pub use self::worker::Worker;

use crate::claim::interval;
use crate::pool::Connection;
use crate::sql::{self, Call};
use crate::{Error, Once};

/// A job to be enqueued.
///
/// ```
/// # use pgonce::{NewJob, Unique};
/// # use std::time::Duration;
/// let job = NewJob::new(&serde_json::json!({"order": 7}))
///     .key("customer-3") // one after another, in the order of enqueueing
///     .unique("receipt-7", Unique::Alive)
///     .after(Duration::from_secs(60));
/// ```
#[derive(Debug, Clone)]
#[must_use = "a job does nothing until it is enqueued"]
pub struct NewJob {
    payload: Result<serde_json::Value, String>,
    priority: i32,
    at: Option<SystemTime>,
    after: Option<Duration>,
    key: Option<String>,
    unique: Option<(String, Unique)>,
    attempts_max: Option<i32>,
}

/// How long a unique key is its job's: another job with the key is then not added.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Unique {
    /// As its queue says.
    #[default]
    AsDefined,
    /// Until it is taken: what is asked for while it waits, it will still do.
    Waiting,
    /// Until it has ended.
    Alive,
    /// For so long, ended or not.
    Window(Duration),
}

impl Unique {
    fn scope(self) -> Option<&'static str> {
        match self {
            Self::AsDefined => None,
            Self::Waiting => Some("waiting"),
            Self::Alive => Some("alive"),
            Self::Window(_) => Some("window"),
        }
    }

    fn window(self) -> Option<String> {
        match self {
            Self::Window(window) => Some(interval(window)),
            _ => None,
        }
    }
}

type Parameter<'p> = (&'p (dyn ToSql + Sync), Type);

impl NewJob {
    /// A job, and what it is about: at most 1 MiB of JSON.
    pub fn new(payload: &impl Serialize) -> Self {
        let payload = serde_json::to_value(payload).map_err(|error| error.to_string());
        Self { payload, priority: 0, at: None, after: None, key: None, unique: None, attempts_max: None }
    }

    /// Higher ones are taken first; 0 if not called.
    pub fn priority(mut self, priority: i32) -> Self {
        self.priority = priority;
        self
    }

    /// Not before this time.
    pub fn at(mut self, time: SystemTime) -> Self {
        self.at = Some(time);
        self
    }

    /// Not before so much time has passed, by the database's clock.
    pub fn after(mut self, delay: Duration) -> Self {
        self.after = Some(delay);
        self
    }

    /// Jobs of one key run one after another, in the order in which they were enqueued.
    pub fn key(mut self, key: impl ToString) -> Self {
        self.key = Some(key.to_string());
        self
    }

    /// Not added where a job with this key is there; its id is returned instead.
    pub fn unique(mut self, key: impl ToString, scope: Unique) -> Self {
        self.unique = Some((key.to_string(), scope));
        self
    }

    /// How often it is tried; as its queue says if not called.
    pub fn attempts_max(mut self, attempts: i32) -> Self {
        self.attempts_max = Some(attempts);
        self
    }

    fn payload(&self) -> Result<&serde_json::Value, Error> {
        self.payload.as_ref().map_err(|reason| Error::Invalid(format!("the job cannot be written as JSON: {reason}")))
    }

    /// Adds it by a connection of the pool, in whatever transaction that is in.
    pub(crate) async fn add(&self, connection: &Connection, queue: &str, tenant: &str) -> Result<i64, Error> {
        let wire = Wire::new(self)?;
        Ok(connection.call(Call::Enqueue, &wire.parameters(&queue, &tenant)).await?.try_get(0)?)
    }
}

/// The parts of a job as parameters.
struct Wire<'a> {
    job: &'a NewJob,
    payload: &'a serde_json::Value,
    after: Option<String>,
    unique: Option<&'a str>,
    scope: Option<&'static str>,
    window: Option<String>,
}

impl<'a> Wire<'a> {
    fn new(job: &'a NewJob) -> Result<Self, Error> {
        let scope = job.unique.as_ref().map(|(_, scope)| *scope).unwrap_or_default();
        Ok(Self {
            job,
            payload: job.payload()?,
            after: job.after.map(interval),
            unique: job.unique.as_ref().map(|(key, _)| key.as_str()),
            scope: scope.scope(),
            window: scope.window(),
        })
    }

    fn parameters<'p>(
        &'p self,
        queue: &'p (impl ToSql + Sync),
        tenant: &'p (impl ToSql + Sync),
    ) -> [Parameter<'p>; 11] {
        [
            (queue, Type::TEXT),
            (&self.payload, Type::JSONB),
            (&self.job.priority, Type::INT4),
            (&self.job.at, Type::TIMESTAMPTZ),
            (&self.after, Type::TEXT),
            (&self.unique, Type::TEXT),
            (&self.job.attempts_max, Type::INT4),
            (&self.job.key, Type::TEXT),
            (&self.scope, Type::TEXT),
            (&self.window, Type::TEXT),
            (tenant, Type::TEXT),
        ]
    }
}

/// Adds a job in the caller's own transaction. Returns its id, or that of the job that has its unique key.
///
/// # Errors
/// What the database refuses.
pub async fn enqueue(transaction: &impl GenericClient, tenant: &str, queue: &str, job: &NewJob) -> Result<i64, Error> {
    let wire = Wire::new(job)?;
    let parameters = wire.parameters(&queue, &tenant);
    Ok(transaction.query_typed_one(sql::text(Call::Enqueue, true), &parameters).await?.try_get(0)?)
}

/// A job, as a handler gets it.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Job {
    /// Its id.
    pub id: i64,
    /// The fence of this attempt.
    pub claim_id: Uuid,
    /// Whose it is.
    pub tenant: String,
    /// What it stays in order with.
    pub key: Option<String>,
    /// Its priority.
    pub priority: i32,
    /// What it is about.
    pub payload: serde_json::Value,
    /// Which attempt this is, from one.
    pub attempt: u32,
    /// How many there may be.
    pub attempts_max: u32,
    /// When it was enqueued.
    pub enqueued_at: SystemTime,
}

impl Job {
    fn read(row: &Row) -> Result<Self, tokio_postgres::Error> {
        Ok(Self {
            id: row.try_get(0)?,
            claim_id: row.try_get(1)?,
            tenant: row.try_get(2)?,
            key: row.try_get(3)?,
            priority: row.try_get(4)?,
            payload: row.try_get(5)?,
            attempt: u32::try_from(row.try_get::<_, i32>(6)?).unwrap_or(1),
            attempts_max: u32::try_from(row.try_get::<_, i32>(7)?).unwrap_or(1),
            enqueued_at: row.try_get(8)?,
        })
    }
}

/// What became of a job.
#[derive(Debug, Clone, PartialEq)]
pub struct Looked {
    /// `ready`, `parked`, `delayed`, `running`, `succeeded`, `buried` or `cancelled`.
    pub state: String,
    /// How often it was taken.
    pub attempts: i32,
    /// Its result, where there is one.
    pub result: Option<serde_json::Value>,
    /// Why its last attempt failed.
    pub last_error: Option<String>,
}

/// A queue, by its name.
#[derive(Debug, Clone)]
#[must_use = "a queue does nothing until it is given jobs, or a worker"]
pub struct Queue<'a> {
    once: &'a Once,
    name: String,
    tenant: String,
}

impl<'a> Queue<'a> {
    pub(crate) fn new(once: &'a Once, name: String) -> Self {
        Self { once, name, tenant: String::new() }
    }

    /// Whose jobs are enqueued, looked at and cancelled.
    pub fn tenant(mut self, tenant: impl Into<String>) -> Self {
        self.tenant = tenant.into();
        self
    }

    /// Declares its rules: see `once.define_queue`. With the same ones it writes nothing; call it at every start.
    ///
    /// # Errors
    /// P4020 for a rule that is none.
    pub async fn define(&self, policy: &serde_json::Value) -> Result<(), Error> {
        let parameters: [Parameter<'_>; 2] = [(&self.name, Type::TEXT), (policy, Type::JSONB)];
        self.once.connection().await?.call(Call::DefineQueue, &parameters).await?;
        Ok(())
    }

    /// Enqueues a job in a transaction of its own. Where an effect asks for it, [`crate::Tx::enqueue`] makes them one.
    ///
    /// # Errors
    /// What the database refuses.
    pub async fn enqueue(&self, job: &NewJob) -> Result<i64, Error> {
        let connection = self.once.connection().await?;
        job.add(&connection, &self.name, &self.tenant).await
    }

    /// Enqueues many jobs in one transaction, at most 10,000: their ids, in their order. The scope of unique keys and the
    /// number of attempts are those of the first that has them.
    ///
    /// # Errors
    /// What the database refuses: then none is added.
    pub async fn enqueue_batch(&self, jobs: &[NewJob]) -> Result<Vec<i64>, Error> {
        let connection = self.once.connection().await?;
        let payloads: Vec<&serde_json::Value> = jobs.iter().map(NewJob::payload).collect::<Result<_, _>>()?;
        let given = |any: bool| any.then_some(());
        let priorities: Option<Vec<i32>> =
            given(jobs.iter().any(|job| job.priority != 0)).map(|()| jobs.iter().map(|job| job.priority).collect());
        let timed = given(jobs.iter().any(|job| job.at.is_some() || job.after.is_some()));
        let times: Option<Vec<Option<SystemTime>>> = timed.map(|()| jobs.iter().map(|job| job.at).collect());
        let delays: Option<Vec<Option<String>>> =
            timed.map(|()| jobs.iter().map(|job| job.after.map(interval)).collect());
        let keys: Option<Vec<Option<&str>>> = given(jobs.iter().any(|job| job.key.is_some()))
            .map(|()| jobs.iter().map(|job| job.key.as_deref()).collect());
        let first = jobs.iter().find_map(|job| job.unique.as_ref());
        let uniques: Option<Vec<Option<&str>>> =
            first.map(|_| jobs.iter().map(|job| job.unique.as_ref().map(|(key, _)| key.as_str())).collect());
        let scope = first.map(|(_, scope)| *scope).unwrap_or_default();
        let (scope, window) = (scope.scope(), scope.window());
        let attempts_max = jobs.iter().find_map(|job| job.attempts_max);
        let parameters: [Parameter<'_>; 11] = [
            (&self.name, Type::TEXT),
            (&payloads, Type::JSONB_ARRAY),
            (&priorities, Type::INT4_ARRAY),
            (&times, Type::TIMESTAMPTZ_ARRAY),
            (&delays, Type::TEXT_ARRAY),
            (&uniques, Type::TEXT_ARRAY),
            (&attempts_max, Type::INT4),
            (&keys, Type::TEXT_ARRAY),
            (&scope, Type::TEXT),
            (&window, Type::TEXT),
            (&self.tenant, Type::TEXT),
        ];
        Ok(connection.call(Call::EnqueueBatch, &parameters).await?.try_get(0)?)
    }

    /// Stops a job: `cancelled` at once, `asked` where it runs, `None` where it is not alive.
    ///
    /// # Errors
    /// Where the database cannot be asked.
    pub async fn cancel(&self, job: i64) -> Result<Option<String>, Error> {
        let parameters: [Parameter<'_>; 2] = [(&job, Type::INT8), (&self.tenant, Type::TEXT)];
        Ok(self.once.connection().await?.call(Call::CancelJob, &parameters).await?.try_get(0)?)
    }

    /// What became of a job. `None`: it never was, or it succeeded without a result, and its queue keeps nothing of that.
    ///
    /// # Errors
    /// Where the database cannot be asked.
    pub async fn look(&self, job: i64) -> Result<Option<Looked>, Error> {
        let parameters: [Parameter<'_>; 2] = [(&job, Type::INT8), (&self.tenant, Type::TEXT)];
        let Some(row) = self.once.connection().await?.look(Call::LookJob, &parameters).await? else { return Ok(None) };
        Ok(Some(Looked {
            state: row.try_get(0)?,
            attempts: row.try_get(1)?,
            result: row.try_get(2)?,
            last_error: row.try_get(3)?,
        }))
    }

    /// Counts its jobs by state into the gauge `pgonce_queue_jobs`.
    ///
    /// # Errors
    /// Where the database cannot be asked.
    pub async fn measure(&self) -> Result<(), Error> {
        let rows = self.once.connection().await?.rows(Call::CountJobs, &[(&self.name, Type::TEXT)]).await?;
        for row in rows {
            let (state, jobs): (String, i64) = (row.try_get(0)?, row.try_get(1)?);
            #[allow(clippy::cast_precision_loss, reason = "a gauge")]
            metrics::gauge!("pgonce_queue_jobs", "queue" => self.name.clone(), "state" => state).set(jobs as f64);
        }
        Ok(())
    }

    /// A worker on this queue.
    pub fn worker(self) -> Worker<'a> {
        Worker::new(self)
    }
}
