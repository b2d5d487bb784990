//! Requests of this process that are at one intent: the first leads, the others follow it. So a thousand
//! duplicates are one question to the database, and hold none of its connections while they wait.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use pgonce::Fingerprint;
use tokio::sync::watch;

use crate::cache::Replay;
use crate::problem::Problem;

/// Whose flight it is: tenant, scope, key.
pub(crate) type FlightKey = (String, String, String);

/// Where a flight is.
#[derive(Debug, Clone)]
pub(crate) enum Stage {
    /// The leader asks the database. Nothing is known yet, not even whether its payload is the intent's.
    Asking,
    /// The leader owns the claim: this is the intent's payload.
    Running(Fingerprint),
    /// Another process is at it, with what the leader sent as far as the database can tell.
    Elsewhere(Fingerprint),
    /// It has its outcome.
    Settled(Arc<Replay>),
    /// It ended without an outcome for others: they are told the same, if they sent the same.
    Ended(Fingerprint, Problem),
    /// It says nothing about others: they ask for themselves.
    Dissolved,
}

/// All flights of this process.
#[derive(Debug, Default)]
pub(crate) struct Flights(Arc<Mutex<HashMap<FlightKey, Arc<Flight>>>>);

#[derive(Debug)]
struct Flight {
    stage: watch::Sender<Stage>,
    waiters: AtomicUsize,
}

/// What a request is in its flight.
#[derive(Debug)]
pub(crate) enum Seat {
    Leader(Leader),
    Follower(Follower),
}

/// Sees where the flight is.
#[derive(Debug)]
pub(crate) struct Follower {
    flight: Arc<Flight>,
    pub(crate) stages: watch::Receiver<Stage>,
}

/// A follower that waits for the end, counted until dropped.
#[derive(Debug)]
pub(crate) struct Waiter(Arc<Flight>);

/// The right and the duty to say how it goes on. Dropped without a word, it dissolves the flight.
#[derive(Debug)]
pub(crate) struct Leader {
    flights: Arc<Mutex<HashMap<FlightKey, Arc<Flight>>>>,
    key: FlightKey,
    flight: Arc<Flight>,
}

impl Flights {
    /// Joins the intent's flight, or starts it.
    pub(crate) fn enter(&self, key: FlightKey) -> Seat {
        let mut flights = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        match flights.entry(key) {
            Entry::Occupied(flight) => {
                let flight = Arc::clone(flight.get());
                Seat::Follower(Follower { stages: flight.stage.subscribe(), flight })
            }
            Entry::Vacant(vacant) => {
                let flight =
                    Arc::new(Flight { stage: watch::Sender::new(Stage::Asking), waiters: AtomicUsize::new(0) });
                let key = vacant.key().clone();
                vacant.insert(Arc::clone(&flight));
                Seat::Leader(Leader { flights: Arc::clone(&self.0), key, flight })
            }
        }
    }

    /// How many intents this process is at.
    pub(crate) fn count(&self) -> usize {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).len()
    }
}

impl Leader {
    /// Tells the followers where the flight is.
    pub(crate) fn at(&self, stage: Stage) {
        self.flight.stage.send_replace(stage);
    }

    /// Tells that it is over without an outcome for others, unless they have been told one.
    pub(crate) fn end(&self, fingerprint: Fingerprint, problem: Problem) {
        self.flight.stage.send_if_modified(|stage| {
            let open = !matches!(stage, Stage::Settled(_));
            if open {
                *stage = Stage::Ended(fingerprint, problem);
            }
            open
        });
    }
}

impl Follower {
    /// Waits with the others, if there are not too many.
    pub(crate) fn wait(&self, waiters_max: usize) -> Option<Waiter> {
        let waiter = Waiter(Arc::clone(&self.flight));
        (waiter.0.waiters.fetch_add(1, Ordering::Relaxed) < waiters_max).then_some(waiter)
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        self.0.waiters.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for Leader {
    fn drop(&mut self) {
        // Out of the table first: who comes now starts a new flight.
        self.flights.lock().unwrap_or_else(std::sync::PoisonError::into_inner).remove(&self.key);
        self.flight.stage.send_if_modified(|stage| {
            let unsaid = !matches!(stage, Stage::Settled(_) | Stage::Ended(..) | Stage::Dissolved);
            if unsaid {
                *stage = Stage::Dissolved;
            }
            unsaid
        });
    }
}
