//! Unique jobs: one of a key while it waits, while it lives, or for a window.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use pgonce_testkit::{TestDb, lock_waiters};
use tokio::sync::Barrier;

use crate::desk::{code, define, enqueue, ids, number, take, take_soon, text};

/// Twenty at once, in each scope: one job, and everybody gets its id.
#[tokio::test]
async fn of_twenty_at_once_one_is_added() {
    let db = TestDb::new().await;
    let client = db.client().await;
    define(&client, "{}").await;
    for scope in ["waiting", "alive", "window"] {
        let barrier = Arc::new(Barrier::new(20));
        let mut tasks = Vec::new();
        for _ in 0..20 {
            let (client, barrier) = (db.client().await, Arc::clone(&barrier));
            tasks.push(tokio::spawn(async move {
                barrier.wait().await;
                enqueue(&client, &format!(", p_unique_key => '{scope}', p_unique_scope => '{scope}'")).await
            }));
        }
        let mut made = BTreeSet::new();
        for task in tasks {
            made.insert(task.await.unwrap());
        }
        assert_eq!(made.len(), 1, "{scope}");
        assert_eq!(ids(&take(&client, 100).await), made.into_iter().collect::<Vec<_>>(), "{scope}");
    }
}

#[tokio::test]
async fn each_scope_ends_where_it_says() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let again = async |scope: &str| {
        enqueue(&client, &format!(", p_unique_key => '{scope}', p_unique_scope => '{scope}'")).await
    };
    // Waiting: until it is taken.
    let first = again("waiting").await;
    assert_eq!(again("waiting").await, first);
    let held = take(&client, 1).await.remove(0);
    let second = again("waiting").await;
    assert_ne!(second, first);
    // It is to be tried again: the key is the second's now.
    held.say(&client, "retry", ", 'x', '0'").await.unwrap();
    assert_eq!(again("waiting").await, second);
    for held in take(&client, 10).await {
        held.finish(&client).await.unwrap();
    }
    // Alive: until it has ended, whichever way.
    for end in ["finish", "bury", "cancel"] {
        let first = again("alive").await;
        let held = take(&client, 1).await.remove(0);
        assert_eq!(again("alive").await, first, "{end}");
        held.say(&client, "retry", ", 'x', '0'").await.unwrap();
        assert_eq!(again("alive").await, first, "{end}");
        if end == "cancel" {
            text(&client, "SELECT once.cancel_job($1)", &[&first]).await.unwrap();
        } else {
            take(&client, 1).await[0].say(&client, end, "").await.unwrap();
        }
        let second = again("alive").await;
        assert_ne!(second, first, "{end}");
        take(&client, 1).await[0].finish(&client).await.unwrap();
    }
    // Window: for so long, ended or not.
    let first = again("window").await;
    take(&client, 1).await[0].finish(&client).await.unwrap();
    assert_eq!(again("window").await, first);
    db.travel(Duration::from_secs(3601)).await;
    let second = again("window").await;
    assert_ne!(second, first);
    assert_eq!(again("window").await, second);
    db.travel(Duration::from_secs(7300)).await;
    assert_eq!(number(&client, "SELECT once.purge_jobs()").await, 1);
    assert_eq!(number(&client, "SELECT count(*) FROM once.job_unique").await, 0);
}

/// Whether an uncommitted rival's job exists is not known: it is waited for.
#[tokio::test]
async fn a_rival_that_rolls_back_leaves_the_key() {
    let db = TestDb::new().await;
    let (client, rival, observer) = (db.client().await, db.client().await, db.client().await);
    define(&client, "{}").await;
    rival.batch_execute("BEGIN").await.unwrap();
    let lost = enqueue(&rival, ", p_unique_key => 'u'").await;
    let waiting = tokio::spawn(async move { enqueue(&client, ", p_unique_key => 'u'").await });
    lock_waiters(&observer, 1).await;
    rival.batch_execute("ROLLBACK").await.unwrap();
    let made = waiting.await.unwrap();
    assert_ne!(made, lost);
    assert_eq!(ids(&take(&observer, 10).await), [made]);
}

/// Who got the id of a job that waits may count on it: it does not run before that transaction has committed, and so
/// sees what it wrote.
#[tokio::test]
async fn a_waiting_job_does_not_start_before_who_counts_on_it() {
    let db = TestDb::new().await;
    let (client, late) = (db.client().await, db.client().await);
    let waiting = ", p_unique_key => 'u', p_unique_scope => 'waiting'";
    let id = enqueue(&client, waiting).await;
    late.batch_execute("BEGIN").await.unwrap();
    assert_eq!(enqueue(&late, waiting).await, id);
    client.batch_execute("SET statement_timeout = '20s'").await.unwrap();
    assert_eq!(take(&client, 10).await, [], "not waited for, and not taken");
    late.batch_execute("COMMIT").await.unwrap();
    assert_eq!(ids(&take_soon(&client, 10).await), [id]);
    assert_ne!(enqueue(&late, waiting).await, id);
}

/// Batches with the same unique keys, each in an order of its own: some wait, none is a victim.
#[tokio::test]
async fn batches_of_the_same_keys_do_not_deadlock() {
    let db = TestDb::new().await;
    define(&db.client().await, "{}").await;
    let barrier = Arc::new(Barrier::new(8));
    let mut tasks = Vec::new();
    for worker in 0..8_usize {
        let (client, barrier) = (db.client().await, Arc::clone(&barrier));
        tasks.push(tokio::spawn(async move {
            let sql = "SELECT once.enqueue_batch('q', array_fill('{}'::jsonb, ARRAY[40]), p_unique_keys => $1)";
            for round in 0..15_usize {
                let mut keys: Vec<String> = (0..40).map(|key| format!("{round} {key}")).collect();
                keys.rotate_left(worker * 5);
                if worker % 2 == 0 {
                    keys.reverse();
                }
                // Bounded: where one of them has failed, the others must not wait for it for ever.
                tokio::time::timeout(Duration::from_secs(60), barrier.wait()).await.unwrap();
                client.execute(sql, &[&keys]).await.map_err(|error| code(&error)).unwrap();
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    let client = db.client().await;
    assert_eq!(number(&client, "SELECT count(*) FROM once.jobs").await, 600);
    assert_eq!(number(&client, "SELECT count(*) FROM once.job_unique").await, 600);
}
