//! Completions and renewals.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join3;
use tokio::sync::oneshot;
use uuid::Uuid;

use crate::claim::{Answer, IntentName, interval, resolve_parameters};
use crate::pool::Connection;
use crate::sql::Call;
use crate::{Error, observe};

use super::calls::{self, Completed, Renewal, Trouble};
use super::keep::Held;
use super::lane::{Job, Lane};
use super::turn::Serve;
use super::{Core, Recorded, get};

/// What the completing connections do.
#[derive(Debug)]
pub(super) enum Task {
    Complete(Box<Completion>),
    Renew(Arc<Held>, Instant),
    Ping(Instant, oneshot::Sender<()>),
}

/// A success to record. Nobody need wait for it: the effect is there.
#[derive(Debug)]
pub(super) struct Completion {
    name: IntentName,
    claim_id: Uuid,
    answer: Answer,
    since: Instant,
    deadline: Instant,
    /// How often it was sent.
    sent: u32,
    reply: oneshot::Sender<Result<Recorded, Error>>,
}

impl Completion {
    pub(super) fn new(
        name: IntentName,
        claim_id: Uuid,
        answer: Answer,
        deadline: Duration,
        reply: oneshot::Sender<Result<Recorded, Error>>,
    ) -> Self {
        let since = Instant::now();
        Self { name, claim_id, answer, since, deadline: since + deadline, sent: 0, reply }
    }

    fn tell(self, recorded: Result<Recorded, Error>) {
        let _ = self.reply.send(recorded);
    }
}

impl Job for Task {
    fn since(&self) -> Instant {
        match self {
            Self::Complete(completion) => completion.since,
            Self::Renew(_, since) | Self::Ping(since, _) => *since,
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Complete(completion) => completion.answer.body.as_ref().map_or(0, Vec::len) + 1024,
            Self::Renew(..) | Self::Ping(..) => 256,
        }
    }

    fn is_over(&self) -> bool {
        match self {
            Self::Complete(completion) => completion.deadline <= Instant::now(),
            Self::Renew(held, _) => held.is_over(),
            Self::Ping(_, reply) => reply.is_closed(),
        }
    }
}

impl Serve for Task {
    fn lane(core: &Core) -> &Arc<Lane<Self>> {
        &core.tasks
    }

    fn serve(core: &Arc<Core>, connection: &Connection, batch: Vec<Self>) -> impl Future<Output = bool> + Send {
        do_all(core, connection, batch)
    }
}

/// How long one call may take: time for another is left before the deadline.
fn limit(core: &Core) -> Duration {
    core.batch.deadline / 2
}

/// False: the connection is not to be used again.
async fn do_all(core: &Arc<Core>, connection: &Connection, batch: Vec<Task>) -> bool {
    let (mut completions, mut renewals, mut pings) = (Vec::new(), Vec::new(), Vec::new());
    for task in batch {
        match task {
            Task::Complete(mut completion) => {
                completion.sent += 1;
                completions.push(*completion);
            }
            Task::Renew(held, _) => renewals.push(held),
            Task::Ping(_, reply) => pings.push(reply),
        }
    }
    let pinged = !pings.is_empty();
    let ping = async {
        if pinged && completions.is_empty() && renewals.is_empty() {
            let asked = connection.rows(Call::Ping, &[]);
            return tokio::time::timeout(limit(core), asked).await.is_ok_and(|answer| answer.is_ok());
        }
        true
    };
    let (completed, renewed, answers) =
        join3(send_completions(core, connection, &completions), send_renewals(core, connection, &renewals), ping).await;
    // What else was sent along answers a ping, too.
    let answers = answers && completed.is_ok() && renewed.is_ok();
    if answers {
        for reply in pings {
            let _ = reply.send(());
        }
    }
    let kept = settle_renewals(core, renewals, renewed);
    let kept = settle(core, connection, completions, completed).await && kept;
    kept && (answers || !pinged)
}

async fn send_completions(
    core: &Core,
    connection: &Connection,
    completions: &[Completion],
) -> Result<Vec<Completed>, Trouble> {
    if completions.is_empty() {
        return Ok(Vec::new());
    }
    let intents: Vec<(&IntentName, Uuid, &Answer)> =
        completions.iter().map(|one| (&one.name, one.claim_id, &one.answer)).collect();
    calls::succeed(connection, &intents, limit(core)).await
}

async fn send_renewals(core: &Core, connection: &Connection, held: &[Arc<Held>]) -> Result<Vec<Renewal>, Trouble> {
    if held.is_empty() {
        return Ok(Vec::new());
    }
    let intents: Vec<(&IntentName, Uuid)> = held.iter().map(|held| (&held.name, held.claim_id)).collect();
    calls::renew(connection, &intents, limit(core)).await
}

fn settle_renewals(core: &Arc<Core>, all: Vec<Arc<Held>>, renewed: Result<Vec<Renewal>, Trouble>) -> bool {
    match renewed {
        Ok(renewals) => {
            for (held, renewal) in all.into_iter().zip(renewals) {
                match renewal {
                    Renewal::Renewed { asked, lease } => held.renewed(asked, lease),
                    Renewal::Busy => held.rest(),
                    Renewal::Settled => held.settle(),
                    Renewal::Lost => held.lose(),
                }
            }
            true
        }
        Err(Trouble::Broken) => {
            let now = Instant::now();
            core.tasks.again(all.into_iter().map(|held| Task::Renew(held, now)).collect());
            false
        }
        Err(trouble) => {
            tracing::warn!(?trouble, "leases not renewed; trying again");
            all.iter().for_each(|held| held.rest());
            true
        }
    }
}

/// Between two sendings; longer every time.
fn pause(sent: u32) -> Duration {
    Duration::from_millis(5).saturating_mul(1 << sent.min(5)).min(Duration::from_millis(100))
}

fn again(core: &Arc<Core>, completion: Completion) {
    let pause = pause(completion.sent);
    core.tasks.again_after(&core.runtime, vec![Task::Complete(Box::new(completion))], pause);
}

async fn settle(
    core: &Arc<Core>,
    connection: &Connection,
    completions: Vec<Completion>,
    completed: Result<Vec<Completed>, Trouble>,
) -> bool {
    match completed {
        Ok(completed) => {
            for (completion, completed) in completions.into_iter().zip(completed) {
                answer(core, completion, completed);
            }
            true
        }
        Err(Trouble::Broken) => {
            metrics::counter!("pgonce_in_doubt_total").increment(completions.len() as u64);
            core.tasks.again(completions.into_iter().map(|one| Task::Complete(Box::new(one))).collect());
            false
        }
        Err(trouble @ (Trouble::Later | Trouble::Warned)) => {
            if matches!(trouble, Trouble::Warned) {
                metrics::counter!("pgonce_in_doubt_total").increment(completions.len() as u64);
            }
            completions.into_iter().for_each(|completion| again(core, completion));
            true
        }
        Err(Trouble::Refused { .. }) if completions.len() > 1 => one_by_one(core, connection, completions).await,
        Err(Trouble::Refused { sqlstate, message }) => {
            let refused = |one: Completion| one.tell(Err(calls::refusal(sqlstate.clone(), message.clone())));
            completions.into_iter().for_each(refused);
            true
        }
    }
}

/// Something in the batch is more than the database takes: each goes alone, so that it costs only its own
/// caller.
async fn one_by_one(core: &Arc<Core>, connection: &Connection, completions: Vec<Completion>) -> bool {
    let mut fine = true;
    for completion in completions {
        let alone = vec![completion];
        let completed = send_completions(core, connection, &alone).await;
        fine &= Box::pin(settle(core, connection, alone, completed)).await;
    }
    fine
}

fn answer(core: &Arc<Core>, completion: Completion, completed: Completed) {
    let Completed { verdict, status, answer, failure_code, failure_message, expires_in } = completed;
    let recorded = match (verdict.as_str(), status.as_deref()) {
        ("recorded", _) => {
            observe::settled(&completion.name.scope, "succeeded");
            Ok(Recorded::Now { expires_in })
        }
        ("before", Some("succeeded")) => Ok(Recorded::Before { answer, expires_in }),
        ("before", _) => Err(Error::FailedBefore { code: failure_code.unwrap_or_default(), message: failure_message }),
        ("busy", _) => return again(core, completion),
        ("lost", _) if completion.sent > 1 => {
            core.runtime.spawn(ask_row(Arc::clone(core), completion));
            return;
        }
        ("lost", _) => Err(Error::LeaseLost),
        ("too_large", _) => Err(Error::Refused {
            sqlstate: "P4005".into(),
            message: "a part of the answer is over its limit; store a reference and rebuild the answer from it".into(),
        }),
        (other, _) => {
            Err(Error::Schema(format!("the database answered a verdict that this version does not know: {other:?}")))
        }
    };
    completion.tell(recorded);
}

/// A completion that was sent before is told that the claim is not its own. If the first sending got
/// through, the row would say so, unless it is gone already: only where it cannot be is the lease lost.
async fn ask_row(core: Arc<Core>, completion: Completion) {
    let wait = interval(Duration::from_secs(1));
    let reason = "the connection was lost while completing";
    loop {
        let asked = async {
            let parameters = resolve_parameters(&completion.name, &completion.claim_id, &wait);
            let connection = get(&core.side).await?;
            Ok::<Option<bool>, Error>(connection.call(Call::Resolve, &parameters).await?.try_get(0)?)
        };
        match asked.await {
            Ok(Some(false)) => return completion.tell(Err(Error::LeaseLost)),
            Ok(_) => return completion.tell(Err(Error::InDoubt { reason: reason.into() })),
            Err(error) if error.is_retryable() && Instant::now() < completion.deadline => {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            Err(_) => return completion.tell(Err(Error::InDoubt { reason: reason.into() })),
        }
    }
}
