//! `InboxWorker`: stored messages, worked on by processes that fail, time out, stop and die.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pgonce::{Advance, Arrival, Failure, Handled, MessageTx, Once, StoredMessage, Verdict};
use pgonce_testkit::{TestDb, eventually};
use tokio::sync::Notify;

use crate::desk::{define, number, state, text, texts};

async fn write(tx: &MessageTx, message: &StoredMessage) -> Result<(), Failure> {
    let sql = "INSERT INTO public.effect (scope, key, claim_id) VALUES ('inbox', $1, $2)";
    tx.execute(sql, &[&message.id, &message.claim_id]).await?;
    Ok(())
}

async fn store(once: &Once, ids: &[&str]) {
    let arrivals: Vec<Arrival> = ids.iter().map(|id| arrival(id)).collect();
    let verdicts = once.consumer("c").source("s").receive(&arrivals).await.unwrap();
    assert_eq!(verdicts, vec![Verdict::New; ids.len()]);
}

fn arrival(id: &str) -> Arrival {
    Arrival { id: id.into(), body: id.as_bytes().to_vec(), ..Arrival::default() }
}

#[tokio::test]
async fn everything_that_was_stored_reaches_the_handler() {
    let db = TestDb::new().await;
    let once = db.once().await;
    let whole = Arrival {
        id: "m".into(),
        body: vec![0, 255],
        topic: Some("orders".into()),
        kind: Some("order.created".into()),
        ordering_key: Some("k".into()),
        entity: Some("order/7".into()),
        version: Some(1),
        headers: Some(serde_json::json!({"traceparent": "00-1"})),
        content_type: Some("application/json".into()),
    };
    let inbox = once.consumer("c").source("s").tenant("t");
    assert_eq!(inbox.receive(&[whole.clone(), whole.clone()]).await.unwrap(), [Verdict::New, Verdict::Duplicate]);
    let seen = Mutex::new(Vec::new());
    let worked = inbox
        .worker()
        .run_until_empty(async |tx, message| {
            write(&tx, &message).await?;
            assert_eq!(tx.advance(message.entity.as_deref().unwrap(), message.version.unwrap()).await?, Advance::Apply);
            tx.made("order", "7");
            seen.lock().unwrap().push(message);
            Ok(Handled::Applied)
        })
        .await
        .unwrap();
    assert_eq!(worked, 1);
    let seen = seen.into_inner().unwrap();
    let got = Arrival {
        id: seen[0].id.clone(),
        body: seen[0].body.clone(),
        topic: seen[0].topic.clone(),
        kind: seen[0].kind.clone(),
        ordering_key: seen[0].ordering_key.clone(),
        entity: seen[0].entity.clone(),
        version: seen[0].version,
        headers: seen[0].headers.clone(),
        content_type: seen[0].content_type.clone(),
    };
    assert_eq!(got, whole);
    assert_eq!((seen[0].tenant.as_str(), seen[0].source.as_str(), seen[0].attempt), ("t", "s", 1));
    let row = "SELECT concat_ws(' ', state, result, result_type, result_id) FROM once.inbox_messages";
    assert_eq!(text(&db.client().await, row, &[]).await.unwrap(), "processed applied order 7");
    assert_eq!(db.effects("m").await, 1);
}

#[tokio::test]
async fn failures_are_recorded_after_their_rollback() {
    let db = TestDb::new().await;
    let once = db.once().await;
    define(&db, r#"{"backoff": "1h", "backoff_max": "1h"}"#).await;
    store(&once, &["fine", "later", "never", "broken", "nothing"]).await;
    let handler = async |tx: MessageTx, message: Arc<StoredMessage>| {
        write(&tx, &message).await?;
        match message.id.as_str() {
            "later" => Err(Failure::retry("busy", "not now")),
            "never" => Err(Failure::refuse("unknown", "no such customer")),
            "broken" => {
                tx.batch_execute("SELECT 1 / 0").await?;
                Ok(Handled::Applied)
            }
            "nothing" => Ok(Handled::Ignored),
            _ => Ok(Handled::Applied),
        }
    };
    once.consumer("c").worker().run_until_empty(handler).await.unwrap();
    let client = db.client().await;
    let all = "SELECT concat_ws(' ', message_id, state, result) FROM once.inbox_messages ORDER BY id";
    assert_eq!(
        texts(&client, all, &[]).await,
        [
            "fine processed applied",
            "later failed_retryable",
            "never failed_final failed_final",
            "broken failed_final failed_final",
            "nothing processed ignored"
        ]
    );
    let effects = texts(&client, "SELECT key FROM public.effect ORDER BY key", &[]).await;
    assert_eq!(effects, ["fine", "nothing"], "of the others nothing stays");
}

#[tokio::test]
async fn versions_out_of_order_are_applied_in_order() {
    let db = TestDb::new().await;
    let once = db.once().await;
    let arrivals: Vec<Arrival> = [5, 3, 1, 2, 4, 2]
        .iter()
        .enumerate()
        .map(|(place, version)| Arrival {
            entity: Some("e".into()),
            version: Some(*version),
            ..arrival(&format!("{place}"))
        })
        .collect();
    once.consumer("c").source("s").receive(&arrivals).await.unwrap();
    let applied = Mutex::new(Vec::new());
    let handler = async |tx: MessageTx, message: Arc<StoredMessage>| {
        let version = message.version.unwrap();
        match tx.advance("e", version).await? {
            Advance::Gap => Ok(Handled::Gap),
            Advance::Stale => Ok(Handled::Ignored),
            Advance::Apply => {
                applied.lock().unwrap().push(version);
                Ok(Handled::Applied)
            }
        }
    };
    once.consumer("c").worker().at_once(1).run_until_empty(handler).await.unwrap();
    assert_eq!(applied.into_inner().unwrap(), [1, 2, 3, 4, 5]);
    let client = db.client().await;
    assert_eq!(number(&client, "SELECT count(*) FROM once.inbox_messages WHERE state = 'processed'").await, 6);
}

/// It stops when it is told to, after what it holds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_lets_it_finish_what_it_holds() {
    let db = TestDb::new().await;
    let once = db.once().await;
    store(&once, &["held", "not taken"]).await;
    let (entered, go, stop) = (Arc::new(Notify::new()), Arc::new(Notify::new()), Arc::new(Notify::new()));
    let running = {
        let (once, entered, go, stop) = (once.clone(), Arc::clone(&entered), Arc::clone(&go), Arc::clone(&stop));
        tokio::spawn(async move {
            let worker = once.consumer("c").worker().at_once(1);
            let handler = |tx: MessageTx, message: Arc<StoredMessage>| {
                let (entered, go) = (Arc::clone(&entered), Arc::clone(&go));
                async move {
                    entered.notify_one();
                    go.notified().await;
                    write(&tx, &message).await?;
                    Ok(Handled::Applied)
                }
            };
            worker.run_until(async move { stop.notified().await }, handler).await;
        })
    };
    entered.notified().await;
    stop.notify_one();
    go.notify_one();
    running.await.unwrap();
    let client = db.client().await;
    assert_eq!((state(&client, "held").await.as_str(), db.effects("held").await), ("processed", 1));
    assert_eq!(state(&client, "not taken").await, "received");
}

/// A handler that outlives its lease's share is cut off; nothing of it stays, and the message comes again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_that_never_ends_is_cut_off() {
    let db = TestDb::new().await;
    let once = db.once().await;
    define(&db, r#"{"backoff": "0s", "attempts_max": 2}"#).await;
    store(&once, &["slow"]).await;
    let runs = AtomicUsize::new(0);
    let handler = async |tx: MessageTx, message: Arc<StoredMessage>| {
        write(&tx, &message).await?;
        runs.fetch_add(1, Ordering::SeqCst);
        std::future::pending::<()>().await;
        Ok(Handled::Applied)
    };
    let worker = once.consumer("c").worker().lease(Duration::from_millis(400));
    worker.run_until_empty(handler).await.unwrap();
    let client = db.client().await;
    assert_eq!((state(&client, "slow").await.as_str(), runs.into_inner()), ("failed_final", 2));
    let reason = text(&client, "SELECT last_error FROM once.inbox_parked", &[]).await.unwrap();
    assert!(reason.contains("three quarters of the lease"), "{reason}");
    eventually("the sessions are rolled back", async || {
        let open = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in%'";
        number(&client, open).await == 0
    })
    .await;
    assert_eq!(db.effects("slow").await, 0);
}

/// Another worker took the message over while this one was at it: this one's effect is rolled back.
#[tokio::test]
async fn a_worker_whose_lease_was_lost_leaves_nothing() {
    let db = TestDb::new().await;
    let once = db.once().await;
    store(&once, &["m"]).await;
    let thief = db.client().await;
    let stolen = AtomicUsize::new(0);
    let handler = async |tx: MessageTx, message: Arc<StoredMessage>| {
        write(&tx, &message).await?;
        if message.attempt == 1 {
            db.travel(Duration::from_secs(60)).await;
            stolen.store(
                thief.query("SELECT * FROM once.inbox_take('c', 'thief')", &[]).await.unwrap().len(),
                Ordering::SeqCst,
            );
        }
        Ok(Handled::Applied)
    };
    once.consumer("c").worker().run_until_empty(handler).await.unwrap();
    assert_eq!((stolen.load(Ordering::SeqCst), db.effects("m").await), (1, 0));
    assert_eq!(state(&thief, "m").await, "processing", "the other one's");
    // The other one vanishes, too: the message is there for the next.
    db.travel(Duration::from_secs(120)).await;
    once.consumer("c").worker().run_until_empty(handler).await.unwrap();
    assert_eq!((state(&thief, "m").await.as_str(), db.effects("m").await), ("processed", 1));
}

/// Several workers, one inbox: every message once, keys in their order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_workers_share_the_work() {
    let db = TestDb::new().await;
    let once = db.once_with(|settings| settings.pool_max = 16).await;
    let client = db.client().await;
    client
        .batch_execute("CREATE TABLE done (n bigint GENERATED ALWAYS AS IDENTITY, key text, message text)")
        .await
        .unwrap();
    let arrivals: Vec<Arrival> = (0..120)
        .map(|n| Arrival { ordering_key: Some(format!("k{}", n % 10)), ..arrival(&format!("{n:03}")) })
        .collect();
    once.consumer("c").source("s").receive(&arrivals).await.unwrap();
    let stop = Arc::new(Notify::new());
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..3 {
        let (once, stop) = (once.clone(), Arc::clone(&stop));
        tasks.spawn(async move {
            let worker = once.consumer("c").worker().at_once(4).poll(Duration::from_millis(5));
            let handler = async |tx: MessageTx, message: Arc<StoredMessage>| {
                let sql = "INSERT INTO done (key, message) VALUES ($1, $2)";
                tx.execute(sql, &[&message.ordering_key, &message.id]).await?;
                Ok(Handled::Applied)
            };
            worker.run_until(async move { stop.notified().await }, handler).await;
        });
    }
    eventually("all are done", async || number(&client, "SELECT count(*) FROM done").await >= 120).await;
    stop.notify_waiters();
    for _ in 0..3 {
        stop.notify_one();
    }
    tasks.join_all().await;
    let disorder = "SELECT count(*) FROM (SELECT message < lag(message) OVER (PARTITION BY key ORDER BY n) AS back FROM done) d WHERE back";
    assert_eq!(number(&client, disorder).await, 0);
    let distinct = "SELECT count(DISTINCT message) * 1000 + count(*) FROM done";
    assert_eq!(number(&client, distinct).await, 120_120);
}
