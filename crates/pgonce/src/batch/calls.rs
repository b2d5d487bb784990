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

use super::rows::{ClaimAnswer, CompletionAnswer};

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
        Call::ClaimBatch | Call::ClaimAlone => "claim",
        Call::PeekBatch => "peek",
        Call::SucceedBatch | Call::SucceedAlone => "succeed",
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

#[allow(clippy::needless_pass_by_value, reason = "as map_err gives it")]
fn not_read(error: tokio_postgres::Error) -> Trouble {
    unreadable(&error.to_string())
}

/// Rows in the order of what was sent, one each.
fn in_order<T>(rows: &[Row], size: usize, read: impl Fn(&Row) -> Result<T, Trouble>) -> Result<Vec<T>, Trouble> {
    let mut placed: Vec<Option<T>> = (0..size).map(|_| None).collect();
    for row in rows {
        placed[place(row, size)?] = Some(read(row)?);
    }
    placed.into_iter().map(|one| one.ok_or_else(|| unreadable("an intent has no row"))).collect()
}

/// The same of a call for one, whose row need not say its place.
fn alone<T>(rows: &[Row], read: impl Fn(&Row) -> Result<T, Trouble>) -> Result<Vec<T>, Trouble> {
    match rows {
        [row] => Ok(vec![read(row)?]),
        _ => Err(unreadable("not one row for one intent")),
    }
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
    let ClaimAnswer { error, message, row, expires_in_ms } = ClaimAnswer::read(row).map_err(not_read)?;
    let error = error.map(|error| (error, message.unwrap_or_default()));
    Ok(Told { error, row, expires_in: left(expires_in_ms, asked) })
}

pub(super) async fn claim(
    connection: &Connection,
    intents: &[(&IntentName, Uuid)],
    claimed_by: Option<&str>,
    limit: Duration,
) -> Result<Vec<Told>, Trouble> {
    if let [(name, claim_id)] = intents {
        return claim_alone(connection, name, *claim_id, claimed_by, limit).await;
    }
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

/// For one the arrays would cost more than the look.
async fn claim_alone(
    connection: &Connection,
    name: &IntentName,
    claim_id: Uuid,
    claimed_by: Option<&str>,
    limit: Duration,
) -> Result<Vec<Told>, Trouble> {
    let parameters: [(&(dyn ToSql + Sync), Type); 6] = [
        (&name.tenant, Type::TEXT),
        (&name.scope, Type::TEXT),
        (&name.key, Type::TEXT),
        (&name.fingerprint, Type::BYTEA),
        (&claim_id, Type::UUID),
        (&claimed_by, Type::TEXT),
    ];
    let asked = Instant::now();
    let rows = send_durably(connection, Call::ClaimAlone, 1, &parameters, limit).await?;
    alone(&rows, |row| read_told(row, asked))
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
    if let [(name, claim_id, answer)] = intents {
        return succeed_alone(connection, name, *claim_id, answer, limit).await;
    }
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
    in_order(&rows, intents.len(), |row| read_completed(row, asked))
}

async fn succeed_alone(
    connection: &Connection,
    name: &IntentName,
    claim_id: Uuid,
    answer: &Answer,
    limit: Duration,
) -> Result<Vec<Completed>, Trouble> {
    let parameters: [(&(dyn ToSql + Sync), Type); 9] = [
        (&name.tenant, Type::TEXT),
        (&name.scope, Type::TEXT),
        (&name.key, Type::TEXT),
        (&claim_id, Type::UUID),
        (&answer.code, Type::INT4),
        (&answer.headers, Type::JSONB),
        (&answer.body, Type::BYTEA),
        (&answer.result_type, Type::TEXT),
        (&answer.result_id, Type::TEXT),
    ];
    let asked = Instant::now();
    let rows = send_durably(connection, Call::SucceedAlone, 1, &parameters, limit).await?;
    alone(&rows, |row| read_completed(row, asked))
}

fn read_completed(row: &Row, asked: Instant) -> Result<Completed, Trouble> {
    let read = CompletionAnswer::read(row).map_err(not_read)?;
    Ok(Completed {
        verdict: read.verdict.ok_or_else(|| unreadable("a completion without its verdict"))?,
        status: read.status,
        answer: read.answer,
        failure_code: read.failure_code,
        failure_message: read.failure_message,
        expires_in: left(read.expires_in_ms, asked),
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
        let verdict: String = row.try_get(1).map_err(not_read)?;
        let lease = millis(row.try_get(2).map_err(not_read)?);
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
