//! The stored inbox: order within a key, leases, fences, poison.

use std::time::Duration;

use pgonce_testkit::TestDb;

use crate::desk::{define, effect, ids, number, receive, state, take, text};

#[tokio::test]
async fn taken_in_order_one_of_a_key_at_a_time() {
    let db = TestDb::new().await;
    let (client, other) = (db.client().await, db.client().await);
    for (id, key) in [("a1", Some("a")), ("a2", Some("a")), ("b1", Some("b")), ("free 1", None), ("free 2", None)] {
        receive(&client, id, key, None).await;
    }
    other.batch_execute("BEGIN").await.unwrap();
    let first = take(&other, 2).await;
    assert_eq!(ids(&first), ["a1", "b1"]);
    // While that is not committed: what it holds is skipped, and what stands behind it is not handed out.
    assert_eq!(ids(&take(&client, 10).await), ["free 1", "free 2"]);
    other.batch_execute("COMMIT").await.unwrap();
    assert_eq!(take(&client, 10).await, []);
    first[0].finish(&client).await.unwrap();
    let second = take(&client, 10).await;
    assert_eq!((ids(&second), second[0].attempts), (vec!["a2"], 1));
    assert_eq!(state(&client, "a1").await, "processed");
    let result = "SELECT result FROM once.inbox_messages WHERE message_id = 'a1'";
    assert_eq!(text(&client, result, &[]).await.unwrap(), "applied");
}

#[tokio::test]
async fn a_failure_waits_for_its_time_and_keeps_its_place() {
    let db = TestDb::new().await;
    let client = db.client().await;
    define(&db, r#"{"backoff": "10s", "backoff_max": "20s", "attempts_max": 3}"#).await;
    receive(&client, "first", Some("k"), None).await;
    receive(&client, "second", Some("k"), None).await;
    let held = take(&client, 10).await;
    assert_eq!(held[0].fail(&client, true, "not now").await.unwrap(), "failed_retryable");
    assert_eq!(
        number(
            &client,
            "SELECT extract(epoch FROM next_at - once.clock())::bigint / 11 FROM once.inbox WHERE message_id = 'first'"
        )
        .await,
        0
    );
    client
        .batch_execute(
            "UPDATE once.inbox SET next_at = once.clock() + interval '5 seconds' WHERE state = 'failed_retryable'",
        )
        .await
        .unwrap();
    assert_eq!(take(&client, 10).await, [], "the second does not overtake");
    db.travel(Duration::from_secs(6)).await;
    let held = take(&client, 10).await;
    assert_eq!((ids(&held), held[0].attempts), (vec!["first"], 2));
    // A delay of the caller's own.
    let sql = "SELECT once.inbox_fail($1, $2, true, 'again', '1 hour')";
    text(&client, sql, &[&held[0].number, &held[0].claim_id]).await.unwrap();
    db.travel(Duration::from_secs(3000)).await;
    assert_eq!(take(&client, 10).await, []);
    db.travel(Duration::from_secs(3700)).await;
    let held = take(&client, 10).await;
    assert_eq!(held[0].attempts, 3);
    assert_eq!(held[0].fail(&client, true, "no").await.unwrap(), "failed_final", "the attempts are used up");
    let reason = text(&client, "SELECT last_error FROM once.inbox_parked", &[]).await.unwrap();
    assert_eq!(reason, "poison: 3 attempts, none finished; last error: no");
}

/// A message that kills its worker, time after time: counted where it is taken, buried at its limit, while others flow.
#[tokio::test]
async fn poison_is_buried_while_other_keys_flow() {
    let db = TestDb::new().await;
    let client = db.client().await;
    define(&db, r#"{"attempts_max": 3, "lease": "30s"}"#).await;
    receive(&client, "poison", Some("k"), None).await;
    receive(&client, "behind", Some("k"), None).await;
    for attempt in 1..=3_u32 {
        receive(&client, &format!("other {attempt}"), Some("other"), None).await;
        let victim = db.client().await;
        let held = take(&victim, 1).await;
        assert_eq!((ids(&held), held[0].attempts), (vec!["poison"], i32::try_from(attempt).unwrap()));
        drop(victim); // the worker is gone, and says nothing
        let other = take(&client, 10).await;
        assert_eq!(ids(&other), [format!("other {attempt}")], "its lease runs; others flow");
        other[0].finish(&client).await.unwrap();
        db.travel(Duration::from_secs(u64::from(attempt) * 31)).await;
    }
    receive(&client, "other 4", Some("other"), None).await;
    assert_eq!(ids(&take(&client, 10).await), ["other 4"], "not a fourth time");
    assert_eq!(state(&client, "poison").await, "failed_final");
    let parked = client.query_one("SELECT last_error, behind FROM once.inbox_parked", &[]).await.unwrap();
    assert_eq!(parked.get::<_, &str>(0), "poison: 3 attempts, none finished; last error: none, the worker vanished");
    assert_eq!(parked.get::<_, i64>(1), 1, "and its key is held, visibly");
    assert_eq!(state(&client, "behind").await, "received");
    define(&db, r#"{"attempts_max": 3, "on_poison": "skip"}"#).await;
    assert_eq!(ids(&take(&client, 10).await), ["behind"]);
}

/// A worker that was thought dead comes back: its end raises, and its effect goes with it.
#[tokio::test]
async fn a_stale_worker_leaves_nothing() {
    let db = TestDb::new().await;
    let (stale, client) = (db.client().await, db.client().await);
    receive(&client, "m", None, None).await;
    let old = take(&stale, 1).await;
    db.travel(Duration::from_secs(31)).await;
    stale.batch_execute("BEGIN").await.unwrap();
    effect(&stale, "m").await;
    let new = take(&client, 1).await;
    assert_eq!((ids(&new), new[0].attempts), (vec!["m"], 2));
    assert_eq!(old[0].finish(&stale).await.unwrap_err(), "P4051");
    stale.batch_execute("ROLLBACK").await.unwrap();
    assert_eq!(old[0].fail(&stale, true, "late").await.unwrap_err(), "P4051");
    assert_eq!(old[0].wait(&stale).await.unwrap_err(), "P4051");
    client.batch_execute("BEGIN").await.unwrap();
    effect(&client, "m").await;
    new[0].finish(&client).await.unwrap();
    client.batch_execute("COMMIT").await.unwrap();
    assert_eq!(new[0].finish(&client).await.unwrap_err(), "P4051", "nor a second time");
    assert_eq!(db.effects("m").await, 1);
}

/// A lease that is over, and not taken over, is still its worker's to end.
#[tokio::test]
async fn a_late_end_counts_while_nobody_else_has_it() {
    let db = TestDb::new().await;
    let (late, client) = (db.client().await, db.client().await);
    receive(&client, "m", None, None).await;
    let held = take(&late, 1).await;
    db.travel(Duration::from_secs(3600)).await;
    late.batch_execute("BEGIN").await.unwrap();
    held[0].finish(&late).await.unwrap();
    assert_eq!(take(&client, 1).await, [], "its end is being written: skipped, not waited for");
    late.batch_execute("COMMIT").await.unwrap();
    assert_eq!(take(&client, 1).await, []);
    assert_eq!(state(&client, "m").await, "processed");
}

#[tokio::test]
async fn tenants_are_taken_apart_or_together() {
    let db = TestDb::new().await;
    let client = db.client().await;
    for tenant in ["", "t", "u"] {
        let sql = "SELECT once.receive('c', 's', 'm', 'x', p_ordering_key => 'k', p_tenant => $1)";
        assert_eq!(text(&client, sql, &[&tenant]).await.unwrap(), "new");
    }
    let sql = "SELECT tenant FROM once.inbox_take('c', 'w', 10, p_tenant => 't')";
    assert_eq!(text(&client, sql, &[]).await.unwrap(), "t");
    assert_eq!(take(&client, 10).await.len(), 2, "a key is one tenant's");
}

/// The table itself refuses rows that no state allows.
#[tokio::test]
async fn the_shape_of_states_is_checked() {
    let db = TestDb::new().await;
    let client = db.client().await;
    receive(&client, "m", None, None).await;
    for set in [
        "state = 'processing'",
        "state = 'processed'",
        "state = 'failed_final'",
        "leased_until = now()",
        "finished_at = now()",
        "state = 'waiting'",
        "state = 'processing', leased_until = now()",
    ] {
        let error = client.batch_execute(&format!("UPDATE once.inbox SET {set}")).await.unwrap_err();
        assert_eq!(crate::desk::code(&error), "23514", "{set}");
    }
}
