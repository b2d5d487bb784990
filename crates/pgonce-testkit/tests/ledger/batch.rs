//! Several groups in one call.

use std::sync::Arc;

use serde_json::{Value, json};
use tokio::sync::Barrier;
use tokio::task::JoinSet;
use tokio_postgres::Client;

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
