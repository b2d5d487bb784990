//! When and how often to try again: full jitter, a deadline, a budget, and a breaker on pool wait.

use std::sync::Mutex;
use std::time::{Duration, Instant};

/// How `run` tries again. Each retry is a whole new transaction.
#[derive(Debug, Clone)]
pub struct RetryPolicy {
    /// How many attempts in all, the first included.
    pub attempts_max: u32,
    /// No new attempt starts after this much time.
    pub deadline: Duration,
    /// The first pause is up to this long.
    pub pause_min: Duration,
    /// No pause is longer than this.
    pub pause_max: Duration,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            attempts_max: 8,
            deadline: Duration::from_secs(30),
            pause_min: Duration::from_millis(5),
            pause_max: Duration::from_secs(2),
        }
    }
}

/// One run's budget.
#[derive(Debug)]
pub(crate) struct Budget<'a> {
    policy: &'a RetryPolicy,
    started: Instant,
    pub(crate) attempt: u32,
    /// Whether messages may be posted, without waiting for their answers.
    pub(crate) posts: bool,
}

impl<'a> Budget<'a> {
    pub(crate) fn new(policy: &'a RetryPolicy) -> Self {
        Self { policy, started: Instant::now(), attempt: 1, posts: true }
    }

    /// The time that is left.
    pub(crate) fn left(&self) -> Duration {
        self.policy.deadline.saturating_sub(self.started.elapsed())
    }

    /// Waits before the next attempt; false when the budget is used up. `at_least` is what the other side asked for.
    pub(crate) async fn pause(&mut self, at_least: Option<Duration>) -> bool {
        let pause = self.jitter().max(at_least.unwrap_or_default());
        if self.attempt >= self.policy.attempts_max || pause >= self.left() {
            return false;
        }
        self.attempt += 1;
        tokio::time::sleep(pause).await;
        true
    }

    /// Full jitter: anything between nothing and the exponential step, so that rivals spread out.
    fn jitter(&self) -> Duration {
        let step = self.policy.pause_min.saturating_mul(1 << (self.attempt - 1).min(20));
        step.min(self.policy.pause_max).mul_f64(rand::random::<f64>())
    }
}

/// Opens after several calls in a row could not get a connection in time, so that callers are told at
/// once in place of queueing; lets one through after a pause, and closes when that one gets its connection.
#[derive(Debug)]
pub(crate) struct Breaker {
    state: Mutex<BreakerState>,
    failures_max: u32,
    open_for: Duration,
}

#[derive(Debug, Default)]
struct BreakerState {
    failures: u32,
    opened: Option<Instant>,
}

impl Breaker {
    pub(crate) fn new(failures_max: u32, open_for: Duration) -> Self {
        Self { state: Mutex::default(), failures_max, open_for }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, BreakerState> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// How long callers are refused still; None lets this one through.
    pub(crate) fn refuses_for(&self) -> Option<Duration> {
        let mut state = self.state();
        let opened = state.opened?;
        let left = self.open_for.saturating_sub(opened.elapsed());
        if left.is_zero() {
            state.opened = Some(Instant::now()); // this caller is the probe; the others wait another round
            return None;
        }
        Some(left)
    }

    pub(crate) fn succeeded(&self) {
        *self.state() = BreakerState::default();
    }

    pub(crate) fn failed(&self) {
        let mut state = self.state();
        state.failures += 1;
        if state.failures >= self.failures_max {
            state.opened = Some(Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_budget_ends() {
        let policy = RetryPolicy { attempts_max: 3, ..RetryPolicy::default() };
        let mut budget = Budget::new(&policy);
        assert!(budget.pause(None).await);
        assert!(budget.pause(None).await);
        assert!(!budget.pause(None).await);
        assert_eq!(budget.attempt, 3);
        let mut budget = Budget::new(&policy);
        assert!(!budget.pause(Some(Duration::from_secs(60))).await, "a pause beyond the deadline is not begun");
    }

    #[test]
    fn the_breaker_opens_lets_one_through_and_closes() {
        let breaker = Breaker::new(2, Duration::from_millis(1));
        assert!(breaker.refuses_for().is_none());
        breaker.failed();
        assert!(breaker.refuses_for().is_none());
        breaker.failed();
        assert!(breaker.refuses_for().is_some());
        let waited = Instant::now();
        while breaker.refuses_for().is_some() {
            assert!(waited.elapsed() < Duration::from_secs(5));
        }
        breaker.succeeded();
        assert!(breaker.refuses_for().is_none());
    }
}
