//! The worker: takes ahead, has its lanes work, prolongs leases, and gives back what it did not begin.

use std::cmp::Reverse;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};
use uuid::Uuid;

use super::desk::Desk;
use super::schedule;
use super::{Job, JobTx, Queue};
use crate::claim::interval;
use crate::error::Failure;
use crate::sql::Call;
use crate::{Error, Once, observe};

/// Works on the jobs of one queue. Each job's effect commits in one transaction with its end; a worker that dies, or
/// outlives its lease, leaves nothing of it.
///
/// ```no_run
/// # use pgonce::{Failure, Once, Worker};
/// # async fn example(once: &Once) -> Result<(), pgonce::Error> {
/// Worker::new(once.queue("emails"))
///     .run(async |tx, job| {
///         tx.execute("INSERT INTO sent (job, address) VALUES ($1, $2)", &[&job.id, &job.payload["to"].as_str()]).await?;
///         Ok(())
///     })
///     .await // until SIGTERM or SIGINT
/// # }
/// ```
#[derive(Debug, Clone)]
#[must_use = "a worker does nothing until it is run"]
pub struct Worker<'a> {
    pub(super) queue: Queue<'a>,
    pub(super) name: String,
    pub(super) at_once: usize,
    pub(super) group: usize,
    pub(super) group_time: Duration,
    lease: Duration,
    ahead: usize,
    poll_max: Duration,
    one_tenant: bool,
    schedules: bool,
}

/// Sub-transactions of one transaction that PostgreSQL keeps in memory are 64: a larger group would slow everybody down.
const GROUP_MAX: usize = 50;

impl<'a> Worker<'a> {
    /// A worker on a queue; see [`Once::queue`].
    pub fn new(queue: Queue<'a>) -> Self {
        let at_once = (queue.once.shared.settings.pool_max / 2).clamp(1, 4);
        Self {
            queue,
            name: format!("worker {}", std::process::id()),
            at_once,
            group: GROUP_MAX,
            group_time: Duration::from_millis(20),
            lease: Duration::from_secs(30),
            ahead: 2000,
            poll_max: Duration::from_millis(250),
            one_tenant: false,
            schedules: true,
        }
    }

    /// What operators see as the holder of a job.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// How many jobs are worked on at once: with [`Worker::run`] each on a connection of the pool. Half of the pool, up
    /// to 4, if not called. Leave two connections of the pool for taking and for heartbeats.
    pub fn at_once(mut self, jobs: usize) -> Self {
        self.at_once = jobs.clamp(1, 1000);
        self
    }

    /// How many quick jobs share a transaction, at most: 50 if not called, and no more. A group ends when nothing more is
    /// at hand, or after 20 ms; so a slow handler is alone. What a group's jobs lock stays locked until it ends, and where
    /// its end fails, each of its handlers is called again. 1: every job has its own transaction.
    pub fn group(mut self, jobs: usize) -> Self {
        self.group = jobs.clamp(1, GROUP_MAX);
        self
    }

    /// How long a job is this worker's without a heartbeat: 30 seconds if not called. Heartbeats come three times in each;
    /// a worker that died is noticed when it is over.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease.clamp(Duration::from_millis(30), Duration::from_secs(86_400));
        self
    }

    /// How many jobs may be taken ahead: 2000 if not called. How many are follows from how quickly they are done; 0: only
    /// as many as can be begun at once.
    pub fn ahead(mut self, jobs: usize) -> Self {
        self.ahead = jobs.min(10_000);
        self
    }

    /// The longest pause before an empty queue is asked again: 250 ms if not called.
    pub fn poll_max(mut self, pause: Duration) -> Self {
        self.poll_max = pause.max(Duration::from_millis(1));
        self
    }

    /// Only the jobs of the queue's tenant; of every tenant if not called.
    pub fn one_tenant(mut self) -> Self {
        self.one_tenant = true;
        self
    }

    /// Does not fire schedules. Every worker does, of whatever queue, if this is not called.
    pub fn without_schedules(mut self) -> Self {
        self.schedules = false;
        self
    }

    /// Works until SIGTERM or SIGINT, then finishes what was begun, and gives back the rest.
    ///
    /// # Errors
    /// Where the process cannot listen to signals.
    pub async fn run<F, R>(&self, handler: F) -> Result<(), Error>
    where
        F: Fn(JobTx, Arc<Job>) -> R,
        R: Future<Output = Result<(), Failure>>,
    {
        let stop = terminated().map_err(|error| Error::Invalid(format!("signals cannot be listened to: {error}")))?;
        self.run_until(stop, handler).await;
        Ok(())
    }

    /// Works until `stop` resolves, then finishes what was begun, and gives back the rest. A database that is away is
    /// waited for. A handler's error is rolled back, and the job tried again after its queue's backoff; after
    /// [`Failure::refuse`], or when its attempts are used up, it is buried. Serialization failures and deadlocks are run
    /// again at once.
    pub async fn run_until<F, R>(&self, stop: impl Future<Output = ()>, handler: F)
    where
        F: Fn(JobTx, Arc<Job>) -> R,
        R: Future<Output = Result<(), Failure>>,
    {
        let desk = Arc::new(Desk::default());
        let lanes = (0..self.at_once).map(|_| self.lane(&desk, &handler));
        self.drive(&desk, stop, false, join_all(lanes)).await;
    }

    /// Works until there is nothing to take and nothing in hand: for tests, and for jobs that run now and then. What is
    /// delayed is not waited for. Schedules are not fired.
    pub async fn run_until_empty<F, R>(&self, stop: impl Future<Output = ()>, handler: F)
    where
        F: Fn(JobTx, Arc<Job>) -> R,
        R: Future<Output = Result<(), Failure>>,
    {
        let desk = Arc::new(Desk::default());
        let lanes = (0..self.at_once).map(|_| self.lane(&desk, &handler));
        self.drive(&desk, stop, true, join_all(lanes)).await;
    }

    /// As [`Worker::run_until`], for handlers whose effect is elsewhere: they get no transaction, and their jobs are
    /// finished afterwards, in batches. A worker that dies in between leaves the effect, and the job is done again: the
    /// handler has to know it by its id.
    pub async fn run_outside<F, R>(&self, stop: impl Future<Output = ()>, until_empty: bool, handler: F)
    where
        F: Fn(Arc<Job>) -> R,
        R: Future<Output = Result<Option<serde_json::Value>, Failure>>,
    {
        let desk = Arc::new(Desk::default());
        self.drive(&desk, stop, until_empty, self.outside(&desk, &handler)).await;
    }

    /// Runs the lanes while jobs are taken and leases prolonged, and gives back what was not begun.
    async fn drive<L>(
        &self,
        desk: &Arc<Desk>,
        stop: impl Future<Output = ()>,
        until_empty: bool,
        lanes: impl Future<Output = L>,
    ) {
        let once = self.queue.once;
        // Tasks of their own: a handler that keeps its thread busy must not cost all leases.
        let _beat = Task(tokio::spawn(Arc::clone(desk).beat(once.clone(), self.lease)));
        let _schedules = (self.schedules && !until_empty).then(|| Task(tokio::spawn(schedule::fire_all(once.clone()))));
        let stop = pin!(stop);
        tokio::join!(self.take_until(desk, stop, until_empty), lanes);
        self.give_back(desk).await; // what a lane could not begin
    }

    /// Takes ahead until told to stop, then closes the desk, and gives back what is on it.
    async fn take_until(&self, desk: &Desk, mut stop: Pin<&mut impl Future<Output = ()>>, until_empty: bool) {
        let mut window = Window::new(self.at_once, self.ahead);
        let mut pause = Duration::ZERO;
        loop {
            // Asked for before the look: what ends in between is not missed, nor whom it lets through.
            let moved = desk.moved();
            let idle = desk.is_idle();
            let room = window.room(desk.len());
            let wait = if room == 0 {
                None
            } else {
                match self.take(room).await {
                    Ok(jobs) if jobs.is_empty() => {
                        if until_empty && idle {
                            break;
                        }
                        pause = (pause * 2).clamp(Duration::from_millis(5), self.poll_max);
                    }
                    Ok(jobs) => {
                        window.took(jobs.len());
                        desk.put(jobs);
                        pause = Duration::ZERO;
                    }
                    Err(error) => {
                        tracing::warn!(queue = %self.queue.name, %error, "the queue cannot be asked; asking again");
                        pause = (pause * 2).clamp(Duration::from_millis(100), Duration::from_secs(5));
                    }
                }
                Some(pause)
            };
            tokio::select! {
                biased;
                () = &mut stop => break,
                () = moved, if wait.is_none() => {}
                () = tokio::time::sleep(wait.unwrap_or_default()), if wait.is_some() => {}
            }
        }
        // At once: others need not wait for what this worker has begun.
        self.give_back(desk).await;
    }

    async fn take(&self, limit: usize) -> Result<Vec<Job>, Error> {
        let connection = self.queue.once.connection().await?;
        let limit = i32::try_from(limit).unwrap_or(10_000);
        let lease = interval(self.lease);
        let tenant = self.one_tenant.then_some(&self.queue.tenant);
        let parameters: [(&(dyn ToSql + Sync), Type); 5] = [
            (&self.queue.name, Type::TEXT),
            (&self.name, Type::TEXT),
            (&limit, Type::INT4),
            (&lease, Type::TEXT),
            (&tenant, Type::TEXT),
        ];
        let rows = connection.rows(Call::Take, &parameters).await?;
        let read = |row: &Row| Ok::<(i64, Job), tokio_postgres::Error>((row.try_get(9)?, Job::read(row)?));
        let mut jobs = rows.iter().map(read).collect::<Result<Vec<_>, _>>()?;
        jobs.sort_unstable_by_key(|(place, job)| (Reverse(job.priority), *place, job.id));
        Ok(jobs.into_iter().map(|(_, job)| job).collect())
    }

    /// What was taken and not begun: ready for others at once, its attempt not counted.
    async fn give_back(&self, desk: &Desk) {
        let left: Vec<_> = desk.close().into_iter().map(|ticket| ticket.job).collect();
        let (ids, claims): (Vec<i64>, Vec<Uuid>) = left.iter().map(|job| (job.id, job.claim_id)).unzip();
        for (ids, claims) in ids.chunks(1000).zip(claims.chunks(1000)) {
            let parameters: [(&(dyn ToSql + Sync), Type); 2] = [(&ids, Type::INT8_ARRAY), (&claims, Type::UUID_ARRAY)];
            let given =
                async { Ok::<_, Error>(self.queue.once.connection().await?.call(Call::GiveBack, &parameters).await?) };
            match given.await {
                Ok(_) => observe::worked(&self.queue.name, "given_back", ids.len()),
                Err(error) => tracing::warn!(%error, "jobs could not be given back; their leases will end"),
            }
        }
        desk.let_go(&left);
    }

    /// Records that an attempt failed, in a transaction of its own. Where that cannot be done, the lease ends by itself.
    pub(super) async fn fail(&self, job: &Job, failure: &Failure) {
        let text = format!("{}: {}", failure.code(), failure.message());
        let none: Option<String> = None;
        let parameters: [(&(dyn ToSql + Sync), Type); 4] =
            [(&job.id, Type::INT8), (&job.claim_id, Type::UUID), (&text, Type::TEXT), (&none, Type::TEXT)];
        let recorded = async {
            let connection = self.queue.once.connection().await?;
            let row = match failure.is_refusal() {
                true => connection.call(Call::BuryJob, &parameters[..3]).await?,
                false => connection.call(Call::RetryJob, &parameters).await?,
            };
            Ok::<String, Error>(row.try_get(0)?)
        };
        let end = match recorded.await.as_deref() {
            Ok("buried") => "buried",
            Ok("cancelled") => "cancelled",
            Ok(_) => "retried",
            Err(Error::JobLost) => "lost",
            Err(error) => {
                tracing::warn!(%error, "what became of the job could not be recorded; its lease will end");
                "unrecorded"
            }
        };
        observe::worked(&self.queue.name, end, 1);
    }

    pub(super) fn once(&self) -> &Once {
        self.queue.once
    }
}

/// How many jobs are taken ahead: more while they are done quickly, so that other workers get theirs when they are slow.
#[derive(Debug)]
struct Window {
    size: usize,
    min: usize,
    max: usize,
    filled: Instant,
}

impl Window {
    fn new(at_once: usize, ahead: usize) -> Self {
        Self { size: at_once, min: at_once, max: ahead.max(at_once), filled: Instant::now() }
    }

    /// How many to ask for while so many wait here: none until half of them are begun.
    fn room(&self, waiting: usize) -> usize {
        if waiting > self.size / 2 { 0 } else { self.size - waiting }
    }

    /// The window was worth this long: doubled where that was short, halved where it was long.
    fn took(&mut self, jobs: usize) {
        let lasted = self.filled.elapsed();
        self.filled = Instant::now();
        if lasted < Duration::from_millis(100) && jobs >= self.size / 2 {
            self.size = (self.size * 2).min(self.max);
        } else if lasted > Duration::from_millis(500) {
            self.size = (self.size / 2).max(self.min);
        }
    }
}

/// A task that ends with its owner.
struct Task(tokio::task::JoinHandle<()>);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Resolves at the first SIGTERM or SIGINT from now on.
fn terminated() -> std::io::Result<impl Future<Output = ()>> {
    use tokio::signal::unix::{SignalKind, signal};
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quick_jobs_are_taken_ahead_and_slow_ones_are_not() {
        let mut window = Window::new(2, 100);
        assert_eq!((window.room(0), window.room(1), window.room(2)), (2, 1, 0));
        for _ in 0..10 {
            window.took(window.size);
        }
        assert_eq!(window.size, 100);
        window.filled = Instant::now().checked_sub(Duration::from_secs(1)).unwrap_or_else(Instant::now);
        window.took(100);
        assert_eq!(window.size, 50);
        assert_eq!((window.room(26), window.room(25)), (0, 25));
        assert_eq!(Window::new(3, 0).room(0), 3);
    }
}
