//! What a worker has in hand: jobs that were taken ahead, and those that are being done, whose leases are prolonged.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio_postgres::types::{ToSql, Type};
use uuid::Uuid;

use super::Job;
use crate::claim::interval;
use crate::sql::Call;
use crate::{Error, Once};

/// Whether a job is still this worker's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Standing {
    Held = 0,
    /// Somebody wants it to stop.
    Cancel,
    /// Another has it, or it has ended.
    Lost,
}

/// What the heartbeat says about a job to whoever works on it. Every job has one, and hardly any is ever told something: so
/// it is no channel, whose end would be announced for each.
#[derive(Debug, Default)]
struct Word {
    standing: AtomicU8,
    said: Notify,
}

impl Word {
    fn say(&self, standing: Standing) {
        self.standing.store(standing as u8, Ordering::Release);
        self.said.notify_waiters();
    }

    fn standing(&self) -> Standing {
        match self.standing.load(Ordering::Acquire) {
            said if said == Standing::Held as u8 => Standing::Held,
            said if said == Standing::Cancel as u8 => Standing::Cancel,
            _ => Standing::Lost,
        }
    }
}

/// A job and the word about its standing.
#[derive(Debug, Clone)]
pub(super) struct Ticket {
    pub(super) job: Arc<Job>,
    word: Arc<Word>,
}

impl Ticket {
    /// Whether the job is still this worker's, as far as it knows.
    pub(super) fn standing(&self) -> Standing {
        self.word.standing()
    }

    /// Resolves when the job is to be dropped.
    pub(super) async fn dropped(&self) -> Standing {
        loop {
            let said = self.word.said.notified();
            tokio::pin!(said);
            said.as_mut().enable(); // before the look, so that nothing is missed in between
            match self.standing() {
                Standing::Held => said.await,
                told => return told,
            }
        }
    }
}

/// Shared by the taking, the lanes and the heartbeat.
#[derive(Debug, Default)]
pub(super) struct Desk {
    waiting: Mutex<Waiting>,
    held: Mutex<HashMap<i64, (Uuid, Arc<Word>)>>,
    arrived: Notify,
    taken: Notify,
}

#[derive(Debug, Default)]
struct Waiting {
    jobs: VecDeque<Ticket>,
    closed: bool,
}

impl Desk {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn held(&self) -> MutexGuard<'_, HashMap<i64, (Uuid, Arc<Word>)>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Jobs that were taken, in their order.
    pub(super) fn put(&self, jobs: Vec<Job>) {
        let (mut waiting, mut held) = (self.waiting(), self.held());
        for job in jobs {
            let word = Arc::<Word>::default();
            held.insert(job.id, (job.claim_id, Arc::clone(&word)));
            waiting.jobs.push_back(Ticket { job: Arc::new(job), word });
        }
        drop((waiting, held));
        self.arrived.notify_waiters();
    }

    /// The next one; `None` where no more are to be begun.
    pub(super) async fn next(&self) -> Option<Ticket> {
        if let Some(ticket) = self.at_hand() {
            return Some(ticket); // as nearly always where there is much to do: nobody has to be told of an arrival
        }
        loop {
            let arrived = self.arrived.notified();
            tokio::pin!(arrived);
            arrived.as_mut().enable(); // before the look, so that nothing is missed in between
            {
                let mut waiting = self.waiting();
                if waiting.closed {
                    return None;
                }
                if let Some(ticket) = waiting.jobs.pop_front() {
                    self.taken.notify_one();
                    return Some(ticket);
                }
            }
            arrived.await;
        }
    }

    /// The next one, if one is here.
    pub(super) fn at_hand(&self) -> Option<Ticket> {
        let mut waiting = self.waiting();
        let ticket = if waiting.closed { None } else { waiting.jobs.pop_front() };
        if ticket.is_some() {
            self.taken.notify_one();
        }
        ticket
    }

    /// Puts one back that could not be begun.
    pub(super) fn put_back(&self, ticket: Ticket) {
        self.waiting().jobs.push_front(ticket);
        self.arrived.notify_waiters();
    }

    /// How many wait here.
    pub(super) fn len(&self) -> usize {
        self.waiting().jobs.len()
    }

    /// Whether nothing is in hand at all.
    pub(super) fn is_idle(&self) -> bool {
        self.held().is_empty()
    }

    /// Resolves after a job was begun or ended.
    pub(super) async fn moved(&self) {
        self.taken.notified().await;
    }

    /// No more are begun. Returns those that were not.
    pub(super) fn close(&self) -> Vec<Ticket> {
        let mut waiting = self.waiting();
        waiting.closed = true;
        let left = waiting.jobs.drain(..).collect();
        drop(waiting);
        self.arrived.notify_waiters();
        left
    }

    /// After a job's end, whatever that was.
    pub(super) fn let_go<'a>(&self, jobs: impl IntoIterator<Item = &'a Arc<Job>>) {
        let mut held = self.held();
        for job in jobs {
            // Only this attempt: the job may be here again, under another claim.
            if let Entry::Occupied(found) = held.entry(job.id)
                && found.get().0 == job.claim_id
            {
                found.remove();
            }
        }
        drop(held);
        self.taken.notify_one();
    }

    /// Prolongs all leases, three times in each, until dropped.
    pub(super) async fn beat(self: Arc<Self>, once: Once, lease: Duration) {
        let mut pause = lease / 3;
        loop {
            tokio::time::sleep(pause).await;
            pause = match self.beat_once(&once, lease).await {
                Ok(()) => lease / 3,
                Err(error) => {
                    tracing::warn!(%error, "leases could not be prolonged; trying again");
                    lease / 10
                }
            };
        }
    }

    async fn beat_once(&self, once: &Once, lease: Duration) -> Result<(), Error> {
        let (ids, claims): (Vec<i64>, Vec<Uuid>) = self.held().iter().map(|(id, (claim, _))| (*id, *claim)).unzip();
        for (ids, claims) in ids.chunks(1000).zip(claims.chunks(1000)) {
            let lease = interval(lease);
            let parameters: [(&(dyn ToSql + Sync), Type); 3] =
                [(&ids, Type::INT8_ARRAY), (&claims, Type::UUID_ARRAY), (&lease, Type::TEXT)];
            let rows = once.connection().await?.rows(Call::HeartbeatBatch, &parameters).await?;
            let held = self.held();
            for row in rows {
                let standing = match row.try_get(1)? {
                    "cancel" => Standing::Cancel,
                    "lost" => Standing::Lost,
                    _ => continue,
                };
                if let Some((_, word)) = held.get(&row.try_get::<_, i64>(0)?) {
                    word.say(standing);
                }
            }
        }
        Ok(())
    }
}
