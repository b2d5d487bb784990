//! A batch by way of the staging table: what can be written is written, and what cannot is told row by row.

use bytes::Bytes;
use futures_util::SinkExt as _;
use tokio_postgres::Client;
use tokio_postgres::types::{ToSql, Type};

use super::RowFailure;
use super::batch::Batch;
use super::plan::Plan;
use super::records::Bad;
use crate::pool::Connection;
use crate::sql::Call;
use crate::sqlstate::{self, Verdict};

/// What became of a batch's rows. What is not named was applied.
#[derive(Debug, Clone, Default)]
pub(super) struct Outcome {
    pub(super) existing: Vec<i64>,
    pub(super) unchanged: Vec<i64>,
    pub(super) dropped: Vec<i64>,
    pub(super) failed: Vec<RowFailure>,
}

impl Outcome {
    /// Of rows that could not even be read: the others count as applied.
    pub(super) fn unread(batch: &Batch) -> Self {
        let failed = batch.bad.iter().map(|(place, bad)| failure(batch, *place, &bad.code, &bad.message));
        Self { failed: failed.collect(), ..Self::default() }
    }

    pub(super) fn skipped(&self) -> u64 {
        (self.existing.len() + self.unchanged.len() + self.dropped.len()) as u64
    }

    pub(super) fn failures(&self) -> u64 {
        self.failed.len() as u64
    }
}

/// How staging went.
#[derive(Debug)]
pub(super) enum Staged {
    Applied(Outcome),
    /// The server cannot take a row of it even as text.
    Refused(Bad),
}

fn failure(batch: &Batch, place: u32, code: &str, message: &str) -> RowFailure {
    let (line, input) = batch.input(place);
    RowFailure {
        row: batch.first + u64::from(place),
        line,
        code: code.to_owned(),
        message: message.to_owned(),
        input: input.to_vec(),
    }
}

/// Stages and applies, in the transaction that is open. More failures than allowed end it early: the caller looks.
pub(super) async fn apply(
    connection: &Connection,
    plan: &Plan,
    batch: &Batch,
    failures_max: u64,
) -> Result<Staged, tokio_postgres::Error> {
    let mut outcome = Outcome::unread(batch);
    if batch.good.is_empty() || outcome.failures() > failures_max {
        return Ok(Staged::Applied(outcome));
    }
    connection.client.batch_execute(&plan.stage).await?;
    match copy(&connection.client, &plan.copy_stage, &batch.numbered()).await {
        Ok(_) => {}
        Err(error) => {
            return match error.as_db_error() {
                Some(said) if is_rows_own(said.code().code()) => {
                    Ok(Staged::Refused(Bad::new(said.code().code().to_owned(), said.message())))
                }
                _ => Err(error),
            };
        }
    }
    fail::fail_point!("pgonce::import_staged");
    let rows = i32::try_from(batch.rows()).unwrap_or(i32::MAX);
    let left = i64::try_from(failures_max - outcome.failures()).unwrap_or(i64::MAX);
    let parameters: [(&(dyn ToSql + Sync), Type); 8] = [
        (&rows, Type::INT4),
        (&plan.apply, Type::TEXT),
        (&plan.distinct, Type::TEXT),
        (&plan.repeated, Type::TEXT),
        (&plan.known, Type::TEXT),
        (&plan.existing, Type::TEXT),
        (&left, Type::INT8),
        (&plan.target.search_path, Type::TEXT),
    ];
    for row in connection.rows(Call::ImportApply, &parameters).await? {
        let (place, reason): (i32, &str) = (row.try_get(0)?, row.try_get(2)?);
        let place = u32::try_from(place).unwrap_or_default();
        let number = i64::try_from(batch.first + u64::from(place)).unwrap_or(i64::MAX);
        match (row.try_get(1)?, reason) {
            ("failed", code) => {
                let message: Option<&str> = row.try_get(3)?;
                outcome.failed.push(failure(batch, place, code, message.unwrap_or_default()));
            }
            (_, "exists") => outcome.existing.push(number),
            (_, "unchanged") => outcome.unchanged.push(number),
            _ => outcome.dropped.push(number),
        }
    }
    outcome.failed.sort_by_key(|failure| failure.row);
    Ok(Staged::Applied(outcome))
}

/// COPY, to its end; how many rows it wrote.
pub(super) async fn copy(client: &Client, sql: &str, data: &[u8]) -> Result<u64, tokio_postgres::Error> {
    const CHUNK_BYTES: usize = 128 << 10;
    // Prepared for this one use, and closed before the transaction ends: so a pooler may be between.
    let sink = client.copy_in(sql).await?;
    tokio::pin!(sink);
    let mut sent = Ok(());
    for chunk in data.chunks(CHUNK_BYTES) {
        sent = sink.send(Bytes::copy_from_slice(chunk)).await;
        if sent.is_err() {
            break;
        }
    }
    // The server's own words come at the end.
    let written = sink.finish().await?;
    sent.map(|()| written)
}

/// Whether an error is about the row, and not about the server, the connection, a rival or the statement. The same rule is
/// in once.import_apply.
pub(super) fn is_rows_own(code: &str) -> bool {
    let is_elsewhere = ["08", "0A", "25", "28", "3D", "3F", "40", "53", "55", "57", "58", "72", "F0", "XX"]
        .iter()
        .any(|class| code.starts_with(class));
    !is_elsewhere && (!code.starts_with("42") || code == "42501") && sqlstate::verdict(code) != Verdict::Lost
}
