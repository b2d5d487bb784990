//! Claims and looks.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join;
use tokio::sync::oneshot;
use uuid::Uuid;

use crate::claim::{Claim, IntentName};
use crate::intent::kind_of;
use crate::pool::Connection;
use crate::{Error, observe};

use super::calls::{self, Told, Trouble};
use super::lane::{Job, Lane};
use super::orphans::Orphans;
use super::turn::Serve;
use super::{Core, Observed};

/// A caller's question.
#[derive(Debug)]
pub(super) struct Ask {
    name: IntentName,
    /// None: only looking.
    claim_id: Option<Uuid>,
    since: Instant,
    /// How often it was sent.
    sent: u32,
    reply: oneshot::Sender<Reply>,
}

/// An answer on its way. A claim that does not arrive is given back.
#[derive(Debug)]
pub(super) struct Reply {
    told: Option<Result<Option<Observed>, Error>>,
    owned: Option<(IntentName, Uuid, Orphans)>,
}

impl Reply {
    /// It has arrived.
    pub(super) fn open(mut self) -> Result<Option<Observed>, Error> {
        self.owned = None;
        self.told.take().unwrap_or_else(|| Err(Error::Schema("an answer was opened twice [P4099]".into())))
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if let Some((name, claim_id, orphans)) = self.owned.take() {
            orphans.add(name, claim_id);
        }
    }
}

impl Ask {
    pub(super) fn new(name: IntentName, claim_id: Option<Uuid>, reply: oneshot::Sender<Reply>) -> Self {
        Self { name, claim_id, since: Instant::now(), sent: 0, reply }
    }

    fn tell(self, core: &Core, told: Result<Option<Observed>, Error>) {
        let owned = match (&told, self.claim_id) {
            (Ok(Some(Observed { claim: Claim::Owned(_), .. })), Some(claim_id)) => {
                Some((self.name, claim_id, core.orphans.clone()))
            }
            _ => None,
        };
        // Where nobody listens any more, the reply comes back and is dropped.
        let _ = self.reply.send(Reply { told: Some(told), owned });
    }
}

impl Job for Ask {
    fn since(&self) -> Instant {
        self.since
    }

    fn bytes(&self) -> usize {
        self.name.tenant.len() + self.name.scope.len() + self.name.key.len() + 64
    }

    fn is_over(&self) -> bool {
        self.sent == 0 && self.reply.is_closed()
    }
}

impl Serve for Ask {
    fn lane(core: &Core) -> &Arc<Lane<Self>> {
        &core.asks
    }

    async fn serve(core: &Arc<Core>, connection: &Connection, mut batch: Vec<Self>) -> bool {
        // A question whose caller has left is not sent again; what its first sending did is undone.
        batch.retain(|ask| {
            let left = ask.reply.is_closed();
            if let (true, Some(claim_id)) = (left && ask.sent > 0, ask.claim_id) {
                core.orphans.add(ask.name.clone(), claim_id);
            }
            !left
        });
        if batch.is_empty() {
            return true;
        }
        core.waits.add(batch.iter().filter(|ask| ask.sent == 0).map(|ask| ask.since.elapsed()));
        ask_all(core, connection, batch).await
    }
}

/// Asks, and answers everyone that can be answered. False: the connection is not to be used again.
async fn ask_all(core: &Arc<Core>, connection: &Connection, mut batch: Vec<Ask>) -> bool {
    for ask in &mut batch {
        ask.sent += 1;
    }
    let (claims, looks): (Vec<Ask>, Vec<Ask>) = batch.into_iter().partition(|ask| ask.claim_id.is_some());
    let asked = Instant::now();
    let (claimed, looked) = join(send_claims(core, connection, &claims), send_looks(core, connection, &looks)).await;
    let claimed = settle(core, connection, claims, claimed, asked).await;
    let looked = settle(core, connection, looks, looked, asked).await;
    claimed && looked
}

async fn send_claims(core: &Core, connection: &Connection, asks: &[Ask]) -> Result<Vec<Told>, Trouble> {
    if asks.is_empty() {
        return Ok(Vec::new());
    }
    let intents: Vec<(&IntentName, Uuid)> = asks.iter().filter_map(|ask| Some((&ask.name, ask.claim_id?))).collect();
    calls::claim(connection, &intents, core.claimed_by.as_deref(), core.batch.claim_deadline).await
}

async fn send_looks(core: &Core, connection: &Connection, asks: &[Ask]) -> Result<Vec<Told>, Trouble> {
    if asks.is_empty() {
        return Ok(Vec::new());
    }
    let intents: Vec<&IntentName> = asks.iter().map(|ask| &ask.name).collect();
    calls::peek(connection, &intents, core.batch.claim_deadline).await
}

async fn settle(
    core: &Arc<Core>,
    connection: &Connection,
    asks: Vec<Ask>,
    told: Result<Vec<Told>, Trouble>,
    asked: Instant,
) -> bool {
    match told {
        Ok(told) => {
            for (ask, told) in asks.into_iter().zip(told) {
                answer(core, ask, told, asked);
            }
            true
        }
        Err(Trouble::Broken) => {
            core.asks.again(asks);
            false
        }
        Err(Trouble::Later | Trouble::Warned) => {
            core.asks.again_after(&core.runtime, asks, AGAIN);
            true
        }
        Err(Trouble::Refused { .. }) if asks.len() > 1 => one_by_one(core, connection, asks).await,
        Err(Trouble::Refused { sqlstate, message }) => {
            let refused = |ask: Ask| ask.tell(core, Err(calls::refusal(sqlstate.clone(), message.clone())));
            asks.into_iter().for_each(refused);
            true
        }
    }
}

/// Between two sendings of what could not be answered now.
const AGAIN: Duration = Duration::from_millis(20);
/// How often an intent that seems to be somebody else's is asked for again, where it may be our own.
const RESENT_MAX: u32 = 6;

/// Something in the batch is more than the database takes (a NUL in a text, for example): each goes alone,
/// so that it costs only its own caller.
async fn one_by_one(core: &Arc<Core>, connection: &Connection, asks: Vec<Ask>) -> bool {
    let mut fine = true;
    for ask in asks {
        let asked = Instant::now();
        let alone = vec![ask];
        let told = match alone[0].claim_id {
            Some(_) => send_claims(core, connection, &alone).await,
            None => send_looks(core, connection, &alone).await,
        };
        fine &= Box::pin(settle(core, connection, alone, told, asked)).await;
    }
    fine
}

fn answer(core: &Arc<Core>, ask: Ask, told: Told, asked_at: Instant) {
    let Told { error, row, expires_in } = told;
    let took = ask.since.elapsed();
    let count = |ask: &Ask, kind| {
        observe::claimed(&ask.name.scope, kind, took);
        core.tally.add(&ask.name.tenant, &ask.name.scope, kind);
    };
    if let Some((sqlstate, message)) = error {
        let error = calls::refusal(sqlstate, message);
        if matches!(error, Error::Conflict) && ask.claim_id.is_some() {
            count(&ask, "conflict");
        }
        return ask.tell(core, Err(error));
    }
    if row.kind.is_none() {
        return ask.tell(core, Ok(None)); // a look at what could be owned
    }
    let claim = match Claim::read(ask.name.clone(), row) {
        Ok(claim) => claim,
        Err(error) => return ask.tell(core, Err(error)),
    };
    if let (Claim::InProgress { .. }, Some(claim_id)) = (&claim, ask.claim_id)
        && ask.sent > 1
    {
        // The first sending's transaction may be open still: then it is ourselves that we see at it.
        if ask.sent < RESENT_MAX {
            return core.asks.again_after(&core.runtime, vec![ask], AGAIN);
        }
        core.orphans.add(ask.name.clone(), claim_id);
    }
    // Who only looks may do so again and again: what counts is the answer that it goes away with.
    if ask.claim_id.is_some() || matches!(claim, Claim::Replay(_)) {
        count(&ask, kind_of(&claim));
    }
    ask.tell(core, Ok(Some(Observed { claim, expires_in, asked_at })));
}
