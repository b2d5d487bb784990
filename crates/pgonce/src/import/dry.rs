//! A rehearsal: everything in one transaction, which is rolled back.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio::sync::watch;

use super::batch::{Batch, Reading, read_ahead};
use super::input::Content;
use super::job::Settled;
use super::plan::{Plan, STAGE};
use super::stage::{self, Outcome, Staged};
use super::{Ending, ImportOptions, Layout, Progress, Report, RowFailure};
use crate::pool::Pooled;
use crate::tx::rollback;
use crate::{Error, Once};

const FAILURES_TOLD: usize = 10;

/// Applies every row, counts, and takes all of it back.
pub(super) async fn rehearse(
    once: &Once,
    content: &Arc<Content>,
    layout: &Layout,
    plan: &Plan,
    options: &ImportOptions,
    mut stop: watch::Receiver<bool>,
    mut progress: impl FnMut(Progress),
) -> Result<Report, Error> {
    let connection = once.connection().await?;
    connection.dirty.store(true, Ordering::SeqCst);
    connection
        .client
        .batch_execute(
            "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL statement_timeout = '10min';
             SET LOCAL idle_in_transaction_session_timeout = 0; SET CONSTRAINTS ALL IMMEDIATE",
        )
        .await?;
    let reading = Reading {
        format: options.format,
        wanted: layout.wanted.clone(),
        keys: layout.key_fields(options),
        batch_rows: options.batch_rows,
        row: 1,
        from: layout.begin,
    };
    let mut batches = read_ahead(Arc::clone(content), reading);
    let mut settled = Settled::default();
    let mut failures: Vec<RowFailure> = Vec::new();
    let ending = loop {
        let bytes = content.taken.load(Ordering::Relaxed);
        let (rows, failed) = (settled.rows(), settled.failed);
        progress(Progress { is_hashing: false, bytes, bytes_total: content.size, rows, failed });
        let next = tokio::select! {
            biased;
            _ = stop.wait_for(|stop| *stop) => break Ending::Interrupted,
            next = batches.recv() => next,
        };
        let batch = match next {
            None => break Ending::Rehearsed,
            Some(Err(error)) => {
                break Ending::Stopped(format!("row {}, line {}: {}", rows + 1, error.line, error.reason));
            }
            Some(Ok(batch)) => batch,
        };
        for outcome in apply(&connection, plan, batch, options.failures_max.saturating_sub(failed)).await? {
            settled.applied += outcome.0 - outcome.1.skipped() - outcome.1.failures();
            settled.skipped += outcome.1.skipped();
            settled.failed += outcome.1.failures();
            failures.extend(outcome.1.failed.into_iter().take(FAILURES_TOLD.saturating_sub(failures.len())));
        }
        if settled.failed > options.failures_max {
            break Ending::Stopped(format!("more than {} rows failed", options.failures_max));
        }
    };
    rollback(connection).await;
    Ok(Report {
        rows: settled.rows(),
        applied: settled.applied,
        skipped: settled.skipped,
        failed: settled.failed,
        failures,
        ..Report::nothing(ending)
    })
}

/// A batch, or its parts, with their numbers of rows.
async fn apply(connection: &Pooled, plan: &Plan, batch: Batch, left: u64) -> Result<Vec<(u64, Outcome)>, Error> {
    let mut all = Vec::new();
    let mut pending = vec![batch];
    while let Some(mut batch) = pending.pop() {
        connection.client.batch_execute("SAVEPOINT once_batch").await?;
        match stage::apply(connection, plan, &batch, left).await? {
            Staged::Applied(outcome) => {
                let end = format!("DROP TABLE IF EXISTS {STAGE}; RELEASE SAVEPOINT once_batch");
                connection.client.batch_execute(&end).await?;
                all.push((batch.rows(), outcome));
            }
            Staged::Refused(bad) => {
                connection.client.batch_execute("ROLLBACK TO SAVEPOINT once_batch").await?;
                if batch.rows() == 1 {
                    batch.good.clear();
                    batch.bad.push((0, bad));
                    pending.push(batch);
                } else {
                    let (left, right) = batch.halves();
                    pending.extend([right, left]);
                }
            }
        }
    }
    Ok(all)
}
