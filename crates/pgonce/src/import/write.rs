//! Batch after batch, each in one transaction with the record of what became of its rows.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::future::join;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_postgres::types::{ToSql, Type};

use super::batch::{Batch, Position, Reading, read_ahead};
use super::errors::ErrorFile;
use super::input::Content;
use super::job::{Job, interval};
use super::plan::Plan;
use super::stage::{self, Outcome, Staged};
use super::{Ending, ImportOptions, Layout, Progress, Report, RowFailure};
use crate::pool::Pooled;
use crate::sql::Call;
use crate::sqlstate::{Verdict, verdict_of};
use crate::tx::{Ended, commit_behind, rollback};
use crate::{Error, Once, observe};

const FAILURES_TOLD: usize = 10;
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// An import that is under way.
pub(super) struct Run<'a> {
    pub(super) once: &'a Once,
    pub(super) options: &'a ImportOptions,
    pub(super) plan: &'a Plan,
    pub(super) job: &'a mut Job,
    pub(super) errors: &'a mut ErrorFile,
}

/// Why a batch was not settled.
enum Halt {
    TooMany(Vec<RowFailure>),
    Interrupted,
    Broken(Error),
}

impl From<Error> for Halt {
    fn from(error: Error) -> Self {
        Self::Broken(error)
    }
}

impl From<tokio_postgres::Error> for Halt {
    fn from(error: tokio_postgres::Error) -> Self {
        Self::Broken(error.into())
    }
}

/// Which way the next batch goes. COPY into the target is fastest, and can only do all or nothing: where it was refused,
/// the next batches go by the stage, more and more of them, until COPY is tried again.
#[derive(Debug, Default)]
struct Way {
    staged_left: u32,
    penalty: u32,
}

impl Way {
    const PENALTY_MAX: u32 = 64;

    fn refused(&mut self) {
        self.penalty = (self.penalty * 2).clamp(1, Self::PENALTY_MAX);
        self.staged_left = self.penalty;
    }

    fn is_direct(&mut self) -> bool {
        let is_direct = self.staged_left == 0;
        self.staged_left = self.staged_left.saturating_sub(1);
        is_direct
    }
}

/// What an attempt at a batch came to.
enum Attempt {
    Written(&'static str, Outcome),
    Refused(super::records::Bad),
    TooMany(Vec<RowFailure>),
}

impl Run<'_> {
    /// Goes on to the file's end, or until something is in the way.
    pub(super) async fn finish(
        &mut self,
        content: Arc<Content>,
        layout: &Layout,
        mut stop: watch::Receiver<bool>,
        mut progress: impl FnMut(Progress),
    ) -> Result<Report, Error> {
        let from_row = self.job.next_row;
        let mut batches = read_ahead(Arc::clone(&content), self.reading(layout));
        let mut told: Vec<RowFailure> = Vec::new();
        let mut way = Way::default();
        let ending = loop {
            progress(self.progress(&content));
            let next = tokio::select! {
                biased;
                _ = stop.wait_for(|stop| *stop) => break Ending::Interrupted,
                next = batches.recv() => next,
            };
            let batch = match next {
                None if content.is_same() => break Ending::Done,
                None => break Ending::Stopped("the file was changed while it was imported: import it again".into()),
                Some(Err(error)) => {
                    let row = self.job.next_row;
                    break Ending::Stopped(format!(
                        "row {row}, line {}: {}; the rows before it are settled",
                        error.line, error.reason
                    ));
                }
                Some(Ok(batch)) => batch,
            };
            match self.settle(batch, &mut way, &mut stop, &mut told).await {
                Ok(()) => {}
                Err(Halt::Interrupted) => break Ending::Interrupted,
                Err(Halt::TooMany(failures)) => {
                    let (max, row) = (self.options.failures_max, self.job.next_row);
                    told = failures;
                    told.truncate(FAILURES_TOLD);
                    break Ending::Stopped(format!(
                        "more than {max} rows failed; the batch that begins with row {row} was rolled back"
                    ));
                }
                Err(Halt::Broken(error)) => {
                    // Where it can be told: else the lease ends by itself.
                    let _ = self.job.end(self.once, Some(&without_values(&error))).await;
                    return Err(error);
                }
            }
        };
        self.close(&ending, &mut stop).await?;
        Ok(Report { from_row, failures: told, ..self.job.report(ending, self.options) })
    }

    fn reading(&self, layout: &Layout) -> Reading {
        Reading {
            format: self.options.format,
            wanted: layout.wanted.clone(),
            keys: layout.key_fields(self.options),
            batch_rows: self.options.batch_rows,
            row: self.job.next_row,
            from: if self.job.next_row == 1 { layout.begin } else { self.job.next },
        }
    }

    fn progress(&self, content: &Content) -> Progress {
        Progress {
            is_hashing: false,
            bytes: content.taken.load(Ordering::Relaxed),
            bytes_total: content.size,
            rows: self.job.settled.rows(),
            failed: self.job.settled.failed,
        }
    }

    /// Says how the job ended; the database may be waited for.
    async fn close(&self, ending: &Ending, stop: &mut watch::Receiver<bool>) -> Result<(), Error> {
        let reason = match ending {
            Ending::Done => None,
            Ending::Stopped(reason) => Some(reason.as_str()),
            _ => Some("interrupted"),
        };
        let mut patience = Patience::new(self.options.wait_max);
        loop {
            match self.job.end(self.once, reason).await {
                Err(error) if error.is_retryable() && reason.is_none() => patience.wait(error, stop).await?,
                // That it stopped is told; that it is not recorded as stopped costs the next one a lease at most.
                Err(error) if reason.is_some() => {
                    tracing::debug!(%error, "the stop was not recorded");
                    return Ok(());
                }
                ended => return ended,
            }
        }
    }

    /// Writes a batch, or its parts.
    async fn settle(
        &mut self,
        batch: Batch,
        way: &mut Way,
        stop: &mut watch::Receiver<bool>,
        told: &mut Vec<RowFailure>,
    ) -> Result<(), Halt> {
        let mut pending = vec![batch];
        while let Some(mut batch) = pending.pop() {
            match self.persist(&batch, way, stop).await? {
                Attempt::Written(name, outcome) => {
                    let (skipped, failed) = (outcome.skipped(), outcome.failures());
                    let applied = batch.rows() - skipped - failed;
                    observe::imported(name, applied, skipped, failed);
                    self.job.settled.applied += applied;
                    self.job.settled.skipped += skipped;
                    self.job.settled.failed += failed;
                    (self.job.next_row, self.job.next) = (batch.last() + 1, batch.next());
                    self.errors.add(&outcome.failed)?;
                    told.extend(outcome.failed.into_iter().take(FAILURES_TOLD.saturating_sub(told.len())));
                }
                Attempt::TooMany(failures) => return Err(Halt::TooMany(failures)),
                Attempt::Refused(bad) if batch.rows() == 1 => {
                    batch.good.clear();
                    batch.data.clear();
                    batch.bad.push((0, bad));
                    pending.push(batch);
                }
                Attempt::Refused(_) => {
                    let (left, right) = batch.halves();
                    pending.extend([right, left]);
                }
            }
        }
        Ok(())
    }

    /// Tries until it is known what became of the batch, or waiting does not help.
    async fn persist(&self, batch: &Batch, way: &mut Way, stop: &mut watch::Receiver<bool>) -> Result<Attempt, Halt> {
        let mut patience = Patience::new(self.options.wait_max);
        let mut doubt = None;
        let mut direct = self.plan.copy_direct.as_deref().filter(|_| way.is_direct());
        loop {
            let tried = match direct {
                Some(copy) => match self.directly(copy, batch, &mut doubt).await {
                    Ok(None) => {
                        way.refused();
                        direct = None;
                        continue;
                    }
                    Ok(Some(written)) => {
                        way.penalty = 0;
                        Ok(written)
                    }
                    Err(error) => Err(error),
                },
                None => self.staged(batch, &mut doubt).await,
            };
            match tried {
                Err(error) if error.is_retryable() => {
                    observe::retried(error.sqlstate().unwrap_or("connection"));
                    tracing::info!(%error, first_row = batch.first, "the batch is tried again");
                    if *stop.borrow() {
                        return Err(Halt::Interrupted);
                    }
                    patience.wait(error, stop).await?;
                }
                tried => return Ok(tried?),
            }
        }
    }

    /// COPY straight into the target: all of it, or None and nothing.
    async fn directly(&self, copy: &str, batch: &Batch, doubt: &mut Option<Outcome>) -> Result<Option<Attempt>, Error> {
        let outcome = Outcome::unread(batch);
        if self.job.settled.failed + outcome.failures() > self.options.failures_max {
            return Ok(Some(Attempt::TooMany(outcome.failed)));
        }
        let connection = self.once.connection().await?;
        if let Some(known) = self.begin(&connection, batch, doubt).await? {
            return Ok(Some(known));
        }
        let copied =
            if batch.good.is_empty() { Ok(0) } else { stage::copy(&connection.client, copy, &batch.data).await };
        match copied {
            // Fewer: a trigger let some go. Which ones, the stage can tell.
            Ok(rows) if rows == batch.good.len() as u64 => {}
            Ok(_) => {
                rollback(connection).await;
                return Ok(None);
            }
            Err(error) => {
                rollback(connection).await;
                return if is_passing(&error) { Err(error.into()) } else { Ok(None) };
            }
        }
        match self.commit(connection, batch, outcome.clone()).await {
            Ok(()) => Ok(Some(Attempt::Written("direct", outcome))),
            // A constraint that is looked at only now.
            Err(Error::Database(error)) if !is_passing(&error) => Ok(None),
            Err(error) => {
                *doubt = Some(outcome);
                Err(error)
            }
        }
    }

    /// By way of the stage, where rows can be told apart.
    async fn staged(&self, batch: &Batch, doubt: &mut Option<Outcome>) -> Result<Attempt, Error> {
        let connection = self.once.connection().await?;
        if let Some(known) = self.begin(&connection, batch, doubt).await? {
            return Ok(known);
        }
        let left = self.options.failures_max.saturating_sub(self.job.settled.failed);
        let prepared = connection.client.batch_execute("SET CONSTRAINTS ALL IMMEDIATE").await;
        let applied = match prepared {
            Ok(()) => stage::apply(&connection, self.plan, batch, left).await,
            Err(error) => Err(error),
        };
        let outcome = match applied {
            Ok(Staged::Applied(outcome)) => outcome,
            Ok(Staged::Refused(bad)) => {
                rollback(connection).await;
                return Ok(Attempt::Refused(bad));
            }
            Err(error) => {
                rollback(connection).await;
                return Err(error.into());
            }
        };
        if outcome.failures() > left {
            rollback(connection).await;
            return Ok(Attempt::TooMany(outcome.failed));
        }
        match self.commit(connection, batch, outcome.clone()).await {
            Ok(()) => Ok(Attempt::Written("staged", outcome)),
            Err(error) => {
                *doubt = Some(outcome);
                Err(error)
            }
        }
    }

    /// Begins the batch's transaction, with the job locked. Some: it was written before, by the attempt in doubt.
    async fn begin(
        &self,
        connection: &Pooled,
        batch: &Batch,
        doubt: &mut Option<Outcome>,
    ) -> Result<Option<Attempt>, Error> {
        const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL statement_timeout = '10min'";
        connection.dirty.store(true, Ordering::SeqCst);
        let parameters: [(&(dyn ToSql + Sync), Type); 2] = [(&self.job.id, Type::INT8), (&self.job.claim, Type::UUID)];
        // `join` polls in order: BEGIN is on the wire first.
        let (begun, next) =
            join(connection.client.batch_execute(BEGIN), connection.call(Call::ImportBegin, &parameters)).await;
        begun?;
        let next: i64 = next?.try_get(0)?;
        let next = u64::try_from(next).unwrap_or_default();
        if next == batch.first {
            *doubt = None;
            return Ok(None);
        }
        match doubt.take() {
            Some(outcome) if next == batch.last() + 1 => Ok(Some(Attempt::Written("doubt", outcome))),
            _ => Err(Error::ImportLost),
        }
    }

    /// Records and commits, in one round trip.
    async fn commit(&self, connection: Pooled, batch: &Batch, outcome: Outcome) -> Result<(), Error> {
        let signed = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        let (first, last) = (signed(batch.first), signed(batch.last()));
        let Position { offset, line } = batch.next();
        let (offset, line, lease) = (signed(offset), signed(line), interval(self.options.lease));
        let some = |rows: &Vec<i64>| (!rows.is_empty()).then(|| rows.clone());
        let (existing, unchanged, dropped) =
            (some(&outcome.existing), some(&outcome.unchanged), some(&outcome.dropped));
        let failed: Vec<i64> = outcome.failed.iter().map(|failure| signed(failure.row)).collect();
        let lines: Vec<i64> = outcome.failed.iter().map(|failure| signed(failure.line)).collect();
        let codes: Vec<&str> = outcome.failed.iter().map(|failure| failure.code.as_str()).collect();
        let messages: Vec<&str> = outcome.failed.iter().map(|failure| failure.message.as_str()).collect();
        let inputs: Vec<&[u8]> = outcome.failed.iter().map(|failure| failure.input.as_slice()).collect();
        let parameters: [(&(dyn ToSql + Sync), Type); 15] = [
            (&self.job.id, Type::INT8),
            (&self.job.claim, Type::UUID),
            (&first, Type::INT8),
            (&last, Type::INT8),
            (&offset, Type::INT8),
            (&line, Type::INT8),
            (&lease, Type::TEXT),
            (&existing, Type::INT8_ARRAY),
            (&unchanged, Type::INT8_ARRAY),
            (&dropped, Type::INT8_ARRAY),
            (&failed, Type::INT8_ARRAY),
            (&lines, Type::INT8_ARRAY),
            (&codes, Type::TEXT_ARRAY),
            (&messages, Type::TEXT_ARRAY),
            (&inputs, Type::BYTEA_ARRAY),
        ];
        fail::fail_point!("pgonce::import_before_commit");
        let ended = commit_behind(&connection, Call::ImportRecord, &parameters).await;
        fail::fail_point!("pgonce::import_after_commit");
        match ended {
            Ended::Committed => Ok(()),
            Ended::Refused(error) => Err(error.into()),
            Ended::InDoubt(reason) => Err(Error::InDoubt { reason }),
            Ended::Overtaken | Ended::Kept => Err(Error::InDoubt { reason: "the batch was overtaken".into() }),
        }
    }
}

/// Whether it may pass by itself: then the way is not to blame.
fn is_passing(error: &tokio_postgres::Error) -> bool {
    matches!(verdict_of(error), Verdict::Again | Verdict::Later | Verdict::InDoubt | Verdict::Lost)
}

/// For the job's record, which names no values.
fn without_values(error: &Error) -> String {
    match error {
        Error::Database(database) => match database.code() {
            Some(code) => format!("the database said no [{}]", code.code()),
            None => "the connection was lost".into(),
        },
        other => other.to_string(),
    }
}

/// How long something that may pass is waited for.
struct Patience {
    until: Instant,
    pause: Duration,
}

impl Patience {
    fn new(max: Duration) -> Self {
        Self { until: Instant::now() + max, pause: Duration::from_millis(20) }
    }

    /// Waits a little, or gives the error back.
    async fn wait(&mut self, error: Error, stop: &mut watch::Receiver<bool>) -> Result<(), Error> {
        if Instant::now() + self.pause >= self.until {
            return Err(error);
        }
        tokio::select! {
            // Told to stop while something is away: it is said what.
            _ = stop.wait_for(|stop| *stop) => return Err(error),
            () = tokio::time::sleep(self.pause.mul_f64(0.5 + rand::random::<f64>() / 2.0)) => {}
        }
        self.pause = (self.pause * 2).min(PAUSE_MAX);
        Ok(())
    }
}
