//! Work that cannot live in one transaction: claimed first, renewed while it runs, completed under its fence.

use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;
use tracing::Instrument as _;
use uuid::Uuid;

use crate::claim::{
    Answer, Claim, ClaimWire, Mode, fail_parameters, interval, release_parameters, renew_parameters, succeed_parameters,
};
use crate::error::Failure;
use crate::intent::Intent;
use crate::outcome::{Answered, Decision, Outcome, as_json, from_json};
use crate::retry::Budget;
use crate::sql::{Call, ClaimRow};
use crate::sqlstate::{Verdict, is_disconnect, verdict_of};
use crate::{Error, Once, observe};

/// The shortest lease that the database takes.
const LEASE_MIN: Duration = Duration::from_millis(10);

/// What the work may know of its claim. A resource that can compare takes `fence` and refuses smaller ones;
/// a provider that deduplicates takes the intent's key.
#[derive(Debug, Clone)]
pub struct Lease {
    /// The claim's fence: an upstream may pass it to `once.succeed` in its own transaction.
    pub claim_id: Uuid,
    /// Grows with every claim.
    pub fence: Option<i64>,
    /// Which attempt this is.
    pub attempt: u32,
}

impl Intent<'_> {
    /// Runs work outside the database once: claims with a lease, renews it while the work runs, and records
    /// the outcome under the claim's fence.
    ///
    /// What this does not promise: the work's own effect is not in the same commit as the outcome. If this
    /// process dies in between, the scope's `stale` policy decides: rerun, probe, or hold as uncertain.
    ///
    /// # Errors
    /// See [`Error`]. `Error::LeaseLost` means that the work was stopped, or finished too late to be recorded.
    pub async fn run_leased<T, F, R>(self, work: F) -> Result<Outcome<T>, Error>
    where
        T: Serialize + DeserializeOwned,
        F: FnOnce(Lease) -> R,
        R: Future<Output = Result<T, Failure>>,
    {
        // What cannot be written was done all the same.
        let decided = async |lease| Ok(as_json(work(lease).await?, Decision::Unknown));
        from_json(self.run_leased_answer(decided).await?)
    }

    /// Runs as [`Intent::run_leased`] does, for work that decides itself what exactly is stored. There are no
    /// writes to roll back here: a refusal is stored like any other answer.
    ///
    /// # Errors
    /// As [`Intent::run_leased`].
    pub async fn run_leased_answer<T, F, R>(mut self, work: F) -> Result<Answered<T>, Error>
    where
        F: FnOnce(Lease) -> R,
        R: Future<Output = Result<Decision<T>, Failure>>,
    {
        self.check()?;
        self.options.mode = Some(Mode::Leased);
        let span = self.span("pgonce.run_leased");
        async move {
            let policy = self.retry_policy().clone();
            let mut budget = Budget::new(&policy);
            let (claim, claimed_at) = self.claim_leased(&mut budget).await?;
            let owned = match claim {
                Claim::Owned(owned) => owned,
                settled => return self.settled_before(settled).map(Answered::Replayed),
            };
            fail::fail_point!("pgonce::leased_after_claim");
            let Some(lease) = owned.lease else {
                return Err(Error::Schema("a leased claim was given without its lease [P4099]".into()));
            };
            let held = Lease { claim_id: owned.claim_id, fence: owned.fence, attempt: owned.attempt };
            let worked = tokio::select! {
                biased;
                lost = self.keep(owned.claim_id, lease, claimed_at) => return Err(lost),
                worked = work(held) => worked,
            };
            // The heartbeat has stopped: it would only queue behind the completion's row lock (trap 8).
            fail::fail_point!("pgonce::leased_before_complete");
            let mut budget = Budget::new(&policy);
            match worked {
                Ok(Decision::Done(answer, value) | Decision::Refused(answer, value)) => {
                    self.complete_leased(owned.claim_id, &answer, &mut budget).await?;
                    fail::fail_point!("pgonce::leased_after_complete");
                    observe::settled(&self.name().scope, "succeeded");
                    Ok(Answered::Executed(value))
                }
                Ok(Decision::NotDone(value)) => {
                    self.let_go(Call::Release, owned.claim_id).await;
                    Ok(Answered::NotStored(value))
                }
                Ok(Decision::Unknown(value)) => {
                    self.let_go(Call::Renew, owned.claim_id).await;
                    Ok(Answered::NotStored(value))
                }
                Err(failure) => Err(self.fail_leased(owned.claim_id, failure, &mut budget).await),
            }
        }
        .instrument(span)
        .await
    }

    /// Claims in a transaction of its own. A lost answer may leave a claim that nobody works on: it ends
    /// with its lease, like that of a process that died.
    async fn claim_leased(&self, budget: &mut Budget<'_>) -> Result<(Claim, Instant), Error> {
        let wire = ClaimWire::new(&self.options);
        loop {
            // The lease is counted from before the question: the local end is never later than the database's.
            let asked = Instant::now();
            let claimed = match self.once().connection().await {
                Ok(connection) => {
                    connection.call(Call::Claim, &wire.parameters(self.name())).await.map_err(Error::from)
                }
                Err(error) => Err(error),
            };
            match claimed {
                Ok(row) => return Ok((self.observed(ClaimRow::read(&row)?, asked.elapsed())?, asked)),
                Err(error) if error.is_retryable() => {
                    if !budget.pause(None).await {
                        return Err(error);
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Renews until the lease is lost: by the database's word, or because no renewal got through before
    /// the lease's end by this process's monotonic clock. Returns only then.
    async fn keep(&self, claim_id: Uuid, lease: Duration, claimed_at: Instant) -> Error {
        let mut ends = claimed_at + lease;
        let text = Some(interval(lease));
        loop {
            tokio::time::sleep(lease / 3).await;
            let asked = Instant::now();
            if asked >= ends {
                return Error::LeaseLost;
            }
            let renewed = tokio::time::timeout(ends - asked, renew(self.once(), self, claim_id, &text)).await;
            match renewed {
                Ok(Ok(())) => ends = asked + lease,
                Ok(Err(Error::LeaseLost)) => return Error::LeaseLost,
                Ok(Err(error)) => tracing::warn!(%error, "lease not renewed; trying again"),
                Err(_) => return Error::LeaseLost,
            }
        }
    }

    /// Completes under the fence. An answer that was lost is asked for again: if the first completion got
    /// through, the second is refused and the row says that it is ours.
    async fn complete_leased(&self, claim_id: Uuid, answer: &Answer, budget: &mut Budget<'_>) -> Result<(), Error> {
        let mut in_doubt = false;
        loop {
            let error = match self.once().connection().await {
                Ok(connection) => {
                    let parameters = succeed_parameters(self.name(), &claim_id, answer);
                    match connection.call(Call::Succeed, &parameters).await {
                        Ok(_) => return Ok(()),
                        Err(error) => {
                            in_doubt |= is_disconnect(&error);
                            Error::from(error)
                        }
                    }
                }
                Err(error) => error,
            };
            if in_doubt && matches!(error, Error::LeaseLost) {
                let reason = "the connection was lost while completing";
                return match self.ask_row(claim_id, budget.left()).await {
                    Ok(Some(true)) => Ok(()),
                    Ok(Some(false)) => Err(Error::LeaseLost),
                    Ok(None) | Err(_) => Err(Error::InDoubt { reason: reason.into() }),
                };
            }
            let gives_up = !error.is_retryable() || matches!(error, Error::LeaseLost) || !budget.pause(None).await;
            match (gives_up, in_doubt) {
                (false, _) => {}
                (true, true) => return Err(Error::InDoubt { reason: error.to_string() }),
                (true, false) => return Err(error),
            }
        }
    }

    /// Leaves a claim without an outcome: gives it back, or renews it to the shortest lease there is, so that the
    /// scope's `stale` policy is asked at once. Best effort: otherwise the lease ends by itself.
    async fn let_go(&self, how: Call, claim_id: Uuid) {
        let left = match self.once().connection().await {
            Ok(connection) if how == Call::Release => {
                connection.call(how, &release_parameters(self.name(), &claim_id)).await.map_err(Error::from)
            }
            Ok(connection) => {
                let shortest = Some(interval(LEASE_MIN));
                connection.call(how, &renew_parameters(self.name(), &claim_id, &shortest)).await.map_err(Error::from)
            }
            Err(error) => Err(error),
        };
        if let Err(error) = left {
            tracing::warn!(%error, "the claim could not be left; its lease will end by itself");
        }
    }

    async fn fail_leased(&self, claim_id: Uuid, failure: Failure, budget: &mut Budget<'_>) -> Error {
        let Failure { code, message, verdict, .. } = failure;
        let retryable = matches!(verdict, Verdict::Again | Verdict::Later | Verdict::InDoubt);
        let name = self.name();
        let (code_text, message_text) = (code.as_str(), message.as_str());
        let parameters = fail_parameters(name, &claim_id, &retryable, &code_text, &message_text);
        loop {
            let recorded = match self.once().connection().await {
                Ok(connection) => connection.call(Call::Fail, &parameters).await.map(|_| ()).map_err(|error| {
                    (matches!(verdict_of(&error), Verdict::Again | Verdict::Later), Error::from(error))
                }),
                Err(error) => Err((error.is_retryable(), error)),
            };
            match recorded {
                Ok(()) => {
                    observe::settled(&name.scope, if retryable { "failed_retryable" } else { "failed_final" });
                    break;
                }
                Err((true, _)) if budget.pause(None).await => {}
                Err((_, Error::LeaseLost)) => return Error::LeaseLost,
                Err((_, error)) => {
                    tracing::warn!(%error, "the failure could not be recorded; the lease will end by itself");
                    break;
                }
            }
        }
        if retryable { Error::FailedRetryable { code, message } } else { Error::Failed { code, message } }
    }
}

async fn renew(once: &Once, intent: &Intent<'_>, claim_id: Uuid, lease: &Option<String>) -> Result<(), Error> {
    let connection = once.connection().await?;
    connection.call(Call::Renew, &renew_parameters(intent.name(), &claim_id, lease)).await?;
    Ok(())
}
