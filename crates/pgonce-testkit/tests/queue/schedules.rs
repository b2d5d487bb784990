//! Schedules: each time once, whoever fires.

use std::sync::Arc;

use pgonce_testkit::TestDb;
use tokio::sync::Barrier;

use crate::desk::{define, number, text};

async fn defined(client: &tokio_postgres::Client, cron: &str, options: &str) -> String {
    let sql = "SELECT once.define_schedule('s', 'q', $1, '{\"n\": 1}', 'Europe/Berlin', $2::text::jsonb)::text";
    text(client, sql, &[&cron, &options]).await.map_or_else(|code| code, |_| "defined".into())
}

/// Eight instances, twenty times each: every time makes one job.
#[tokio::test]
async fn each_time_is_fired_once() {
    let db = TestDb::new().await;
    let client = db.client().await;
    define(&client, "{}").await;
    defined(&client, "* * * * *", "{}").await;
    let first = "SELECT once.fire_schedule('s', 1, NULL, once.clock() - interval '1 hour')::text";
    assert_eq!(text(&client, first, &[]).await.unwrap(), "NULL", "the first time is only computed");
    let barrier = Arc::new(Barrier::new(8));
    let mut tasks = Vec::new();
    for _ in 0..8 {
        let (client, barrier) = (db.client().await, Arc::clone(&barrier));
        tasks.push(tokio::spawn(async move {
            let mut fired = 0;
            for _ in 0..20 {
                barrier.wait().await;
                let due = "SELECT next_at FROM once.due_schedules()";
                let next: std::time::SystemTime = client.query_one(due, &[]).await.unwrap().get(0);
                barrier.wait().await;
                let sql = "SELECT once.fire_schedule('s', 1, $1::timestamptz, $1::timestamptz + interval '1 minute')";
                let job: Option<i64> = client.query_one(sql, &[&next]).await.unwrap().get(0);
                fired += u32::from(job.is_some());
            }
            fired
        }));
    }
    let mut fired = 0;
    for task in tasks {
        fired += task.await.unwrap();
    }
    assert_eq!(fired, 20);
    assert_eq!(number(&client, "SELECT count(*) FROM once.jobs").await, 20);
    let told = "SELECT (last_job = (SELECT max(id) FROM once.jobs))::text FROM once.schedules";
    assert_eq!(text(&client, told, &[]).await.unwrap(), "true");
}

/// Its job and its next time commit together, or neither.
#[tokio::test]
async fn a_fire_that_rolls_back_is_fired_again() {
    let db = TestDb::new().await;
    let client = db.client().await;
    defined(&client, "* * * * *", "{}").await;
    client.execute("SELECT once.fire_schedule('s', 1, NULL, once.clock() - interval '1 hour')", &[]).await.unwrap();
    let fire = "SELECT once.fire_schedule('s', 1, next_at, once.clock() + interval '1 hour') IS NOT NULL FROM once.due_schedules()";
    client.batch_execute(&format!("BEGIN; {fire}; ROLLBACK")).await.unwrap();
    assert_eq!(number(&client, "SELECT count(*) FROM once.jobs").await, 0);
    client.execute(fire, &[]).await.unwrap();
    assert_eq!(number(&client, "SELECT count(*) FROM once.jobs").await, 1);
    assert_eq!(number(&client, "SELECT count(*) FROM once.due_schedules()").await, 0);
}

/// A worker that computed by an older rule, or too early, does not fire.
#[tokio::test]
async fn older_rules_and_early_times_do_not_fire() {
    let db = TestDb::new().await;
    let client = db.client().await;
    defined(&client, "* * * * *", "{}").await;
    client.execute("SELECT once.fire_schedule('s', 1, NULL, once.clock() + interval '1 hour')", &[]).await.unwrap();
    let early = "SELECT once.fire_schedule('s', 1, next_at, next_at + interval '1 hour')::text FROM once.schedules";
    assert_eq!(text(&client, early, &[]).await.unwrap(), "NULL");
    defined(&client, "* * * * *", "{}").await;
    assert_eq!(number(&client, "SELECT revision::bigint FROM once.schedule").await, 1, "the same rule changes nothing");
    defined(&client, "0 * * * *", r#"{"missed": "skip", "key": "k", "attempts_max": 3}"#).await;
    assert_eq!(number(&client, "SELECT count(*) FROM once.due_schedules()").await, 1, "its next time is computed anew");
    let stale = "SELECT once.fire_schedule('s', 1, NULL, once.clock() - interval '1 hour')::text";
    text(&client, stale, &[]).await.unwrap();
    assert_eq!(number(&client, "SELECT count(*) FROM once.schedules WHERE next_at IS NULL").await, 1);
    client.execute("SELECT once.fire_schedule('s', 2, NULL, once.clock() - interval '1 hour')", &[]).await.unwrap();
    defined(&client, "0 * * * *", r#"{"paused": true}"#).await;
    assert_eq!(number(&client, "SELECT count(*) FROM once.due_schedules()").await, 0);
    assert_eq!(number(&client, "SELECT count(*) FROM once.jobs").await, 0);
    assert_eq!(text(&client, "SELECT once.drop_schedule('s')::text", &[]).await.unwrap(), "true");
}

#[tokio::test]
async fn what_is_no_schedule_is_refused() {
    let db = TestDb::new().await;
    let client = db.client().await;
    for (cron, options) in
        [("* * *", "{}"), ("* * * * *", r#"{"often": 1}"#), ("* * * * *", "[]"), ("* * * * *", r#"{"missed": "all"}"#)]
    {
        assert_eq!(defined(&client, cron, options).await, "P4020", "{cron} {options}");
    }
    let sql = "SELECT once.define_schedule('s', 'q', '* * * * *', '{}', 'Mars/Olympus')::text";
    assert_eq!(text(&client, sql, &[]).await, Err("P4020".into()));
}
