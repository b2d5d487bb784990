//! Requests that are not run, and requests that are none of the layer's business.

use std::time::Duration;

use axum::Router;
use axum::routing::post as route;
use pgonce_http::{IdempotencyLayer, Requirement};
use pgonce_testkit::TestDb;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::client::{post, post_with, receive, send};
use crate::shop::{open, policy, serve};

async fn intents(db: &TestDb) -> i64 {
    db.client().await.query_one("SELECT count(*) FROM once.intents", &[]).await.unwrap().get(0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_request_under_the_same_key_is_refused() {
    let (db, shop, address) = open(|_| {}).await;
    let first = send(address, post("/orders", "k", "{}")).await;
    assert_eq!(first.status, 201);
    for other in [post("/orders", "k", "{ }"), post("/orders?x=1", "k", "{}"), post("/stream", "k", "{}")] {
        let reply = send(address, other).await;
        assert_eq!((reply.status, reply.problem().as_str()), (422, "conflict"));
        assert_eq!(reply.json()["effect"], "not_done");
        assert!(!String::from_utf8_lossy(&reply.body).contains("/orders/1"));
    }
    assert_eq!(send(address, post("/orders", "k", "{}")).await.body, first.body);
    assert_eq!((shop.calls(), db.effects("k").await), (1, 1));
}

/// Inside a nested router the path has lost its prefix, and the prefix may name whose order it is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_nested_route_is_pinned_by_its_whole_path() {
    let db = TestDb::new().await;
    let orders = Router::new()
        .route("/orders", route(async || "made"))
        .layer(IdempotencyLayer::new(db.once().await, policy(|_| {})));
    let address = serve(Router::new().nest("/users/{user}", orders)).await;
    assert_eq!(send(address, post("/users/1/orders", "k", "{}")).await.status, 200);
    assert!(send(address, post("/users/1/orders", "k", "{}")).await.is_replay());
    assert_eq!(send(address, post("/users/2/orders", "k", "{}")).await.problem(), "conflict");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_that_are_missing_or_malformed_are_refused() {
    let (db, shop, address) = open(|policy| policy.syntax = pgonce_http::KeySyntax::Strict).await;
    let missing = send(address, post_with("/orders", "", "{}")).await;
    assert_eq!((missing.status, missing.problem().as_str()), (400, "key-missing"));
    let long = format!("\"{}\"", "x".repeat(256));
    for key in ["bare", "\"\"", "\"a\", \"b\"", "\"a", &long] {
        let reply = send(address, post_with("/orders", &format!("Idempotency-Key: {key}\r\n"), "{}")).await;
        assert_eq!((reply.status, reply.problem().as_str()), (400, "key-malformed"), "{key}");
    }
    let twice = "Idempotency-Key: \"a\"\r\nIdempotency-Key: \"a\"\r\n";
    assert_eq!(send(address, post_with("/orders", twice, "{}")).await.problem(), "key-malformed");
    assert_eq!((shop.calls(), intents(&db).await), (0, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_that_is_too_large_leaves_no_claim() {
    let (db, shop, address) = open(|policy| policy.body_bytes_max = 100).await;
    let large = format!("{{\"filler\": \"{}\"}}", "x".repeat(200));
    let declared = send(address, post("/orders", "k", &large)).await;
    assert_eq!((declared.status, declared.problem().as_str()), (413, "body-too-large"));
    assert_eq!(declared.json()["limit_bytes"], 100);
    // Without a length it shows only while it is read.
    let chunked = "POST /orders HTTP/1.1\r\nHost: shop\r\nConnection: close\r\nIdempotency-Key: \"k\"\r\n\
                   Transfer-Encoding: chunked\r\n\r\n";
    let chunked = format!("{chunked}40\r\n{0}\r\n40\r\n{0}\r\n0\r\n\r\n", "x".repeat(64));
    assert_eq!(send(address, chunked).await.problem(), "body-too-large");
    assert_eq!((shop.calls(), intents(&db).await), (0, 0));
    assert_eq!(send(address, post("/orders", "k", "{}")).await.status, 201);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_that_is_cut_short_leaves_no_claim() {
    let (db, shop, address) = open(|_| {}).await;
    let head = "POST /orders HTTP/1.1\r\nHost: shop\r\nIdempotency-Key: \"k\"\r\n";
    for begun in [
        "Content-Length: 100\r\n\r\n{",
        "Transfer-Encoding: chunked\r\n\r\n5\r\n{\"a\"",
        "Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    ] {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(format!("{head}{begun}").as_bytes()).await.unwrap();
        stream.shutdown().await.unwrap();
        let mut answer = Vec::new();
        // An answer, or the end of the connection: then it is known to be over.
        let _ = stream.read_to_end(&mut answer).await;
        let answer = String::from_utf8_lossy(&answer);
        assert!(answer.is_empty() || answer.contains(" 400 "), "{answer}");
    }
    assert_eq!((shop.calls(), intents(&db).await), (0, 0));
    assert_eq!(send(address, post("/orders", "k", "{}")).await.status, 201);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_that_is_too_slow_leaves_no_claim() {
    let (db, shop, address) = open(|policy| policy.body_timeout = Duration::from_millis(50)).await;
    let mut stream = TcpStream::connect(address).await.unwrap();
    let begun = "POST /orders HTTP/1.1\r\nHost: shop\r\nIdempotency-Key: \"k\"\r\nContent-Length: 100\r\n\r\n{";
    stream.write_all(begun.as_bytes()).await.unwrap();
    let reply = receive(&mut stream).await;
    assert_eq!((reply.status, reply.problem().as_str()), (408, "body-timeout"));
    assert_eq!((shop.calls(), intents(&db).await), (0, 0));
}

/// What is answered before its body was read must not be followed by an answer to that body (trap 21).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_request_leaves_its_connection_in_order() {
    let (_, shop, address) = open(|_| {}).await;
    let smuggled = post("/orders", "smuggled", "{}");
    let refused = format!(
        "POST /orders HTTP/1.1\r\nHost: shop\r\nIdempotency-Key: \"\"\r\nContent-Length: {}\r\n\r\n{smuggled}",
        smuggled.len()
    );
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(refused.as_bytes()).await.unwrap();
    stream.write_all(post("/orders", "k", "{}").as_bytes()).await.unwrap();
    let mut all = Vec::new();
    let _ = stream.read_to_end(&mut all).await;
    let all = String::from_utf8_lossy(&all);
    let statuses: Vec<&str> = all.lines().filter_map(|line| line.strip_prefix("HTTP/1.1 ")).collect();
    assert!(statuses.first().is_some_and(|status| status.starts_with("400")), "{all}");
    assert!(statuses[1..].iter().all(|status| status.starts_with("201")) && statuses.len() <= 2, "{all}");
    assert!(shop.calls() <= 1, "only the request that was one");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_not_guarded_passes_untouched() {
    let (db, shop, address) = open(|policy| policy.requirement = Requirement::Optional).await;
    let get = |path: &str| {
        format!("GET {path} HTTP/1.1\r\nHost: shop\r\nConnection: close\r\nIdempotency-Key: \"k\"\r\n\r\n")
    };
    let listed = send(address, get("/orders")).await;
    assert_eq!((listed.status, listed.body.as_slice()), (200, &b"list"[..]));
    let streamed = send(address, get("/stream")).await;
    assert_eq!(streamed.header("transfer-encoding"), Some("chunked"), "not read before it is sent");
    let unkeyed = send(address, post_with("/stream", "", "{}")).await;
    assert_eq!((unkeyed.status, unkeyed.is_replay()), (200, false));
    assert_eq!((shop.calls(), intents(&db).await), (0, 0));
    // A handler that cannot do without says what is missing, and where the fault is.
    let needs_key = send(address, post_with("/orders", "", "{}")).await;
    assert_eq!((needs_key.status, needs_key.problem().as_str()), (400, "key-missing"));
    let outside = send(address, post("/outside", "k", "{}")).await;
    assert_eq!((outside.status, outside.problem().as_str()), (500, "not-guarded"));
    assert_eq!(shop.calls(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_status_can_be_mapped() {
    let (_, _, address) = open(|policy| {
        policy.statuses.set("conflict", 400).unwrap();
        policy.statuses.set("key-missing", 428).unwrap();
        policy.statuses.set("response-not-stored", 409).unwrap();
        policy.response_bytes_max = 1;
    })
    .await;
    send(address, post("/orders", "k", "{}")).await;
    for (request, status, problem) in [
        (post("/orders", "k", "[]"), 400, "conflict"),
        (post_with("/orders", "", "{}"), 428, "key-missing"),
        (post("/orders", "k", "{}"), 409, "response-not-stored"),
    ] {
        let reply = send(address, request).await;
        assert_eq!((reply.status, reply.problem().as_str()), (status, problem));
    }
}
