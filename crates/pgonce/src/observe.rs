//! Metrics, and the counts of answers that are flushed into the database now and then.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

/// `pgonce_claims_total` and its neighbours; see docs/reference/metrics.md.
pub(crate) fn claimed(scope: &str, kind: &'static str, took: Duration) {
    metrics::counter!("pgonce_claims_total", "scope" => scope.to_owned(), "kind" => kind).increment(1);
    metrics::histogram!("pgonce_claim_duration_seconds").record(took.as_secs_f64());
    match kind {
        "conflict" => metrics::counter!("pgonce_conflicts_total", "scope" => scope.to_owned()).increment(1),
        "processing_stale" => metrics::counter!("pgonce_takeovers_total").increment(1),
        _ => {}
    }
}

/// A claim that waited for a rival.
pub(crate) fn waited(wait: Duration) {
    metrics::histogram!("pgonce_lock_wait_seconds").record(wait.as_secs_f64());
}

/// How many intents are uncertain in the whole database.
pub(crate) fn uncertain(count: i64) {
    #[allow(clippy::cast_precision_loss, reason = "it is counted up to 100,000")]
    metrics::gauge!("pgonce_uncertain").set(count as f64);
}

pub(crate) fn purged(what: &'static str, rows: u64) {
    metrics::counter!("pgonce_purged_total", "what" => what).increment(rows);
}

pub(crate) fn settled(scope: &str, status: &'static str) {
    metrics::counter!("pgonce_outcomes_total", "scope" => scope.to_owned(), "status" => status).increment(1);
}

/// A claim whose owner did not know, by what became of it.
pub(crate) fn doubted(scope: &str, status: &str) {
    metrics::counter!("pgonce_outcomes_total", "scope" => scope.to_owned(), "status" => status.to_owned()).increment(1);
}

pub(crate) fn retried(sqlstate: &str) {
    metrics::counter!("pgonce_retries_total", "sqlstate" => sqlstate.to_owned()).increment(1);
}

/// An inbound message, by what it was taken for or what became of it.
pub(crate) fn consumed(consumer: &str, verdict: &'static str) {
    metrics::counter!("pgonce_inbox_messages_total", "consumer" => consumer.to_owned(), "verdict" => verdict)
        .increment(1);
}

/// A call of a provider, by what became of it: `confirmed`, `failed`, `unknown`, `requested` (again), `escalated`, `lost`.
pub(crate) fn called(provider: &str, step: &'static str, state: &str, took: Duration) {
    metrics::counter!("pgonce_calls_total", "provider" => provider.to_owned(), "step" => step, "verdict" => state.to_owned())
        .increment(1);
    metrics::histogram!("pgonce_call_duration_seconds", "provider" => provider.to_owned(), "step" => step)
        .record(took.as_secs_f64());
}

/// How many calls are under way.
pub(crate) fn calls_open(provider: &str, state: &str, calls: i64) {
    #[allow(clippy::cast_precision_loss, reason = "a gauge")]
    metrics::gauge!("pgonce_calls", "provider" => provider.to_owned(), "state" => state.to_owned()).set(calls as f64);
}

/// A job, by what became of it.
pub(crate) fn worked(queue: &str, end: &'static str, jobs: usize) {
    let jobs = u64::try_from(jobs).unwrap_or(u64::MAX);
    metrics::counter!("pgonce_jobs_total", "queue" => queue.to_owned(), "end" => end).increment(jobs);
}

/// Rows of an import, by what became of them, and the way that their batch went.
pub(crate) fn imported(way: &'static str, applied: u64, skipped: u64, failed: u64) {
    metrics::counter!("pgonce_import_batches_total", "way" => way).increment(1);
    for (outcome, rows) in [("applied", applied), ("skipped", skipped), ("failed", failed)] {
        metrics::counter!("pgonce_import_rows_total", "outcome" => outcome).increment(rows);
    }
}

/// Counts of answers by tenant, scope and kind since the last flush.
#[derive(Debug, Default)]
pub(crate) struct Tally(Mutex<Tallied>);

/// By tenant, then by scope, then by kind: each looked up by what the caller has, so that counting copies nothing.
pub(crate) type Counts = HashMap<String, HashMap<String, HashMap<&'static str, u64>>>;

#[derive(Debug, Default)]
struct Tallied {
    counts: Counts,
    scopes: usize,
}

impl Tally {
    pub(crate) fn add(&self, tenant: &str, scope: &str, kind: &'static str) {
        let mut tallied = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let known = tallied.counts.get_mut(tenant).and_then(|scopes| scopes.get_mut(scope));
        if let Some(kinds) = known {
            *kinds.entry(kind).or_default() += 1;
        // A flood of tenants must not grow without bound between two flushes.
        } else if tallied.scopes < 10_000 {
            tallied.scopes += 1;
            let scopes = tallied.counts.entry(tenant.to_owned()).or_default();
            scopes.insert(scope.to_owned(), HashMap::from([(kind, 1)]));
        }
    }

    pub(crate) fn take(&self) -> Counts {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)).counts
    }
}
