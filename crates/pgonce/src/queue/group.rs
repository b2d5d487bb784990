//! A lane: one connection, on which jobs run one after another, quick ones several to a transaction.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use futures_util::future::join;
use tokio_postgres::types::{ToSql, Type};
use tracing::Instrument as _;
use uuid::Uuid;

use super::desk::{Desk, Standing, Ticket};
use super::{Job, JobTx, Worker};
use crate::error::Failure;
use crate::pool::Pooled;
use crate::sql::Call;
use crate::sqlstate::Verdict;
use crate::tx::{Ended, commit_behind, rollback};
use crate::{Error, observe};

/// How often a job that is alone in its transaction is run again at once, after serialization failures and deadlocks.
const AGAIN_MAX: u32 = 20;

/// What became of one handler's run.
enum Ran {
    /// Its effect is in the transaction.
    Done(Option<serde_json::Value>),
    /// It failed; the transaction goes on without it.
    Failed(Failure),
    /// Nothing of the transaction can stay: `Some` failed in a way of its own.
    Broken(Option<Failure>),
    /// It was dropped: another's, or cancelled.
    Dropped(Standing),
}

/// The jobs of one transaction.
struct Group {
    connection: Pooled,
    done: Vec<(Ticket, Option<serde_json::Value>)>,
    failed: Vec<(Ticket, Failure)>,
    mark: Mark,
}

/// What is sent before a job's first statement, and costs no round trip of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mark {
    /// Nothing: the job is alone in its transaction.
    Alone,
    /// The first savepoint.
    First,
    /// After one whose effect is to stay.
    AfterDone,
    /// After one that failed.
    AfterFailed,
}

impl Mark {
    fn text(self) -> Option<&'static str> {
        match self {
            Self::Alone => None,
            Self::First => Some("SAVEPOINT job"),
            Self::AfterDone => Some("RELEASE SAVEPOINT job; SAVEPOINT job"),
            Self::AfterFailed => Some("ROLLBACK TO SAVEPOINT job"),
        }
    }

    fn after(self, next: Self) -> Self {
        if self == Self::Alone { self } else { next }
    }
}

impl Worker<'_> {
    /// Works until no more jobs are to be begun.
    pub(super) async fn lane<F, R>(&self, desk: &Desk, handler: &F)
    where
        F: Fn(JobTx, Arc<Job>) -> R,
        R: Future<Output = Result<(), Failure>>,
    {
        // Those whose group came to nothing: each in a transaction of its own now.
        let mut alone: VecDeque<(Ticket, u32)> = VecDeque::new();
        loop {
            let (first, group, again) = match alone.pop_front() {
                Some((ticket, again)) => (ticket, 1, again),
                None => match desk.next().await {
                    Some(ticket) => (ticket, self.group, 0),
                    None => return,
                },
            };
            if again > 1 {
                tokio::time::sleep(Duration::from_millis(2) * again).await; // who met here may meet again
            }
            match self.begin(group > 1).await {
                Ok(begun) => {
                    let again = again + 1;
                    alone.extend(
                        self.work(desk, begun, first, group, handler).await.into_iter().map(|ticket| (ticket, again)),
                    );
                }
                Err(error) => {
                    tracing::warn!(queue = %self.queue.name, %error, "no transaction can be begun; trying again");
                    desk.put_back(first);
                    tokio::time::sleep(Duration::from_millis(250)).await;
                }
            }
            while let Some((ticket, _)) = alone.pop_front_if(|(_, again)| *again > AGAIN_MAX) {
                let failure = Failure::retry("40001", "its transaction failed to be serialized, time after time");
                self.fail(&ticket.job, &failure).await;
                desk.let_go(&[ticket.job]);
            }
        }
    }

    async fn begin(&self, savepoints: bool) -> Result<Group, Error> {
        let connection = self.once().connection().await?;
        connection.dirty.store(true, Ordering::SeqCst);
        // Waited for: without its answer a statement of the handler's could be outside any transaction.
        connection.client.batch_execute("BEGIN").await?;
        let mark = if savepoints { Mark::First } else { Mark::Alone };
        Ok(Group { connection, done: Vec::new(), failed: Vec::new(), mark })
    }

    /// Runs one transaction, from its first job on. Returns the jobs of which nothing stayed, to be run alone.
    async fn work<F, R>(&self, desk: &Desk, mut group: Group, first: Ticket, limit: usize, handler: &F) -> Vec<Ticket>
    where
        F: Fn(JobTx, Arc<Job>) -> R,
        R: Future<Output = Result<(), Failure>>,
    {
        let started = Instant::now();
        let mut next = Some(first);
        let mut count = 0;
        while let Some(ticket) = next.take() {
            count += 1;
            let (connection, ran) = self.run_one(group.connection, &ticket, group.mark, handler).await;
            match (connection, ran) {
                (Some(connection), Ran::Done(result)) => {
                    group.connection = connection;
                    group.mark = group.mark.after(Mark::AfterDone);
                    group.done.push((ticket, result));
                }
                (Some(connection), Ran::Failed(failure)) if group.mark != Mark::Alone => {
                    group.connection = connection;
                    group.mark = Mark::AfterFailed;
                    group.failed.push((ticket, failure));
                }
                (connection, ran) => {
                    // The whole transaction goes.
                    if let Some(connection) = connection {
                        rollback(connection).await;
                    }
                    let mut alone: Vec<Ticket> = group.done.into_iter().map(|(ticket, _)| ticket).collect();
                    match ran {
                        Ran::Broken(None) | Ran::Done(_) => alone.push(ticket),
                        Ran::Failed(failure) | Ran::Broken(Some(failure)) if failure.verdict == Verdict::Again => {
                            observe::retried(failure.code());
                            alone.push(ticket);
                        }
                        Ran::Failed(failure) | Ran::Broken(Some(failure)) => group.failed.push((ticket, failure)),
                        Ran::Dropped(standing) => self.drop_job(desk, &ticket, standing).await,
                    }
                    self.record(desk, group.failed).await;
                    return alone;
                }
            }
            if count < limit && started.elapsed() < self.group_time {
                next = desk.at_hand();
            }
        }
        self.end(desk, group).await
    }

    /// One handler, in the open transaction, behind a savepoint where it is not alone there.
    async fn run_one<F, R>(&self, connection: Pooled, ticket: &Ticket, mark: Mark, handler: &F) -> (Option<Pooled>, Ran)
    where
        F: Fn(JobTx, Arc<Job>) -> R,
        R: Future<Output = Result<(), Failure>>,
    {
        let job = Arc::clone(&ticket.job);
        let span = tracing::info_span!("pgonce.work", queue = %self.queue.name, job = job.id, attempt = job.attempt);
        let tx = JobTx::new(connection, self.queue.name.as_str().into(), Arc::clone(&job));
        fail::fail_point!("pgonce::job_before_handler");
        let ran = {
            let mark = async {
                match mark.text() {
                    Some(text) => tx.batch_execute(text).await,
                    None => Ok(()),
                }
            };
            // `join` polls in order: the mark is on the wire before the handler's first statement.
            let running = join(mark, handler(tx.clone(), Arc::clone(&job))).instrument(span);
            tokio::select! {
                biased;
                standing = ticket.dropped() => Err(standing),
                ran = running => Ok(ran),
            }
        };
        let (marked, handled) = match ran {
            Ok(ran) => ran,
            Err(standing) => {
                // It may be in the middle of a statement: the rollback waits for that, and nobody waits for it.
                tokio::spawn(tx.rollback());
                return (None, Ran::Dropped(standing));
            }
        };
        let Some((connection, result)) = tx.into_parts() else {
            let failure = Failure::retry("kept", "the handler kept its transaction beyond its end");
            return (None, Ran::Broken(Some(failure)));
        };
        if marked.is_err() {
            return (Some(connection), Ran::Broken(None)); // the one before it broke the transaction and did not say so
        }
        match handled {
            Ok(()) => (Some(connection), Ran::Done(result)),
            Err(failure) if failure.verdict == Verdict::Again => (Some(connection), Ran::Broken(Some(failure))),
            Err(failure) => (Some(connection), Ran::Failed(failure)),
        }
    }

    /// Finishes the group's jobs and commits, in one round trip. Where that is refused, nothing of it is there.
    async fn end(&self, desk: &Desk, group: Group) -> Vec<Ticket> {
        let Group { connection, done, failed, mark } = group;
        let mut alone = Vec::new();
        // The last one's failure is not undone yet. Where that cannot be done, the finish is refused.
        if !done.is_empty() && mark == Mark::AfterFailed {
            let _ = connection.client.batch_execute("ROLLBACK TO SAVEPOINT job").await;
        }
        if done.is_empty() {
            rollback(connection).await;
        } else {
            let is_one = done.len() == 1;
            let (tickets, results): (Vec<Ticket>, Vec<Option<serde_json::Value>>) = done.into_iter().unzip();
            let jobs: Vec<Arc<Job>> = tickets.iter().map(|ticket| Arc::clone(&ticket.job)).collect();
            match finish_and_commit(connection, &jobs, &results).await {
                Ended::Committed => {
                    observe::worked(&self.queue.name, "finished", jobs.len());
                    desk.let_go(&jobs);
                }
                Ended::InDoubt(reason) => {
                    // Not prolonged any more: it is finished, or its lease ends, and it is done again.
                    tracing::warn!(queue = %self.queue.name, reason, "the end of jobs is in doubt; they are there, or their leases will end");
                    observe::worked(&self.queue.name, "in_doubt", jobs.len());
                    desk.let_go(&jobs);
                }
                Ended::Refused(error) if is_one => alone.extend(self.refused(desk, tickets, error).await),
                Ended::Refused(_) | Ended::Overtaken | Ended::Kept => alone = tickets,
            }
        }
        self.record(desk, failed).await;
        alone
    }

    /// The finish of one job alone was refused: lost, to be run again, or failed by what its handler did.
    async fn refused(&self, desk: &Desk, tickets: Vec<Ticket>, error: tokio_postgres::Error) -> Vec<Ticket> {
        let failure = Failure::of_database(&error);
        match failure.verdict {
            Verdict::Again => return tickets,
            Verdict::Lost => observe::worked(&self.queue.name, "lost", 1),
            _ => {
                for ticket in &tickets {
                    self.fail(&ticket.job, &failure).await;
                }
            }
        }
        desk.let_go(tickets.iter().map(|ticket| &ticket.job));
        Vec::new()
    }

    async fn record(&self, desk: &Desk, failed: Vec<(Ticket, Failure)>) {
        for (ticket, failure) in failed {
            match failure.verdict {
                Verdict::Lost => observe::worked(&self.queue.name, "lost", 1),
                _ => self.fail(&ticket.job, &failure).await,
            }
            desk.let_go(&[ticket.job]);
        }
    }

    /// A job whose handler was dropped: another's, or ended as cancelled.
    pub(super) async fn drop_job(&self, desk: &Desk, ticket: &Ticket, standing: Standing) {
        if standing == Standing::Cancel {
            self.fail(&ticket.job, &Failure::retry("cancelled", "it was asked to stop")).await;
        } else {
            observe::worked(&self.queue.name, "lost", 1);
        }
        desk.let_go(&[Arc::clone(&ticket.job)]);
    }
}

async fn finish_and_commit(connection: Pooled, jobs: &[Arc<Job>], results: &[Option<serde_json::Value>]) -> Ended {
    // In the order of ids: as every batch locks them.
    let mut order: Vec<usize> = (0..jobs.len()).collect();
    order.sort_by_key(|place| jobs[*place].id);
    let (ids, claims): (Vec<i64>, Vec<Uuid>) =
        order.iter().map(|place| (jobs[*place].id, jobs[*place].claim_id)).unzip();
    let results: Option<Vec<&Option<serde_json::Value>>> =
        results.iter().any(Option::is_some).then(|| order.iter().map(|place| &results[*place]).collect());
    let parameters: [(&(dyn ToSql + Sync), Type); 3] =
        [(&ids, Type::INT8_ARRAY), (&claims, Type::UUID_ARRAY), (&results, Type::JSONB_ARRAY)];
    fail::fail_point!("pgonce::job_before_commit");
    let ended = commit_behind(&connection, Call::FinishBatch, &parameters).await;
    fail::fail_point!("pgonce::job_after_commit");
    ended
}
