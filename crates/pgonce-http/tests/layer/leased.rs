//! Handlers that call out, and services that are not axum's.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::Router;
use axum::body::Body;
use axum::http::StatusCode;
use axum::routing::post as route;
use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use pgonce::{Failure, Tx};
use pgonce_http::{Failed, IdempotencyLayer, LayerBody, Leased, Transaction};
use pgonce_testkit::{TestDb, eventually};
use tower::{Layer, ServiceExt};

use crate::client::{post, send};
use crate::shop::{insert, policy, serve};

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

fn request(key: &str) -> Request<Full<Bytes>> {
    let request = Request::post("/orders").header("idempotency-key", key);
    request.body(Full::new(Bytes::from_static(b"{}"))).unwrap()
}

/// Any tower service, with bodies of its own.
#[tokio::test]
async fn a_plain_service_finds_the_transaction_among_the_extensions() {
    let db = TestDb::new().await;
    let service = tower::service_fn(async |request: Request<LayerBody<Full<Bytes>>>| {
        let tx = request.extensions().get::<Tx>().unwrap().clone();
        insert(&tx, "k").await.unwrap();
        drop(tx);
        let (parts, body) = request.into_parts();
        let mut response = Response::new(Full::new(body.collect().await.unwrap().to_bytes()));
        // Middleware that copies extensions over does not keep the transaction.
        *response.extensions_mut() = parts.extensions;
        Ok::<_, Infallible>(response)
    });
    let service = IdempotencyLayer::new(db.once().await, policy(|_| {})).layer(service);
    for replayed in [false, true] {
        let response = service.clone().oneshot(request("k")).await.unwrap();
        assert_eq!(response.headers().contains_key("idempotency-replayed"), replayed);
        assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "{}");
    }
    assert_eq!(db.effects("k").await, 1);
}

#[tokio::test]
async fn an_error_of_the_service_is_passed_on_and_rolls_back() {
    let db = TestDb::new().await;
    let service = tower::service_fn(async |request: Request<LayerBody<Full<Bytes>>>| {
        insert(request.extensions().get::<Tx>().unwrap(), "k").await.unwrap();
        Err::<Response<Body>, _>(std::io::Error::other("no"))
    });
    let service = IdempotencyLayer::new(db.once().await, policy(|_| {})).layer(service);
    let failed = service.oneshot(request("k")).await;
    assert_eq!(failed.map(|_| ()).unwrap_err().to_string(), "no");
    assert_eq!((db.effects("k").await, db.status("orders", "k").await), (0, None));
}

/// What was reserved for a guarded request must not keep its own calls from running.
#[tokio::test]
async fn a_limit_of_one_call_at_a_time_is_no_deadlock() {
    let db = TestDb::new().await;
    let one = tower::limit::ConcurrencyLimitLayer::new(1);
    let service = one.layer(tower::service_fn(async |request: Request<LayerBody<Full<Bytes>>>| {
        insert(request.extensions().get::<Tx>().unwrap(), "k").await.unwrap();
        Ok::<_, Infallible>(Response::new(Full::new(Bytes::new())))
    }));
    let mut service = IdempotencyLayer::new(db.once().await, policy(|_| {})).layer(service);
    for _ in 0..3 {
        let ready = service.ready().await.unwrap();
        tower::Service::call(ready, request("k")).await.unwrap();
    }
    assert_eq!(db.effects("k").await, 1);
}
