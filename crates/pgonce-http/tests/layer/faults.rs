//! Databases that go away, transactions that must run again, commits whose answer is lost.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::Router;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post as route;
use pgonce::IsolationLevel;
use pgonce_http::{Failed, IdempotencyLayer, InProgress, Transaction};
use pgonce_testkit::{Cut, FaultProxy, TestDb, eventually};

use crate::client::{post, send};
use crate::shop::{Shop, insert, key_of, open, policy, serve};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_serialization_failure_runs_the_handler_again() {
    let (db, shop, address) = open(|_| {}).await;
    let reply = send(address, post("/orders", "k", "{\"serialization_failures\": 2}")).await;
    assert_eq!((reply.status, reply.is_replay()), (201, false));
    assert_eq!((shop.calls(), db.effects("k").await), (3, 1));
}

/// The failure comes with COMMIT, when the handler has long answered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_serialization_failure_at_commit_runs_the_handler_again() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client.batch_execute("CREATE TABLE public.stock (n int); INSERT INTO public.stock VALUES (1)").await.unwrap();
    let (calls, rival) = (Arc::new(AtomicUsize::new(0)), Arc::new(client));
    let handler = {
        let calls = Arc::clone(&calls);
        async move |tx: Transaction, headers: HeaderMap| -> Result<&'static str, Failed> {
            insert(&tx, &key_of(&headers)).await?;
            let stock: i64 = tx.query_one("SELECT sum(n) FROM public.stock", &[]).await?.get(0);
            if calls.fetch_add(1, Ordering::SeqCst) == 0 {
                // The rival reads what we are about to change, and changes what we have read.
                let skew = "BEGIN ISOLATION LEVEL SERIALIZABLE; SELECT count(*) FROM public.effect;
                            INSERT INTO public.stock VALUES (1); COMMIT";
                rival.batch_execute(skew).await?;
            }
            Ok(if stock == 2 { "two" } else { "one" })
        }
    };
    let layer = IdempotencyLayer::new(db.once().await, policy(|_| {})).isolation(IsolationLevel::Serializable);
    let address = serve(Router::new().route("/orders", route(handler)).layer(layer)).await;
    let reply = send(address, post("/orders", "k", "{}")).await;
    assert_eq!((reply.status, reply.body.as_slice()), (200, &b"two"[..]), "by what the second run saw");
    assert_eq!((calls.load(Ordering::SeqCst), db.effects("k").await), (2, 1));
}

/// The session of a running handler is ended. Whatever the handler makes of that, it did not happen.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_whose_session_is_terminated_runs_again() {
    for tells in ["an error that may pass", "a plain 500", "a refusal", "success"] {
        let db = TestDb::new().await;
        let calls = Arc::new(AtomicUsize::new(0));
        let (admin, counted) = (Arc::new(db.client().await), Arc::clone(&calls));
        let handler = async move |tx: Transaction, headers: HeaderMap| -> Result<StatusCode, Failed> {
            insert(&tx, &key_of(&headers)).await?;
            if counted.fetch_add(1, Ordering::SeqCst) > 0 {
                return Ok(StatusCode::CREATED);
            }
            let pid: i32 = tx.query_one("SELECT pg_backend_pid()", &[]).await?.get(0);
            admin.execute("SELECT pg_terminate_backend($1)", &[&pid]).await?;
            let lost = loop {
                match tx.batch_execute("SELECT 1").await {
                    Ok(()) => tokio::task::yield_now().await,
                    Err(lost) => break lost,
                }
            };
            match tells {
                "a plain 500" => Ok(StatusCode::INTERNAL_SERVER_ERROR),
                "a refusal" => Ok(StatusCode::CONFLICT),
                "success" => Ok(StatusCode::CREATED),
                _ => Err(lost.into()),
            }
        };
        let layer = IdempotencyLayer::new(db.once().await, policy(|_| {}));
        let address = serve(Router::new().route("/orders", route(handler)).layer(layer)).await;
        let reply = send(address, post("/orders", "k", "{}")).await;
        assert_eq!((reply.status, calls.load(Ordering::SeqCst), db.effects("k").await), (201, 2, 1), "{tells}");
        assert!(send(address, post("/orders", "k", "{}")).await.is_replay());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_that_never_gets_through_is_a_clean_refusal() {
    let (db, shop) = (TestDb::new().await, Shop::default());
    let once = db.once_with(|settings| settings.retry.attempts_max = 3).await;
    let address = shop.serve(IdempotencyLayer::new(once, policy(|_| {}))).await;
    for (body, calls) in
        [("{\"sql\": \"SELECT pg_terminate_backend(pg_backend_pid())\"}", 3), ("{\"serialization_failures\": 1000}", 6)]
    {
        let key = format!("k{calls}");
        let reply = send(address, post("/orders", &key, body)).await;
        assert_eq!((reply.status, reply.problem().as_str()), (503, "try-again"));
        assert_eq!(reply.json()["effect"], "not_done");
        assert_eq!((shop.calls(), db.effects(&key).await), (calls, 0));
        assert_ne!(db.status("orders", &key).await.as_deref(), Some("succeeded"));
    }
}

/// Trap 11: COMMIT is cut off before it arrives, or only its answer is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_commit_is_resolved_before_the_client_is_answered() {
    let db = TestDb::new().await;
    let proxy = FaultProxy::before(db.direct_url()).await;
    for (turn, (cut, calls)) in [(Cut::BeforeCommit, 2), (Cut::AnswerOfCommit, 1)].into_iter().enumerate() {
        let shop = Shop::default();
        let mut settings = pgonce::Settings::from_url(&proxy.url(db.direct_url()));
        settings.pool_max = 2;
        let once = pgonce::Once::with_settings(settings).await.unwrap();
        let address = shop.serve(IdempotencyLayer::new(once, policy(|_| {}))).await;
        // Prepared by now: the completion and its COMMIT travel together.
        assert_eq!(send(address, post("/orders", &format!("warm{turn}"), "{}")).await.status, 201);
        let before = shop.calls();
        proxy.arm(cut);
        let key = format!("k{turn}");
        let reply = send(address, post("/orders", &key, "{}")).await;
        assert_eq!((reply.status, reply.is_replay(), proxy.fired()), (201, false, turn + 1), "{cut:?}");
        assert_eq!((shop.calls() - before, db.effects(&key).await), (calls, 1), "{cut:?}");
        let replay = send(address, post("/orders", &key, "{}")).await;
        assert!(replay.is_replay() && replay.body == reply.body);
    }
}

/// Fail closed: without the database nothing guarded runs, and what is not guarded does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_database_guarded_requests_are_refused_and_others_pass() {
    let mut cluster = tokio::task::spawn_blocking(pgonce_testkit::cluster).await.unwrap();
    let url = cluster.url("postgres");
    let mut client = pgonce::migrate::connect(&url).await.unwrap();
    pgonce::migrate::apply(&mut client, false).await.unwrap();
    let mut settings = pgonce::Settings::from_url(&url);
    settings.retry.attempts_max = 2;
    let once = pgonce::Once::with_settings(settings).await.unwrap();
    let shop = Shop::default();
    let waits = policy(|policy| policy.in_progress = InProgress::Wait);
    let address = shop.serve(IdempotencyLayer::new(once, waits)).await;
    let mut cluster = tokio::task::spawn_blocking(move || {
        cluster.kill_9().unwrap();
        cluster
    })
    .await
    .unwrap();
    // Many at once: the duplicates are told what the first one was told.
    let clients: Vec<_> = (0..20).map(|_| tokio::spawn(send(address, post("/orders", "k", "{}")))).collect();
    for client in clients {
        let reply = client.await.unwrap();
        assert_eq!((reply.status, reply.problem().as_str()), (503, "database-away"));
        assert_eq!(reply.json()["effect"], "not_done");
    }
    let get = "GET /orders HTTP/1.1\r\nHost: shop\r\nConnection: close\r\n\r\n";
    assert_eq!(send(address, get).await.status, 200);
    assert_eq!(shop.calls(), 0);
    let _cluster = tokio::task::spawn_blocking(move || {
        cluster.restart().unwrap();
        cluster
    })
    .await
    .unwrap();
    eventually("the database is back", async || {
        let reply = send(address, post("/stream", "again", "{}")).await;
        // The table of effects is not there: the handler is reached, and fails.
        reply.status == 500 && reply.problem() == "handler-failed"
    })
    .await;
}
