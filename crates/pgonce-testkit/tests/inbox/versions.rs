//! Versions of an entity: in order, stale, with gaps; under rivals, too.

use std::sync::Arc;
use std::time::Duration;

use pgonce_testkit::{TestDb, lock_waiters};
use tokio::sync::Barrier;
use tokio::task::JoinSet;

use crate::desk::{LEVELS, advance, define, ids, number, receive, state, take, text, texts};

#[tokio::test]
async fn apply_stale_and_gap() {
    let db = TestDb::new().await;
    let client = db.client().await;
    for (version, answer) in
        [(2, "gap"), (1, "apply"), (1, "stale"), (0, "stale"), (3, "gap"), (2, "apply"), (3, "apply"), (3, "stale")]
    {
        assert_eq!(advance(&client, "e", version).await.unwrap(), answer, "version {version}");
    }
    assert_eq!(advance(&client, "from zero", 0).await.unwrap(), "apply");
    assert_eq!(advance(&client, "from zero", 1).await.unwrap(), "apply");
    // A snapshot's version is never taken back.
    for (version, last) in [(10, 10), (4, 10), (11, 11)] {
        let sql = format!("SELECT once.baseline('c', 'e', {version})");
        assert_eq!(number(&client, &sql).await, last);
    }
    assert_eq!(advance(&client, "e", 12).await.unwrap(), "apply");
    let sql = "SELECT once.advance('c', 'e', 1, p_tenant => 't')";
    assert_eq!(text(&client, sql, &[]).await.unwrap(), "apply", "another tenant's");
}

/// Everybody wants every version: each is applied once, in order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rivals_apply_each_version_once() {
    let db = TestDb::new().await;
    let admin = db.client().await;
    admin.batch_execute("CREATE TABLE applied (n serial, level text, version bigint)").await.unwrap();
    for level in LEVELS {
        let barrier = Arc::new(Barrier::new(8));
        let mut tasks = JoinSet::new();
        for _ in 0..8 {
            let (client, barrier) = (db.client().await, Arc::clone(&barrier));
            tasks.spawn(async move {
                barrier.wait().await;
                let mut version = 1;
                while version <= 15 {
                    client.batch_execute(&format!("BEGIN ISOLATION LEVEL {level}")).await.unwrap();
                    let answer = advance(&client, level, version).await;
                    if answer.as_deref() == Ok("apply") {
                        let sql = "INSERT INTO applied (level, version) VALUES ($1, $2)";
                        client.execute(sql, &[&level, &version]).await.unwrap();
                    }
                    let ended = client.batch_execute(if answer.is_ok() { "COMMIT" } else { "ROLLBACK" }).await;
                    match answer {
                        Ok(answer) if ended.is_ok() => {
                            assert_ne!(answer, "gap", "{level}: who comes after version {version} saw it applied");
                            version += 1;
                        }
                        Ok(_) => assert_eq!(crate::desk::code(&ended.unwrap_err()), "40001"),
                        Err(code) => assert_eq!(code, "40001", "{level}"),
                    }
                }
            });
        }
        tasks.join_all().await;
        let sql = "SELECT version::text FROM applied WHERE level = $1 ORDER BY n";
        let expected: Vec<String> = (1..=15).map(|version: i32| version.to_string()).collect();
        assert_eq!(texts(&admin, sql, &[&level]).await, expected, "{level}");
    }
}

/// Who finds a gap while a rival is filling it waits for the rival, and then there is none.
#[tokio::test]
async fn a_gap_that_is_being_filled_is_waited_for() {
    let db = TestDb::new().await;
    let observer = db.client().await;
    for (entity, first) in [("unknown", 1_i64), ("known", 2)] {
        if first == 2 {
            advance(&observer, entity, 1).await.unwrap();
        }
        for (end, answer) in [("ROLLBACK", "gap"), ("COMMIT", "apply")] {
            let (filler, next) = (db.client().await, db.client().await);
            filler.batch_execute("BEGIN").await.unwrap();
            assert_eq!(advance(&filler, entity, first).await.unwrap(), "apply");
            let waiting = tokio::spawn(async move { advance(&next, entity, first + 1).await });
            lock_waiters(&observer, 1).await;
            filler.batch_execute(end).await.unwrap();
            assert_eq!(waiting.await.unwrap().unwrap(), answer, "{entity}");
        }
    }
}

/// Takes one message, and applies, parks or ignores it: what was done, and with which version.
async fn step(client: &tokio_postgres::Client) -> Option<String> {
    let held = take(client, 10).await;
    assert!(held.len() < 2, "one of a key at a time: {held:?}");
    let one = held.first()?;
    let version: i64 = one.id[1..].parse().unwrap();
    let answer = advance(client, "e", version).await.unwrap();
    match answer.as_str() {
        "gap" => {
            assert_eq!(one.wait(client).await.unwrap(), "waiting");
            assert_eq!(state(client, &one.id).await, "waiting");
        }
        _ => one.finish(client).await.unwrap(),
    }
    Some(format!("{answer} {version}"))
}

/// Versions of one ordering key that arrive in any order, with what was stored before them, are applied in theirs.
#[tokio::test]
async fn out_of_order_is_parked_and_released_in_order() {
    let db = TestDb::new().await;
    let client = db.client().await;
    receive(&client, "v3", Some("k"), Some(3)).await;
    assert_eq!(step(&client).await.unwrap(), "gap 3");
    assert_eq!(step(&client).await, None);
    // Version 4 stands behind it, and so does what has no version; version 2 comes first, and is too early as well.
    receive(&client, "v4", Some("k"), Some(4)).await;
    receive(&client, "other", Some("k"), None).await;
    assert_eq!(take(&client, 10).await, []);
    receive(&client, "v2", Some("k"), Some(2)).await;
    assert_eq!(step(&client).await.unwrap(), "gap 2");
    receive(&client, "v1", Some("k"), Some(1)).await;
    for done in ["apply 1", "apply 2", "apply 3", "apply 4"] {
        assert_eq!(step(&client).await.unwrap(), done);
    }
    assert_eq!(ids(&take(&client, 10).await), ["other"]);
    assert_eq!(number(&client, "SELECT max(attempts)::bigint FROM once.inbox").await, 1, "waiting is no attempt");
}

/// While one of a key is worked on, an earlier version that comes is not handed out beside it.
#[tokio::test]
async fn a_key_that_is_worked_on_is_left_alone() {
    let db = TestDb::new().await;
    let client = db.client().await;
    receive(&client, "v2", Some("k"), Some(2)).await;
    let held = take(&client, 10).await;
    receive(&client, "v1", Some("k"), Some(1)).await;
    assert_eq!(take(&client, 10).await, []);
    // Its worker vanishes: the earlier version is first now, and then the other is taken over.
    db.travel(Duration::from_secs(60)).await;
    assert_eq!(step(&client).await.unwrap(), "apply 1");
    assert_eq!(step(&client).await.unwrap(), "apply 2");
    assert_eq!(held[0].finish(&client).await.unwrap_err(), "P4051");
}

/// The missing version is applied between the worker's look and its parking: nobody would wake it any more.
#[tokio::test]
async fn parking_looks_again() {
    let db = TestDb::new().await;
    let client = db.client().await;
    receive(&client, "v2", None, Some(2)).await;
    let held = take(&client, 1).await;
    assert_eq!(advance(&client, "e", 2).await.unwrap(), "gap");
    assert_eq!(advance(&client, "e", 1).await.unwrap(), "apply");
    assert_eq!(held[0].wait(&client).await.unwrap(), "received");
    assert_eq!(ids(&take(&client, 1).await), ["v2"]);
}

/// The same with the applying transaction still open: parking waits for it.
#[tokio::test]
async fn parking_waits_for_who_is_filling_the_gap() {
    let db = TestDb::new().await;
    let (filler, parker, observer) = (db.client().await, db.client().await, db.client().await);
    receive(&observer, "v2", None, Some(2)).await;
    let held = take(&observer, 1).await;
    filler.batch_execute("BEGIN").await.unwrap();
    advance(&filler, "e", 1).await.unwrap();
    let waiting = tokio::spawn(async move { held[0].wait(&parker).await });
    lock_waiters(&observer, 1).await;
    filler.batch_execute("COMMIT").await.unwrap();
    assert_eq!(waiting.await.unwrap().unwrap(), "received");
}

#[tokio::test]
async fn a_gap_ends_loudly_at_its_limit() {
    let db = TestDb::new().await;
    let client = db.client().await;
    define(&db, r#"{"gap_max": "10m"}"#).await;
    receive(&client, "v2", Some("k"), Some(2)).await;
    receive(&client, "behind", Some("k"), None).await;
    let held = take(&client, 10).await;
    assert_eq!(ids(&held), ["v2"]);
    held[0].wait(&client).await.unwrap();
    assert_eq!(take(&client, 10).await, [], "what stands behind a waiting message waits, too");
    let recover = "SELECT state FROM once.inbox_recover()";
    db.travel(Duration::from_secs(9 * 60)).await;
    assert_eq!(texts(&client, recover, &[]).await, Vec::<String>::new());
    db.travel(Duration::from_secs(11 * 60)).await;
    assert_eq!(texts(&client, recover, &[]).await, ["failed_final"]);
    let reason = text(&client, "SELECT last_error FROM once.inbox_parked WHERE state = 'failed_final'", &[]).await;
    assert!(reason.unwrap().starts_with("gap: the version before"));
    assert_eq!(take(&client, 10).await, [], "its key is held until somebody decides");
    // The missing one is found; the message is replayed, and everything goes on.
    assert_eq!(advance(&client, "e", 1).await.unwrap(), "apply");
    client.query("SELECT * FROM once.inbox_replay('c', 'me', 'found version 1')", &[]).await.unwrap();
    let held = take(&client, 10).await;
    assert_eq!(ids(&held), ["v2"]);
    assert_eq!(advance(&client, "e", 2).await.unwrap(), "apply");
    held[0].finish(&client).await.unwrap();
    assert_eq!(ids(&take(&client, 10).await), ["behind"]);
}

#[tokio::test]
async fn a_baseline_lets_waiting_messages_go() {
    let db = TestDb::new().await;
    let client = db.client().await;
    receive(&client, "v6", None, Some(6)).await;
    take(&client, 1).await[0].wait(&client).await.unwrap();
    client.batch_execute("SELECT once.baseline('c', 'e', 5)").await.unwrap();
    assert_eq!(state(&client, "v6").await, "received");
    // And where nobody woke one whose turn has come, recovery does.
    client
        .batch_execute("UPDATE once.inbox SET state = 'waiting', next_at = once.clock() + interval '1 hour'")
        .await
        .unwrap();
    assert_eq!(texts(&client, "SELECT state FROM once.inbox_recover()", &[]).await, ["received"]);
}
