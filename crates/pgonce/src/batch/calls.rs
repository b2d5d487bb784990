//! The set-based calls: arrays out, one row an intent back.

use std::time::{Duration, Instant};

use serde_json::Value;
use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};
use uuid::Uuid;

use crate::claim::{Answer, IntentName};
use crate::pool::Connection;
use crate::sql::{Call, ClaimRow};
use crate::sqlstate::{Verdict, is_disconnect, verdict_of};
use crate::{Error, Fingerprint};

/// Why a whole call came to nothing.
#[derive(Debug)]
pub(super) enum Trouble {
    /// The connection broke, or did not answer: what was sent may or may not be done.
    Broken,
    /// The server could not now, and may soon: nothing was done.
    Later,
    /// The server warned about the commit: it may not be durable on its standby.
    Warned,
    /// It will say the same every time: nothing was done.
    Refused { sqlstate: String, message: String },
}

/// Names as arrays.
struct Names<'a> {
    tenants: Vec<&'a str>,
    scopes: Vec<&'a str>,
    keys: Vec<&'a str>,
}

impl<'a> Names<'a> {
    fn new(names: impl Iterator<Item = &'a IntentName> + Clone) -> Self {
        Self {
            tenants: names.clone().map(|name| name.tenant.as_str()).collect(),
            scopes: names.clone().map(|name| name.scope.as_str()).collect(),
            keys: names.map(|name| name.key.as_str()).collect(),
        }
    }
}

/// Sends one call and waits for its rows, no longer than `limit`.
async fn send(
    connection: &Connection,
    call: Call,
    size: usize,
    parameters: &[(&(dyn ToSql + Sync), Type)],
    limit: Duration,
) -> Result<Vec<Row>, Trouble> {
    let label = match call {
        Call::ClaimBatch => "claim",
        Call::PeekBatch => "peek",
        Call::SucceedBatch => "succeed",
        Call::RenewBatch => "renew",
        _ => "other",
    };
    #[allow(clippy::cast_precision_loss, reason = "at most a thousand")]
    metrics::histogram!("pgonce_batch_size", "call" => label).record(size as f64);
    match tokio::time::timeout(limit, connection.rows(call, parameters)).await {
        Ok(Ok(rows)) => Ok(rows),
        Ok(Err(error)) if is_disconnect(&error) => Err(Trouble::Broken),
        // Read-only: this is not the primary any more, and a new connection may find the one that is.
        Ok(Err(error)) if error.code().is_some_and(|code| code.code() == "25006") => Err(Trouble::Broken),
        // Cancelled, or out of time: nothing was done, and no one caller of many is to blame.
        Ok(Err(error)) if error.code().is_some_and(|code| code.code() == "57014") => Err(Trouble::Later),
        Ok(Err(error)) => Err(match verdict_of(&error) {
            Verdict::Again | Verdict::Later | Verdict::InDoubt => {
                tracing::debug!(%error, label, "batch refused for now");
                Trouble::Later
            }
            _ => Trouble::Refused {
                sqlstate: error.code().map_or_else(|| "driver".to_owned(), |code| code.code().to_owned()),
                message: crate::error::describe(&error),
            },
        }),
        Err(_) => Err(Trouble::Broken),
    }
}

/// The same, and what it wrote is certain to be durable: a warning with the commit says that it is not (trap 12).
async fn send_durably(
    connection: &Connection,
    call: Call,
    size: usize,
    parameters: &[(&(dyn ToSql + Sync), Type)],
    limit: Duration,
) -> Result<Vec<Row>, Trouble> {
    connection.expect_no_warning();
    let rows = send(connection, call, size, parameters, limit).await?;
    if connection.warned() { Err(Trouble::Warned) } else { Ok(rows) }
}

/// The place in the batch that a row is about.
fn place(row: &Row, size: usize) -> Result<usize, Trouble> {
    match row.try_get::<_, i32>(0).ok().and_then(|ordinal| usize::try_from(ordinal - 1).ok()) {
        Some(place) if place < size => Ok(place),
        _ => Err(unreadable("a row without its place")),
    }
}

fn unreadable(what: &str) -> Trouble {
    Trouble::Refused { sqlstate: "P4099".into(), message: format!("the database's answer cannot be read: {what}") }
}

/// Rows in the order of what was sent, one each.
fn in_order<T>(rows: &[Row], size: usize, read: impl Fn(&Row) -> Result<T, Trouble>) -> Result<Vec<T>, Trouble> {
    let mut placed: Vec<Option<T>> = (0..size).map(|_| None).collect();
    for row in rows {
        placed[place(row, size)?] = Some(read(row)?);
    }
    placed.into_iter().map(|one| one.ok_or_else(|| unreadable("an intent has no row"))).collect()
}

fn millis(value: Option<i64>) -> Option<Duration> {
    value.map(|ms| Duration::from_millis(u64::try_from(ms).unwrap_or(0)))
}

/// How long from now: what the database said is counted from a moment after the question.
fn left(ms: Option<i64>, asked: Instant) -> Option<Duration> {
    millis(ms).map(|left| left.saturating_sub(asked.elapsed()))
}

/// What the database says of one claim or look.
pub(super) struct Told {
    pub(super) error: Option<(String, String)>,
    pub(super) row: ClaimRow,
    pub(super) expires_in: Option<Duration>,
}

fn read_told(row: &Row, asked: Instant) -> Result<Told, Trouble> {
    let read = || -> Result<Told, tokio_postgres::Error> {
        let error: Option<String> = row.try_get(1)?;
        let message: Option<String> = row.try_get(2)?;
        Ok(Told {
            error: error.map(|error| (error, message.unwrap_or_default())),
            row: ClaimRow {
                kind: row.try_get(3)?,
                claim_id: row.try_get(4)?,
                attempt_count: row.try_get(5)?,
                response_code: row.try_get(6)?,
                response_headers: row.try_get(7)?,
                response_body: row.try_get(8)?,
                result_type: row.try_get(9)?,
                result_id: row.try_get(10)?,
                failure_code: row.try_get(11)?,
                failure_message: row.try_get(12)?,
                retry_after_ms: row.try_get(13)?,
                fence: row.try_get(14)?,
                lease_ms: row.try_get(15)?,
                waited_ms: None, // a batch never waits
            },
            expires_in: left(row.try_get(16)?, asked),
        })
    };
    read().map_err(|error| unreadable(&error.to_string()))
}

pub(super) async fn claim(
    connection: &Connection,
    intents: &[(&IntentName, Uuid)],
    claimed_by: Option<&str>,
    limit: Duration,
) -> Result<Vec<Told>, Trouble> {
    let names = Names::new(intents.iter().map(|(name, _)| *name));
    let fingerprints: Vec<&Fingerprint> = intents.iter().map(|(name, _)| &name.fingerprint).collect();
    let claim_ids: Vec<Uuid> = intents.iter().map(|(_, claim_id)| *claim_id).collect();
    let parameters: [(&(dyn ToSql + Sync), Type); 6] = [
        (&names.tenants, Type::TEXT_ARRAY),
        (&names.scopes, Type::TEXT_ARRAY),
        (&names.keys, Type::TEXT_ARRAY),
        (&fingerprints, Type::BYTEA_ARRAY),
        (&claim_ids, Type::UUID_ARRAY),
        (&claimed_by, Type::TEXT),
    ];
    let asked = Instant::now();
    let rows = send_durably(connection, Call::ClaimBatch, intents.len(), &parameters, limit).await?;
    in_order(&rows, intents.len(), |row| read_told(row, asked))
}

pub(super) async fn peek(
    connection: &Connection,
    intents: &[&IntentName],
    limit: Duration,
) -> Result<Vec<Told>, Trouble> {
    let names = Names::new(intents.iter().copied());
    let fingerprints: Vec<&Fingerprint> = intents.iter().map(|name| &name.fingerprint).collect();
    let parameters: [(&(dyn ToSql + Sync), Type); 4] = [
        (&names.tenants, Type::TEXT_ARRAY),
        (&names.scopes, Type::TEXT_ARRAY),
        (&names.keys, Type::TEXT_ARRAY),
        (&fingerprints, Type::BYTEA_ARRAY),
    ];
    let asked = Instant::now();
    let rows = send(connection, Call::PeekBatch, intents.len(), &parameters, limit).await?;
    in_order(&rows, intents.len(), |row| read_told(row, asked))
}

/// What the database says of one completion.
pub(super) struct Completed {
    pub(super) verdict: String,
    /// Where it was settled before: as what.
    pub(super) status: Option<String>,
    pub(super) answer: Answer,
    pub(super) failure_code: Option<String>,
    pub(super) failure_message: Option<String>,
    pub(super) expires_in: Option<Duration>,
}

pub(super) async fn succeed(
    connection: &Connection,
    intents: &[(&IntentName, Uuid, &Answer)],
    limit: Duration,
) -> Result<Vec<Completed>, Trouble> {
    let names = Names::new(intents.iter().map(|(name, ..)| *name));
    let claim_ids: Vec<Uuid> = intents.iter().map(|(_, claim_id, _)| *claim_id).collect();
    let answers = || intents.iter().map(|(.., answer)| *answer);
    let codes: Vec<Option<i32>> = answers().map(|answer| answer.code).collect();
    let headers: Vec<Option<&Value>> = answers().map(|answer| answer.headers.as_ref()).collect();
    let bodies: Vec<Option<&[u8]>> = answers().map(|answer| answer.body.as_deref()).collect();
    let result_types: Vec<Option<&str>> = answers().map(|answer| answer.result_type.as_deref()).collect();
    let result_ids: Vec<Option<&str>> = answers().map(|answer| answer.result_id.as_deref()).collect();
    let parameters: [(&(dyn ToSql + Sync), Type); 9] = [
        (&names.tenants, Type::TEXT_ARRAY),
        (&names.scopes, Type::TEXT_ARRAY),
        (&names.keys, Type::TEXT_ARRAY),
        (&claim_ids, Type::UUID_ARRAY),
        (&codes, Type::INT4_ARRAY),
        (&headers, Type::JSONB_ARRAY),
        (&bodies, Type::BYTEA_ARRAY),
        (&result_types, Type::TEXT_ARRAY),
        (&result_ids, Type::TEXT_ARRAY),
    ];
    let asked = Instant::now();
    let rows = send_durably(connection, Call::SucceedBatch, intents.len(), &parameters, limit).await?;
    in_order(&rows, intents.len(), |row| {
        let read = || -> Result<Completed, tokio_postgres::Error> {
            Ok(Completed {
                verdict: row.try_get(1)?,
                status: row.try_get(2)?,
                answer: Answer {
                    code: row.try_get(3)?,
                    headers: row.try_get(4)?,
                    body: row.try_get(5)?,
                    result_type: row.try_get(6)?,
                    result_id: row.try_get(7)?,
                },
                failure_code: row.try_get(8)?,
                failure_message: row.try_get(9)?,
                expires_in: left(row.try_get(10)?, asked),
            })
        };
        read().map_err(|error| unreadable(&error.to_string()))
    })
}

/// What the database says of one lease.
pub(super) enum Renewal {
    /// It ends this long after a moment not before `asked`.
    Renewed {
        asked: Instant,
        lease: Duration,
    },
    /// A transaction that completes it holds the row.
    Busy,
    /// An outcome is recorded under the claim.
    Settled,
    Lost,
}

pub(super) async fn renew(
    connection: &Connection,
    intents: &[(&IntentName, Uuid)],
    limit: Duration,
) -> Result<Vec<Renewal>, Trouble> {
    let names = Names::new(intents.iter().map(|(name, _)| *name));
    let claim_ids: Vec<Uuid> = intents.iter().map(|(_, claim_id)| *claim_id).collect();
    let parameters: [(&(dyn ToSql + Sync), Type); 4] = [
        (&names.tenants, Type::TEXT_ARRAY),
        (&names.scopes, Type::TEXT_ARRAY),
        (&names.keys, Type::TEXT_ARRAY),
        (&claim_ids, Type::UUID_ARRAY),
    ];
    let asked = Instant::now();
    let rows = send(connection, Call::RenewBatch, intents.len(), &parameters, limit).await?;
    in_order(&rows, intents.len(), |row| {
        let verdict: String = row.try_get(1).map_err(|error| unreadable(&error.to_string()))?;
        let lease = millis(row.try_get(2).map_err(|error| unreadable(&error.to_string()))?);
        match (verdict.as_str(), lease) {
            ("renewed", Some(lease)) => Ok(Renewal::Renewed { asked, lease }),
            ("busy", _) => Ok(Renewal::Busy),
            ("settled", _) => Ok(Renewal::Settled),
            ("lost", _) => Ok(Renewal::Lost),
            _ => Err(unreadable("a verdict that this version does not know")),
        }
    })
}

/// An intent's own refusal, as the crate tells it elsewhere.
pub(super) fn refusal(sqlstate: String, message: String) -> Error {
    match sqlstate.as_str() {
        "P4002" => Error::Conflict,
        _ => Error::Refused { sqlstate, message },
    }
}
