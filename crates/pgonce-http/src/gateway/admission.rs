//! How much is taken on at once: in all, and of each tenant. One tenant's flood is that tenant's problem.
//!
//! Counts are behind one short lock, so that they are exact; a tenant is known only while it has something
//! running or waiting, so there are never more of them than of those.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::config::Limits;
use crate::Problem;

/// Even under the worst load some pass: by them it is seen that the load is over.
const SHED_MAX: f64 = 0.95;
/// Nobody is sent away for longer.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(30);
/// Refused requests are told to come back at different times, not all at once.
const RETRY_SPREAD_S: u64 = 3;

/// Who may run and who may wait.
#[derive(Debug, Clone)]
pub(super) struct Admission(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    limits: Limits,
    total: Counts,
    tenants: HashMap<Arc<str>, Counts>,
    /// Grows by the part to be shed with each request; at one, a request is shed.
    shed_debt: f64,
    refused: u64,
}

/// What runs and what waits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub running: usize,
    pub waiting: usize,
}

impl Admission {
    pub(super) fn new(limits: Limits) -> Self {
        let state = State { limits, total: Counts::default(), tenants: HashMap::new(), shed_debt: 0.0, refused: 0 };
        Self(Arc::new(Mutex::new(state)))
    }

    /// New limits, for what comes from now on; what was admitted stays.
    pub(super) fn set_limits(&self, limits: Limits) {
        self.state().limits = limits;
    }

    /// Takes a request on, if there is room.
    pub(super) fn admit(&self, tenant: &str) -> Result<Permit, Problem> {
        let tenant = self.state().admit(tenant)?;
        Ok(Permit(Held { admission: self.clone(), tenant, kind: Kind::Running }))
    }

    /// Whether a request that was taken on may ask the database. `queue_wait` is what requests waited lately for
    /// one of its connections (p99): over `shed_wait` a part of them is shed, growing to nearly all at twice that.
    /// Whoever has no more than an even share running is spared until twice as late.
    pub(super) fn shed(&self, tenant: &str, queue_wait: Duration) -> Result<(), Problem> {
        self.state().shed(tenant, queue_wait)
    }

    /// What runs and waits now, and of how many tenants.
    pub(super) fn usage(&self) -> (Counts, usize) {
        let state = self.state();
        (state.total, state.tenants.len())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request that runs; dropped, its place is free.
#[derive(Debug)]
pub(super) struct Permit(Held);

impl Permit {
    /// The request waits for another one's outcome from now on: it leaves the running, if there is room to wait.
    pub(super) fn wait(self) -> Result<Waiting, Problem> {
        let Held { admission, tenant, .. } = &self.0;
        admission.state().may_wait(tenant)?;
        Ok(Waiting(self.0.become_kind(Kind::Waiting)))
    }
}

/// A request that waits; dropped, its place is free.
#[derive(Debug)]
pub(super) struct Waiting(Held);

impl Waiting {
    /// The request runs after all, as if it came now.
    pub(super) fn resume(self) -> Result<Permit, Problem> {
        let Held { admission, tenant, .. } = &self.0;
        admission.state().may_run(tenant)?;
        Ok(Permit(self.0.become_kind(Kind::Running)))
    }
}

#[derive(Debug)]
struct Held {
    admission: Admission,
    tenant: Arc<str>,
    kind: Kind,
}

#[derive(Debug, Clone, Copy)]
enum Kind {
    Running,
    Waiting,
}

impl Held {
    fn become_kind(mut self, kind: Kind) -> Self {
        let mut state = self.admission.state();
        state.add(&self.tenant, kind);
        state.remove(&self.tenant, self.kind);
        drop(state);
        self.kind = kind;
        self
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.admission.state().remove(&self.tenant, self.kind);
    }
}

impl Counts {
    fn of(&mut self, kind: Kind) -> &mut usize {
        match kind {
            Kind::Running => &mut self.running,
            Kind::Waiting => &mut self.waiting,
        }
    }
}

impl State {
    fn admit(&mut self, tenant: &str) -> Result<Arc<str>, Problem> {
        self.may_run(tenant)?;
        let known = self.tenants.get_key_value(tenant).map(|(known, _)| known.clone());
        let tenant = known.unwrap_or_else(|| tenant.into());
        self.add(&tenant, Kind::Running);
        Ok(tenant)
    }

    fn add(&mut self, tenant: &Arc<str>, kind: Kind) {
        *self.total.of(kind) += 1;
        *self.tenants.entry(tenant.clone()).or_default().of(kind) += 1;
    }

    fn remove(&mut self, tenant: &str, kind: Kind) {
        *self.total.of(kind) -= 1;
        if let Some(counts) = self.tenants.get_mut(tenant) {
            *counts.of(kind) -= 1;
            if *counts == Counts::default() {
                self.tenants.remove(tenant);
            }
        }
    }

    fn counts(&self, tenant: &str) -> Counts {
        self.tenants.get(tenant).copied().unwrap_or_default()
    }

    /// A tenant over its own limit is told so, also when everybody is over theirs: that is what it can change.
    fn may_run(&mut self, tenant: &str) -> Result<(), Problem> {
        if self.counts(tenant).running >= self.limits.tenant_inflight_max {
            return Err(Problem::QuotaExceeded { retry_after: self.retry_after(Duration::ZERO) });
        }
        if self.total.running >= self.limits.inflight_max {
            return Err(Problem::Overloaded { retry_after: self.retry_after(Duration::ZERO) });
        }
        Ok(())
    }

    fn may_wait(&mut self, tenant: &str) -> Result<(), Problem> {
        if self.counts(tenant).waiting >= self.limits.tenant_waiters_max {
            return Err(Problem::QuotaExceeded { retry_after: self.retry_after(Duration::ZERO) });
        }
        if self.total.waiting >= self.limits.waiters_max {
            return Err(Problem::Overloaded { retry_after: self.retry_after(Duration::ZERO) });
        }
        Ok(())
    }

    fn shed(&mut self, tenant: &str, queue_wait: Duration) -> Result<(), Problem> {
        if queue_wait <= self.limits.shed_wait {
            self.shed_debt = 0.0;
            return Ok(());
        }
        // The request itself is among those that run.
        let others = self.counts(tenant).running.saturating_sub(1);
        let is_small = others < self.total.running.saturating_sub(1) / self.tenants.len().max(1);
        let late = self.limits.shed_wait.as_secs_f64() * if is_small { 2.0 } else { 1.0 };
        self.shed_debt += (queue_wait.as_secs_f64() / late - 1.0).clamp(0.0, SHED_MAX);
        if self.shed_debt < 1.0 {
            return Ok(());
        }
        self.shed_debt -= 1.0;
        Err(Problem::Overloaded { retry_after: self.retry_after(queue_wait) })
    }

    fn retry_after(&mut self, queue_wait: Duration) -> Duration {
        self.refused = self.refused.wrapping_add(1);
        let spread = Duration::from_secs(1 + self.refused % RETRY_SPREAD_S);
        queue_wait.saturating_mul(2).saturating_add(spread).min(RETRY_AFTER_MAX)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on should stop, loudly")]
mod tests {
    use super::*;

    fn limits(inflight_max: usize, tenant_inflight_max: usize) -> Limits {
        Limits {
            header_bytes_max: 1,
            header_timeout: Duration::from_secs(1),
            connections_max: 1,
            inflight_max,
            tenant_inflight_max,
            waiters_max: 3,
            tenant_waiters_max: 2,
            shed_wait: Duration::from_secs(1),
        }
    }

    fn slug(problem: Result<impl Sized, Problem>) -> &'static str {
        problem.map(drop).map_err(|problem| problem.slug()).unwrap_err()
    }

    #[test]
    fn a_tenant_has_its_limit_and_all_have_theirs() {
        let admission = Admission::new(limits(3, 2));
        let first = admission.admit("a").unwrap();
        let _second = admission.admit("a").unwrap();
        assert_eq!(slug(admission.admit("a")), "quota-exceeded");
        let _third = admission.admit("b").unwrap();
        assert_eq!(slug(admission.admit("c")), "overloaded");
        assert_eq!(slug(admission.admit("a")), "quota-exceeded", "its own limit comes first");
        drop(first);
        let fourth = admission.admit("c").unwrap();
        assert_eq!(admission.usage(), (Counts { running: 3, waiting: 0 }, 3));
        drop(fourth);
        assert_eq!(admission.usage(), (Counts { running: 2, waiting: 0 }, 2), "who has nothing is forgotten");
    }

    #[test]
    fn waiters_leave_the_running_and_have_their_own_limits() {
        let admission = Admission::new(limits(2, 1));
        let waiting = admission.admit("a").unwrap().wait().unwrap();
        let _second = admission.admit("a").unwrap().wait().unwrap();
        assert_eq!(slug(admission.admit("a").unwrap().wait()), "quota-exceeded");
        let _third = admission.admit("b").unwrap().wait().unwrap();
        assert_eq!(slug(admission.admit("b").unwrap().wait()), "overloaded");
        assert_eq!(admission.usage(), (Counts { running: 0, waiting: 3 }, 2));
        let running = waiting.resume().unwrap();
        assert_eq!(admission.usage(), (Counts { running: 1, waiting: 2 }, 2));
        drop(running);
        drop(_second);
        drop(_third);
        assert_eq!(admission.usage(), (Counts::default(), 0));
    }

    #[test]
    fn a_waiter_that_may_not_run_leaves() {
        let admission = Admission::new(limits(1, 1));
        let waiting = admission.admit("a").unwrap().wait().unwrap();
        let _running = admission.admit("a").unwrap();
        assert_eq!(slug(waiting.resume()), "quota-exceeded");
        assert_eq!(admission.usage().0, Counts { running: 1, waiting: 0 });
    }

    /// How many of 1000 are shed.
    fn shed(admission: &Admission, tenant: &str, wait_ms: u64) -> usize {
        let refused = |_: &usize| {
            let _running = admission.admit(tenant).unwrap();
            admission.shed(tenant, Duration::from_millis(wait_ms)).is_err()
        };
        (0..1000).filter(refused).count()
    }

    #[test]
    fn load_is_shed_by_how_long_the_queue_is() {
        let admission = Admission::new(limits(1000, 1000));
        let _held: Vec<_> = (0..10).map(|_| admission.admit("flood").unwrap()).collect();
        let _other = admission.admit("other").unwrap();
        assert_eq!(shed(&admission, "flood", 1000), 0);
        assert!((490..=510).contains(&shed(&admission, "flood", 1500)));
        assert!((940..=951).contains(&shed(&admission, "flood", 60_000)), "some always pass");
        assert_eq!(shed(&admission, "other", 2000), 0, "whoever has little is spared");
        assert!((490..=510).contains(&shed(&admission, "other", 3000)), "but not for ever");
        let minute = Duration::from_secs(60);
        assert_eq!(slug(admission.shed("flood", minute).and(admission.shed("flood", minute))), "overloaded");
        assert_eq!(shed(&admission, "flood", 10), 0, "over as soon as it is over");
    }

    #[test]
    fn the_only_tenant_is_shed_as_well() {
        let admission = Admission::new(limits(1000, 1000));
        let _held = admission.admit("").unwrap();
        assert!(shed(&admission, "", 2000) > 900);
    }

    #[test]
    fn refused_ones_come_back_at_different_times() {
        let admission = Admission::new(limits(0, 1));
        let mut waits: Vec<_> = (0..3).filter_map(|_| admission.admit("a").unwrap_err().retry_after()).collect();
        waits.sort();
        assert_eq!(waits, [1, 2, 3].map(Duration::from_secs));
        let hour = Duration::from_secs(3600);
        let long = admission.shed("a", hour).and(admission.shed("a", hour)).unwrap_err().retry_after();
        assert_eq!(long, Some(RETRY_AFTER_MAX));
    }

    #[test]
    fn new_limits_count_from_now_on() {
        let admission = Admission::new(limits(5, 5));
        let held: Vec<_> = (0..5).map(|_| admission.admit("a").unwrap()).collect();
        admission.set_limits(limits(2, 2));
        assert!(admission.admit("a").is_err());
        drop(held);
        assert!(admission.admit("a").is_ok());
    }
}
