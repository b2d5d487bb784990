//! Hundreds of messages in one statement: a verdict each, no neighbour harmed, no deadlock.

use std::sync::Arc;

use pgonce::{Incoming, Verdict};
use pgonce_testkit::{TestDb, lock_waiters};
use tokio::sync::Barrier;
use tokio::task::JoinSet;
use tokio_postgres::Client;

use crate::desk::{LEVELS, admit, code, number, text, texts};

async fn admit_batch(client: &Client, ids: &[String], hashes: &[Vec<u8>]) -> Result<Vec<String>, String> {
    let sql = "SELECT ordinal, message_id, verdict FROM once.admit_batch('c', 's', $1, $2)";
    let rows = client.query(sql, &[&ids, &hashes]).await.map_err(|error| code(&error))?;
    for (place, row) in rows.iter().enumerate() {
        assert_eq!(row.get::<_, i32>(0), i32::try_from(place + 1).unwrap(), "in the order given");
        assert_eq!(row.get::<_, &str>(1), ids[place]);
    }
    assert_eq!(rows.len(), ids.len());
    Ok(rows.iter().map(|row| row.get(2)).collect())
}

fn hashed(body: &str) -> Vec<u8> {
    body.as_bytes().to_vec()
}

#[tokio::test]
async fn five_hundred_with_duplicates_and_conflicts_inside() {
    let db = TestDb::new().await;
    let client = db.client().await;
    for id in ["m-7", "m-300"] {
        admit(&client, id, id.as_bytes()).await.unwrap();
    }
    let mut ids: Vec<String> = (0..500).rev().map(|n| format!("m-{n}")).collect();
    let mut hashes: Vec<Vec<u8>> = ids.iter().map(|id| hashed(id)).collect();
    let mut expected: Vec<&str> = vec!["new"; 500];
    let place = |ids: &[String], id: &str| ids.iter().position(|other| other == id).unwrap();
    expected[place(&ids, "m-7")] = "duplicate";
    hashes[place(&ids, "m-300")] = hashed("another body");
    expected[place(&ids, "m-300")] = "conflict";
    for (id, body, verdict) in
        [("m-4", "m-4", "duplicate"), ("m-5", "not m-5", "conflict"), ("m-7", "m-7", "duplicate")]
    {
        ids.push(id.into());
        hashes.push(hashed(body));
        expected.push(verdict);
    }
    assert_eq!(admit_batch(&client, &ids, &hashes).await.unwrap(), expected);
    assert_eq!(number(&client, "SELECT count(*) FROM once.admitted_messages").await, 500);
    // Again: everything is known; what was a conflict is one still.
    let again: Vec<&str> =
        expected.iter().map(|verdict| if *verdict == "new" { "duplicate" } else { *verdict }).collect();
    assert_eq!(admit_batch(&client, &ids, &hashes).await.unwrap(), again);
    // What a batch admitted, a single call knows, and the other way round.
    assert_eq!(admit(&client, "m-1", b"m-1").await.unwrap(), "duplicate");
}

/// All new, but for one in the middle: the plain INSERT was wrong, and what it did is undone.
#[tokio::test]
async fn a_known_message_in_the_middle_costs_only_itself() {
    let db = TestDb::new().await;
    let client = db.client().await;
    admit(&client, "b", b"b").await.unwrap();
    let ids = ["a", "b", "c"].map(String::from);
    let verdicts = admit_batch(&client, &ids, &ids.each_ref().map(|id| hashed(id))).await.unwrap();
    assert_eq!(verdicts, ["new", "duplicate", "new"]);
    assert_eq!(number(&client, "SELECT count(*) FROM once.admitted_messages").await, 3);
    assert_eq!(admit_batch(&client, &[], &[]).await.unwrap(), Vec::<String>::new());
}

/// A delta each, gated: each account ends with the sum of distinct messages, in every isolation level, though every
/// batch is delivered by several at once, in another order each.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gated_batches_that_overlap_apply_every_message_once() {
    let db = TestDb::new().await;
    let admin = db.client().await;
    admin
        .batch_execute("CREATE TABLE account (id int PRIMARY KEY, balance bigint NOT NULL DEFAULT 0); INSERT INTO account SELECT generate_series(0, 9)")
        .await
        .unwrap();
    for level in LEVELS {
        admin.batch_execute("UPDATE account SET balance = 0").await.unwrap();
        let barrier = Arc::new(Barrier::new(8));
        let mut tasks = JoinSet::new();
        for rival in 0..8_usize {
            let (client, barrier) = (db.client().await, Arc::clone(&barrier));
            tasks.spawn(async move {
                // Overlapping ranges, some of them backwards.
                let mut ids: Vec<String> = (rival * 50..rival * 50 + 200).map(|n| format!("{level}-{n}")).collect();
                if rival % 2 == 0 {
                    ids.reverse();
                }
                barrier.wait().await;
                while let Err(code) = gated(&client, level, &ids).await {
                    assert_eq!(code, "40001", "{level}: sorted batches do not deadlock");
                }
            });
        }
        tasks.join_all().await;
        let total = "SELECT sum(balance)::bigint FROM account";
        assert_eq!(number(&admin, total).await, 7 * 50 + 200, "{level}");
    }
}

async fn gated(client: &Client, level: &str, ids: &[String]) -> Result<(), String> {
    let hashes: Vec<Vec<u8>> = ids.iter().map(|id| hashed(id)).collect();
    let accounts: Vec<i32> = (0..10).cycle().take(ids.len()).collect();
    client.batch_execute(&format!("BEGIN ISOLATION LEVEL {level}")).await.unwrap();
    // Accounts are locked in one order, too: that is the caller's part.
    let sql = "WITH m AS MATERIALIZED (
            SELECT d.account, count(*) AS delta
            FROM once.admit_batch('c', 's', $1, $2) v JOIN unnest($3::int[]) WITH ORDINALITY d (account, place) ON d.place = v.ordinal
            WHERE v.verdict = 'new' GROUP BY d.account),
        locked AS MATERIALIZED (SELECT a.id FROM account a WHERE a.id IN (SELECT m.account FROM m) ORDER BY a.id FOR UPDATE)
        UPDATE account a SET balance = balance + m.delta FROM m JOIN locked l ON l.id = m.account WHERE a.id = m.account";
    let done = match client.execute(sql, &[&ids, &hashes, &accounts]).await {
        Ok(_) => client.batch_execute("COMMIT").await,
        Err(error) => Err(error),
    };
    if let Err(error) = done {
        client.batch_execute("ROLLBACK").await.unwrap();
        return Err(code(&error));
    }
    Ok(())
}

/// The batch waits for a rival that is at one of its messages.
#[tokio::test]
async fn a_rival_of_one_message_is_waited_for() {
    let db = TestDb::new().await;
    let observer = db.client().await;
    admit(&observer, "the stream is known", b"h").await.unwrap();
    for (end, verdict) in [("COMMIT", "duplicate"), ("ROLLBACK", "new")] {
        let (first, second) = (db.client().await, db.client().await);
        let ids = ["x", "y", "z"].map(|id| format!("{id}-{end}"));
        first.batch_execute("BEGIN").await.unwrap();
        assert_eq!(admit(&first, &ids[1], ids[1].as_bytes()).await.unwrap(), "new");
        let batch = ids.clone();
        let waiting =
            tokio::spawn(
                async move { admit_batch(&second, &batch, &batch.each_ref().map(|id| hashed(id))).await.unwrap() },
            );
        lock_waiters(&observer, 1).await;
        first.batch_execute(end).await.unwrap();
        assert_eq!(waiting.await.unwrap(), ["new", verdict, "new"]);
    }
}

#[tokio::test]
async fn an_old_snapshot_is_told_to_begin_again() {
    let db = TestDb::new().await;
    for level in &LEVELS[1..] {
        let (old, rival) = (db.client().await, db.client().await);
        admit(&rival, "the stream is known", b"h").await.unwrap();
        let (a, b) = (format!("a-{level}"), format!("b-{level}"));
        old.batch_execute(&format!("BEGIN ISOLATION LEVEL {level}; SELECT count(*) FROM once.consumer")).await.unwrap();
        admit(&rival, &b, b"h").await.unwrap();
        let verdicts = admit_batch(&old, &[a.clone(), b.clone()], &[hashed("h"), hashed("h")]).await;
        assert_eq!(verdicts.unwrap_err(), "40001", "{level}");
        old.batch_execute("ROLLBACK").await.unwrap();
    }
}

#[tokio::test]
async fn from_rust_in_a_transaction_of_ones_own() {
    let db = TestDb::new().await;
    let once = db.once().await;
    let inbox = once.consumer("c").source("s");
    let mut client = db.client().await;
    let messages = [inbox.message("a", b"1"), inbox.message("b", b"2"), inbox.message("a", b"3")];
    let transaction = client.transaction().await.unwrap();
    let verdicts = inbox.admit_batch(&transaction, &messages).await.unwrap();
    assert_eq!(verdicts, [Verdict::New, Verdict::New, Verdict::Conflict]);
    transaction.rollback().await.unwrap();
    assert_eq!(inbox.admit(&client, &messages[0]).await.unwrap(), Verdict::New);
    assert_eq!(inbox.admit(&client, &messages[0]).await.unwrap(), Verdict::Duplicate);
    assert!(matches!(inbox.admit(&client, &messages[2]).await, Err(pgonce::Error::OtherBody)));
    let elsewhere = [Incoming::new("elsewhere", "a", b"1")];
    assert!(matches!(inbox.admit_batch(&client, &elsewhere).await, Err(pgonce::Error::Invalid(_))));
}

/// Rows of the stored inbox get their numbers in the order given, though they are inserted sorted.
#[tokio::test]
async fn stored_batches_keep_their_order_and_tell_each_message_apart() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let ids = ["z", "a", "z", "m", "a"];
    let bodies: [&[u8]; 5] = [b"1", b"2", b"1", b"3", b"other"];
    let sql = "SELECT verdict FROM once.receive_batch('c', 's', $1, $2) ORDER BY ordinal";
    let verdicts = texts(&client, sql, &[&ids.as_slice(), &bodies.as_slice()]).await;
    assert_eq!(verdicts, ["new", "new", "duplicate", "new", "conflict"]);
    assert_eq!(texts(&client, "SELECT message_id::text FROM once.inbox ORDER BY id", &[]).await, ["z", "a", "m"]);
    let verdicts = texts(&client, sql, &[&["b", "a"].as_slice(), &[b"9".as_slice(), b"2"].as_slice()]).await;
    assert_eq!(verdicts, ["new", "duplicate"]);
    assert_eq!(text(&client, "SELECT once.receive('c', 's', 'b', '9')", &[]).await.unwrap(), "duplicate");
    assert_eq!(text(&client, "SELECT once.receive('c', 's', 'b', '8')", &[]).await.unwrap_err(), "P4050");
}
