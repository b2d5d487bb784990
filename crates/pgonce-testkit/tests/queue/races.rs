//! Everything at once: no deadlock, nobody asleep, order kept, each job once.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use pgonce_testkit::TestDb;
use rand::{RngExt as _, SeedableRng as _};
use tokio_postgres::Client;

use crate::desk::{Held, define, enqueue, number, try_take};

const JOBS: i64 = 240;

/// What was seen of a key's jobs, by a table that the takes write to, in their own transactions.
const LOG: &str =
    "CREATE TABLE public.took (seq bigserial, key text, job bigint); CREATE TABLE public.did (job bigint)";

async fn take_and_log(client: &Client, limit: i32) -> Vec<Held> {
    client.batch_execute("BEGIN").await.unwrap();
    let held = try_take(client, limit).await.unwrap();
    for one in &held {
        client.execute("INSERT INTO public.took (key, job) VALUES ($1, $2)", &[&one.key, &one.id]).await.unwrap();
    }
    client.batch_execute("COMMIT").await.unwrap();
    held
}

/// Ends what it holds in one of all ways, in one of all isolation levels. False: a serialization failure, to be repeated.
async fn end(client: &Client, held: &[Held], way: u32, level: &str) -> bool {
    let (ids, claims): (Vec<_>, Vec<_>) = held.iter().map(|one| (one.id, one.claim_id)).unzip();
    let sql = match way {
        0..=11 => "SELECT once.finish_batch($1, $2)",
        12..=13 => "SELECT once.retry_batch($1, $2, NULL, array_fill(interval '0', ARRAY[cardinality($1::bigint[])]))",
        14..=15 => {
            "SELECT once.retry_batch($1, $2, NULL, array_fill(interval '3 milliseconds', ARRAY[cardinality($1::bigint[])]))"
        }
        16 => "SELECT once.give_back($1, $2)",
        17 => "SELECT count(*) FROM once.heartbeat_batch($1, $2)",
        _ => "SELECT once.bury_batch($1, $2)",
    };
    client.batch_execute(&format!("BEGIN ISOLATION LEVEL {level}")).await.unwrap();
    let ended = async {
        if way <= 11 {
            client.execute("INSERT INTO public.did SELECT unnest($1::bigint[])", &[&ids]).await?;
        }
        client.execute(sql, &[&ids, &claims]).await?;
        client.batch_execute("COMMIT").await
    };
    match ended.await {
        Ok(()) => way != 17,
        Err(error) => {
            assert_eq!(error.code().map(|code| code.code()), Some("40001"), "{error:?}");
            client.batch_execute("ROLLBACK").await.unwrap();
            false
        }
    }
}

/// Takes some, and ends them in all ways, until all have ended.
async fn work(client: Client, added: Arc<AtomicUsize>, seed: u64) {
    const LEVELS: [&str; 4] = ["READ COMMITTED", "READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"];
    let deadline = Instant::now() + Duration::from_secs(120);
    let mut random = rand::rngs::StdRng::seed_from_u64(seed);
    loop {
        let held = take_and_log(&client, random.random_range(1..6)).await;
        let (first, second) = held.split_at(held.len() / 2);
        for part in [first, second] {
            while !part.is_empty() {
                let (way, level) = (random.random_range(0..20), LEVELS[random.random_range(0..4)]);
                if end(&client, part, way, level).await {
                    break;
                }
            }
        }
        let all = i64::try_from(added.load(Ordering::Relaxed)).unwrap() == JOBS;
        if held.is_empty() && all && number(&client, "SELECT count(*) FROM once.jobs").await == 0 {
            return;
        }
        assert!(Instant::now() < deadline, "a job sleeps");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn everything_at_once() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client.batch_execute(LOG).await.unwrap();
    define(&client, r#"{"attempts_max": 100000}"#).await;
    let added = Arc::new(AtomicUsize::new(0));
    let mut tasks = Vec::new();
    for seed in 0..2_u64 {
        let (client, added) = (db.client().await, Arc::clone(&added));
        tasks.push(tokio::spawn(async move {
            for job in 0..JOBS / 2 {
                // One that enqueues for a key at a time: ids are in the order of commits.
                let key = seed * 2 + u64::try_from(job % 2).unwrap();
                enqueue(&client, &format!(", p_key => 'k{key}', p_priority => {}", job % 3)).await;
                added.fetch_add(1, Ordering::Relaxed);
            }
        }));
    }
    for seed in 0..7_u64 {
        let client = db.client().await;
        tasks.push(tokio::spawn(work(client, Arc::clone(&added), seed)));
    }
    for task in tasks {
        task.await.unwrap();
    }
    let ended =
        number(&client, "SELECT (SELECT count(*) FROM public.did) + (SELECT count(*) FROM once.jobs_buried)").await;
    assert_eq!(ended, JOBS, "each job has one end");
    assert_eq!(
        number(&client, "SELECT count(DISTINCT job) FROM public.did").await,
        number(&client, "SELECT count(*) FROM public.did").await
    );
    let mut last: HashMap<String, i64> = HashMap::new();
    for row in client.query("SELECT key, job FROM public.took ORDER BY seq", &[]).await.unwrap() {
        let (key, job): (String, i64) = (row.get(0), row.get(1));
        let before = last.insert(key, job).unwrap_or_default();
        assert!(before <= job, "a key's jobs are taken in their order: {job} after {before}");
    }
}
