//! A bounded queue that gives out everything that waits at once, and the connection that serves it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use deadpool::managed::Manager as _;
use tokio::sync::Notify;

use crate::pool::{Connection, Manager};

/// Jobs that wait for a connection.
#[derive(Debug)]
pub(super) struct Lane<J> {
    state: Mutex<State<J>>,
    wake: Notify,
    jobs_max: usize,
}

#[derive(Debug)]
struct State<J> {
    waiting: VecDeque<J>,
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

/// A batch is bounded in bytes, too: arrays are built in memory on both sides.
const BATCH_BYTES_MAX: usize = 4 << 20;

impl<J: Job> Lane<J> {
    pub(super) fn new(jobs_max: usize) -> Self {
        let state = State { waiting: VecDeque::new(), closed: false, trouble: None };
        Self { state: Mutex::new(state), wake: Notify::new(), jobs_max: jobs_max.max(1) }
    }

    fn state(&self) -> MutexGuard<'_, State<J>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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
        drop(state);
        self.wake.notify_last();
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
        drop(state);
        self.wake.notify_last();
    }

    /// The same, after a pause.
    pub(super) fn again_after(self: &Arc<Self>, jobs: Vec<J>, pause: Duration) {
        if jobs.is_empty() {
            return;
        }
        let lane = Arc::clone(self);
        tokio::spawn(async move {
            tokio::time::sleep(pause).await;
            lane.again(jobs);
        });
    }

    /// Everything that waits, up to the limits, as soon as there is anything: one caller alone is not kept
    /// waiting for company. None: closed, and nothing is left.
    pub(super) async fn take(&self, batch_max: usize) -> Option<Vec<J>> {
        loop {
            let notified = self.wake.notified();
            if let Some(batch) = self.take_now(batch_max) {
                return if batch.is_empty() { None } else { Some(batch) };
            }
            notified.await;
        }
    }

    /// None: nothing is there yet; empty: nothing ever will be.
    fn take_now(&self, batch_max: usize) -> Option<Vec<J>> {
        let mut state = self.state();
        let mut batch = Vec::new();
        let mut bytes = 0;
        while batch.len() < batch_max {
            let Some(job) = state.waiting.pop_front() else { break };
            if job.is_over() {
                continue; // its drop tells whoever still listens
            }
            bytes += job.bytes();
            if bytes > BATCH_BYTES_MAX && !batch.is_empty() {
                state.waiting.push_front(job);
                break;
            }
            batch.push(job);
        }
        if !state.waiting.is_empty() || state.closed {
            self.wake.notify_last(); // for the next worker
        }
        (!batch.is_empty() || state.closed).then_some(batch)
    }

    /// Drops what is over: while no connection is there, nobody takes it.
    fn sweep(&self) {
        self.state().waiting.retain(|job| !job.is_over());
    }

    pub(super) fn close(&self) {
        self.state().closed = true;
        self.wake.notify_last();
    }

    fn is_done(&self) -> bool {
        let state = self.state();
        state.closed && state.waiting.is_empty()
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

/// One connection, made again whenever it is gone.
#[derive(Debug)]
pub(super) struct Line {
    manager: Arc<Manager>,
    connection: Option<Connection>,
    connect_timeout: Duration,
}

impl Line {
    pub(super) fn new(manager: Arc<Manager>, connect_timeout: Duration) -> Self {
        Self { manager, connection: None, connect_timeout }
    }

    /// The connection, when there is one. None: the lane is closed and nothing is left to do.
    pub(super) async fn open<J: Job>(&mut self, lane: &Lane<J>) -> Option<&Connection> {
        let mut pause = Duration::from_millis(10);
        while self.connection.as_ref().is_none_or(|connection| connection.client.is_closed()) {
            self.connection = None;
            let error = match tokio::time::timeout(self.connect_timeout, self.manager.create()).await {
                Ok(Ok(connection)) => {
                    self.connection = Some(connection);
                    break;
                }
                Ok(Err(error)) => crate::error::describe(&error),
                Err(_) => "connecting took too long".to_owned(),
            };
            tracing::warn!(%error, "no connection; trying again");
            lane.state().trouble = Some(error);
            lane.sweep();
            if lane.is_done() {
                return None;
            }
            tokio::time::sleep(pause.mul_f64(0.5 + rand::random::<f64>() / 2.0)).await;
            pause = (pause * 2).min(Duration::from_secs(1));
        }
        self.connection.as_ref()
    }

    /// What came of a call: a connection that did not answer is left, for nothing more is known of it.
    pub(super) fn served<J: Job>(&mut self, lane: &Lane<J>, answered: bool) {
        let mut state = lane.state();
        if answered {
            if let Some(trouble) = state.trouble.take() {
                tracing::info!(before = %trouble, "the database answers again");
            }
        } else {
            self.connection = None;
            state.trouble.get_or_insert_with(|| "the connection broke".to_owned());
        }
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

    fn sizes(batch: Option<Vec<Note>>) -> Option<Vec<usize>> {
        batch.map(|batch| batch.iter().map(|note| note.0).collect())
    }

    #[tokio::test]
    async fn takes_what_waits_within_its_limits() {
        let lane = Lane::new(5);
        for size in [1, 2, 3, BATCH_BYTES_MAX, 5] {
            assert!(lane.push(Note(size, size == 2)).is_ok());
        }
        assert!(lane.push(Note(9, false)).is_err(), "full");
        assert_eq!(sizes(lane.take(2).await), Some(vec![1, 3]), "what is over is left out");
        assert_eq!(sizes(lane.take(9).await), Some(vec![BATCH_BYTES_MAX]), "and no more bytes than that");
        lane.again(vec![Note(3, false), Note(4, false)]);
        lane.close();
        assert_eq!(sizes(lane.take(9).await), Some(vec![3, 4, 5]), "in order, also after the end");
        assert!(lane.take(9).await.is_none());
        assert!(lane.take(9).await.is_none(), "every worker is told");
    }
}
