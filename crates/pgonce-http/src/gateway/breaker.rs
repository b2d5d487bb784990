//! An upstream that is away is left alone for a while: requests are told at once, and it is not met by a storm
//! when it comes back. What it answers is no concern here, a 500 least of all: only whether it can be reached.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::config::BreakerConfig;
use crate::Problem;

/// Closed while the upstream answers, open while it is left alone, and between the two one request tries.
#[derive(Debug, Clone)]
pub(super) struct Breaker(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    config: BreakerConfig,
    phase: Phase,
    /// Grows with each change of phase. Verdicts of attempts from before one are old news.
    generation: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Closed { failures: u32 },
    Open { until: Instant },
    Trying,
}

impl Breaker {
    pub(super) fn new(config: BreakerConfig) -> Self {
        Self(Arc::new(Mutex::new(State { config, phase: Phase::Closed { failures: 0 }, generation: 0 })))
    }

    /// New settings, for what comes from now on.
    pub(super) fn set_config(&self, config: BreakerConfig) {
        self.state().config = config;
    }

    /// Whether the upstream may be asked now. Otherwise nothing was sent to it.
    pub(super) fn admit(&self) -> Result<Attempt, Problem> {
        self.admit_at(Instant::now())
    }

    /// Whether requests are refused now.
    pub(super) fn is_open(&self) -> bool {
        !matches!(self.state().phase, Phase::Closed { .. })
    }

    fn admit_at(&self, now: Instant) -> Result<Attempt, Problem> {
        let mut state = self.state();
        match state.phase {
            Phase::Closed { .. } => {}
            Phase::Open { until } if until <= now => state.enter(Phase::Trying),
            Phase::Open { .. } | Phase::Trying => return Err(Problem::UpstreamAway),
        }
        Ok(Attempt { generation: state.generation, breaker: self.clone(), began: now })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn enter(&mut self, phase: Phase) {
        self.phase = phase;
        self.generation += 1;
    }
}

/// One request to the upstream. Dropped without a verdict (the client left), it says nothing.
#[derive(Debug)]
#[must_use]
pub(super) struct Attempt {
    breaker: Breaker,
    generation: u64,
    began: Instant,
}

impl Attempt {
    /// The upstream answered, whatever it was.
    pub(super) fn answered(self) {
        let mut state = self.breaker.state();
        match state.phase {
            _ if state.generation != self.generation => {}
            Phase::Closed { failures: 0 } => {}
            Phase::Closed { .. } => state.phase = Phase::Closed { failures: 0 },
            Phase::Trying | Phase::Open { .. } => {
                state.enter(Phase::Closed { failures: 0 });
                tracing::info!("the upstream answers again");
            }
        }
    }

    /// It could not be connected to, or did not answer in time.
    pub(super) fn failed(self) {
        self.failed_at(Instant::now());
    }

    fn failed_at(self, now: Instant) {
        let mut state = self.breaker.state();
        let State { config, phase, generation } = *state;
        let until = now + config.open_for;
        match phase {
            _ if generation != self.generation => {}
            Phase::Closed { failures } if failures + 1 < config.failures_max => {
                state.phase = Phase::Closed { failures: failures + 1 };
            }
            Phase::Closed { .. } => {
                state.enter(Phase::Open { until });
                tracing::warn!(open_for = ?config.open_for, "the upstream is away: requests are refused for a while");
            }
            Phase::Trying | Phase::Open { .. } => state.enter(Phase::Open { until }),
        }
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        let mut state = self.breaker.state();
        // After a verdict the generation is another one.
        if state.phase == Phase::Trying && state.generation == self.generation {
            state.enter(Phase::Open { until: self.began });
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on should stop, loudly")]
mod tests {
    use std::time::Duration;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn breaker() -> (Breaker, Instant) {
        (Breaker::new(BreakerConfig { failures_max: 3, open_for: SECOND }), Instant::now())
    }

    fn fail(breaker: &Breaker, now: Instant, times: usize) {
        for _ in 0..times {
            breaker.admit_at(now).unwrap().failed_at(now);
        }
    }

    #[test]
    fn failures_in_a_row_open_it_and_one_try_closes_it() {
        let (breaker, now) = breaker();
        fail(&breaker, now, 2);
        breaker.admit_at(now).unwrap().answered();
        fail(&breaker, now, 2);
        assert!(!breaker.is_open(), "an answer between starts the count again");
        fail(&breaker, now, 1);
        assert!(breaker.is_open());
        assert_eq!(breaker.admit_at(now + SECOND / 2).unwrap_err(), Problem::UpstreamAway);
        let trial = breaker.admit_at(now + SECOND).unwrap();
        assert!(breaker.admit_at(now + SECOND).is_err(), "one tries, the others are told");
        trial.answered();
        assert!(!breaker.is_open());
        fail(&breaker, now, 2);
        assert!(!breaker.is_open());
    }

    #[test]
    fn a_failed_try_opens_it_again() {
        let (breaker, now) = breaker();
        fail(&breaker, now, 3);
        fail(&breaker, now + SECOND, 1);
        assert!(breaker.admit_at(now + SECOND + SECOND / 2).is_err());
        assert!(breaker.admit_at(now + 2 * SECOND).is_ok());
    }

    #[test]
    fn a_try_without_a_verdict_lets_another_try() {
        let (breaker, now) = breaker();
        fail(&breaker, now, 3);
        drop(breaker.admit_at(now + SECOND).unwrap());
        let trial = breaker.admit_at(now + SECOND).unwrap();
        assert!(breaker.admit_at(now + SECOND).is_err());
        trial.answered();
        assert!(!breaker.is_open());
    }

    #[test]
    fn verdicts_from_before_do_not_count() {
        let (breaker, now) = breaker();
        let early: Vec<_> = (0..5).map(|_| breaker.admit_at(now).unwrap()).collect();
        let slow = breaker.admit_at(now).unwrap();
        early.into_iter().for_each(|attempt| attempt.failed_at(now));
        assert!(breaker.is_open());
        let trial = breaker.admit_at(now + SECOND).unwrap();
        slow.failed_at(now + SECOND);
        trial.answered();
        assert!(!breaker.is_open(), "the slow one belongs to the time before");
    }

    #[test]
    fn a_dropped_request_is_no_failure() {
        let (breaker, now) = breaker();
        (0..10).for_each(|_| drop(breaker.admit_at(now).unwrap()));
        assert!(!breaker.is_open());
    }
}
