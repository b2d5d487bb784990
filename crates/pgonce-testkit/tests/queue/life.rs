//! A job's life: order, delay, retries, burial, cancellation, results.

use std::time::Duration;

use pgonce_testkit::TestDb;

use crate::desk::{define, enqueue, ids, keyed, number, state, states, take, text, try_take};

#[tokio::test]
async fn by_priority_then_in_order_and_not_before_its_time() {
    let db = TestDb::new().await;
    let client = db.client().await;
    assert_eq!(take(&client, 10).await, [], "a queue that nobody knows is empty");
    let low = enqueue(&client, "").await;
    let later = enqueue(&client, ", p_available_at => once.clock() + interval '1 hour'").await;
    let high = enqueue(&client, ", p_priority => 7").await;
    let also_low = enqueue(&client, "").await;
    let lowest = enqueue(&client, ", p_priority => -3").await;
    assert_eq!(ids(&take(&client, 2).await), [high, low]);
    assert_eq!(ids(&take(&client, 10).await), [also_low, lowest]);
    assert_eq!(take(&client, 10).await, []);
    db.travel(Duration::from_secs(3601)).await;
    let mut held = ids(&take(&client, 10).await);
    held.retain(|id| *id == later);
    assert_eq!(held, [later]);
}

#[tokio::test]
async fn a_job_is_there_if_and_only_if_its_transaction_commits() {
    let db = TestDb::new().await;
    let (client, other) = (db.client().await, db.client().await);
    client.batch_execute("BEGIN").await.unwrap();
    enqueue(&client, "").await;
    client.batch_execute("ROLLBACK; BEGIN").await.unwrap();
    let id = enqueue(&client, "").await;
    assert_eq!(take(&other, 10).await, []);
    client.batch_execute("COMMIT").await.unwrap();
    assert_eq!(ids(&take(&other, 10).await), [id]);
}

#[tokio::test]
async fn a_batch_of_jobs_is_in_the_order_given() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let sql = "SELECT once.enqueue_batch('q', ARRAY['1', '2', '3']::jsonb[], p_priorities => ARRAY[0, NULL, 5],
               p_available_ats => ARRAY[NULL, once.clock() + interval '1 hour', NULL], p_keys => ARRAY['a', 'a', 'a'])";
    let made: Vec<i64> = client.query_one(sql, &[]).await.unwrap().get(0);
    assert!(made.is_sorted());
    assert_eq!(states(&client).await, ["ready", "delayed", "ready"]);
    // The third has the priority; the first has the turn.
    assert_eq!(ids(&take(&client, 10).await), [made[0]]);
    let sql = "SELECT once.enqueue_batch('q', ARRAY['1', '2', '3', '4']::jsonb[], p_unique_keys => ARRAY['z', NULL, 'a', 'z'])";
    let made: Vec<i64> = client.query_one(sql, &[]).await.unwrap().get(0);
    assert_eq!(made[0], made[3], "the second of a unique key is the first");
    let payloads =
        "SELECT string_agg(payload::text, ',' ORDER BY array_position($1, id)) FROM once.job WHERE id = ANY ($1)";
    assert_eq!(text(&client, payloads, &[&made]).await.unwrap(), "1,2,3");
    let none = text(&client, "SELECT once.enqueue_batch('q', '{}')::text", &[]).await.unwrap();
    assert_eq!(none, "{}");
}

#[tokio::test]
async fn retried_after_its_backoff_and_buried_at_its_limit() {
    let db = TestDb::new().await;
    let client = db.client().await;
    define(&client, r#"{"backoff": "10s", "backoff_max": "15s", "attempts_max": 3}"#).await;
    let first = keyed(&client, "k").await;
    let second = keyed(&client, "k").await;
    let held = take(&client, 10).await;
    assert_eq!(ids(&held), [first]);
    assert_eq!(held[0].say(&client, "retry", ", 'not now'").await.unwrap(), "delayed");
    let wait = "SELECT (available_at BETWEEN once.clock() + interval '4 seconds' AND once.clock() + interval '10 seconds')::text
                FROM once.jobs WHERE state = 'delayed'";
    assert_eq!(text(&client, wait, &[]).await.unwrap(), "true");
    assert_eq!(take(&client, 10).await, [], "the second does not overtake");
    db.travel(Duration::from_secs(11)).await;
    let held = take(&client, 10).await;
    assert_eq!((ids(&held), held[0].attempts), (vec![first], 2));
    assert_eq!(held[0].say(&client, "retry", ", 'now', '0'").await.unwrap(), "ready");
    let held = take(&client, 10).await;
    assert_eq!((ids(&held), held[0].attempts), (vec![first], 3));
    assert_eq!(held[0].say(&client, "retry", ", 'never'").await.unwrap(), "buried");
    let reason = text(&client, "SELECT last_error FROM once.jobs_buried", &[]).await.unwrap();
    assert_eq!(reason, "its 3 attempts are used up; last error: never");
    assert_eq!(ids(&take(&client, 10).await), [second], "a buried one lets the next go");
}

/// Attempts are counted when a job is taken: one that never comes back is buried all the same.
#[tokio::test]
async fn a_job_that_kills_its_worker_is_buried() {
    let db = TestDb::new().await;
    let client = db.client().await;
    define(&client, r#"{"attempts_max": 3, "lease": "10s"}"#).await;
    let id = keyed(&client, "k").await;
    let behind = keyed(&client, "k").await;
    for attempt in 1..=3_u32 {
        let held = take(&client, 10).await;
        assert_eq!((ids(&held), held[0].attempts), (vec![id], i32::try_from(attempt).unwrap()));
        db.travel(Duration::from_secs(u64::from(attempt) * 11)).await;
    }
    assert_eq!(ids(&take(&client, 10).await), [behind]);
    assert_eq!(state(&client, id).await, "buried");
}

/// A job that was enqueued for later does not hold its key back; once it is due, it stands where it was enqueued.
#[tokio::test]
async fn a_later_job_holds_nobody_back() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let later = enqueue(&client, ", p_key => 'k', p_available_at => once.clock() + interval '1 minute'").await;
    let (second, third) = (keyed(&client, "k").await, keyed(&client, "k").await);
    let held = take(&client, 10).await;
    assert_eq!(ids(&held), [second]);
    held[0].say(&client, "heartbeat", ", '1 hour'").await.unwrap();
    db.travel(Duration::from_secs(61)).await;
    assert_eq!(take(&client, 10).await, [], "one runs");
    // Not an end, but it runs no more: who was parked behind it has its turn.
    held[0].say(&client, "retry", ", 'later', '1 minute'").await.unwrap();
    let held = take(&client, 10).await;
    assert_eq!(ids(&held), [later]);
    held[0].finish(&client).await.unwrap();
    db.travel(Duration::from_secs(130)).await;
    assert_eq!(ids(&take(&client, 10).await), [second]);
    assert_eq!(state(&client, third).await, "parked");
}

#[tokio::test]
async fn cancelled_before_at_once_and_while_running_by_the_worker() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let cancel = async |id: i64| text(&client, "SELECT once.cancel_job($1)", &[&id]).await.unwrap();
    let (first, second, third) = (keyed(&client, "k").await, keyed(&client, "k").await, keyed(&client, "k").await);
    let held = take(&client, 10).await;
    assert_eq!(cancel(second).await, "cancelled");
    assert_eq!(cancel(first).await, "asked");
    assert_eq!(state(&client, second).await, "cancelled");
    let sql = "SELECT verdict FROM once.heartbeat_batch(ARRAY[$1::bigint], ARRAY[$2::uuid])";
    assert_eq!(text(&client, sql, &[&held[0].id, &held[0].claim_id]).await.unwrap(), "cancel");
    assert_eq!(held[0].say(&client, "retry", ", 'dropped'").await.unwrap(), "cancelled");
    let held = take(&client, 10).await;
    assert_eq!(ids(&held), [third]);
    assert_eq!(cancel(third).await, "asked");
    held[0].finish(&client).await.unwrap();
    assert_eq!(cancel(third).await, "NULL", "a finish that came first wins");
    assert_eq!(text(&client, "SELECT once.cancel_job($1, 'other tenant')", &[&first]).await.unwrap(), "NULL");
    let batch: Vec<Option<String>> = client
        .query_one("SELECT once.cancel_batch(ARRAY[$1::bigint, $2::bigint])", &[&third, &enqueue(&client, "").await])
        .await
        .unwrap()
        .get(0);
    assert_eq!(batch, [None, Some("cancelled".into())]);
}

/// A worker that was told to stop and never came back: its job is not run again.
#[tokio::test]
async fn a_cancelled_job_of_a_dead_worker_is_cancelled() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = enqueue(&client, "").await;
    take(&client, 1).await;
    text(&client, "SELECT once.cancel_job($1)", &[&id]).await.unwrap();
    db.travel(Duration::from_secs(31)).await;
    assert_eq!(take(&client, 1).await, []);
    assert_eq!(state(&client, id).await, "cancelled");
}

#[tokio::test]
async fn results_are_kept_for_their_time() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (with, without) = (enqueue(&client, "").await, enqueue(&client, "").await);
    let held = take(&client, 2).await;
    held[0].say(&client, "finish", r#", '{"rows": 3}'"#).await.unwrap();
    held[1].finish(&client).await.unwrap();
    let result = "SELECT (result ->> 'rows') || state FROM once.look_job($1)";
    assert_eq!(text(&client, result, &[&with]).await.unwrap(), "3succeeded");
    assert_eq!(state(&client, without).await, "gone");
    define(&client, r#"{"keep": "1h"}"#).await;
    let kept = enqueue(&client, "").await;
    take(&client, 1).await[0].finish(&client).await.unwrap();
    assert_eq!(state(&client, kept).await, "succeeded");
    let buried = enqueue(&client, "").await;
    take(&client, 1).await[0].say(&client, "bury", ", 'no'").await.unwrap();
    assert_eq!(number(&client, "SELECT once.purge_jobs()").await, 0);
    db.travel(Duration::from_secs(3601)).await;
    assert_eq!(number(&client, "SELECT once.purge_jobs()").await, 1);
    assert_eq!((state(&client, with).await, state(&client, kept).await), ("succeeded".into(), "gone".into()));
    db.travel(Duration::from_secs(86_400 * 400)).await;
    assert_eq!(number(&client, "SELECT once.purge_jobs()").await, 1);
    assert_eq!(state(&client, buried).await, "buried", "buried ones wait for somebody");
}

#[tokio::test]
async fn somebody_decides_about_buried_jobs() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (first, second) = (enqueue(&client, "").await, enqueue(&client, "").await);
    for held in take(&client, 2).await {
        held.say(&client, "bury", ", 'no address'").await.unwrap();
    }
    let unsaid = text(&client, "SELECT id::text FROM once.retry_buried('q', 'me', ' ')", &[]).await;
    assert_eq!(unsaid, Err("P4013".into()));
    let sql = "SELECT id::text FROM once.retry_buried('q', 'me', 'the address is there', ARRAY[$1::bigint])";
    assert_eq!(text(&client, sql, &[&first]).await.unwrap(), first.to_string());
    let sql = "SELECT id::text FROM once.discard_buried('q', 'me', 'nobody wants it')";
    assert_eq!(text(&client, sql, &[]).await.unwrap(), second.to_string());
    let held = take(&client, 10).await;
    assert_eq!((ids(&held), held[0].attempts), (vec![first], 1));
    assert_eq!(state(&client, second).await, "gone");
    let audit =
        "SELECT count(*) FROM once.audit_trail WHERE action IN ('retry_buried', 'discard_buried') AND actor = 'me'";
    assert_eq!(number(&client, audit).await, 2);
}

#[tokio::test]
async fn tenants_are_apart() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let mine = enqueue(&client, ", p_tenant => 'a', p_key => 'k', p_unique_key => 'u'").await;
    let yours = enqueue(&client, ", p_tenant => 'b', p_key => 'k', p_unique_key => 'u'").await;
    assert_ne!(mine, yours);
    let sql = "SELECT id FROM once.take('q', p_limit => 10, p_tenant => 'b')";
    assert_eq!(number(&client, sql).await, yours);
    assert_eq!(ids(&take(&client, 10).await), [mine]);
}

/// With a snapshot of the whole transaction, two takes could not see each other.
#[tokio::test]
async fn taken_in_read_committed_only() {
    let db = TestDb::new().await;
    let client = db.client().await;
    enqueue(&client, "").await;
    for level in ["REPEATABLE READ", "SERIALIZABLE"] {
        client.batch_execute(&format!("BEGIN ISOLATION LEVEL {level}")).await.unwrap();
        assert_eq!(try_take(&client, 1).await, Err("P4064".into()));
        client.batch_execute("ROLLBACK").await.unwrap();
    }
    assert_eq!(take(&client, 1).await.len(), 1);
}
