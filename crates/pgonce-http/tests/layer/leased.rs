//! Handlers that call out.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::Router;
use axum::http::StatusCode;
use axum::routing::post as route;
use pgonce::Failure;
use pgonce_http::{Failed, IdempotencyLayer, Leased, Transaction};
use pgonce_testkit::{TestDb, eventually};

use crate::client::{post, send};
use crate::shop::{policy, serve};

/// A provider that is called with the claim's fence, and answers as the request's body says.
async fn provider(db: &TestDb, stale: &str) -> (Arc<AtomicUsize>, std::net::SocketAddr) {
    let define = format!("SELECT once.define_scope('orders', '{{\"mode\": \"leased\", \"stale\": \"{stale}\"}}')");
    db.client().await.batch_execute(&define).await.unwrap();
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&calls);
    let pay = async move |lease: Leased, status: String| {
        assert!(lease.fence.is_some());
        let call = counted.fetch_add(1, Ordering::SeqCst);
        assert!(status != "panic", "the test asked for it");
        // Only the first answers as asked; a later one is well.
        let status = if call == 0 { status.parse().unwrap() } else { 201 };
        (StatusCode::from_u16(status).unwrap(), format!("payment {call}"))
    };
    // As if the outcome of a call could not be written down afterwards.
    let counted = Arc::clone(&calls);
    let lost = async move |_: Leased| -> Result<(), Failed> {
        counted.fetch_add(1, Ordering::SeqCst);
        Err(Failed(Failure::retry("40001", "again")))
    };
    let wants_transaction = async |_: Transaction| "never";
    let layer = IdempotencyLayer::new(db.once().await, policy(|_| {})).leased();
    let router = Router::new()
        .route("/pay", route(pay))
        .route("/lost", route(lost))
        .route("/atomic", route(wants_transaction))
        .layer(layer);
    (calls, serve(router).await)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leased_handlers_response_is_stored() {
    for (status, stored) in [("201", true), ("404", true), ("429", false)] {
        let db = TestDb::new().await;
        let (calls, address) = provider(&db, "hold").await;
        let first = send(address, post("/pay", "k", status)).await;
        assert_eq!((first.status.to_string().as_str(), first.is_replay()), (status, false));
        let retry = send(address, post("/pay", "k", status)).await;
        assert_eq!((retry.is_replay(), calls.load(Ordering::SeqCst)), (stored, if stored { 1 } else { 2 }));
        assert_eq!(retry.body == first.body, stored);
    }
    let db = TestDb::new().await;
    let (_, address) = provider(&db, "hold").await;
    assert_eq!(send(address, post("/atomic", "k", "")).await.problem(), "not-guarded");
}

/// A 5xx or a panic says nothing of what was done outside: the scope's policy decides about the retry.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leased_handler_that_fails_leaves_it_to_policy() {
    for (path, failure) in [("/pay", "500"), ("/pay", "panic"), ("/lost", "")] {
        for stale in ["hold", "rerun"] {
            let db = TestDb::new().await;
            let (calls, address) = provider(&db, stale).await;
            let first = send(address, post(path, "k", failure)).await;
            assert_eq!((first.status, calls.load(Ordering::SeqCst)), (500, 1));
            if failure != "500" {
                assert_eq!((first.problem().as_str(), &first.json()["effect"]), ("internal", &"unknown".into()));
            }
            let mut retry = None;
            eventually("the lease is over", async || {
                let reply = send(address, post(path, "k", failure)).await;
                let over = reply.status != 409 || reply.problem() != "in-progress";
                retry = Some(reply);
                over
            })
            .await;
            let (status, again) = match (stale, failure) {
                ("hold", _) => (409, 1),
                (_, "500") => (201, 2),
                _ => (500, 2),
            };
            assert_eq!((retry.unwrap().status, calls.load(Ordering::SeqCst)), (status, again), "{path} {failure}");
        }
    }
}
