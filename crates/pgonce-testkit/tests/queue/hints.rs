//! Where takes begin to look: past what is gone, and never past what is there.

use pgonce_testkit::TestDb;
use serde_json::Value;
use tokio_postgres::Client;

use crate::desk::{enqueue, ids, number, stand, take};

/// Pages that a take touched.
async fn pages(client: &Client, limit: i32) -> i64 {
    let sql = format!("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT * FROM once.take('q', 'w', {limit})");
    let plan: Value = client.query_one(&sql, &[]).await.unwrap().get(0);
    let plan = &plan[0]["Plan"];
    plan["Shared Hit Blocks"].as_i64().unwrap() + plan["Shared Read Blocks"].as_i64().unwrap()
}

/// Works off so many jobs, in batches.
async fn work_off(client: &Client, jobs: i32) {
    for _ in 0..jobs / 1000 {
        let sql = "SELECT once.enqueue_batch('q', array_fill('{}'::jsonb, ARRAY[1000]))";
        client.execute(sql, &[]).await.unwrap();
        let sql = "SELECT once.finish_batch(array_agg(id), array_agg(claim_id)) FROM once.take('q', 'w', 1000)";
        client.execute(sql, &[]).await.unwrap();
    }
    assert_eq!(number(client, "SELECT count(*) FROM once.jobs").await, 0);
}

/// An open transaction keeps every index entry of every job that is gone. Takes do not walk over them: not for jobs that are
/// ready, not for leases that are over, not for jobs that are due.
#[tokio::test]
async fn takes_stay_flat_while_a_transaction_is_open() {
    let db = TestDb::new().await;
    let (client, idle) = (db.client().await, db.client().await);
    stand(&db, 0).await;
    idle.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1 FROM once.jobs").await.unwrap();
    let measure = async || {
        for _ in 0..20 {
            enqueue(&client, "").await;
        }
        let full = pages(&client, 10).await;
        let short = pages(&client, 100).await;
        let empty = pages(&client, 10).await;
        let sql = "SELECT once.finish_batch(array_agg(id), array_agg(claim_id)) FROM once.jobs";
        client.execute(sql, &[]).await.unwrap();
        (full, short, empty)
    };
    take(&client, 1).await;
    let before = measure().await;
    work_off(&client, 30_000).await;
    // The leases of all of them would be over by now.
    stand(&db, 40).await;
    take(&client, 1).await; // looks from the beginning, and moves the hints
    let after = measure().await;
    assert!(number(&client, "SELECT max(low) FROM once.queue_hint").await > 25_000);
    for (before, after) in [(before.0, after.0), (before.1, after.1), (before.2, after.2)] {
        // The room that is left for late commits is walked, two thousand entries, where thirty thousand are dead.
        assert!(after < before + 300, "a take touched {before} pages before and {after} after");
    }
    idle.batch_execute("COMMIT").await.unwrap();
}

/// A transaction that enqueued long ago commits now: its job's place is before the hint.
#[tokio::test]
async fn who_commits_late_is_found() {
    let db = TestDb::new().await;
    let (client, late) = (db.client().await, db.client().await);
    stand(&db, 0).await;
    enqueue(&client, "").await;
    late.batch_execute("BEGIN").await.unwrap();
    let id = enqueue(&late, "").await;
    take(&client, 1).await[0].finish(&client).await.unwrap();
    work_off(&client, 6000).await;
    stand(&db, 10).await;
    assert_eq!(take(&client, 1).await, []);
    assert!(number(&client, "SELECT max(low) FROM once.queue_hint").await > id, "the hint is past it");
    late.batch_execute("COMMIT").await.unwrap();
    // The next look from the beginning is a second later, or where looks take long, up to a minute.
    stand(&db, 80).await;
    assert_eq!(ids(&take(&client, 1).await), [id]);
}

/// The same for a job whose time came, and for a lease that was over, before the marks: their transactions committed late.
#[tokio::test]
async fn late_delays_and_leases_are_found() {
    let db = TestDb::new().await;
    let (client, late, taker) = (db.client().await, db.client().await, db.client().await);
    stand(&db, 0).await;
    let stuck = enqueue(&client, "").await;
    taker.batch_execute("BEGIN").await.unwrap();
    assert_eq!(ids(&take(&taker, 1).await), [stuck]);
    late.batch_execute("BEGIN").await.unwrap();
    let delayed = enqueue(&late, ", p_available_at => once.clock() + interval '10 seconds'").await;
    taker.batch_execute("COMMIT").await.unwrap();
    late.batch_execute("COMMIT").await.unwrap();
    let marks = "UPDATE once.queue_mark SET due_low = once.clock() + interval '1 hour', lease_low = once.clock() + interval '1 hour'";
    client.batch_execute(marks).await.unwrap();
    stand(&db, 120).await;
    let mut found = ids(&take(&client, 10).await);
    found.sort_unstable();
    assert_eq!(found, [stuck, delayed]);
}

/// Jobs of many priorities, more than have hints.
#[tokio::test]
async fn every_priority_is_found() {
    let db = TestDb::new().await;
    let client = db.client().await;
    for seconds in 0..3 {
        stand(&db, seconds * 100).await;
        let mut made = Vec::new();
        for priority in [i32::MAX, 50, 7, 0, -1, i32::MIN].into_iter().chain(1000..1050) {
            made.push((priority, enqueue(&client, &format!(", p_priority => {priority}")).await));
        }
        made.sort_by_key(|(priority, id)| (std::cmp::Reverse(*priority), *id));
        let mut taken = Vec::new();
        loop {
            let held = take(&client, 7).await;
            if held.is_empty() {
                break;
            }
            for one in &held {
                one.finish(&client).await.unwrap();
            }
            taken.extend(ids(&held));
        }
        assert_eq!(taken, made.into_iter().map(|(_, id)| id).collect::<Vec<_>>());
    }
}
