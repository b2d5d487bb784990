//! One intent, from its name to its outcome.

use std::hash::{Hash, Hasher};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio_postgres::IsolationLevel;
use tokio_postgres::types::{ToSql, Type};
use tracing::Instrument as _;
use uuid::Uuid;

use crate::claim::{Answer, Claim, ClaimOptions, ClaimWire, IntentName, Mode, interval, resolve_parameters};
use crate::direct::{Policy, claim_parameters, read_claim};
use crate::error::Failure;
use crate::pool::Connection;
use crate::retry::{Budget, RetryPolicy};
use crate::sql::{Call, ClaimRow};
use crate::sqlstate::Verdict;
use crate::tx::{self, Ended, Tx};
use crate::{Error, Once, fingerprint, fingerprint_bytes, key_hash, observe};

/// What became of an intent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome<T> {
    /// This call ran the effect and committed it.
    Executed(T),
    /// An earlier attempt did; this is what it answered.
    Replayed(T),
}

impl<T> Outcome<T> {
    /// The answer, whoever produced it.
    pub fn into_inner(self) -> T {
        match self {
            Self::Executed(value) | Self::Replayed(value) => value,
        }
    }

    /// Whether an earlier attempt produced it.
    pub fn is_replay(&self) -> bool {
        matches!(self, Self::Replayed(_))
    }
}

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
            name: IntentName { tenant: String::new(), scope, key, fingerprint: fingerprint_bytes(b"", "", "") },
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

    /// Runs the effect once: begins, claims, runs, completes and commits, in no more round trips than
    /// begin, effect and commit take. Retries what is retryable from the transaction's start, so the
    /// closure may be called several times; only one call's writes ever commit. A lost connection during
    /// COMMIT is resolved by asking the intent's row; a failure is recorded after the rollback.
    ///
    /// # Errors
    /// See [`Error`]: each variant says what became of the effect.
    pub async fn run<T, F, R>(mut self, effect: F) -> Result<Outcome<T>, Error>
    where
        T: Serialize + DeserializeOwned,
        F: Fn(Tx) -> R,
        R: Future<Output = Result<T, Failure>>,
    {
        self.options.mode = Some(Mode::Atomic);
        let span = self.span("pgonce.run");
        async move {
            let mut budget = Budget::new(&self.retry);
            let mut step = self.peek_if_seen(&mut budget).await?;
            loop {
                let again = match step {
                    Step::Done(outcome) => return outcome,
                    Step::Again { after, reason } => (after, reason),
                    Step::Start => (None, None),
                };
                if let (after, Some(reason)) = again {
                    observe::retried(reason.sqlstate().unwrap_or("connection"));
                    tracing::debug!(%reason, attempt = budget.attempt, "again");
                    if !budget.pause(after).await {
                        return Err(self.give_up(reason).await);
                    }
                }
                tracing::Span::current().record("retry_attempt_count", budget.attempt - 1);
                step = self.attempt(&effect, &mut budget).await?;
            }
        }
        .instrument(span)
        .await
    }

    pub(crate) fn span(&self, what: &'static str) -> tracing::Span {
        tracing::info_span!(
            "pgonce.run",
            what,
            scope = %self.name.scope,
            tenant = %self.name.tenant,
            key_hash = %key_hash(&self.name.key),
            retry_attempt_count = tracing::field::Empty,
            deduplication_decision = tracing::field::Empty,
        )
    }

    /// One attempt: a transaction from its beginning to its end.
    async fn attempt<T, F, R>(&self, effect: &F, budget: &mut Budget<'_>) -> Result<Step<T>, Error>
    where
        T: Serialize + DeserializeOwned,
        F: Fn(Tx) -> R,
        R: Future<Output = Result<T, Failure>>,
    {
        if let Some(reason) = &self.payload_error {
            return Err(Error::Invalid(format!("the payload has no fingerprint: {reason}")));
        }
        let connection = match self.once.connection().await {
            Ok(connection) => connection,
            Err(reason) if reason.is_retryable() => return Ok(Step::again(reason)),
            Err(reason) => return Err(reason),
        };
        let started = Instant::now();
        let wire = ClaimWire::new(&self.options);
        let direct = match self.direct(&connection).await {
            Ok(direct) => direct,
            Err(error) => return self.refused(error.into(), started.elapsed()),
        };
        let (row, direct) = match Tx::begin(&connection, self.begin(), &self.name, &wire, direct).await {
            Ok(claimed) => claimed,
            Err(error) => {
                tx::rollback(connection).await;
                return self.refused(error.into(), started.elapsed());
            }
        };
        fail::fail_point!("pgonce::after_claim");
        let claim = self.observed(row, started.elapsed())?;
        let Claim::Owned(owned) = claim else {
            // Nothing was written: the answer need not wait for the transaction's end.
            tokio::spawn(tx::rollback(connection));
            return Ok(Step::Done(self.settled_before(claim)));
        };
        let claim_id = owned.claim_id;
        let tx = Tx::new(connection, owned.name, claim_id, owned.attempt, direct);
        match effect(tx.handle()).await {
            Ok(value) => {
                let body = match serde_json::to_vec(&value) {
                    Ok(body) => body,
                    Err(error) => {
                        tx.rollback().await;
                        return Err(error.into());
                    }
                };
                match tx.commit(body).await {
                    Ended::Committed => Ok(self.executed(value)),
                    Ended::Refused(error) => self.refused(error.into(), started.elapsed()),
                    Ended::Overtaken => Ok(Step::again(Error::FailedRetryable {
                        code: "40001".into(),
                        message: "another transaction settled this intent first".into(),
                    })),
                    Ended::Leaked => Err(Error::Invalid(
                        "the effect kept its transaction beyond its end; nothing was committed".into(),
                    )),
                    Ended::InDoubt(reason) => match self.resolve(claim_id, budget, reason).await? {
                        true => Ok(self.executed(value)),
                        false => Ok(Step::again(Error::InDoubt { reason: "resolved: it was not committed".into() })),
                    },
                }
            }
            Err(failure) => {
                tx.rollback().await;
                self.failed(failure).await
            }
        }
    }

    /// The scope's rules, where the straight path may go without function calls.
    async fn direct(&self, connection: &Connection) -> Result<Option<Policy>, tokio_postgres::Error> {
        match &self.once.shared.direct {
            Some(policies) if self.options.wait.is_none() => policies.straight(connection, &self.name).await,
            _ => Ok(None),
        }
    }

    fn begin(&self) -> &'static str {
        match self.isolation {
            None => "BEGIN",
            Some(IsolationLevel::RepeatableRead) => "BEGIN ISOLATION LEVEL REPEATABLE READ",
            Some(IsolationLevel::Serializable) => "BEGIN ISOLATION LEVEL SERIALIZABLE",
            Some(_) => "BEGIN ISOLATION LEVEL READ COMMITTED",
        }
    }

    fn executed<T>(&self, value: T) -> Step<T> {
        self.once.shared.note_seen(self.hash());
        observe::settled(&self.name.scope, "succeeded");
        Step::Done(Ok(Outcome::Executed(value)))
    }

    /// What the effect's failure means: another attempt, or an outcome, recorded in a transaction of its own.
    async fn failed<T: DeserializeOwned>(&self, failure: Failure) -> Result<Step<T>, Error> {
        let Failure { code, message, verdict } = failure;
        match verdict {
            Verdict::Again | Verdict::Later | Verdict::InDoubt => {
                Ok(Step::again(Error::FailedRetryable { code, message }))
            }
            Verdict::Lost => Err(Error::LeaseLost),
            Verdict::Final | Verdict::Classify => match self.record_failure(false, &code, &message).await? {
                // A unique violation can be our own intent's rival, which committed while we ran (trap 24).
                Claim::Replay(answer) => Ok(Step::Done(self.replayed(answer))),
                _ => {
                    observe::settled(&self.name.scope, "failed_final");
                    Err(Error::Failed { code, message })
                }
            },
        }
    }

    /// The budget is used up: what is left to say, and, for a failed effect, to record.
    async fn give_up(&self, reason: Error) -> Error {
        if let Error::FailedRetryable { code, message } = &reason {
            observe::settled(&self.name.scope, "failed_retryable");
            if let Err(error) = self.record_failure(true, code, message).await {
                tracing::warn!(%error, "the failure could not be recorded; the intent stays claimable");
            }
        }
        reason
    }

    async fn record_failure(&self, retryable: bool, code: &str, message: &str) -> Result<Claim, Error> {
        let connection = self.once.connection().await?;
        let parameters: [(&(dyn ToSql + Sync), Type); 7] = [
            (&self.name.scope, Type::TEXT),
            (&self.name.key, Type::TEXT),
            (&self.name.fingerprint, Type::BYTEA),
            (&retryable, Type::BOOL),
            (&code, Type::TEXT),
            (&message, Type::TEXT),
            (&self.name.tenant, Type::TEXT),
        ];
        let row = connection.call(Call::RecordFailure, &parameters).await?;
        Claim::read(self.name.clone(), ClaimRow::read(&row)?)
    }

    /// Asks the intent's row, under its lock, whether the claim's transaction committed (trap 11). Goes on
    /// until the deadline, whatever the number of attempts: an unknown outcome is the worst answer.
    async fn resolve(&self, claim_id: Uuid, budget: &mut Budget<'_>, reason: String) -> Result<bool, Error> {
        tracing::warn!(%reason, "commit in doubt; asking the intent's row");
        metrics::counter!("pgonce_in_doubt_total").increment(1);
        loop {
            match self.ask_row(claim_id, budget.left()).await {
                Ok(Some(committed)) => return Ok(committed),
                Ok(None) => return Err(Error::InDoubt { reason }),
                Err(error) if !error.is_retryable() || budget.left().is_zero() => {
                    return Err(Error::InDoubt { reason });
                }
                Err(_) => tokio::time::sleep(Duration::from_millis(50).min(budget.left())).await,
            }
        }
    }

    /// One question to `once.resolve`: committed, not committed and never will be, or it cannot tell.
    pub(crate) async fn ask_row(&self, claim_id: Uuid, wait: Duration) -> Result<Option<bool>, Error> {
        let connection = self.once.connection().await?;
        let wait = interval(wait.clamp(Duration::from_millis(1), Duration::from_secs(5)));
        let parameters = resolve_parameters(&self.name, &claim_id, &wait);
        connection.expect_no_warning();
        let committed = connection.call(Call::Resolve, &parameters).await?.try_get(0)?;
        // Where a synchronous standby is declared, asking commits a lock on the row, and so waits for the
        // standby to have everything before it: unless that wait was cancelled, too.
        if connection.warned() {
            return Err(Error::InDoubt { reason: "the standby has not confirmed it".into() });
        }
        Ok(committed)
    }

    /// The server refused the claim or the commit: nothing of this attempt is there.
    fn refused<T>(&self, error: Error, took: Duration) -> Result<Step<T>, Error> {
        if matches!(error, Error::Conflict) {
            self.count("conflict", took);
        }
        if error.is_retryable() { Ok(Step::again(error)) } else { Err(error) }
    }

    /// A duplicate in the same process is likely a replay: ask by one read before opening a transaction.
    async fn peek_if_seen<T: DeserializeOwned>(&self, _: &mut Budget<'_>) -> Result<Step<T>, Error> {
        if self.payload_error.is_some() || !self.once.shared.has_seen(self.hash()) {
            return Ok(Step::Start);
        }
        let Ok(connection) = self.once.connection().await else { return Ok(Step::Start) };
        let started = Instant::now();
        let direct = self.once.shared.direct.is_some();
        let asked = if direct { Call::DirectPeek } else { Call::Peek };
        let row = match connection.look(asked, &claim_parameters(&self.name)).await {
            Ok(Some(row)) if direct => read_claim(&row)?.unwrap_or_default(),
            Ok(Some(row)) => ClaimRow::read(&row)?,
            Ok(None) => ClaimRow::default(),
            Err(error) => return self.refused(error.into(), started.elapsed()),
        };
        if row.kind.as_deref() != Some("replay_success") {
            return Ok(Step::Start);
        }
        let claim = self.observed(row, started.elapsed())?;
        Ok(Step::Done(self.settled_before(claim)))
    }

    pub(crate) fn observed(&self, row: ClaimRow, took: Duration) -> Result<Claim, Error> {
        let claim = Claim::read(self.name.clone(), row)?;
        self.count(kind_of(&claim), took);
        Ok(claim)
    }

    fn count(&self, kind: &'static str, took: Duration) {
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

    /// The outcome of a claim that found the intent settled, or somebody at it.
    pub(crate) fn settled_before<T: DeserializeOwned>(&self, claim: Claim) -> Result<Outcome<T>, Error> {
        match claim {
            Claim::Replay(answer) => self.replayed(answer),
            Claim::InProgress { retry_after } => Err(Error::InProgress { retry_after }),
            Claim::FailedBefore { code, message, .. } => Err(Error::FailedBefore { code, message }),
            Claim::Uncertain => Err(Error::Uncertain),
            Claim::ResultExpired => Err(Error::ResultExpired),
            Claim::Owned(_) => Err(Error::Schema("an owned claim is not an outcome [P4099]".into())),
        }
    }

    fn replayed<T: DeserializeOwned>(&self, answer: Answer) -> Result<Outcome<T>, Error> {
        self.once.shared.note_seen(self.hash());
        let unreadable = |reason: String| Error::AnswerUnreadable {
            reason,
            result_type: answer.result_type.clone(),
            result_id: answer.result_id.clone(),
        };
        let Some(body) = &answer.body else {
            return Err(unreadable("the scope's policy does not keep it".into()));
        };
        serde_json::from_slice(body).map(Outcome::Replayed).map_err(|error| unreadable(error.to_string()))
    }

    fn hash(&self) -> u64 {
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

    pub(crate) fn retry_policy(&self) -> &RetryPolicy {
        &self.retry
    }

    pub(crate) fn payload_error(&self) -> Option<&str> {
        self.payload_error.as_deref()
    }
}

/// Where a run stands after an attempt.
#[derive(Debug)]
enum Step<T> {
    Start,
    Done(Result<Outcome<T>, Error>),
    Again { after: Option<Duration>, reason: Option<Error> },
}

impl<T> Step<T> {
    fn again(reason: Error) -> Self {
        let after = match &reason {
            Error::Overloaded { retry_after } => Some(*retry_after),
            _ => None,
        };
        Self::Again { after, reason: Some(reason) }
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
