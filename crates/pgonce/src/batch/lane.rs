//! A bounded queue that gives out everything that waits at once, and the connections that serve it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use deadpool::managed::Manager as _;
use tokio::runtime::Handle;
use tokio::sync::Notify;

use crate::pool::{Connection, Manager};

use super::turn::{Driven, Turn};

/// Jobs that wait for a connection, and the connections.
#[derive(Debug)]
pub(super) struct Lane<J> {
    state: Mutex<State<J>>,
    wake: Notify,
    watch: Notify,
    jobs_max: usize,
}

/// Every connection is in one place: idle, missing (nobody makes it yet), being made by a worker, or away.
#[derive(Debug)]
struct State<J, C = Box<Connection>> {
    waiting: VecDeque<J>,
    /// What was taken last were many: others are likely to come with whoever comes next.
    gathers: bool,
    /// Connections that nobody uses.
    idle: Vec<C>,
    /// How many are to be made.
    missing: usize,
    /// Connections in use, and groups of jobs that pause: from each of them jobs may come back.
    away: usize,
    /// Calls that their callers drive.
    driven: Vec<Arc<Driven>>,
    /// Whoever watches them is going to look by itself.
    watched: bool,
    closed: bool,
    /// Why there is no answer, while there is none.
    trouble: Option<String>,
}

/// What a lane needs to know of a job.
pub(super) trait Job: Send + 'static {
    /// Since when it waits.
    fn since(&self) -> Instant;
    /// Roughly what it weighs on the wire.
    fn bytes(&self) -> usize;
    /// Nobody waits for it any more, or its time is up.
    fn is_over(&self) -> bool;
}

/// What a worker does next.
pub(super) enum Next<J: Job> {
    /// Serves these with this connection.
    Serve(Turn<J>, Vec<J>),
    /// Makes a connection.
    Connect,
    /// Nothing more: the lane is closed, nothing is left and nothing can come back.
    End,
}

/// A batch is bounded in bytes, too: arrays are built in memory on both sides.
const BATCH_BYTES_MAX: usize = 4 << 20;

impl<J: Job, C> State<J, C> {
    fn new(connections: usize) -> Self {
        Self {
            waiting: VecDeque::new(),
            gathers: false,
            idle: Vec::with_capacity(connections),
            missing: connections,
            away: 0,
            driven: Vec::new(),
            watched: false,
            closed: false,
            trouble: None,
        }
    }

    /// A connection for a caller that comes now. Not where somebody waits, for it must not overtake; nor where many
    /// came together lately, for by the time that a worker looks they may do so again.
    fn free(&mut self) -> Option<C> {
        if self.waiting.is_empty() && !self.gathers { self.idle.pop() } else { None }
    }

    /// What waits, up to the limits. What is over is dropped, which tells whoever still listens.
    fn batch(&mut self, batch_max: usize) -> Vec<J> {
        let mut batch = Vec::new();
        let mut bytes = 0;
        while batch.len() < batch_max {
            let Some(job) = self.waiting.pop_front() else { break };
            if job.is_over() {
                continue;
            }
            bytes += job.bytes();
            if bytes > BATCH_BYTES_MAX && !batch.is_empty() {
                self.waiting.push_front(job);
                break;
            }
            batch.push(job);
        }
        self.gathers = batch.len() > 1;
        batch
    }

    fn is_done(&self) -> bool {
        self.closed && self.waiting.is_empty() && self.away == 0
    }

    /// Whether a worker that sleeps would find something to do.
    fn has_work(&self) -> bool {
        self.missing > 0 || self.is_done() || !(self.waiting.is_empty() || self.idle.is_empty())
    }
}

impl<J: Job> Lane<J> {
    pub(super) fn new(jobs_max: usize, connections: usize) -> Self {
        Self {
            state: Mutex::new(State::new(connections)),
            wake: Notify::new(),
            watch: Notify::new(),
            jobs_max: jobs_max.max(1),
        }
    }

    fn state(&self) -> MutexGuard<'_, State<J>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// After a change: wakes a worker where there is something to do.
    fn changed(&self, state: MutexGuard<'_, State<J>>) {
        let wakes = state.has_work();
        drop(state);
        if wakes {
            self.wake.notify_last();
        }
    }

    /// Queues a job, or gives it back where too many wait.
    pub(super) fn push(&self, job: J) -> Result<(), J> {
        let mut state = self.state();
        if state.waiting.len() >= self.jobs_max {
            // Who has left makes room; the oldest leave first.
            while state.waiting.front().is_some_and(J::is_over) {
                state.waiting.pop_front();
            }
            if state.waiting.len() >= self.jobs_max {
                return Err(job);
            }
        }
        state.waiting.push_back(job);
        self.changed(state);
        Ok(())
    }

    /// Puts back what was taken, before everything else: it has waited longest.
    pub(super) fn again(&self, jobs: Vec<J>) {
        if jobs.is_empty() {
            return;
        }
        let mut state = self.state();
        for job in jobs.into_iter().rev() {
            state.waiting.push_front(job);
        }
        self.changed(state);
    }

    /// The same, after a pause. The lane is not done before.
    pub(super) fn again_after(self: &Arc<Self>, runtime: &Handle, jobs: Vec<J>, pause: Duration) {
        if jobs.is_empty() {
            return;
        }
        self.state().away += 1;
        let lane = Arc::clone(self);
        runtime.spawn(async move {
            tokio::time::sleep(pause).await;
            lane.again(jobs);
            let mut state = lane.state();
            state.away -= 1;
            lane.changed(state);
        });
    }

    /// A connection for a caller that comes now, if one is idle and nobody waits.
    pub(super) fn turn(self: &Arc<Self>) -> Option<Turn<J>> {
        let mut state = self.state();
        while let Some(connection) = state.free() {
            if !connection.client.is_closed() {
                state.away += 1;
                return Some(Turn::new(Arc::clone(self), connection));
            }
            state.missing += 1; // it broke while it was idle
        }
        self.changed(state);
        None
    }

    /// A call is driven by its caller from now on.
    pub(super) fn drives(&self, driven: &Arc<Driven>) {
        let mut state = self.state();
        state.driven.push(Arc::clone(driven));
        let watched = std::mem::replace(&mut state.watched, true);
        drop(state);
        if !watched {
            self.watch.notify_one();
        }
    }

    /// Its caller drives it no more.
    pub(super) fn drives_no_more(&self, driven: &Arc<Driven>) {
        self.state().driven.retain(|other| !Arc::ptr_eq(other, driven));
    }

    /// What callers drive, as soon as they do. None: closed, and nobody will.
    pub(super) async fn driven(&self) -> Option<Vec<Arc<Driven>>> {
        loop {
            {
                let mut state = self.state();
                if !state.driven.is_empty() {
                    return Some(state.driven.clone());
                }
                if state.closed {
                    return None;
                }
                state.watched = false;
            }
            self.watch.notified().await;
        }
    }

    /// A turn is over. None: nothing more is known of its connection, and another one is to be made.
    /// `wakes`: whoever ends it does not look itself for what is next.
    pub(super) fn take_back(&self, connection: Option<Box<Connection>>, wakes: bool) {
        let mut state = self.state();
        state.away -= 1;
        match connection {
            Some(connection) => {
                state.idle.push(connection);
                if let Some(trouble) = state.trouble.take() {
                    tracing::info!(before = %trouble, "the database answers again");
                }
            }
            None => {
                state.missing += 1;
                state.trouble.get_or_insert_with(|| "the connection broke".to_owned());
            }
        }
        if wakes {
            self.changed(state);
        }
    }

    /// What a worker does next, as soon as there is anything: one caller alone is not kept waiting for company.
    pub(super) async fn next(self: &Arc<Self>, batch_max: usize) -> Next<J> {
        loop {
            let notified = self.wake.notified();
            if let Some(next) = self.next_now(batch_max) {
                return next;
            }
            notified.await;
        }
    }

    fn next_now(self: &Arc<Self>, batch_max: usize) -> Option<Next<J>> {
        let mut state = self.state();
        let next = self.choose(&mut state, batch_max)?;
        self.changed(state); // for the next worker
        Some(next)
    }

    fn choose(self: &Arc<Self>, state: &mut State<J>, batch_max: usize) -> Option<Next<J>> {
        while !state.waiting.is_empty() {
            let Some(connection) = state.idle.pop() else { break };
            if connection.client.is_closed() {
                state.missing += 1; // it broke while it was idle
                continue;
            }
            let batch = state.batch(batch_max);
            if batch.is_empty() {
                state.idle.push(connection);
                break;
            }
            state.away += 1;
            return Some(Next::Serve(Turn::new(Arc::clone(self), connection), batch));
        }
        if state.is_done() {
            state.idle.clear(); // closed now, whoever else still holds the lane
            return Some(Next::End);
        }
        let connects = state.missing > 0;
        state.missing -= usize::from(connects);
        connects.then_some(Next::Connect)
    }

    /// Makes a connection, as often as it takes; gives up where the lane is done.
    pub(super) async fn connect(&self, manager: &Manager, timeout: Duration) {
        let mut pause = Duration::from_millis(10);
        loop {
            let error = match tokio::time::timeout(timeout, manager.create()).await {
                Ok(Ok(connection)) => {
                    let mut state = self.state();
                    state.idle.push(Box::new(connection));
                    return self.changed(state);
                }
                Ok(Err(error)) => crate::error::describe(&error),
                Err(_) => "connecting took too long".to_owned(),
            };
            tracing::warn!(%error, "no connection; trying again");
            if self.is_done_without(error) {
                return;
            }
            tokio::time::sleep(pause.mul_f64(0.5 + rand::random::<f64>() / 2.0)).await;
            pause = (pause * 2).min(Duration::from_secs(1));
        }
    }

    /// There is no connection: while there is none, nobody takes what is over, so it is dropped here.
    fn is_done_without(&self, error: String) -> bool {
        let mut state = self.state();
        state.trouble = Some(error);
        state.waiting.retain(|job| !job.is_over());
        state.is_done()
    }

    pub(super) fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        self.changed(state);
        self.watch.notify_one();
    }

    /// How long the first in the queue has waited.
    pub(super) fn oldest(&self) -> Duration {
        self.state().waiting.front().map_or(Duration::ZERO, |job| job.since().elapsed())
    }

    /// Why there is no answer, where there is none.
    pub(super) fn trouble(&self) -> Option<String> {
        self.state().trouble.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Note(usize, bool);

    impl Job for Note {
        fn since(&self) -> Instant {
            Instant::now()
        }
        fn bytes(&self) -> usize {
            self.0
        }
        fn is_over(&self) -> bool {
            self.1
        }
    }

    fn sizes(batch: &[Note]) -> Vec<usize> {
        batch.iter().map(|note| note.0).collect()
    }

    #[test]
    fn takes_what_waits_within_its_limits() {
        let lane = Lane::new(5, 0);
        for size in [1, 2, 3, BATCH_BYTES_MAX, 5] {
            assert!(lane.push(Note(size, size == 2)).is_ok());
        }
        assert!(lane.push(Note(9, false)).is_err(), "full");
        assert_eq!(sizes(&lane.state().batch(2)), [1, 3], "what is over is left out");
        assert_eq!(sizes(&lane.state().batch(9)), [BATCH_BYTES_MAX], "and no more bytes than that");
        lane.again(vec![Note(3, false), Note(4, false)]);
        lane.close();
        assert_eq!(sizes(&lane.state().batch(9)), [3, 4, 5], "in order, also after the end");
        assert!(lane.state().batch(9).is_empty());
    }

    #[test]
    fn who_comes_does_not_overtake_who_waits() {
        let mut state: State<Note, char> = State::new(2);
        assert_eq!(state.free(), None);
        state.idle = vec!['a', 'b'];
        state.waiting.push_back(Note(1, false));
        assert_eq!(state.free(), None, "the connections are for the one that waits");
        assert_eq!(sizes(&state.batch(9)), [1]);
        assert_eq!(state.free(), Some('b'));
        assert_eq!(state.free(), Some('a'));
        assert_eq!(state.free(), None, "each is given out once");
    }

    #[test]
    fn who_comes_after_many_waits_for_company() {
        let mut state: State<Note, char> = State::new(1);
        state.idle = vec!['a'];
        for (jobs, free) in [(2, None), (1, Some('a'))] {
            state.waiting.extend((0..jobs).map(|_| Note(1, false)));
            assert_eq!(state.batch(9).len(), jobs);
            assert_eq!(state.free(), free, "after {jobs}");
        }
    }

    #[tokio::test]
    async fn is_done_when_nothing_can_come_back() {
        let lane = Arc::new(Lane::new(5, 0));
        lane.again_after(&Handle::current(), vec![Note(1, false)], Duration::ZERO);
        lane.close();
        assert!(!lane.state().is_done(), "a job pauses");
        while lane.state().away > 0 {
            tokio::task::yield_now().await;
        }
        assert!(!lane.state().is_done(), "it is back, and waits");
        assert_eq!(sizes(&lane.state().batch(9)), [1]);
        for _ in 0..2 {
            assert!(matches!(lane.next(9).await, Next::End), "every worker is told");
        }
    }
}
