//! One message at a time: every verdict, and rivals in every isolation level.

use std::sync::Arc;
use std::time::Duration;

use pgonce_testkit::{TestDb, checksum, lock_waiters};
use tokio::sync::Barrier;
use tokio::task::JoinSet;

use crate::desk::{LEVELS, admit, effect, number, text};

#[tokio::test]
async fn new_duplicate_and_another_body() {
    let db = TestDb::new().await;
    let client = db.client().await;
    assert_eq!(admit(&client, "m", b"hash").await.unwrap(), "new");
    let before = checksum(&client).await;
    assert_eq!(admit(&client, "m", b"hash").await.unwrap(), "duplicate");
    assert_eq!(admit(&client, "m", b"other").await.unwrap_err(), "P4050");
    assert_eq!(checksum(&client).await, before, "a duplicate writes nothing, nor does a conflict");
    // Other consumers, sources and tenants have never seen it.
    for call in ["'d', 's'", "'c', 't'"] {
        assert_eq!(text(&client, &format!("SELECT once.admit({call}, 'm', '\\x01')"), &[]).await.unwrap(), "new");
    }
    let tenant = "SELECT once.admit('c', 's', 'm', '\\x01', p_tenant => 't')";
    assert_eq!(text(&client, tenant, &[]).await.unwrap(), "new");
    assert_eq!(number(&client, "SELECT count(*) FROM once.admitted_messages").await, 4);
}

#[tokio::test]
async fn results_are_noted_on_admitted_messages_only() {
    let db = TestDb::new().await;
    let client = db.client().await;
    admit(&client, "m", b"hash").await.unwrap();
    let result = "SELECT result || coalesce(' ' || result_type || ' ' || result_id, '') FROM once.admitted_messages";
    assert_eq!(text(&client, result, &[]).await.unwrap(), "applied");
    for (noted, shown) in [("'ignored'", "ignored"), ("'failed_final'", "failed_final")] {
        client.batch_execute(&format!("SELECT once.note_result('c', 's', 'm', {noted})")).await.unwrap();
        assert_eq!(text(&client, result, &[]).await.unwrap(), shown);
    }
    client.batch_execute("SELECT once.note_result('c', 's', 'm', 'applied', 'order', '7')").await.unwrap();
    assert_eq!(text(&client, result, &[]).await.unwrap(), "applied order 7");
    for call in ["'c', 's', 'n'", "'d', 's', 'm'", "'c', 't', 'm'"] {
        let sql = format!("SELECT once.note_result({call}, 'ignored')::text");
        assert_eq!(text(&client, &sql, &[]).await.unwrap_err(), "P4051", "{call}");
    }
}

/// One transaction a try, from its start on 40001; true for the one whose effect it is.
async fn deliver(client: &tokio_postgres::Client, level: &str, id: &str) -> bool {
    loop {
        client.batch_execute(&format!("BEGIN ISOLATION LEVEL {level}")).await.unwrap();
        match admit(client, id, b"hash").await {
            Ok(verdict) => {
                if verdict == "new" {
                    effect(client, id).await;
                }
                match client.batch_execute("COMMIT").await {
                    Ok(()) => return verdict == "new",
                    Err(error) => assert_eq!(crate::desk::code(&error), "40001"),
                }
            }
            Err(code) => assert_eq!(code, "40001", "{level}: never a wrong answer, never 23505"),
        }
        client.batch_execute("ROLLBACK").await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_number_of_deliveries_at_once_have_one_effect() {
    let db = TestDb::new().await;
    for level in LEVELS {
        for rivals in [2, 5, 20, 50] {
            let id = format!("m-{level}-{rivals}");
            let barrier = Arc::new(Barrier::new(rivals));
            let mut tasks = JoinSet::new();
            for _ in 0..rivals {
                let (client, barrier, id) = (db.client().await, Arc::clone(&barrier), id.clone());
                tasks.spawn(async move {
                    barrier.wait().await;
                    deliver(&client, level, &id).await
                });
            }
            let applied = tasks.join_all().await.into_iter().filter(|applied| *applied).count();
            assert_eq!((applied, db.effects(&id).await), (1, 1), "{level}, {rivals} rivals");
        }
    }
}

/// The second waits for the first: then it is a duplicate, or new where the first rolled back.
#[tokio::test]
async fn a_rival_is_waited_for() {
    let db = TestDb::new().await;
    let observer = db.client().await;
    admit(&observer, "the stream is known", b"h").await.unwrap();
    for (end, verdict) in [("COMMIT", "duplicate"), ("ROLLBACK", "new")] {
        let (first, second) = (db.client().await, db.client().await);
        first.batch_execute("BEGIN").await.unwrap();
        assert_eq!(admit(&first, end, b"hash").await.unwrap(), "new");
        let waiting = tokio::spawn(async move { admit(&second, end, b"hash").await });
        lock_waiters(&observer, 1).await;
        first.batch_execute(end).await.unwrap();
        assert_eq!(waiting.await.unwrap().unwrap(), verdict);
    }
}

/// A snapshot that is older than the rival's commit cannot tell: 40001, and the next try is right.
#[tokio::test]
async fn an_old_snapshot_is_told_to_begin_again() {
    let db = TestDb::new().await;
    for level in &LEVELS[1..] {
        for known in [false, true] {
            let (old, rival) = (db.client().await, db.client().await);
            let stream = format!("{level}{known}");
            let sql = "SELECT once.admit('c', $1, 'm', '\\x01')";
            if known {
                rival.execute("SELECT once.admit('c', $1, 'another', '\\x01')", &[&stream]).await.unwrap();
            }
            old.batch_execute(&format!("BEGIN ISOLATION LEVEL {level}; SELECT 1")).await.unwrap();
            old.batch_execute("SELECT count(*) FROM once.consumer").await.unwrap();
            assert_eq!(text(&rival, sql, &[&stream]).await.unwrap(), "new");
            assert_eq!(text(&old, sql, &[&stream]).await.unwrap_err(), "40001", "{level}");
            old.batch_execute("ROLLBACK").await.unwrap();
            assert_eq!(text(&old, sql, &[&stream]).await.unwrap(), "duplicate");
        }
    }
}

/// The gated statement of the guide: its effect waits for a row that another transaction changes, and is still applied.
/// A function in the WHERE clause would be asked again after that wait, and find its own row.
#[tokio::test]
async fn a_gated_update_survives_a_wait_for_its_row() {
    let db = TestDb::new().await;
    let (holder, gated) = (db.client().await, db.client().await);
    holder
        .batch_execute("CREATE TABLE account (id int PRIMARY KEY, balance int); INSERT INTO account VALUES (1, 0)")
        .await
        .unwrap();
    holder.batch_execute("BEGIN; UPDATE account SET balance = balance + 1").await.unwrap();
    let waiting = tokio::spawn(async move {
        let sql = "WITH m AS MATERIALIZED (SELECT once.admit('c', 's', 'm', '\\x01') AS verdict)
            UPDATE account SET balance = balance + 10 FROM m WHERE m.verdict = 'new' AND id = 1";
        gated.execute(sql, &[]).await.unwrap()
    });
    let observer = db.client().await;
    lock_waiters(&observer, 1).await;
    holder.batch_execute("COMMIT").await.unwrap();
    assert_eq!(waiting.await.unwrap(), 1);
    assert_eq!(number(&observer, "SELECT balance::bigint FROM account").await, 11);
}

/// Trap 16: no boundary of time lets a redelivery in, as long as the retention lasts, and until purge comes.
#[tokio::test]
async fn time_alone_makes_no_message_new() {
    let db = TestDb::new().await;
    let client = db.client().await;
    assert_eq!(admit(&client, "m", b"hash").await.unwrap(), "new");
    for hours in [1, 24, 25, 6 * 24, 7 * 24 - 1] {
        db.travel(Duration::from_secs(hours * 3600)).await;
        let purged = number(&client, "SELECT once.purge_inbox()").await;
        assert_eq!((purged, admit(&client, "m", b"hash").await.unwrap().as_str()), (0, "duplicate"), "after {hours} h");
    }
}
