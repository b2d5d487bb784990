//! Plain jobs run without leaving their line: what a take writes, and how those are found whose worker is gone.

use std::time::Duration;

use pgonce_testkit::TestDb;

use crate::desk::{define, enqueue, ids, keyed, number, state, take};

/// So many seconds after the beginning.
const fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// The row's new version is on its page, and no index is written; where somebody has to count, one is.
#[tokio::test]
async fn a_take_of_plain_jobs_writes_no_index() {
    let db = TestDb::new().await;
    for (policy, hot) in [("{}", 100), (r#"{"running_max": 1000}"#, 0)] {
        let client = db.client().await; // its own counters
        define(&client, policy).await;
        client.execute("SELECT once.enqueue_batch('q', array_fill('{}'::jsonb, ARRAY[100]))", &[]).await.unwrap();
        client.batch_execute("BEGIN").await.unwrap();
        let held = take(&client, 100).await;
        assert_eq!(held.len(), 100);
        let counted = "SELECT pg_stat_get_xact_tuples_hot_updated('once.job'::regclass)";
        assert_eq!(number(&client, counted).await, hot, "{policy}");
        client.batch_execute("COMMIT").await.unwrap();
        for one in held {
            assert_eq!(state(&client, one.id).await, "running");
            one.finish(&client).await.unwrap();
        }
    }
}

/// Of jobs that lie scattered, those that were taken come back, and nothing else is touched. What is over is forgotten.
#[tokio::test]
async fn whose_worker_is_gone_is_found_by_its_take() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let mut urgent = Vec::new();
    for _ in 0..10 {
        enqueue(&client, "").await;
        urgent.push(enqueue(&client, ", p_priority => 1").await);
    }
    let held = take(&client, 10).await;
    assert_eq!(ids(&held), urgent);
    held[0].finish(&client).await.unwrap();
    held[1].say(&client, "retry", ", 'e', '0'").await.unwrap();
    db.travel(at(31)).await;
    let again = take(&client, 10).await;
    assert_eq!(ids(&again)[..9], urgent[1..]);
    assert!(again[..9].iter().skip(1).all(|one| one.attempts == 2), "{again:?}");
    for one in &again {
        one.finish(&client).await.unwrap();
    }
    db.travel(at(62)).await;
    assert_eq!(take(&client, 100).await.len(), 9);
    assert_eq!(number(&client, "SELECT count(*) FROM once.job_take").await, 1, "the last one");
}

/// A job whose worker is at its finish when the lease ends: if that comes to nothing, the job does not sleep for ever.
#[tokio::test]
async fn a_lease_that_ends_under_a_lock_is_looked_at_again() {
    let db = TestDb::new().await;
    let (client, slow) = (db.client().await, db.client().await);
    let (first, second) = (enqueue(&client, "").await, enqueue(&client, "").await);
    let held = take(&client, 2).await;
    slow.batch_execute("BEGIN").await.unwrap();
    held[0].finish(&slow).await.unwrap();
    db.travel(at(31)).await;
    assert_eq!(ids(&take(&client, 10).await), [second]);
    slow.batch_execute("ROLLBACK").await.unwrap();
    db.travel(at(33)).await;
    assert_eq!(ids(&take(&client, 10).await), [first]);
}

/// A heartbeat moves a job out of the line that takes walk; from then on its own lease counts.
#[tokio::test]
async fn a_heartbeat_outlives_the_lease_of_the_take() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (long, short) = (enqueue(&client, "").await, enqueue(&client, "").await);
    let held = take(&client, 2).await;
    db.travel(at(20)).await;
    held[0].say(&client, "heartbeat", "").await.unwrap();
    assert_eq!(number(&client, "SELECT count(*) FROM once.job WHERE state = 'running'").await, 1);
    db.travel(at(35)).await;
    let rescued = take(&client, 10).await;
    assert_eq!(ids(&rescued), [short]);
    rescued[0].finish(&client).await.unwrap();
    db.travel(at(55)).await;
    assert_eq!(ids(&take(&client, 10).await), [long]);
}

/// A job of a key is always counted: were it in its line still, the next of its key could be taken beside it.
#[tokio::test]
async fn a_job_of_a_key_leaves_its_line() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (first, _) = (keyed(&client, "k").await, keyed(&client, "k").await);
    assert_eq!(ids(&take(&client, 10).await), [first]);
    assert_eq!(number(&client, "SELECT count(*) FROM once.job WHERE state = 'running'").await, 1);
    let error = client.execute("UPDATE once.job SET state = 'ready', rescue_at = NULL WHERE id = $1", &[&first]).await;
    assert_eq!(error.unwrap_err().as_db_error().unwrap().constraint(), Some("job_shape"));
}
