//! One intent being described, and what a claim of it found.

use std::hash::{Hash, Hasher};
use std::sync::LazyLock;
use std::time::Duration;

use serde::Serialize;
use tokio_postgres::IsolationLevel;

use crate::claim::{Answer, Claim, ClaimOptions, IntentName};
use crate::retry::RetryPolicy;
use crate::sql::ClaimRow;
use crate::{Error, Fingerprint, Once, fingerprint, fingerprint_bytes, key_hash, observe};

/// The fingerprint of an intent that is given no payload.
static NO_PAYLOAD: LazyLock<Fingerprint> = LazyLock::new(|| fingerprint_bytes(b"", "", ""));

/// An intent being described. Give it its payload, then [`Intent::run`] it.
#[derive(Debug, Clone)]
#[must_use = "an intent does nothing until it is run"]
pub struct Intent<'a> {
    once: &'a Once,
    name: IntentName,
    operation: String,
    version: String,
    payload_error: Option<String>,
    pub(crate) options: ClaimOptions,
    isolation: Option<IsolationLevel>,
    retry: RetryPolicy,
}

impl<'a> Intent<'a> {
    pub(crate) fn new(once: &'a Once, scope: String, key: String) -> Self {
        Self {
            once,
            name: IntentName { tenant: String::new(), scope, key, fingerprint: *NO_PAYLOAD },
            operation: String::new(),
            version: String::new(),
            payload_error: None,
            options: ClaimOptions { claimed_by: once.shared.settings.claimed_by.clone(), ..ClaimOptions::default() },
            isolation: None,
            retry: once.shared.settings.retry.clone(),
        }
    }

    /// Whose intent it is.
    pub fn tenant(mut self, tenant: impl Into<String>) -> Self {
        self.name.tenant = tenant.into();
        self
    }

    /// The operation and the API version, which go into the fingerprint. Call it before [`Intent::payload`].
    pub fn versioned(mut self, operation: impl Into<String>, version: impl Into<String>) -> Self {
        self.operation = operation.into();
        self.version = version.into();
        self
    }

    /// The payload, pinned by its canonical fingerprint.
    pub fn payload<P: Serialize + ?Sized>(mut self, payload: &P) -> Self {
        match fingerprint(payload, &self.operation, &self.version) {
            Ok(fingerprint) => self.name.fingerprint = fingerprint,
            Err(error) => self.payload_error = Some(error.to_string()),
        }
        self
    }

    /// The payload as raw bytes, pinned as they are.
    pub fn payload_bytes(mut self, payload: &[u8]) -> Self {
        self.name.fingerprint = fingerprint_bytes(payload, &self.operation, &self.version);
        self
    }

    /// The payload by a fingerprint that was taken elsewhere; see [`fingerprint_bytes`].
    pub fn fingerprint(mut self, fingerprint: Fingerprint) -> Self {
        self.name.fingerprint = fingerprint;
        self
    }

    /// How long to wait for a rival; zero refuses at once. The scope's rule if not called.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.options.wait = Some(wait);
        self
    }

    /// The lease of [`Intent::run_leased`]; the scope's if not called.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.options.lease = Some(lease);
        self
    }

    /// The transaction's isolation level; the server's default if not called.
    pub fn isolation(mut self, level: IsolationLevel) -> Self {
        self.isolation = Some(level);
        self
    }

    /// How to try again; the settings' if not called.
    pub fn retry(mut self, policy: RetryPolicy) -> Self {
        self.retry = policy;
        self
    }

    pub(crate) fn span(&self, what: &'static str) -> tracing::Span {
        tracing::info_span!(
            "pgonce.run",
            what,
            scope = %self.name.scope,
            tenant = %self.name.tenant,
            key_hash = %KeyHash(&self.name.key),
            retry_attempt_count = tracing::field::Empty,
            deduplication_decision = tracing::field::Empty,
            lock_wait_time_ms = tracing::field::Empty,
        )
    }

    pub(crate) fn observed(&self, row: ClaimRow, took: Duration) -> Result<Claim, Error> {
        if let Some(wait) = row.waited_ms.and_then(|ms| u64::try_from(ms).ok()).map(Duration::from_millis) {
            tracing::Span::current().record("lock_wait_time_ms", row.waited_ms);
            observe::waited(wait);
        }
        let claim = Claim::read(self.name.clone(), row)?;
        self.count(kind_of(&claim), took);
        Ok(claim)
    }

    pub(crate) fn count(&self, kind: &'static str, took: Duration) {
        tracing::Span::current().record(
            "deduplication_decision",
            match kind {
                "new_claim" | "retryable_failure" | "processing_stale" => "new_execution",
                "conflict" => "conflict_retry",
                _ => "db_hit",
            },
        );
        observe::claimed(&self.name.scope, kind, took);
        self.once.shared.tally.add(&self.name.tenant, &self.name.scope, kind);
    }

    /// The answer of a claim that found the intent settled, or what else it met there.
    pub(crate) fn settled_before(&self, claim: Claim) -> Result<Answer, Error> {
        match claim {
            Claim::Replay(answer) => {
                self.once.shared.note_seen(self.hash());
                Ok(answer)
            }
            Claim::InProgress { retry_after } => Err(Error::InProgress { retry_after }),
            Claim::FailedBefore { code, message, .. } => Err(Error::FailedBefore { code, message }),
            Claim::Uncertain => Err(Error::Uncertain),
            Claim::ResultExpired => Err(Error::ResultExpired),
            Claim::Owned(_) => Err(Error::Schema("an owned claim is not an outcome [P4099]".into())),
        }
    }

    pub(crate) fn hash(&self) -> u64 {
        let mut hasher = std::hash::DefaultHasher::new();
        (&self.name.tenant, &self.name.scope, &self.name.key).hash(&mut hasher);
        hasher.finish().max(1)
    }

    pub(crate) fn once(&self) -> &'a Once {
        self.once
    }

    pub(crate) fn name(&self) -> &IntentName {
        &self.name
    }

    /// The payload must have had a fingerprint.
    pub(crate) fn check(&self) -> Result<(), Error> {
        match &self.payload_error {
            Some(reason) => Err(Error::Invalid(format!("the payload has no fingerprint: {reason}"))),
            None => Ok(()),
        }
    }

    pub(crate) fn isolation_level(&self) -> Option<IsolationLevel> {
        self.isolation
    }

    pub(crate) fn retry_policy(&self) -> &RetryPolicy {
        &self.retry
    }
}

/// Hashed only where somebody reads it: fields of a span may be recorded although nobody listens.
struct KeyHash<'a>(&'a str);

impl std::fmt::Display for KeyHash<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&key_hash(self.0))
    }
}

/// The name of a claim's kind, as SQL and metrics spell it.
pub(crate) fn kind_of(claim: &Claim) -> &'static str {
    use crate::claim::OwnedKind;
    match claim {
        Claim::Owned(owned) => match owned.kind {
            OwnedKind::New => "new_claim",
            OwnedKind::AfterFailure => "retryable_failure",
            OwnedKind::Takeover => "processing_stale",
        },
        Claim::Replay(_) => "replay_success",
        Claim::InProgress { .. } => "processing_active",
        Claim::FailedBefore { .. } => "final_failure",
        Claim::Uncertain => "uncertain",
        Claim::ResultExpired => "result_expired",
    }
}
