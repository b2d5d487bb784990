//! Hundreds of calls, every fault, senders killed under way: the books are equal in the end.

use crate::provider::FAULTS;
use crate::rig::{Process, Rig};

/// A provider that knows a call by its key: an absence leads to another send, under the same key.
const KNOWS_KEYS: &str = r#"{"timeout": "500ms", "grace": "1s", "reference": "id", "resend": true, "absent": "resend",
    "absent_after": "2s", "backoff": "50ms", "backoff_max": "300ms", "reconcile_after": "100ms", "attempts_max": 1000,
    "escalate_after": "1h", "breaker": {"failures": 8, "open_for": "200ms"}, "rate_per_second": 200,
    "reconcile": {"how": "http", "path": "/charges/{key}", "field": "status", "confirmed": ["succeeded"], "failed": ["failed"]}}"#;

/// One that charges for every request that it gets: what may have arrived is never sent again.
const FORGETS: &str = r#"{"timeout": "500ms", "grace": "1s", "reference": "id", "absent": "failed",
    "absent_after": "6s", "backoff": "50ms", "backoff_max": "300ms", "reconcile_after": "100ms", "attempts_max": 1000,
    "escalate_after": "1h", "breaker": {"failures": 8, "open_for": "200ms"}, "verify_failed": true,
    "reconcile": {"how": "http", "path": "/charges/{key}", "field": "status", "confirmed": ["succeeded"], "failed": ["failed"]}}"#;

/// Three workers at a time. One after the other is killed, at some point of its work or at any; others come for them.
async fn storm(rig: &Rig, count: i64) {
    const POINTS: [&str; 4] = ["call::before_send", "call::after_send", "call::after_ask", ""];
    let start = |number: usize| -> Process {
        match POINTS[number % POINTS.len()] {
            "" => rig.reconcile().start(),
            point => rig.reconcile().env("PGONCE_KILL_AT", point).start(),
        }
    };
    let mut workers: Vec<Process> = (0..3).map(start).collect();
    let mut started = workers.len();
    let mut mark = 0;
    crate::rig::until("every call is settled", async || {
        for worker in &mut workers {
            if worker.is_gone() && started < 24 {
                *worker = start(started);
                started += 1;
            } else if worker.is_gone() {
                // Enough were killed: whoever comes now may live.
                *worker = rig.reconcile().start();
            }
        }
        let open = rig.open().await;
        // Every tenth of the way one is killed, wherever it is.
        if count - open >= mark + count / 10 {
            mark = count - open;
            workers[started % 3].signal("-KILL");
        }
        open == 0
    })
    .await;
    assert!(started > 6, "hardly any was killed: {started}");
    for worker in &mut workers {
        if worker.is_gone() {
            *worker = rig.reconcile().start();
        }
    }
    drop(workers);
}

async fn books_are_equal(knows_keys: bool, policy: &str) {
    const CALLS: usize = 210;
    let rig = Rig::new(knows_keys, policy).await;
    let faults: Vec<&str> = (0..CALLS).map(|place| FAULTS[place % FAULTS.len()]).collect();
    rig.charge(&faults).await;
    storm(&rig, i64::try_from(CALLS).unwrap()).await;
    let escalated = rig.settle_escalated().await;
    rig.judge(CALLS).await;
    // Faults that were armed have happened: some calls were in doubt, and some were refused.
    assert!(rig.number("SELECT count(*) FROM once.calls WHERE doubted").await > 50);
    assert!(rig.number("SELECT count(*) FROM once.calls WHERE state = 'failed'").await >= 15, "the refused ones");
    if !knows_keys {
        assert_eq!(escalated, 0, "a refusal is verified before it counts, so that no lie is believed");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn with_a_provider_that_knows_our_keys() {
    books_are_equal(true, KNOWS_KEYS).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn with_a_provider_that_charges_for_every_request() {
    books_are_equal(false, FORGETS).await;
}

/// Each fault alone, without anybody being killed but the provider itself.
#[tokio::test(flavor = "multi_thread")]
async fn each_fault_alone() {
    let rig = Rig::new(false, FORGETS).await;
    // The provider's own death comes last: what it had still to charge would die with it, rightly.
    let (deadly, others): (Vec<&str>, Vec<&str>) = FAULTS.iter().partition(|fault| **fault == "kill");
    rig.charge(&others).await;
    let worker = rig.reconcile().start().ready().await;
    rig.until_settled().await;
    rig.charge(&deadly).await;
    rig.until_settled().await;
    worker.stop().await;
    rig.judge(FAULTS.len()).await;
    for (fault, state) in [
        ("none", "confirmed"),
        ("timeout", "confirmed"),
        ("late", "confirmed"),
        ("lie", "confirmed"),
        ("decline", "failed"),
    ] {
        let sql = format!("SELECT count(*) FROM once.calls WHERE key LIKE '% {fault}' AND state = '{state}'");
        assert_eq!(rig.number(&sql).await, 1, "{fault}");
    }
}
