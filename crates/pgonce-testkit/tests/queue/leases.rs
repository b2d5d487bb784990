//! Plain jobs run without leaving their line: what a take writes, and how those are found whose worker is gone.

use std::time::Duration;

use pgonce_testkit::TestDb;

use tokio_postgres::Client;

use crate::desk::{Held, define, enqueue, enqueue_batch, finish_batch, ids, keyed, number, state, take};

/// As many as stay in their line when they are taken together.
const MANY: i32 = 100;

/// So many seconds after the beginning.
const fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

async fn enqueue_many(client: &Client) -> Vec<i64> {
    enqueue_batch(client, MANY).await
}

async fn finish_all(client: &Client, held: &[Held]) {
    finish_batch(client, held).await.unwrap();
}

/// The row's new version is on its page, and no index is written; where somebody has to count, one is.
#[tokio::test]
async fn a_take_of_plain_jobs_writes_no_index() {
    let db = TestDb::new().await;
    for (policy, limit, hot) in [("{}", MANY, 100), ("{}", MANY - 1, 0), (r#"{"running_max": 1000}"#, MANY, 0)] {
        let client = db.client().await; // its own counters
        define(&client, policy).await;
        enqueue_many(&client).await;
        client.batch_execute("BEGIN").await.unwrap();
        let held = take(&client, limit).await;
        assert_eq!(i32::try_from(held.len()), Ok(limit));
        let counted = "SELECT pg_stat_get_xact_tuples_hot_updated('once.job'::regclass)";
        assert_eq!(number(&client, counted).await, hot, "{policy}");
        client.batch_execute("COMMIT").await.unwrap();
        assert_eq!(state(&client, held[0].id).await, "running");
        finish_all(&client, &held).await;
    }
}

/// Of jobs that lie scattered, those that were taken come back, and nothing else is touched. What is over is forgotten.
#[tokio::test]
async fn whose_worker_is_gone_is_found_by_its_take() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let mut urgent = Vec::new();
    for _ in 0..MANY {
        enqueue(&client, "").await;
        urgent.push(enqueue(&client, ", p_priority => 1").await);
    }
    let held = take(&client, MANY).await;
    assert_eq!(ids(&held), urgent);
    held[0].finish(&client).await.unwrap();
    held[1].say(&client, "retry", ", 'e', '0'").await.unwrap();
    db.travel(at(31)).await;
    let again = take(&client, MANY).await;
    assert_eq!(ids(&again)[..99], urgent[1..]);
    assert!(again[..99].iter().all(|one| one.attempts == 2) && again[99].attempts == 1, "{again:?}");
    finish_all(&client, &again).await;
    db.travel(at(62)).await;
    assert_eq!(take(&client, 2 * MANY).await.len(), 99);
    assert_eq!(number(&client, "SELECT count(*) FROM once.job_take").await, 0);
}

/// What was put back and taken anew is its new take's: nobody else gets it, and the old take's end is none of its business.
#[tokio::test]
async fn a_lease_belongs_to_its_take() {
    let db = TestDb::new().await;
    let client = db.client().await;
    enqueue_many(&client).await;
    let (ids, claims): (Vec<_>, Vec<_>) = take(&client, MANY).await.iter().map(|one| (one.id, one.claim_id)).unzip();
    assert_eq!(take(&client, MANY).await, [], "each job once");
    client.execute("SELECT once.give_back($1, $2)", &[&ids, &claims]).await.unwrap();
    db.travel(at(20)).await;
    assert_eq!(take(&client, MANY).await.len(), 100);
    db.travel(at(31)).await;
    assert_eq!(take(&client, MANY).await, [], "they are held until fifty seconds after the beginning");
    db.travel(at(51)).await;
    assert_eq!(take(&client, MANY).await.len(), 100);
}

/// A job whose worker is at its finish when the lease ends: if that comes to nothing, the job does not sleep for ever.
#[tokio::test]
async fn a_lease_that_ends_under_a_lock_is_looked_at_again() {
    let db = TestDb::new().await;
    let (client, slow) = (db.client().await, db.client().await);
    let jobs = enqueue_many(&client).await;
    let held = take(&client, MANY).await;
    slow.batch_execute("BEGIN").await.unwrap();
    held[0].finish(&slow).await.unwrap();
    db.travel(at(31)).await;
    assert_eq!(ids(&take(&client, MANY).await), jobs[1..]);
    slow.batch_execute("ROLLBACK").await.unwrap();
    db.travel(at(33)).await;
    assert_eq!(ids(&take(&client, MANY).await), jobs[..1]);
}

/// A heartbeat moves a job out of the line that takes walk; from then on its own lease counts.
#[tokio::test]
async fn a_heartbeat_outlives_the_lease_of_the_take() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let jobs = enqueue_many(&client).await;
    let held = take(&client, MANY).await;
    db.travel(at(20)).await;
    held[0].say(&client, "heartbeat", "").await.unwrap();
    assert_eq!(number(&client, "SELECT count(*) FROM once.job WHERE state = 'running'").await, 1);
    db.travel(at(35)).await;
    let rescued = take(&client, MANY).await;
    assert_eq!(ids(&rescued), jobs[1..]);
    finish_all(&client, &rescued).await;
    db.travel(at(55)).await;
    assert_eq!(ids(&take(&client, MANY).await), jobs[..1]);
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
