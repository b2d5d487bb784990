//! Many writers at once.

use std::collections::HashMap;
use std::sync::Arc;

use pgonce_testkit::{TestDb, lock_waiters};
use tokio::sync::Barrier;
use tokio::task::JoinSet;
use tokio_postgres::Client;

use crate::book::{LEVELS, balance, book, code, is_sound, number, post, text, transfer};

const WRITERS: u64 = 32;
const EACH: u64 = 40;

/// What an operation books: a function of its number, so that every duplicate says the same.
fn entries(operation: u64) -> (Vec<String>, Vec<i64>) {
    let account = |n: u64| format!("a{}", n % 6);
    let amount = 1 + (operation * 37 % 1000) as i64;
    if operation.is_multiple_of(3) {
        // Two entries of one account among four, in no order.
        let first = account(operation);
        let accounts = vec![first.clone(), account(operation + 5), account(operation + 2), first];
        return (accounts, vec![amount, -3 * amount, amount, amount]);
    }
    (vec![account(operation), account(operation + 1 + operation % 5)], vec![amount, -amount])
}

/// The operations of a writer: its own, and in 3 of 10 places one that another writer has, too.
fn operations(writer: u64) -> Vec<u64> {
    (0..EACH).map(|n| if (n * 7 + writer) % 10 < 3 { 1_000_000 + n } else { writer * 1000 + n }).collect()
}

async fn post_one(client: &Client, level: &str, operation: u64) -> Result<String, String> {
    let (accounts, amounts) = entries(operation);
    let accounts: Vec<&str> = accounts.iter().map(String::as_str).collect();
    loop {
        client.batch_execute(&format!("BEGIN ISOLATION LEVEL {level}")).await.map_err(|error| code(&error))?;
        let posted = post(client, &operation.to_string(), &accounts, &amounts, &["EUR"]).await;
        let ended = match posted {
            Ok((kind, _)) => client.batch_execute("COMMIT").await.map(|()| kind).map_err(|error| code(&error)),
            Err(code) => Err(code),
        };
        match ended {
            Err(code) if code == "40001" && level != "READ COMMITTED" => {
                client.batch_execute("ROLLBACK").await.map_err(|error| crate::book::code(&error))?;
            }
            other => return other,
        }
    }
}

async fn storm(db: &TestDb, level: &'static str) -> HashMap<u64, u64> {
    let barrier = Arc::new(Barrier::new(WRITERS as usize));
    let mut tasks = JoinSet::new();
    for writer in 0..WRITERS {
        let (client, barrier) = (db.client().await, Arc::clone(&barrier));
        tasks.spawn(async move {
            barrier.wait().await;
            let mut made = Vec::new();
            for operation in operations(writer) {
                // A deadlock, or 40001 in READ COMMITTED, ends the test here.
                if post_one(&client, level, operation).await.unwrap() == "posted" {
                    made.push(operation);
                }
            }
            made
        });
    }
    let mut made = HashMap::new();
    for operation in tasks.join_all().await.into_iter().flatten() {
        *made.entry(operation).or_default() += 1;
    }
    made
}

/// The proof that was asked for: 32 writers, three of ten postings duplicates, few accounts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sums_are_equal_under_32_writers_with_30_percent_duplicates() {
    let db = book().await;
    let client = db.client().await;
    let made = storm(&db, "READ COMMITTED").await;
    let mut expected: HashMap<String, i64> = HashMap::new();
    let mut distinct: Vec<u64> = (0..WRITERS).flat_map(operations).collect();
    let all = distinct.len();
    let shared = distinct.iter().filter(|operation| **operation >= 1_000_000).count();
    assert_eq!(shared * 10, all * 3, "three of ten are shared");
    distinct.sort_unstable();
    distinct.dedup();
    for operation in &distinct {
        assert_eq!(made.get(operation), Some(&1), "operation {operation} was posted by one writer");
        let (accounts, amounts) = entries(*operation);
        for (account, amount) in accounts.into_iter().zip(amounts) {
            *expected.entry(account).or_default() += amount;
        }
    }
    assert_eq!(number(&client, "SELECT count(*) FROM once_ledger.posting").await, distinct.len() as i64);
    for (account, sum) in expected {
        assert_eq!(balance(&client, &account).await, sum, "{account}");
    }
    is_sound(&client).await;
}

/// The same operation by all of them, in every isolation level: one posts, the others are told so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_operation_by_many_is_posted_once() {
    let db = book().await;
    let client = db.client().await;
    for (place, level) in LEVELS.into_iter().enumerate() {
        let barrier = Arc::new(Barrier::new(WRITERS as usize));
        let mut tasks = JoinSet::new();
        for _ in 0..WRITERS {
            let (client, barrier) = (db.client().await, Arc::clone(&barrier));
            tasks.spawn(async move {
                barrier.wait().await;
                post_one(&client, level, 7_000_001 + place as u64).await.unwrap()
            });
        }
        let kinds = tasks.join_all().await;
        assert_eq!(kinds.iter().filter(|kind| *kind == "posted").count(), 1, "{level}: {kinds:?}");
        assert_eq!(kinds.iter().filter(|kind| *kind == "already").count(), WRITERS as usize - 1);
    }
    assert_eq!(number(&client, "SELECT count(*) FROM once_ledger.posting").await, 3);
    is_sound(&client).await;
}

/// A rival is waited for: then it is there already, or not at all.
#[tokio::test]
async fn a_rival_is_waited_for() {
    let db = book().await;
    let observer = db.client().await;
    for (end, kind) in [("COMMIT", "already"), ("ROLLBACK", "posted")] {
        let (first, second) = (db.client().await, db.client().await);
        first.batch_execute("BEGIN").await.unwrap();
        assert_eq!(transfer(&first, end, "a0", "a1", 5).await.unwrap(), "posted");
        let waiting = tokio::spawn(async move { transfer(&second, end, "a0", "a1", 5).await });
        lock_waiters(&observer, 1).await;
        first.batch_execute(end).await.unwrap();
        assert_eq!(waiting.await.unwrap().unwrap(), kind);
    }
    is_sound(&observer).await;
}

/// Two withdrawals, one of which fits: whoever waited is judged by what is left.
#[tokio::test]
async fn of_two_withdrawals_the_one_that_fits_happens() {
    let db = book().await;
    let observer = db.client().await;
    observer.batch_execute("SELECT once_ledger.open_account('purse', 'EUR', 0)").await.unwrap();
    transfer(&observer, "fill", "a0", "purse", 100).await.unwrap();
    for (end, second_is) in [("ROLLBACK", Ok("posted".to_owned())), ("COMMIT", Err("P4093".to_owned()))] {
        let (first, second) = (db.client().await, db.client().await);
        first.batch_execute("BEGIN").await.unwrap();
        transfer(&first, &format!("first {end}"), "purse", "a1", 60).await.unwrap();
        let operation = format!("second {end}");
        let waiting = tokio::spawn(async move { transfer(&second, &operation, "purse", "a2", 60).await });
        lock_waiters(&observer, 1).await;
        first.batch_execute(end).await.unwrap();
        assert_eq!(waiting.await.unwrap(), second_is, "{end}");
        if end == "ROLLBACK" {
            transfer(&observer, "fill again", "a0", "purse", 60).await.unwrap();
        }
    }
    assert_eq!(balance(&observer, "purse").await, 40);
    is_sound(&observer).await;
}

/// Two operations take the same posting back: one of them does.
#[tokio::test]
async fn a_posting_is_taken_back_by_one_of_two() {
    let db = book().await;
    let observer = db.client().await;
    transfer(&observer, "o", "a0", "a1", 5).await.unwrap();
    for (end, second_is) in [("ROLLBACK", Ok("posted".to_owned())), ("COMMIT", Err("P4095".to_owned()))] {
        let (first, second) = (db.client().await, db.client().await);
        if end == "COMMIT" {
            transfer(&observer, "p", "a0", "a1", 5).await.unwrap();
        }
        let of = if end == "COMMIT" { "p" } else { "o" };
        let sql = |by: &str| format!("SELECT kind FROM once_ledger.reverse('{end}', '{by}', 'test', '{of}')");
        first.batch_execute("BEGIN").await.unwrap();
        assert_eq!(text(&first, &sql("first")).await.unwrap(), "posted");
        let second_sql = sql("second");
        let waiting = tokio::spawn(async move { text(&second, &second_sql).await });
        lock_waiters(&observer, 1).await;
        first.batch_execute(end).await.unwrap();
        assert_eq!(waiting.await.unwrap(), second_is, "{end}");
    }
    assert_eq!(balance(&observer, "a0").await, 0);
    is_sound(&observer).await;
}

/// Writers whose connections are killed again and again, at whatever they are: what they had not committed is gone, what
/// they retry is there once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sums_are_equal_when_writers_are_killed() {
    const VICTIMS: u64 = 8;
    let db = Arc::new(book().await);
    let mut tasks = JoinSet::new();
    for writer in 0..VICTIMS {
        let db = Arc::clone(&db);
        tasks.spawn(async move {
            let mut client = db.client().await;
            client.batch_execute("SET application_name = 'victim'").await.unwrap();
            let mut lost = 0_u64;
            for operation in operations(writer) {
                while post_one(&client, "READ COMMITTED", operation).await.is_err() {
                    assert!(
                        client.is_closed() || client.batch_execute("SELECT 1").await.is_err(),
                        "killed, or nothing"
                    );
                    lost += 1;
                    client = db.client().await;
                    client.batch_execute("SET application_name = 'victim'").await.ok();
                }
            }
            lost
        });
    }
    let killer = db.client().await;
    let kill = "SELECT count(pg_terminate_backend(pid)) FROM (SELECT pid FROM pg_stat_activity
        WHERE datname = current_database() AND application_name = 'victim' AND state = 'active' ORDER BY random() LIMIT 1) v";
    let mut killed = 0;
    while killed < 20 && !tasks.is_empty() {
        killed += number(&killer, kill).await;
        while tasks.try_join_next().is_some() {}
    }
    while tasks.join_next().await.transpose().unwrap().is_some() {}
    assert!(killed > 0, "nobody was killed");
    let mut distinct: Vec<u64> = (0..VICTIMS).flat_map(operations).collect();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!(number(&killer, "SELECT count(*) FROM once_ledger.posting").await, distinct.len() as i64);
    is_sound(&killer).await;
}
