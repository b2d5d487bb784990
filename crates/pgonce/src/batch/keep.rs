//! One heartbeat for all leases that are kept.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, watch};
use uuid::Uuid;

use crate::claim::IntentName;

use super::Handle;
use super::lane::Lane;
use super::tasks::Task;

/// A lease that is being renewed. Dropping it stops that; the lease then ends by itself.
#[derive(Debug)]
#[must_use = "the lease is renewed for as long as this lives"]
pub struct Kept {
    held: Arc<Held>,
    /// The workers live as long as there is something to renew.
    handle: Arc<Handle>,
}

impl Kept {
    /// Resolves when the lease is lost: by the database's word, or because no renewal got through before its
    /// end by this process's monotonic clock. Never, where an outcome was recorded under the claim meanwhile.
    pub fn lost(&self) -> impl Future<Output = ()> + Send + 'static {
        let held = Arc::clone(&self.held);
        async move {
            let mut state = held.state.subscribe();
            loop {
                let seen = *state.borrow_and_update();
                match seen {
                    Hold::Lost => return,
                    Hold::Settled => std::future::pending().await,
                    Hold::Until(ends) => tokio::select! {
                        () = tokio::time::sleep_until(ends.into()) => return,
                        changed = state.changed() => {
                            if changed.is_err() {
                                return;
                            }
                        }
                    },
                }
            }
        }
    }

    /// When the lease ends unless it is renewed before, by this process's clock; None: lost, or not needed any more.
    #[must_use]
    pub fn ends(&self) -> Option<Instant> {
        match *self.held.state.borrow() {
            Hold::Until(ends) => Some(ends),
            Hold::Lost | Hold::Settled => None,
        }
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.held.stopped.store(true, Ordering::SeqCst);
        self.handle.keeper.forget(&self.held);
    }
}

/// A lease, as the heartbeat sees it.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) name: IntentName,
    pub(super) claim_id: Uuid,
    lease: Mutex<Duration>,
    id: u64,
    /// When it is due; its place in the keeper's order.
    next: Mutex<Instant>,
    state: watch::Sender<Hold>,
    /// A renewal waits or is under way.
    renewing: AtomicBool,
    stopped: AtomicBool,
}

#[derive(Debug, Clone, Copy)]
enum Hold {
    Until(Instant),
    Lost,
    /// An outcome is recorded under the claim: there is nothing to renew, and nothing was lost.
    Settled,
}

impl Held {
    /// Renewed by a call that was sent at `asked`.
    pub(super) fn renewed(&self, asked: Instant, lease: Duration) {
        *lock(&self.lease) = lease;
        self.state.send_if_modified(|hold| match hold {
            Hold::Until(ends) => {
                *ends = asked + lease;
                true
            }
            Hold::Lost | Hold::Settled => false,
        });
        self.rest();
    }

    pub(super) fn lose(&self) {
        self.state.send_replace(Hold::Lost);
    }

    pub(super) fn settle(&self) {
        self.state.send_replace(Hold::Settled);
    }

    /// The renewal is over, whatever came of it: the next may come when it is due.
    pub(super) fn rest(&self) {
        self.renewing.store(false, Ordering::SeqCst);
    }

    /// Nobody needs it renewed.
    pub(super) fn is_over(&self) -> bool {
        self.stopped.load(Ordering::SeqCst)
            || match *self.state.borrow() {
                Hold::Until(ends) => ends <= Instant::now(),
                Hold::Lost | Hold::Settled => true,
            }
    }
}

/// All leases that are kept, by when they are due.
#[derive(Debug)]
pub(super) struct Keeper {
    order: Mutex<Order>,
    wake: Notify,
    ids: AtomicU64,
}

#[derive(Debug, Default)]
struct Order {
    due: BTreeMap<(Instant, u64), Arc<Held>>,
    /// Until when the task sleeps: only what is due before then has to wake it.
    sleeps_until: Option<Instant>,
    closed: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A third of the lease: two more tries before it ends.
fn pace(lease: Duration) -> Duration {
    (lease / 3).max(Duration::from_millis(1))
}

impl Keeper {
    pub(super) fn start(tasks: Arc<Lane<Task>>) -> Arc<Self> {
        let keeper = Arc::new(Self { order: Mutex::default(), wake: Notify::new(), ids: AtomicU64::new(0) });
        tokio::spawn(Arc::clone(&keeper).run(tasks));
        keeper
    }

    pub(super) fn keep(
        handle: &Arc<Handle>,
        name: IntentName,
        claim_id: Uuid,
        lease: Duration,
        claimed_at: Instant,
    ) -> Kept {
        let keeper = &handle.keeper;
        let next = claimed_at + pace(lease);
        let held = Arc::new(Held {
            name,
            claim_id,
            lease: Mutex::new(lease),
            id: keeper.ids.fetch_add(1, Ordering::Relaxed),
            next: Mutex::new(next),
            state: watch::Sender::new(Hold::Until(claimed_at + lease)),
            renewing: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
        });
        let mut order = lock(&keeper.order);
        order.due.insert((next, held.id), Arc::clone(&held));
        let wakes = order.sleeps_until.is_none_or(|until| next < until);
        drop(order);
        if wakes {
            keeper.wake.notify_one();
        }
        Kept { held, handle: Arc::clone(handle) }
    }

    fn forget(&self, held: &Held) {
        let mut order = lock(&self.order);
        let next = *lock(&held.next);
        order.due.remove(&(next, held.id));
    }

    pub(super) fn close(&self) {
        lock(&self.order).closed = true;
        self.wake.notify_one();
    }

    async fn run(self: Arc<Self>, tasks: Arc<Lane<Task>>) {
        loop {
            let Some(until) = self.send_due(&tasks) else { return };
            match until {
                Some(until) => tokio::select! {
                    () = tokio::time::sleep_until(until.into()) => {}
                    () = self.wake.notified() => {}
                },
                None => self.wake.notified().await,
            }
        }
    }

    /// Queues a renewal for everything that is due; until when to sleep. None: closed, and nothing is kept.
    fn send_due(&self, tasks: &Lane<Task>) -> Option<Option<Instant>> {
        let now = Instant::now();
        let mut order = lock(&self.order);
        while let Some(entry) = order.due.first_entry() {
            if entry.key().0 > now {
                break;
            }
            let held = entry.remove();
            if held.is_over() {
                continue;
            }
            if !held.renewing.swap(true, Ordering::SeqCst) && tasks.push(Task::Renew(Arc::clone(&held), now)).is_err() {
                held.rest(); // the lane is full: again when it is due next
            }
            let next = now + pace(*lock(&held.lease));
            *lock(&held.next) = next;
            order.due.insert((next, held.id), held);
        }
        order.sleeps_until = order.due.first_key_value().map(|(key, _)| key.0);
        if order.closed && order.due.is_empty() {
            return None;
        }
        Some(order.sleeps_until)
    }
}
