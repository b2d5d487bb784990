//! The pieces of the protocol, for callers who own the transaction: claim an intent, then succeed, fail or
//! release what was claimed, each call in the transaction that is passed in.

use std::time::Duration;

use tokio_postgres::GenericClient;
use tokio_postgres::types::{ToSql, Type};
use uuid::Uuid;

use crate::sql::{self, Call, ClaimRow};
use crate::{Error, Fingerprint};

/// Who an intent is, and what its payload's fingerprint is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IntentName {
    /// The tenant; empty where there is only one.
    pub tenant: String,
    /// The operation, for example `create_order`.
    pub scope: String,
    /// What names the intent: the same for every retry.
    pub key: String,
    /// See [`crate::fingerprint`].
    pub fingerprint: Fingerprint,
}

/// The two honest modes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Claim, effect and outcome commit in one transaction.
    Atomic,
    /// The claim commits first, with a lease; the outcome later, under the claim's fence.
    Leased,
}

impl Mode {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Atomic => "atomic",
            Self::Leased => "leased",
        }
    }
}

/// What one claim asks for beyond its scope's policy.
#[derive(Debug, Clone, Default)]
pub struct ClaimOptions {
    /// The mode; the scope's if not given.
    pub mode: Option<Mode>,
    /// The lease; the scope's if not given.
    pub lease: Option<Duration>,
    /// How long to wait for a rival; zero refuses at once; the scope's rule if not given.
    pub wait: Option<Duration>,
    /// What operators see as the claimer.
    pub claimed_by: Option<String>,
}

/// What a claim found.
#[derive(Debug)]
#[non_exhaustive]
pub enum Claim {
    /// The intent is the caller's to run.
    Owned(Owned),
    /// It succeeded before: this is the answer.
    Replay(Answer),
    /// Another attempt is at it.
    InProgress {
        /// When to come again.
        retry_after: Duration,
    },
    /// It failed finally before.
    FailedBefore {
        /// The failure's code.
        code: String,
        /// The failure's message.
        message: Option<String>,
        /// What was stored as the answer.
        answer: Answer,
    },
    /// Nobody knows whether the effect is there, until it is settled.
    Uncertain,
    /// It succeeded, and the answer has expired.
    ResultExpired,
}

/// Why the intent could be owned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OwnedKind {
    /// Nobody has run it before.
    New,
    /// It failed before, in a way that may pass.
    AfterFailure,
    /// Its owner's lease ran out, and policy lets it run again.
    Takeover,
}

/// A claim that is the caller's. Completing it consumes it: there is no second completion.
#[derive(Debug)]
#[must_use = "a claim that is neither completed nor released blocks the intent until its lease ends"]
pub struct Owned {
    pub(crate) name: IntentName,
    /// The fence: every write under this claim carries it.
    pub claim_id: Uuid,
    /// Which attempt this is.
    pub attempt: u32,
    /// Why it could be owned.
    pub kind: OwnedKind,
    /// Leased claims: a number that grows with every claim, for resources that can compare.
    pub fence: Option<i64>,
    /// Leased claims: how long the lease is, from the claim on, by the scope's policy or the call's wish.
    pub lease: Option<Duration>,
}

/// What later attempts observe.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Answer {
    /// A status code, where there is one.
    pub code: Option<i32>,
    /// Headers, as they were given.
    pub headers: Option<serde_json::Value>,
    /// The exact bytes.
    pub body: Option<Vec<u8>>,
    /// The type of what the effect made.
    pub result_type: Option<String>,
    /// Its id.
    pub result_id: Option<String>,
}

impl Answer {
    /// Whether it is within the limits of `once.answer_fits` whatever the database makes of its headers: jsonb takes up to
    /// six times the text. What is not is the functions' to take or to refuse (P4005).
    pub(crate) fn surely_fits(&self) -> bool {
        const BODY_BYTES_MAX: usize = 16 * 1024 * 1024;
        const HEADERS_TEXT_BYTES_MAX: usize = 32 * 1024;
        let within = |text: &Option<String>, bytes_max| text.as_ref().is_none_or(|text| text.len() <= bytes_max);
        self.body.as_ref().is_none_or(|body| body.len() <= BODY_BYTES_MAX)
            && self.headers.as_ref().is_none_or(|headers| headers.to_string().len() <= HEADERS_TEXT_BYTES_MAX)
            && within(&self.result_type, 255)
            && within(&self.result_id, 1024)
    }
}

/// Claims an intent in the caller's transaction.
///
/// # Errors
/// `Error::Conflict` for another payload under the same key; `Error::Database` for everything else that
/// the database refuses, names out of their limits among it.
pub async fn claim(client: &impl GenericClient, name: IntentName, options: &ClaimOptions) -> Result<Claim, Error> {
    let wire = ClaimWire::new(options);
    let row = query(client, Call::Claim, &wire.parameters(&name)).await?;
    Claim::read(name, ClaimRow::read(&row)?)
}

impl Owned {
    /// Records success in the caller's transaction.
    ///
    /// # Errors
    /// `Error::LeaseLost` where the claim is not the current one: roll back.
    pub async fn succeed(self, client: &impl GenericClient, answer: &Answer) -> Result<(), Error> {
        query(client, Call::Succeed, &succeed_parameters(&self.name, &self.claim_id, answer)).await?;
        Ok(())
    }

    /// Records a failure in the caller's transaction, which must not be the one that failed.
    ///
    /// # Errors
    /// `Error::LeaseLost` where the claim is not the current one.
    pub async fn fail(
        self,
        client: &impl GenericClient,
        retryable: bool,
        code: &str,
        message: &str,
    ) -> Result<(), Error> {
        query(client, Call::Fail, &fail_parameters(&self.name, &self.claim_id, &retryable, &code, &message)).await?;
        Ok(())
    }

    /// Extends the lease, from now, by the database's clock.
    ///
    /// # Errors
    /// `Error::LeaseLost` where the lease is over or the claim is not the current one.
    pub async fn renew(&self, client: &impl GenericClient, lease: Duration) -> Result<(), Error> {
        let lease = Some(interval(lease));
        query(client, Call::Renew, &renew_parameters(&self.name, &self.claim_id, &lease)).await?;
        Ok(())
    }

    /// Gives the claim back as if it had never been made.
    ///
    /// # Errors
    /// `Error::LeaseLost` where there is nothing to give back.
    pub async fn release(self, client: &impl GenericClient) -> Result<(), Error> {
        query(client, Call::Release, &release_parameters(&self.name, &self.claim_id)).await?;
        Ok(())
    }
}

async fn query(
    client: &impl GenericClient,
    call: Call,
    parameters: &[(&(dyn ToSql + Sync), Type)],
) -> Result<tokio_postgres::Row, Error> {
    Ok(client.query_typed_one(sql::text(call, true), parameters).await?)
}

/// A duration as PostgreSQL reads it. In seconds: before version 15 microseconds are read as a 32-bit number.
pub(crate) fn interval(duration: Duration) -> String {
    format!("{}.{:06} seconds", duration.as_secs(), duration.subsec_micros())
}

/// The parameters of a claim, owned, so that they outlive the query.
pub(crate) struct ClaimWire {
    mode: Option<&'static str>,
    claimed_by: Option<String>,
    lease: Option<String>,
    wait: Option<String>,
}

impl ClaimWire {
    pub(crate) fn new(options: &ClaimOptions) -> Self {
        Self {
            mode: options.mode.map(Mode::as_str),
            claimed_by: options.claimed_by.clone(),
            lease: options.lease.map(interval),
            wait: options.wait.map(interval),
        }
    }

    pub(crate) fn parameters<'a>(&'a self, name: &'a IntentName) -> [(&'a (dyn ToSql + Sync), Type); 8] {
        [
            (&name.scope, Type::TEXT),
            (&name.key, Type::TEXT),
            (&name.fingerprint, Type::BYTEA),
            (&self.mode, Type::TEXT),
            (&self.claimed_by, Type::TEXT),
            (&self.lease, Type::TEXT),
            (&self.wait, Type::TEXT),
            (&name.tenant, Type::TEXT),
        ]
    }
}

pub(crate) fn succeed_parameters<'a>(
    name: &'a IntentName,
    claim_id: &'a Uuid,
    answer: &'a Answer,
) -> [(&'a (dyn ToSql + Sync), Type); 9] {
    [
        (&name.scope, Type::TEXT),
        (&name.key, Type::TEXT),
        (claim_id, Type::UUID),
        (&answer.body, Type::BYTEA),
        (&answer.code, Type::INT4),
        (&answer.headers, Type::JSONB),
        (&answer.result_type, Type::TEXT),
        (&answer.result_id, Type::TEXT),
        (&name.tenant, Type::TEXT),
    ]
}

pub(crate) fn fail_parameters<'a>(
    name: &'a IntentName,
    claim_id: &'a Uuid,
    retryable: &'a bool,
    code: &'a &str,
    message: &'a &str,
) -> [(&'a (dyn ToSql + Sync), Type); 7] {
    [
        (&name.scope, Type::TEXT),
        (&name.key, Type::TEXT),
        (claim_id, Type::UUID),
        (retryable, Type::BOOL),
        (code, Type::TEXT),
        (message, Type::TEXT),
        (&name.tenant, Type::TEXT),
    ]
}

pub(crate) fn renew_parameters<'a>(
    name: &'a IntentName,
    claim_id: &'a Uuid,
    lease: &'a Option<String>,
) -> [(&'a (dyn ToSql + Sync), Type); 5] {
    [
        (&name.scope, Type::TEXT),
        (&name.key, Type::TEXT),
        (claim_id, Type::UUID),
        (lease, Type::TEXT),
        (&name.tenant, Type::TEXT),
    ]
}

pub(crate) fn release_parameters<'a>(name: &'a IntentName, claim_id: &'a Uuid) -> [(&'a (dyn ToSql + Sync), Type); 4] {
    [(&name.scope, Type::TEXT), (&name.key, Type::TEXT), (claim_id, Type::UUID), (&name.tenant, Type::TEXT)]
}

pub(crate) fn resolve_parameters<'a>(
    name: &'a IntentName,
    claim_id: &'a Uuid,
    wait: &'a String,
) -> [(&'a (dyn ToSql + Sync), Type); 5] {
    [
        (&name.scope, Type::TEXT),
        (&name.key, Type::TEXT),
        (claim_id, Type::UUID),
        (wait, Type::TEXT),
        (&name.tenant, Type::TEXT),
    ]
}

impl Claim {
    /// From what the database answered.
    pub(crate) fn read(name: IntentName, mut row: ClaimRow) -> Result<Self, Error> {
        let kind = row.kind.take().unwrap_or_default();
        let owned = |kind| match row.claim_id {
            Some(claim_id) => Ok(Self::Owned(Owned {
                name,
                claim_id,
                attempt: row.attempt_count.and_then(|count| u32::try_from(count).ok()).unwrap_or(1),
                kind,
                fence: row.fence,
                lease: row.lease_ms.and_then(|ms| u64::try_from(ms).ok()).map(Duration::from_millis),
            })),
            None => Err(Error::Schema("a claim was given without its id [P4099]".into())),
        };
        match kind.as_str() {
            "new_claim" => owned(OwnedKind::New),
            "retryable_failure" => owned(OwnedKind::AfterFailure),
            "processing_stale" => owned(OwnedKind::Takeover),
            "replay_success" => Ok(Self::Replay(row.into())),
            "processing_active" => Ok(Self::InProgress {
                retry_after: Duration::from_millis(
                    row.retry_after_ms.and_then(|ms| u64::try_from(ms).ok()).unwrap_or(1000),
                ),
            }),
            "final_failure" => Ok(Self::FailedBefore {
                code: row.failure_code.clone().unwrap_or_default(),
                message: row.failure_message.clone(),
                answer: row.into(),
            }),
            "uncertain" => Ok(Self::Uncertain),
            "result_expired" => Ok(Self::ResultExpired),
            other => Err(Error::Schema(format!(
                "the database answered a kind of claim that this version does not know: {other:?}"
            ))),
        }
    }
}

impl From<ClaimRow> for Answer {
    fn from(row: ClaimRow) -> Self {
        Self {
            code: row.response_code,
            headers: row.response_headers,
            body: row.response_body,
            result_type: row.result_type,
            result_id: row.result_id,
        }
    }
}
