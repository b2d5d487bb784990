//! Services that are not axum's.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use futures_util::FutureExt;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use pgonce::Tx;
use pgonce_http::{IdempotencyLayer, InProgress, LayerBody};
use pgonce_testkit::TestDb;
use tokio::sync::Semaphore;
use tower::{Layer, ServiceExt};

use crate::shop::{insert, policy};

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
        let called = tower::Service::call(ready, request("k"));
        tokio::time::timeout(Duration::from_secs(60), called).await.expect("no deadlock").unwrap();
    }
    assert_eq!(db.effects("k").await, 1);
}

/// They wake together. The pool must not be where they queue: it would refuse most of them, and everybody else.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_thousand_waiters_are_answered_over_two_connections() {
    let db = TestDb::new().await;
    let once = db
        .once_with(|settings| {
            settings.pool_max = 2;
            settings.retry.attempts_max = 1;
            settings.pool_wait = Duration::from_millis(500);
        })
        .await;
    let (running, go) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
    let held = (Arc::clone(&running), Arc::clone(&go));
    let service = tower::service_fn(move |request: Request<LayerBody<Full<Bytes>>>| {
        let (running, go) = held.clone();
        async move {
            insert(request.extensions().get::<Tx>().unwrap(), "k").await.unwrap();
            drop(request);
            running.add_permits(1);
            go.acquire().await.unwrap().forget();
            Ok::<_, Infallible>(Response::new(Full::new(Bytes::from_static(b"done"))))
        }
    });
    let waits = policy(|policy| {
        policy.in_progress = InProgress::Wait;
        policy.wait_max = Duration::from_secs(60);
    });
    let service = IdempotencyLayer::new(once, waits).layer(service);
    let mut requests = tokio::task::JoinSet::new();
    requests.spawn(service.clone().oneshot(request("k")));
    running.acquire().await.unwrap().forget();
    let mut waiters: Vec<_> = (0..2000).map(|_| Box::pin(service.clone().oneshot(request("k")))).collect();
    for waiter in &mut waiters {
        // Polled until it waits: nothing before that takes another task.
        assert!(waiter.now_or_never().is_none());
    }
    waiters.into_iter().for_each(|waiter| drop(requests.spawn(waiter)));
    go.add_permits(1);
    let mut replayed = 0;
    while let Some(done) = requests.join_next().await {
        let response = done.unwrap().unwrap();
        assert_eq!(response.status(), 200);
        replayed += usize::from(response.headers().contains_key("idempotency-replayed"));
    }
    assert_eq!((replayed, db.effects("k").await), (2000, 1));
}
