//! A Redis that fails is left alone for a while, and does not fill the log.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// After so many failures in a row nobody asks any more,
const FAILURES_MAX: u32 = 5;
/// for so long; then one request tries.
const PAUSE: Duration = Duration::from_secs(1);
/// One warning in this time.
const WARN_EVERY: Duration = Duration::from_secs(10);

/// Whether it is worth asking.
#[derive(Debug)]
pub(super) struct Circuit {
    start: Instant,
    failures: AtomicU32,
    /// Milliseconds after the start.
    open_until: AtomicU64,
    /// Milliseconds after the start, and one: 0 is never.
    warned: AtomicU64,
    not_warned: AtomicU64,
}

impl Circuit {
    pub(super) fn new() -> Self {
        Self {
            start: Instant::now(),
            failures: AtomicU32::new(0),
            open_until: AtomicU64::new(0),
            warned: AtomicU64::new(0),
            not_warned: AtomicU64::new(0),
        }
    }

    fn ms(&self, now: Instant) -> u64 {
        u64::try_from(now.saturating_duration_since(self.start).as_millis()).unwrap_or(u64::MAX)
    }

    /// Whether to ask. While it is open, one in each pause may, and closes it if it succeeds.
    pub(super) fn allows(&self, now: Instant) -> bool {
        if self.failures.load(Ordering::Acquire) < FAILURES_MAX {
            return true;
        }
        let until = self.open_until.load(Ordering::Acquire);
        let now = self.ms(now);
        let next = now + PAUSE.as_millis() as u64;
        now >= until && self.open_until.compare_exchange(until, next, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    pub(super) fn succeeded(&self) {
        self.failures.store(0, Ordering::Release);
    }

    /// Notes a failure; tells whether it is open now.
    pub(super) fn failed(&self, now: Instant) -> bool {
        let open = self.failures.fetch_add(1, Ordering::AcqRel).saturating_add(1) >= FAILURES_MAX;
        if open {
            self.open_until.store(self.ms(now) + PAUSE.as_millis() as u64, Ordering::Release);
        }
        open
    }

    /// Whether to log a warning now, and how many were not logged since the last one.
    pub(super) fn warns(&self, now: Instant) -> Option<u64> {
        let last = self.warned.load(Ordering::Acquire);
        let now = self.ms(now) + 1;
        let due = last == 0 || now.saturating_sub(last) >= WARN_EVERY.as_millis() as u64;
        if due && self.warned.compare_exchange(last, now, Ordering::AcqRel, Ordering::Acquire).is_ok() {
            return Some(self.not_warned.swap(0, Ordering::AcqRel));
        }
        self.not_warned.fetch_add(1, Ordering::AcqRel);
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn five_failures_open_it_and_one_success_closes_it() {
        let circuit = Circuit::new();
        let at = |ms| circuit.start + Duration::from_millis(ms);
        for n in 1..=4 {
            assert!(!circuit.failed(at(0)), "{n}");
        }
        circuit.succeeded();
        for n in 1..=4 {
            assert!(!circuit.failed(at(0)), "{n}, in a row");
            assert!(circuit.allows(at(0)));
        }
        assert!(circuit.failed(at(0)));
        assert!(!circuit.allows(at(0)) && !circuit.allows(at(999)));
        assert!(circuit.allows(at(1000)), "one tries");
        assert!(!circuit.allows(at(1000)), "and only one");
        assert!(circuit.failed(at(1020)), "its failure opens it again at once");
        assert!(!circuit.allows(at(2019)) && circuit.allows(at(2020)));
        circuit.succeeded();
        assert!(circuit.allows(at(2021)) && circuit.allows(at(2021)));
    }

    #[test]
    fn one_warning_in_ten_seconds_says_how_many_there_were() {
        let circuit = Circuit::new();
        let at = |ms| circuit.start + Duration::from_millis(ms);
        assert_eq!(circuit.warns(at(0)), Some(0));
        assert_eq!(circuit.warns(at(0)), None);
        assert_eq!(circuit.warns(at(9_999)), None);
        assert_eq!(circuit.warns(at(10_000)), Some(2));
        assert_eq!(circuit.warns(at(10_001)), None);
    }
}
