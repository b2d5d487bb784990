//! Requests of this process that are under way, by tenant and key: a duplicate waits here, in memory, and not
//! with a database connection of its own. A flight decides nothing about an outcome: who has waited asks the
//! database.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use pgonce::Fingerprint;
use tokio::sync::{Semaphore, SemaphorePermit, watch};
use tokio::time::Instant;

use crate::Problem;

/// Tenant and key; the scope is the layer's.
pub(super) type Name = (String, String);

/// What became of a flight, as far as its followers should know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Landed {
    /// The database knows the answer.
    Settled,
    /// Nothing is stored: somebody else may try.
    Free,
    /// Trying now would end in the same way.
    Fault(Problem),
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    /// Asking the database, or waiting there for a rival in another process.
    Asking,
    /// The intent is claimed: the handler runs.
    Running,
    Landed(Landed),
}

/// How many of those that have waited read their answer at once. They wake all together, and thousands of them in
/// the pool's queue would keep everybody else from a connection.
const READERS_MAX: usize = 8;

/// The table.
#[derive(Debug)]
pub(super) struct Flights {
    table: Mutex<HashMap<Name, Arc<Flight>>>,
    readers: Semaphore,
}

impl Default for Flights {
    fn default() -> Self {
        Self { table: Mutex::default(), readers: Semaphore::new(READERS_MAX) }
    }
}

/// A request under way.
#[derive(Debug)]
pub(super) struct Flight {
    fingerprint: Fingerprint,
    state: watch::Sender<State>,
    waiting: AtomicUsize,
}

/// How a request begins.
#[derive(Debug)]
pub(super) enum Boarding {
    /// As the first: it holds the flight until it has landed.
    Lead(Lead),
    /// As a duplicate.
    Follow(Arc<Flight>),
}

/// The first request's hold on its flight. Dropped without having landed: free, for whoever waits.
#[derive(Debug)]
pub(super) struct Lead {
    flights: Arc<Flights>,
    name: Name,
    flight: Arc<Flight>,
}

/// What a follower has seen.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Seen {
    /// It has its claim, and runs.
    Running,
    /// It has landed.
    Landed(Landed),
    /// It has not, in time, or too many wait already.
    Busy,
}

impl Flights {
    pub(super) fn board(self: &Arc<Self>, name: &Name, fingerprint: Fingerprint) -> Boarding {
        let mut table = self.table.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        match table.entry(name.clone()) {
            Entry::Occupied(taken) => Boarding::Follow(Arc::clone(taken.get())),
            Entry::Vacant(vacant) => {
                let state = watch::Sender::new(State::Asking);
                let flight = Arc::new(Flight { fingerprint, state, waiting: AtomicUsize::new(0) });
                vacant.insert(Arc::clone(&flight));
                Boarding::Lead(Lead { flights: Arc::clone(self), name: name.clone(), flight })
            }
        }
    }

    /// A place among those that read what has landed, held while they do.
    pub(super) async fn reader(&self) -> Option<SemaphorePermit<'_>> {
        self.readers.acquire().await.ok() // never closed
    }
}

impl Lead {
    /// The intent is claimed.
    pub(super) fn runs(&self) {
        self.flight.state.send_if_modified(|state| {
            let asked = *state == State::Asking;
            if asked {
                *state = State::Running;
            }
            asked
        });
    }

    pub(super) fn land(self, landed: Landed) {
        self.leave(landed);
    }

    fn leave(&self, landed: Landed) {
        // Out of the table first: who is woken must not board it again.
        let mut table = self.flights.table.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        table.remove(&self.name);
        drop(table);
        self.flight.state.send_if_modified(|state| {
            let first = !matches!(state, State::Landed(_));
            if first {
                *state = State::Landed(landed);
            }
            first
        });
    }
}

impl Drop for Lead {
    fn drop(&mut self) {
        if !matches!(*self.flight.state.borrow(), State::Landed(_)) {
            self.leave(Landed::Free);
        }
    }
}

impl Flight {
    /// Whether this is another request under the same key.
    pub(super) fn is_other(&self, fingerprint: Fingerprint) -> bool {
        self.fingerprint != fingerprint
    }

    /// Waits for the landing, or only until the flight runs. Before it does, it may itself be the one whose
    /// payload is not the key's: then nothing can be said about the follower yet.
    pub(super) async fn follow(&self, until: Instant, waiters_max: usize, to_the_end: bool) -> Seen {
        let mut states = self.state.subscribe();
        let is_enough = |state: &State| match state {
            State::Asking => false,
            State::Running => !to_the_end,
            State::Landed(_) => true,
        };
        // Who need not wait is no waiter, however many there are: another payload is told so (422 before 409).
        let waiting = match is_enough(&states.borrow()) {
            true => None,
            false => Waiting::among(&self.waiting, waiters_max),
        };
        if waiting.is_none() && !is_enough(&states.borrow()) {
            return Seen::Busy;
        }
        let seen = states.wait_for(is_enough);
        match tokio::time::timeout_at(until, seen).await {
            Ok(Ok(state)) => match &*state {
                State::Landed(landed) => Seen::Landed(landed.clone()),
                State::Asking | State::Running => Seen::Running,
            },
            // The sender is in self: it cannot be gone.
            Ok(Err(_)) | Err(_) => Seen::Busy,
        }
    }
}

/// One of a bounded number of waiters.
struct Waiting<'a>(&'a AtomicUsize);

impl<'a> Waiting<'a> {
    fn among(count: &'a AtomicUsize, waiters_max: usize) -> Option<Self> {
        let counted = Self(count);
        let before = count.fetch_add(1, Ordering::Relaxed);
        metrics::gauge!("pgonce_layer_waiters").increment(1);
        (before < waiters_max).then_some(counted)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
        metrics::gauge!("pgonce_layer_waiters").decrement(1);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn lead(flights: &Arc<Flights>, key: &str) -> Lead {
        match flights.board(&(String::new(), key.to_owned()), Fingerprint([1; 32])) {
            Boarding::Lead(lead) => lead,
            Boarding::Follow(_) => panic!("somebody leads already"),
        }
    }

    fn follow(flights: &Arc<Flights>, key: &str) -> Arc<Flight> {
        match flights.board(&(String::new(), key.to_owned()), Fingerprint([1; 32])) {
            Boarding::Follow(flight) => flight,
            Boarding::Lead(_) => panic!("nobody leads"),
        }
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(5)
    }

    #[tokio::test(start_paused = true)]
    async fn followers_see_how_it_landed() {
        let flights = Arc::new(Flights::default());
        for landed in [Landed::Settled, Landed::Free, Landed::Fault(Problem::DatabaseAway)] {
            let first = lead(&flights, "k");
            let flight = follow(&flights, "k");
            let (seen, ()) = tokio::join!(flight.follow(soon(), 1, true), async {
                tokio::task::yield_now().await;
                first.runs();
                first.land(landed.clone());
            });
            assert_eq!(seen, Seen::Landed(landed));
        }
        drop(lead(&flights, "k"));
        assert!(flights.table.lock().is_ok_and(|table| table.is_empty()), "nothing stays behind");
    }

    #[tokio::test(start_paused = true)]
    async fn a_first_request_that_vanishes_leaves_the_key_free() {
        let flights = Arc::new(Flights::default());
        let first = lead(&flights, "k");
        let flight = follow(&flights, "k");
        drop(first);
        assert_eq!(flight.follow(soon(), 1, true).await, Seen::Landed(Landed::Free));
        drop(lead(&flights, "k"));
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_is_bounded_in_time_and_in_number() {
        let flights = Arc::new(Flights::default());
        let _first = lead(&flights, "k");
        let flight = follow(&flights, "k");
        assert_eq!(flight.follow(soon(), 1, true).await, Seen::Busy, "after the time");
        let first_waiter = flight.follow(soon(), 1, true);
        let (waited, refused) = tokio::join!(first_waiter, async {
            let before = Instant::now();
            (flight.follow(soon(), 1, true).await, before.elapsed())
        });
        assert_eq!((waited, refused), (Seen::Busy, (Seen::Busy, Duration::ZERO)), "the second at once");
        assert_eq!(flight.waiting.load(Ordering::Relaxed), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn another_request_is_a_conflict_only_once_the_first_has_its_claim() {
        let flights = Arc::new(Flights::default());
        let first = lead(&flights, "k");
        let flight = follow(&flights, "k");
        let other = Fingerprint([2; 32]);
        let (seen, ()) = tokio::join!(flight.follow(soon(), 1, false), async {
            tokio::task::yield_now().await;
            first.runs();
        });
        assert_eq!(seen, Seen::Running, "not while it was asking: the first may be the wrong one");
        assert!(flight.is_other(other) && !flight.is_other(Fingerprint([1; 32])));
        first.land(Landed::Settled);
        assert_eq!(flight.follow(soon(), 1, false).await, Seen::Landed(Landed::Settled));
    }
}
