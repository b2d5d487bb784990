//! Several groups in one call.

use std::sync::Arc;

use serde_json::{Value, json};
use tokio::sync::Barrier;
use tokio::task::JoinSet;
use tokio_postgres::Client;

use pgonce_testkit::lock_waiters;

use crate::book::{balance, book, code, is_sound, number, transfer};

fn group(operation: &str, from: &str, to: &str, amount: i64) -> Value {
    json!({"source": "test", "operation": operation, "entries": [
        {"account": to, "amount": amount, "currency": "EUR"}, {"account": from, "amount": -amount, "currency": "EUR"}]})
}

async fn post_batch(client: &Client, groups: Vec<Value>, open: bool) -> Result<Vec<(String, Vec<i64>)>, String> {
    let sql = "SELECT kind, balances FROM once_ledger.post_batch($1, $2) ORDER BY ordinal";
    let rows = client.query(sql, &[&Value::Array(groups), &open]).await.map_err(|error| code(&error))?;
    Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
}

#[tokio::test]
async fn a_batch_is_the_same_as_its_groups_and_all_or_none() {
    let db = book().await;
    let client = db.client().await;
    transfer(&client, "before", "a0", "a1", 5).await.unwrap();
    let groups = vec![
        group("z", "a0", "a1", 1),
        group("before", "a0", "a1", 5),
        group("y", "a1", "a2", 2),
        group("z", "a0", "a1", 1),
    ];
    let posted = post_batch(&client, groups.clone(), false).await.unwrap();
    let expected =
        [("posted", vec![-6, 6]), ("already", vec![-5, 5]), ("posted", vec![4, 2]), ("already", vec![-6, 6])];
    assert_eq!(posted, expected.map(|(kind, balances)| (kind.to_owned(), balances)));
    let again = post_batch(&client, groups, false).await.unwrap();
    assert!(again.iter().all(|(kind, _)| kind == "already"), "{again:?}");
    assert_eq!(transfer(&client, "z", "a0", "a1", 1).await.unwrap(), "already", "one door knows what the other posted");
    for (bad, expected) in [
        (group("z", "a0", "a1", 2), "P4094"),
        (group("n", "a0", "nobody", 2), "P4092"),
        (
            json!({"source": "test", "operation": "n", "entries": [{"account": "a0", "amount": 1.5, "currency": "EUR"}]}),
            "P4090",
        ),
        (json!({"source": "test", "operation": "n", "entries": 7}), "P4090"),
        (json!({"source": "test", "operation": "n"}), "P4090"),
        (json!(7), "P4090"),
    ] {
        let refused = post_batch(&client, vec![group("new", "a0", "a1", 1), bad.clone()], false).await;
        assert_eq!(refused.unwrap_err(), expected, "{bad}");
    }
    assert_eq!(number(&client, "SELECT count(*) FROM once_ledger.posting").await, 3);
    assert_eq!(post_batch(&client, vec![group("new", "n1", "n2", 3)], true).await.unwrap()[0].0, "posted");
    assert_eq!(balance(&client, "n2").await, 3);
    assert_eq!(post_batch(&client, vec![], false).await.unwrap(), []);
    is_sound(&client).await;
}

/// Batches whose groups and accounts come in every order, with the same operations among them: no deadlock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_in_any_order_do_not_deadlock() {
    const WRITERS: usize = 8;
    const ROUNDS: usize = 25;
    let db = book().await;
    let barrier = Arc::new(Barrier::new(WRITERS));
    let mut tasks = JoinSet::new();
    for writer in 0..WRITERS {
        let (client, barrier) = (db.client().await, Arc::clone(&barrier));
        tasks.spawn(async move {
            barrier.wait().await;
            for round in 0..ROUNDS {
                let mut groups: Vec<Value> = (0..6)
                    .map(|n| {
                        let (from, to) = (format!("a{n}"), format!("new{}", (n + round) % 4));
                        group(&format!("{round}-{n}"), &from, &to, 1)
                    })
                    .collect();
                if writer % 2 == 1 {
                    groups.reverse();
                }
                groups.rotate_left(writer % 6);
                if writer == 0 {
                    // A single one of them, beside the batches.
                    let (from, to) = ("a3".to_owned(), format!("new{}", (3 + round) % 4));
                    let _ = transfer(&client, &format!("{round}-3"), &from, &to, 1).await;
                }
                post_batch(&client, groups, true).await.unwrap();
            }
        });
    }
    tasks.join_all().await;
    let client = db.client().await;
    assert_eq!(number(&client, "SELECT count(*) FROM once_ledger.posting").await, 6 * ROUNDS as i64);
    is_sound(&client).await;
}

/// Groups are written in the order of their names: one batch waits in the middle of its own, the other for the first.
#[tokio::test]
async fn groups_are_written_in_one_order() {
    let db = book().await;
    let (holder, first, second, observer) =
        (db.client().await, db.client().await, db.client().await, db.client().await);
    holder.batch_execute("BEGIN").await.unwrap();
    transfer(&holder, "m", "a0", "a1", 1).await.unwrap();
    let groups = |names: &[&str]| names.iter().map(|name| group(name, "a2", "a3", 1)).collect::<Vec<_>>();
    let (of_first, of_second) = (groups(&["z", "m", "a"]), groups(&["a", "z"]));
    let first = tokio::spawn(async move { post_batch(&first, of_first, false).await });
    lock_waiters(&observer, 1).await;
    let second = tokio::spawn(async move { post_batch(&second, of_second, false).await });
    lock_waiters(&observer, 2).await;
    holder.batch_execute("ROLLBACK").await.unwrap();
    assert_eq!(first.await.unwrap().unwrap().len(), 3);
    assert!(second.await.unwrap().unwrap().iter().all(|(kind, _)| kind == "already"));
    is_sound(&observer).await;
}

/// Accounts are locked before any of them moves, in the order of their names: a batch that waits for one of its accounts
/// holds none that comes later.
#[tokio::test]
async fn accounts_are_locked_in_one_order() {
    let db = book().await;
    let (holder, first, second, observer) =
        (db.client().await, db.client().await, db.client().await, db.client().await);
    holder.batch_execute("BEGIN").await.unwrap();
    transfer(&holder, "held", "a0", "a3", 1).await.unwrap();
    let of_first = vec![group("1", "a4", "a5", 1), group("2", "a0", "a5", 1), group("3", "a2", "a5", 1)];
    let first = tokio::spawn(async move { post_batch(&first, of_first, false).await });
    lock_waiters(&observer, 1).await;
    // Were it in the way, this would never be had: the holder ends after it.
    second.batch_execute("SET lock_timeout = '20s'").await.unwrap();
    let of_second = vec![group("4", "a2", "a1", 1), group("5", "a4", "a1", 1)];
    assert_eq!(post_batch(&second, of_second, false).await.unwrap().len(), 2);
    holder.batch_execute("COMMIT").await.unwrap();
    assert_eq!(first.await.unwrap().unwrap().len(), 3);
    is_sound(&observer).await;
}
