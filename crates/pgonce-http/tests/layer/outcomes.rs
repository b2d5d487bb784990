//! What is committed, what is stored, and what a retry gets.

use pgonce_http::IdempotencyLayer;

use crate::client::{post, send};
use crate::shop::{Shop, open, policy, small_once};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_and_every_retry_get_the_same_bytes_and_there_is_one_effect() {
    let (db, shop, address) = open(|_| {}).await;
    let first = send(address, post("/orders", "k", "{}")).await;
    assert_eq!((first.status, first.is_replay()), (201, false));
    assert_eq!(first.header("set-cookie"), Some("session=secret"), "the first one's client gets everything");
    // By this process, which has seen it, and by another one.
    let elsewhere = shop.serve(IdempotencyLayer::new(db.once().await, policy(|_| {}))).await;
    for replay in [send(address, post("/orders", "k", "{}")).await, send(elsewhere, post("/orders", "k", "{}")).await] {
        assert_eq!((replay.status, replay.is_replay()), (201, true));
        assert_eq!(replay.body, first.body);
        for name in ["content-type", "location", "link"] {
            assert_eq!(replay.all(name), first.all(name), "{name}");
        }
        assert_eq!(replay.all("link"), ["<b>", "<a>"]);
        assert_eq!((replay.header("set-cookie"), replay.header("x-private")), (None, None));
    }
    assert_eq!((shop.calls(), db.effects("k").await), (1, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_command_keeps_its_answer_and_not_its_writes() {
    let (db, shop, address) = open(|_| {}).await;
    for status in [400, 404, 409, 422] {
        let key = format!("k{status}");
        let body = format!("{{\"status\": {status}}}");
        let first = send(address, post("/orders", &key, &body)).await;
        let replay = send(address, post("/orders", &key, &body)).await;
        assert_eq!((first.status, first.is_replay()), (status, false));
        assert_eq!((replay.status, replay.is_replay()), (status, true));
        assert_eq!(replay.body, first.body);
        assert_eq!((db.effects(&key).await, db.status("orders", &key).await.as_deref()), (0, Some("succeeded")));
    }
    assert_eq!(shop.calls(), 4);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_no_outcome_is_passed_on_and_runs_again() {
    let (db, shop, address) = open(|policy| policy.store_client_errors = false).await;
    for (turn, status) in [404, 408, 425, 429, 500, 503].into_iter().enumerate() {
        let key = format!("k{status}");
        let body = format!("{{\"status\": {status}}}");
        for again in 1..=2 {
            let reply = send(address, post("/orders", &key, &body)).await;
            assert_eq!((reply.status, reply.is_replay()), (status, false));
            assert_eq!(reply.header("set-cookie"), Some("session=secret"), "as the handler sent it");
            assert_eq!(shop.calls(), 2 * turn + again);
        }
        assert_eq!((db.effects(&key).await, db.status("orders", &key).await), (0, None));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_panic_rolls_back_and_the_connection_serves_the_next_request() {
    let (db, shop) = (pgonce_testkit::TestDb::new().await, Shop::default());
    let address = shop.serve(IdempotencyLayer::new(small_once(&db, 1).await, policy(|_| {}))).await;
    for _ in 0..3 {
        let reply = send(address, post("/orders", "k", "{\"panic\": true}")).await;
        assert_eq!((reply.status, reply.problem().as_str()), (500, "handler-failed"));
        assert_eq!(reply.json()["effect"], "not_done");
        assert_eq!((db.effects("k").await, db.status("orders", "k").await), (0, None));
    }
    let reply = send(address, post("/orders", "other", "{}")).await;
    assert_eq!((reply.status, db.effects("other").await), (201, 1));
    assert_eq!(shop.calls(), 4);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_response_that_is_too_large_is_sent_once_and_its_effect_stays() {
    let (db, shop, address) = open(|policy| policy.response_bytes_max = 1000).await;
    let first = send(address, post("/orders", "k", "{\"size\": 5000}")).await;
    assert_eq!((first.status, first.json()["filler"].as_str().unwrap().len()), (201, 5000));
    let retry = send(address, post("/orders", "k", "{\"size\": 5000}")).await;
    assert_eq!((retry.status, retry.problem().as_str()), (410, "response-not-stored"));
    assert_eq!((&retry.json()["effect"], &retry.json()["original_status"]), (&"done".into(), &201.into()));
    assert_eq!((shop.calls(), db.effects("k").await), (1, 1));
}

/// Of a body without a known length the beginning is read before the commit; the client gets it all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_streamed_response_is_stored_or_passed_on_whole() {
    let whole: String = (0..10).map(|turn| format!("chunk {turn}\n")).collect();
    for (limit, stored) in [(1000, true), (20, false)] {
        let (db, _, address) = open(|policy| policy.response_bytes_max = limit).await;
        let first = send(address, post("/stream", "k", "{}")).await;
        assert_eq!((first.status, String::from_utf8(first.body).unwrap()), (200, whole.clone()));
        let retry = send(address, post("/stream", "k", "{}")).await;
        assert_eq!(retry.is_replay(), stored);
        if stored {
            assert_eq!(String::from_utf8(retry.body).unwrap(), whole);
        } else {
            assert_eq!(retry.problem(), "response-not-stored");
        }
        assert_eq!(db.effects("k").await, 1);
    }
}

/// Where the scope keeps no bodies, the layer has nothing to replay, and says that it is done.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_scope_that_keeps_no_responses_is_told_apart_from_an_empty_one() {
    let (db, _, address) = open(|_| {}).await;
    let define = "SELECT once.define_scope('orders', '{\"response\": \"status\"}')";
    db.client().await.batch_execute(define).await.unwrap();
    assert_eq!(send(address, post("/orders", "k", "{}")).await.status, 201);
    let retry = send(address, post("/orders", "k", "{}")).await;
    assert_eq!((retry.problem().as_str(), &retry.json()["original_status"]), ("response-not-stored", &201.into()));
    assert_eq!(db.effects("k").await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transaction_that_is_kept_commits_nothing_and_blocks_nobody() {
    let (db, shop, address) = open(|_| {}).await;
    for status in [201, 404, 500] {
        let body = format!("{{\"keep\": true, \"status\": {status}}}");
        let reply = send(address, post("/orders", "k", &body)).await;
        assert_eq!((reply.status, reply.problem().as_str()), (500, "transaction-kept"));
        assert_eq!((db.effects("k").await, db.status("orders", "k").await), (0, None));
    }
    // While the handles are still there.
    pgonce_testkit::eventually("the key is free", async || {
        send(address, post("/orders", "k", "{\"keep\": false}")).await.status == 201
    })
    .await;
    let kept = std::mem::take(&mut *shop.kept.lock().unwrap());
    for tx in kept {
        assert!(tx.is_closed() || tx.batch_execute("SELECT 1").await.is_err());
    }
    assert_eq!(db.effects("k").await, 1);
}

/// As of a service that the handler asks, whose answer broke off without an error.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_response_that_is_shorter_than_it_says_is_no_outcome() {
    let (db, shop, address) = open(|_| {}).await;
    for again in 1..=2 {
        let reply = send(address, post("/orders", "k", "{\"length\": 100000}")).await;
        assert_eq!((reply.status, reply.problem().as_str()), (500, "handler-failed"), "{reply:?}");
        assert_eq!(shop.calls(), again);
    }
    assert_eq!((db.effects("k").await, db.status("orders", "k").await), (0, None));
}
