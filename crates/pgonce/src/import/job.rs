//! The job: named, taken, held, ended.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;
use tokio_postgres::types::{ToSql, Type};
use uuid::Uuid;

use super::batch::Position;
use super::input::Content;
use super::{Ending, ImportOptions, Report, owner};
use crate::pool::Connection;
use crate::sql::Call;
use crate::{Error, Once};

/// What is settled.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Settled {
    pub(super) applied: u64,
    pub(super) skipped: u64,
    pub(super) failed: u64,
}

impl Settled {
    pub(super) fn rows(self) -> u64 {
        self.applied + self.skipped + self.failed
    }
}

/// A job that is ours.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) id: i64,
    pub(super) claim: Uuid,
    pub(super) next_row: u64,
    pub(super) next: Position,
    pub(super) settled: Settled,
}

/// What opening it came to.
pub(super) enum Opened {
    Ours(Job),
    /// It is done, or somebody else's.
    Ended(Report),
}

struct Answer {
    verdict: String,
    job: Job,
    owner: String,
    lease: Duration,
}

impl Job {
    /// Takes the job, or says why not. One whose importer is dead is taken over: at once where that can be seen, else
    /// when its lease is over.
    pub(super) async fn open(
        once: &Once,
        options: &ImportOptions,
        content: &Content,
        target: &str,
        stop: &mut watch::Receiver<bool>,
    ) -> Result<Opened, Error> {
        let mut give_up = None;
        let mut take_from = None;
        let mut again = options.again;
        loop {
            let Answer { verdict, job, owner, lease } =
                ask(&*once.connection().await?, options, content, target, take_from, again).await?;
            match verdict.as_str() {
                "new" | "resumed" => return Ok(Opened::Ours(job)),
                "done" => return Ok(Opened::Ended(job.report(Ending::AlreadyDone, options))),
                "busy" => {}
                other => {
                    return Err(Error::Schema(format!("the database answered a verdict that is not known: {other:?}")));
                }
            }
            // The run that was asked for is under way.
            again = false;
            if (options.take_over || owner::is_dead(&owner)) && take_from != Some(job.claim) {
                take_from = Some(job.claim);
                continue;
            }
            // Who lives renews its lease; then it is still busy when the one that we saw would have ended.
            let until = *give_up.get_or_insert_with(|| Instant::now() + lease + Duration::from_secs(1));
            if Instant::now() >= until {
                return Ok(Opened::Ended(job.report(Ending::Busy(owner), options)));
            }
            tokio::select! {
                _ = stop.wait_for(|stop| *stop) => return Ok(Opened::Ended(job.report(Ending::Busy(owner), options))),
                () = tokio::time::sleep(Duration::from_millis(250)) => {}
            }
        }
    }

    /// Keeps the file's header, for what is written back.
    pub(super) async fn keep_header(&self, once: &Once, header: &[u8]) -> Result<(), Error> {
        let parameters: [(&(dyn ToSql + Sync), Type); 3] =
            [(&self.id, Type::INT8), (&self.claim, Type::UUID), (&header, Type::BYTEA)];
        once.connection().await?.call(Call::ImportHeader, &parameters).await?;
        Ok(())
    }

    /// Ends it: done, or stopped for a reason.
    pub(super) async fn end(&self, once: &Once, reason: Option<&str>) -> Result<(), Error> {
        let state = if reason.is_some() { "stopped" } else { "done" };
        let parameters: [(&(dyn ToSql + Sync), Type); 4] =
            [(&self.id, Type::INT8), (&self.claim, Type::UUID), (&state, Type::TEXT), (&reason, Type::TEXT)];
        once.connection().await?.call(Call::ImportEnd, &parameters).await?;
        Ok(())
    }

    pub(super) fn report(&self, ending: Ending, options: &ImportOptions) -> Report {
        Report {
            job: Some(self.id),
            rows: self.settled.rows(),
            applied: self.settled.applied,
            skipped: self.settled.skipped,
            failed: self.settled.failed,
            errors: options.errors.clone().filter(|_| self.settled.failed > 0 && ending != Ending::AlreadyDone),
            ..Report::nothing(ending)
        }
    }
}

async fn ask(
    connection: &Connection,
    options: &ImportOptions,
    content: &Content,
    target: &str,
    take_from: Option<Uuid>,
    again: bool,
) -> Result<Answer, Error> {
    let hash = content.sha256.as_slice();
    let size = i64::try_from(content.size).unwrap_or(i64::MAX);
    let named = options.named(target);
    let (this, lease) = (owner::this(), interval(options.lease));
    let parameters: [(&(dyn ToSql + Sync), Type); 11] = [
        (&hash, Type::BYTEA),
        (&size, Type::INT8),
        (&named, Type::JSONB),
        (&target, Type::TEXT),
        (&options.name, Type::TEXT),
        (&this, Type::TEXT),
        (&options.actor, Type::TEXT),
        (&lease, Type::TEXT),
        (&take_from, Type::UUID),
        (&again, Type::BOOL),
        (&options.tenant, Type::TEXT),
    ];
    let row = connection.call(Call::ImportOpen, &parameters).await?;
    let number = |column: &str| row.try_get::<_, i64>(column).map(|number| u64::try_from(number).unwrap_or_default());
    let job = Job {
        id: row.try_get("job")?,
        claim: row.try_get("claim_id")?,
        next_row: number("next_row")?,
        next: Position { offset: number("next_offset")?, line: number("next_line")? },
        settled: Settled { applied: number("applied")?, skipped: number("skipped")?, failed: number("failed")? },
    };
    let lease_ms: Option<i64> = row.try_get("lease_ms")?;
    let lease = Duration::from_millis(u64::try_from(lease_ms.unwrap_or_default()).unwrap_or_default());
    Ok(Answer { verdict: row.try_get("verdict")?, job, owner: row.try_get("owner")?, lease })
}

/// As PostgreSQL reads it.
pub(super) fn interval(duration: Duration) -> String {
    format!("{} milliseconds", duration.as_millis())
}
