//! How long callers waited lately.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The last waits, by when they ended.
#[derive(Debug, Default)]
pub(super) struct Waits(Mutex<Recent>);

#[derive(Debug, Default)]
struct Recent {
    waits: VecDeque<(Instant, Duration)>,
    p99: Duration,
    told: Option<Instant>,
}

const WAITS_MAX: usize = 1024;
/// Older waits say nothing about now.
const RECENT: Duration = Duration::from_secs(10);
/// Whoever asks before every request must not pay for it every time.
const FRESH: Duration = Duration::from_millis(50);

impl Waits {
    pub(super) fn add(&self, waits: impl Iterator<Item = Duration>) {
        let now = Instant::now();
        let mut recent = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for wait in waits {
            if recent.waits.len() >= WAITS_MAX {
                recent.waits.pop_front();
            }
            recent.waits.push_back((now, wait));
        }
    }

    pub(super) fn p99(&self) -> Duration {
        let mut recent = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if recent.told.is_some_and(|told| told.elapsed() < FRESH) {
            return recent.p99;
        }
        let mut waits: Vec<Duration> =
            recent.waits.iter().filter(|(ended, _)| ended.elapsed() < RECENT).map(|(_, wait)| *wait).collect();
        let place = (waits.len() * 99 / 100).min(waits.len().saturating_sub(1));
        recent.p99 = match waits.is_empty() {
            true => Duration::ZERO,
            false => *waits.select_nth_unstable(place).1,
        };
        recent.told = Some(Instant::now());
        recent.p99
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_99th_of_a_hundred() {
        let waits = Waits::default();
        assert_eq!(waits.p99(), Duration::ZERO);
        let waits = Waits::default();
        waits.add((1..=100).map(Duration::from_millis));
        assert_eq!(waits.p99(), Duration::from_millis(100));
        let waits = Waits::default();
        waits.add((1..=2000).map(Duration::from_millis));
        assert!(waits.p99() > Duration::from_millis(1980), "the newest count");
    }
}
