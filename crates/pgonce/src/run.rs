//! Atomic mode: claim, effect and outcome in one transaction, as often as it takes.

use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio_postgres::IsolationLevel;
use tokio_postgres::types::{ToSql, Type};
use tracing::Instrument as _;
use uuid::Uuid;

use crate::claim::{Answer, Claim, ClaimWire, Mode, interval, resolve_parameters};
use crate::direct::{Policy, claim_parameters, read_claim};
use crate::error::Failure;
use crate::outbox::{Waker, is_repeated};
use crate::outcome::{Answered, Decision, Outcome, as_json, from_json};
use crate::pool::Connection;
use crate::retry::Budget;
use crate::sql::{Call, ClaimRow};
use crate::sqlstate::Verdict;
use crate::tx::{self, Ended, Tx, Undone};
use crate::{Error, Intent, observe};

/// The longest wait for a rival that the database takes.
const WAIT_MAX: Duration = Duration::from_secs(300);

impl Intent<'_> {
    /// Runs the effect once: begins, claims, runs, completes and commits, in no more round trips than
    /// begin, effect and commit take. Retries what is retryable from the transaction's start, so the
    /// closure may be called several times; only one call's writes ever commit. A lost connection during
    /// COMMIT is resolved by asking the intent's row; a failure is recorded after the rollback.
    ///
    /// # Errors
    /// See [`Error`]: each variant says what became of the effect.
    pub async fn run<T, F, R>(self, effect: F) -> Result<Outcome<T>, Error>
    where
        T: Serialize + DeserializeOwned,
        F: Fn(Tx) -> R,
        R: Future<Output = Result<T, Failure>>,
    {
        let decided = |tx| {
            let running = effect(tx);
            async move { Ok(as_json(running.await?, Decision::NotDone)) }
        };
        from_json(self.run_answer(decided).await?)
    }

    /// Runs as [`Intent::run`] does, for effects that decide themselves whether their writes stay and what
    /// exactly is stored: code, headers, bytes. What [`Tx::made`] and [`Tx::status`] recorded goes into an
    /// answer that does not say otherwise.
    ///
    /// Where the connection was lost before the effect decided that it is not done, or refused, that decision
    /// says more about the connection than about the intent: it runs again.
    ///
    /// # Errors
    /// See [`Error`]: each variant says what became of the effect.
    pub async fn run_answer<T, F, R>(mut self, effect: F) -> Result<Answered<T>, Error>
    where
        F: Fn(Tx) -> R,
        R: Future<Output = Result<Decision<T>, Failure>>,
    {
        self.options.mode = Some(Mode::Atomic);
        self.check()?;
        let span = self.span("pgonce.run");
        async move {
            let mut budget = Budget::new(self.retry_policy());
            let first = self.peek_if_seen().await?;
            let (answer, value) = match self.until_decided(&effect, first, &mut budget).await? {
                End::Answered(answered) => return Ok(answered),
                End::Refused(answer, value) => (answer, value),
            };
            // The refused writes are gone with their transaction; the answer gets one of its own. A rival may
            // come between: then its outcome is the intent's.
            let store = |_: Tx| std::future::ready(Ok(Decision::Done(answer.clone(), ())));
            match Box::pin(self.until_decided(&store, Step::Start, &mut budget)).await? {
                End::Answered(Answered::Replayed(answer)) => Ok(Answered::Replayed(answer)),
                _ => Ok(Answered::Executed(value)),
            }
        }
        .instrument(span)
        .await
    }

    /// Attempts, until one decides or the budget is used up.
    async fn until_decided<T, F, R>(
        &self,
        effect: &F,
        mut step: Step<T>,
        budget: &mut Budget<'_>,
    ) -> Result<End<T>, Error>
    where
        F: Fn(Tx) -> R,
        R: Future<Output = Result<Decision<T>, Failure>>,
    {
        loop {
            match step {
                Step::End(end) => return Ok(end),
                Step::Start => {}
                Step::Again(reason) => {
                    observe::retried(reason.sqlstate().unwrap_or("connection"));
                    tracing::debug!(%reason, attempt = budget.attempt, "again");
                    let after = match &reason {
                        Error::Overloaded { retry_after } => Some(*retry_after),
                        _ => None,
                    };
                    if !budget.pause(after).await {
                        return Err(Box::pin(self.give_up(reason)).await);
                    }
                }
            }
            tracing::Span::current().record("retry_attempt_count", budget.attempt - 1);
            step = self.attempt(effect, budget).await?;
        }
    }

    /// One attempt: a transaction from its beginning to its end.
    async fn attempt<T, F, R>(&self, effect: &F, budget: &mut Budget<'_>) -> Result<Step<T>, Error>
    where
        F: Fn(Tx) -> R,
        R: Future<Output = Result<Decision<T>, Failure>>,
    {
        let connection = match self.once().connection().await {
            Ok(connection) => connection,
            Err(reason) if reason.is_retryable() => return Ok(Step::Again(reason)),
            Err(reason) => return Err(reason),
        };
        let started = Instant::now();
        let wire = ClaimWire::new(&self.options);
        let direct = match self.direct(&connection).await {
            Ok(direct) => direct,
            Err(error) => return self.refused(error.into(), started.elapsed()),
        };
        let (row, direct) = match Tx::begin(&connection, self.begin(), self.name(), &wire, direct).await {
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
            return self.settled_before(claim).map(Step::replayed);
        };
        let claim_id = owned.claim_id;
        let tx = Tx::new(connection, owned.name, claim_id, owned.attempt, direct, budget.posts);
        let (answer, value) = match effect(tx.clone()).await {
            Ok(Decision::Done(answer, value)) => (answer, value),
            Ok(Decision::Refused(answer, value)) => {
                return undone(tx.rollback().await, End::Refused(answer, value));
            }
            Ok(Decision::NotDone(value) | Decision::Unknown(value)) => {
                return undone(tx.rollback().await, End::Answered(Answered::NotStored(value)));
            }
            Err(failure) => {
                let refused = tx.refused_post().await;
                return match (tx.rollback().await, refused) {
                    (Undone::Kept, _) => Err(Error::Kept),
                    (_, Some(error)) if is_repeated(&error) => Ok(repeated(budget)),
                    (_, Some(error)) => Box::pin(self.failed(error.into())).await,
                    (_, None) => Box::pin(self.failed(failure)).await,
                };
            }
        };
        let emitted = tx.emitted();
        let ended = match tx.commit(answer).await {
            Ok(ended) => ended,
            Err(error) if is_repeated(&error) => return Ok(repeated(budget)),
            Err(error) => return Box::pin(self.failed(error.into())).await,
        };
        if emitted && matches!(ended, Ended::Committed | Ended::InDoubt(_)) {
            Waker::wake(&self.once().shared);
        }
        match ended {
            Ended::Committed => Ok(self.executed(value)),
            Ended::Refused(error) => self.refused(error.into(), started.elapsed()),
            Ended::Overtaken => Ok(Step::Again(Error::FailedRetryable {
                code: "40001".into(),
                message: "another transaction settled this intent first".into(),
            })),
            Ended::Kept => Err(Error::Kept),
            Ended::InDoubt(reason) => match Box::pin(self.resolve(claim_id, budget, reason)).await? {
                true => Ok(self.executed(value)),
                false => Ok(Step::Again(Error::InDoubt { reason: "resolved: it was not committed".into() })),
            },
        }
    }

    /// The scope's rules, where the straight path may go without function calls.
    async fn direct(&self, connection: &Connection) -> Result<Option<Policy>, tokio_postgres::Error> {
        match &self.once().shared.direct {
            // A wait beyond the limit is the function's to refuse.
            Some(policies) if self.options.wait.is_none_or(|wait| wait <= WAIT_MAX) => {
                policies.straight(connection, self.name()).await
            }
            _ => Ok(None),
        }
    }

    fn begin(&self) -> &'static str {
        match self.isolation_level() {
            None => "BEGIN",
            Some(IsolationLevel::RepeatableRead) => "BEGIN ISOLATION LEVEL REPEATABLE READ",
            Some(IsolationLevel::Serializable) => "BEGIN ISOLATION LEVEL SERIALIZABLE",
            Some(_) => "BEGIN ISOLATION LEVEL READ COMMITTED",
        }
    }

    fn executed<T>(&self, value: T) -> Step<T> {
        self.once().shared.note_seen(self.hash());
        observe::settled(&self.name().scope, "succeeded");
        Step::End(End::Answered(Answered::Executed(value)))
    }

    /// What the effect's failure means: another attempt, or an outcome, recorded in a transaction of its own.
    async fn failed<T>(&self, failure: Failure) -> Result<Step<T>, Error> {
        let Failure { code, message, verdict, .. } = failure;
        match verdict {
            Verdict::Again | Verdict::Later | Verdict::InDoubt => {
                Ok(Step::Again(Error::FailedRetryable { code, message }))
            }
            Verdict::Lost => Err(Error::LeaseLost),
            Verdict::Final | Verdict::Classify => match self.record_failure(false, &code, &message).await? {
                // A unique violation can be our own intent's rival, which committed while we ran (trap 24).
                rival @ Claim::Replay(_) => self.settled_before(rival).map(Step::replayed),
                _ => {
                    observe::settled(&self.name().scope, "failed_final");
                    Err(Error::Failed { code, message })
                }
            },
        }
    }

    /// The budget is used up: what is left to say, and, for a failed effect, to record.
    async fn give_up(&self, reason: Error) -> Error {
        if let Error::FailedRetryable { code, message } = &reason {
            observe::settled(&self.name().scope, "failed_retryable");
            if let Err(error) = self.record_failure(true, code, message).await {
                tracing::warn!(%error, "the failure could not be recorded; the intent stays claimable");
            }
        }
        reason
    }

    async fn record_failure(&self, retryable: bool, code: &str, message: &str) -> Result<Claim, Error> {
        let connection = self.once().connection().await?;
        let name = self.name();
        let parameters: [(&(dyn ToSql + Sync), Type); 7] = [
            (&name.scope, Type::TEXT),
            (&name.key, Type::TEXT),
            (&name.fingerprint, Type::BYTEA),
            (&retryable, Type::BOOL),
            (&code, Type::TEXT),
            (&message, Type::TEXT),
            (&name.tenant, Type::TEXT),
        ];
        let row = connection.call(Call::RecordFailure, &parameters).await?;
        Claim::read(name.clone(), ClaimRow::read(&row)?)
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
        let connection = self.once().connection().await?;
        let wait = interval(wait.clamp(Duration::from_millis(1), Duration::from_secs(5)));
        let parameters = resolve_parameters(self.name(), &claim_id, &wait);
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
        if error.is_retryable() { Ok(Step::Again(error)) } else { Err(error) }
    }

    /// A duplicate in the same process is likely a replay: ask by one read before opening a transaction.
    async fn peek_if_seen<T>(&self) -> Result<Step<T>, Error> {
        if !self.once().shared.has_seen(self.hash()) {
            return Ok(Step::Start);
        }
        let Ok(connection) = self.once().connection().await else { return Ok(Step::Start) };
        let started = Instant::now();
        let direct = self.once().shared.direct.is_some();
        let asked = if direct { Call::DirectPeek } else { Call::Peek };
        let row = match connection.look(asked, &claim_parameters(self.name())).await {
            Ok(Some(row)) if direct => read_claim(&row)?.unwrap_or_default(),
            Ok(Some(row)) => ClaimRow::read(&row)?,
            Ok(None) => ClaimRow::default(),
            Err(error) => return self.refused(error.into(), started.elapsed()),
        };
        if row.kind.as_deref() != Some("replay_success") {
            return Ok(Step::Start);
        }
        let claim = self.observed(row, started.elapsed())?;
        self.settled_before(claim).map(Step::replayed)
    }
}

/// Once more, with messages that wait for their answers. At once and not at the budget's cost: it is no retry of anything that
/// failed, and with a budget of one attempt the intent could otherwise never run again while its message is in the log.
fn repeated<T>(budget: &mut Budget<'_>) -> Step<T> {
    observe::retried("23505");
    budget.posts = false;
    Step::Start
}

/// The end that an effect chose which wants none of its writes.
fn undone<T>(undone: Undone, end: End<T>) -> Result<Step<T>, Error> {
    match undone {
        Undone::Confirmed => Ok(Step::End(end)),
        Undone::Lost => Ok(Step::Again(Error::FailedRetryable {
            code: "connection".into(),
            message: "the connection was lost while the effect ran".into(),
        })),
        Undone::Kept => Err(Error::Kept),
    }
}

/// How the attempts ended.
#[derive(Debug)]
enum End<T> {
    Answered(Answered<T>),
    /// Rolled back, and this answer is to be stored.
    Refused(Answer, T),
}

/// Where a run stands after an attempt.
#[derive(Debug)]
enum Step<T> {
    Start,
    End(End<T>),
    Again(Error),
}

impl<T> Step<T> {
    fn replayed(answer: Answer) -> Self {
        Self::End(End::Answered(Answered::Replayed(answer)))
    }
}
