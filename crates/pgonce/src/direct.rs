//! The straight path without function calls, for logins with the role `once_direct`: a new atomic intent is
//! one lookup with a lock and one insert. Whatever is not straight goes through the functions.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};
use uuid::Uuid;

use crate::claim::{Answer, IntentName};
use crate::pool::Connection;
use crate::sql::{Call, ClaimRow};

/// How long a scope's rules are taken as read: a change reaches direct callers within it.
const POLICY_AGE_MAX: Duration = Duration::from_secs(5);
/// How many scopes' rules are remembered.
const POLICIES_MAX: usize = 10_000;

/// What a direct caller knows of a scope.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Policy {
    keep: Keep,
    retention_ms: Option<i64>,
    tombstone_ms: Option<i64>,
    key_pattern: bool,
}

/// Which parts of an answer the scope keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Keep {
    Full,
    Reference,
    Status,
    Error,
}

/// A claim that was made directly: what its completion needs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DirectClaim {
    pub(crate) policy: Policy,
}

/// The rules of scopes, remembered for a moment.
#[derive(Debug, Default)]
pub(crate) struct Policies(Mutex<Known>);

/// By tenant, then by scope: looked up by what the caller has, without a copy.
type Known = HashMap<String, HashMap<String, (Instant, Policy)>>;

impl Policies {
    /// The rules, if the straight path may be tried for this intent: names within their limits, no key format.
    pub(crate) async fn straight(
        &self,
        connection: &Connection,
        name: &IntentName,
    ) -> Result<Option<Policy>, tokio_postgres::Error> {
        if !is_plain(&name.key, 255)
            || !is_plain(&name.scope, 128)
            || !(name.tenant.is_empty() || is_plain(&name.tenant, 255))
        {
            return Ok(None); // the function says what is wrong with it
        }
        let policy = match self.remembered(name) {
            Some(policy) => policy,
            None => self.read(connection, name).await?,
        };
        Ok((!policy.key_pattern).then_some(policy))
    }

    fn remembered(&self, name: &IntentName) -> Option<Policy> {
        let known = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let (read, policy) = known.get(&name.tenant)?.get(&name.scope)?;
        (read.elapsed() < POLICY_AGE_MAX).then_some(*policy)
    }

    async fn read(&self, connection: &Connection, name: &IntentName) -> Result<Policy, tokio_postgres::Error> {
        let read = Instant::now();
        let parameters: [(&(dyn ToSql + Sync), Type); 2] = [(&name.tenant, Type::TEXT), (&name.scope, Type::TEXT)];
        let row = connection.call(Call::DirectPolicy, &parameters).await?;
        let policy = Policy {
            keep: match row.try_get::<_, &str>(0)? {
                "full" => Keep::Full,
                "reference" => Keep::Reference,
                "status" => Keep::Status,
                _ => Keep::Error,
            },
            retention_ms: row.try_get(1)?,
            tombstone_ms: row.try_get(2)?,
            key_pattern: row.try_get(3)?,
        };
        let mut known = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if known.values().map(HashMap::len).sum::<usize>() >= POLICIES_MAX {
            known.clear();
        }
        known.entry(name.tenant.clone()).or_default().insert(name.scope.clone(), (read, policy));
        Ok(policy)
    }
}

/// Within the limits whatever the server's locale thinks a control character is.
fn is_plain(text: &str, bytes_max: usize) -> bool {
    (1..=bytes_max).contains(&text.len()) && !text.chars().any(char::is_control)
}

pub(crate) fn claim_parameters(name: &IntentName) -> [(&(dyn ToSql + Sync), Type); 4] {
    [(&name.scope, Type::TEXT), (&name.key, Type::TEXT), (&name.fingerprint, Type::BYTEA), (&name.tenant, Type::TEXT)]
}

/// What the straight claim found, as the function would have answered it; None: ask the function.
pub(crate) fn read_claim(row: &Row) -> Result<Option<ClaimRow>, tokio_postgres::Error> {
    Ok(match row.try_get(0)? {
        Some(true) => Some(ClaimRow {
            kind: Some("replay_success".to_owned()),
            response_code: row.try_get(1)?,
            response_headers: row.try_get(2)?,
            response_body: row.try_get(3)?,
            result_type: row.try_get(4)?,
            result_id: row.try_get(5)?,
            ..ClaimRow::default()
        }),
        Some(false) => Some(ClaimRow {
            kind: Some("new_claim".to_owned()),
            claim_id: Some(Uuid::new_v4()),
            attempt_count: Some(1),
            ..ClaimRow::default()
        }),
        None => None,
    })
}

impl Policy {
    /// The parts of an answer that this scope keeps.
    pub(crate) fn kept(self, answer: Answer) -> Answer {
        let full = self.keep == Keep::Full;
        let reference = full || self.keep == Keep::Reference;
        Answer {
            code: answer.code.filter(|_| self.keep != Keep::Error),
            headers: answer.headers.filter(|_| full),
            body: answer.body.filter(|_| full),
            result_type: answer.result_type.filter(|_| reference),
            result_id: answer.result_id.filter(|_| reference),
        }
    }

    pub(crate) fn complete_parameters<'a>(
        &'a self,
        name: &'a IntentName,
        claim_id: &'a Uuid,
        answer: &'a Answer,
    ) -> [(&'a (dyn ToSql + Sync), Type); 12] {
        [
            (&name.scope, Type::TEXT),
            (&name.key, Type::TEXT),
            (&name.fingerprint, Type::BYTEA),
            (&name.tenant, Type::TEXT),
            (claim_id, Type::UUID),
            (&self.retention_ms, Type::INT8),
            (&self.tombstone_ms, Type::INT8),
            (&answer.code, Type::INT4),
            (&answer.headers, Type::JSONB),
            (&answer.body, Type::BYTEA),
            (&answer.result_type, Type::TEXT),
            (&answer.result_id, Type::TEXT),
        ]
    }
}

/// Whether a completion failed because a rival was first: then it means 40001 and not a business conflict.
pub(crate) fn is_overtaken(error: &tokio_postgres::Error) -> bool {
    error.as_db_error().is_some_and(|error| {
        error.code().code() == "23505" && error.schema() == Some("once") && error.constraint() == Some("intent_pkey")
    })
}
