//! Limits of running jobs, a queue and a key, are never exceeded, whoever takes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use pgonce_testkit::TestDb;

use crate::desk::{define, enqueue, ids, keyed, number, soon, take, try_take};

#[tokio::test]
async fn a_full_queue_hands_out_nothing() {
    let db = TestDb::new().await;
    let client = db.client().await;
    define(&client, r#"{"running_max": 2}"#).await;
    for _ in 0..5 {
        enqueue(&client, "").await;
    }
    let held = take(&client, 10).await;
    assert_eq!(held.len(), 2);
    assert_eq!(take(&client, 10).await, []);
    held[0].finish(&client).await.unwrap();
    assert_eq!(ids(&take(&client, 10).await).len(), 1);
}

/// What a take that has not committed hands out counts.
#[tokio::test]
async fn two_takes_at_once_share_the_limit() {
    let db = TestDb::new().await;
    let (client, other) = (db.client().await, db.client().await);
    define(&client, r#"{"running_max": 2}"#).await;
    for _ in 0..5 {
        enqueue(&client, "").await;
    }
    other.batch_execute("BEGIN").await.unwrap();
    assert_eq!(take(&other, 2).await.len(), 2);
    client.batch_execute("SET statement_timeout = '20s'").await.unwrap();
    assert_eq!(take(&client, 2).await, [], "not waited for, and not exceeded");
    other.batch_execute("COMMIT").await.unwrap();
    assert_eq!(take(&client, 2).await, []);
}

/// Eight take and finish at once, and somebody counts all the while.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_hold_under_load() {
    let db = TestDb::new().await;
    let client = db.client().await;
    define(&client, r#"{"running_max": 5, "key_running_max": 2}"#).await;
    for job in 0..200 {
        keyed(&client, &format!("k{}", job % 4)).await;
    }
    let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let mut tasks = Vec::new();
    for worker in 0..8 {
        let (client, stop, done) = (db.client().await, Arc::clone(&stop), Arc::clone(&done));
        tasks.push(tokio::spawn(async move {
            while !stop.load(Ordering::Relaxed) {
                for held in try_take(&client, 1 + worker % 3).await.unwrap() {
                    held.finish(&client).await.unwrap();
                    done.fetch_add(1, Ordering::Relaxed);
                }
            }
        }));
    }
    let sql = "SELECT count(*) > 5 OR coalesce(max(of_key), 0) > 2 FROM (
                   SELECT count(*) OVER (PARTITION BY key) AS of_key FROM once.jobs WHERE state = 'running') r";
    soon("all are done", async || {
        let exceeded: bool = client.query_one(sql, &[]).await.unwrap().get(0);
        assert!(!exceeded, "a limit was exceeded");
        done.load(Ordering::Relaxed) == 200
    })
    .await;
    stop.store(true, Ordering::Relaxed);
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(number(&client, "SELECT count(*) FROM once.jobs").await, 0);
}
