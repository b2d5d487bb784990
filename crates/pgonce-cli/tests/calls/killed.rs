//! SIGKILL at each step, and SIGSTOP past the lease: nothing is sent twice to a provider that would charge twice.

use crate::rig::Rig;

const POLICY: &str = r#"{"timeout": "1s", "grace": "1s", "reference": "id", "absent": "failed", "absent_after": "4s",
    "backoff": "50ms", "backoff_max": "200ms", "reconcile_after": "50ms", "escalate_after": "1h",
    "reconcile": {"how": "http", "path": "/charges/{key}", "field": "status", "confirmed": ["succeeded"], "failed": ["failed"]}}"#;

#[tokio::test(flavor = "multi_thread")]
async fn a_sender_killed_at_each_step_leaves_an_unknown_call() {
    // Where it is killed, and whether the provider has charged by then.
    for (point, fault, state) in [
        ("call::before_send", "none", "failed"),
        ("call::after_send", "none", "confirmed"),
        ("call::after_send", "decline", "failed"),
        ("call::after_ask", "timeout", "confirmed"),
    ] {
        let rig = Rig::new(false, POLICY).await;
        rig.charge(&[fault]).await;
        rig.reconcile().env("PGONCE_KILL_AT", point).start().killed().await;
        let left: String = rig.client.query_one("SELECT state FROM once.calls", &[]).await.unwrap().get(0);
        // A webhook may have been faster than the look at it.
        assert!(left != "requested", "{point}: it was sent, as far as anybody knows");
        rig.reconcile().args(&["--until-settled", "--wait-max", "100s"]).ran().await.done();
        rig.judge(1).await;
        let is: String = rig.client.query_one("SELECT state FROM once.calls", &[]).await.unwrap().get(0);
        assert_eq!(is, state, "{point} {fault}");
    }
}

/// It slept through its lease with the call in its hand; meanwhile the absence was believed. It must not send any more.
#[tokio::test(flavor = "multi_thread")]
async fn a_sender_that_wakes_up_late_does_not_send() {
    let rig = Rig::new(false, POLICY).await;
    rig.charge(&["none"]).await;
    let sleeper = rig.reconcile().env("PGONCE_STOP_AT", "call::before_send").start();
    sleeper.stopped().await;
    rig.reconcile().args(&["--until-settled", "--wait-max", "100s"]).ran().await.done();
    rig.judge(1).await;
    sleeper.signal("-CONT");
    // It works again: it sends what comes next.
    let sql = "SELECT once.call('bank', 'charge', '/charges', '{}', p_scope => 'pay', p_key => 'the next')";
    rig.client.query_one(sql, &[]).await.unwrap();
    rig.until_settled().await;
    sleeper.stop().await;
    rig.judge(2).await;
    assert_eq!(rig.charged().len(), 1, "only the next one was sent");
}
