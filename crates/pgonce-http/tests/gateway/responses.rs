//! Responses are kept byte for byte, or said not to be.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::rig::{Reply, Rig, send, try_send};

#[tokio::test(flavor = "multi_thread")]
async fn bytes_encodings_and_nothing_private() {
    let rig = Rig::new("").await;
    let first = rig.post("/bytes", "k", "a").await;
    let again = rig.post("/bytes", "k", "a").await;
    assert_eq!(first.body.as_ref(), [0x1f, 0x8b, 0, 255, 254, 10, 13, 0]);
    assert_eq!(again.body, first.body);
    assert_eq!(again.header("content-encoding"), Some("gzip"));
    assert_eq!(first.header("set-cookie"), Some("session=secret"), "the first caller gets it");
    assert_eq!(again.header("set-cookie"), None, "a replay never does");
    assert_eq!(again.header("x-private"), None);
    let kept: serde_json::Value = rig
        .db
        .client()
        .await
        .query_one("SELECT response_headers FROM once.intent WHERE key = 'k'", &[])
        .await
        .unwrap()
        .get(0);
    assert!(!kept.to_string().contains("secret"), "{kept}");
}

#[tokio::test(flavor = "multi_thread")]
async fn larger_than_the_limit_is_done_and_said_so() {
    let rig = Rig::new("response_bytes_max = 100000").await;
    for bytes in [100_001, 500_000] {
        let key = format!("k-{bytes}");
        let path = format!("/large/{bytes}");
        let first = rig.post(&path, &key, "a").await;
        assert_eq!((first.status, first.body.len()), (200, bytes));
        let again = rig.post(&path, &key, "a").await;
        assert_eq!((again.status, again.problem().as_str()), (410, "response-not-stored"));
        assert_eq!(again.json()["effect"], "done");
        assert_eq!(again.json()["original_status"], 200);
        assert_eq!(rig.effects(&key).await, 1);
    }
    for bytes in [0, 1, 70_000, 100_000] {
        let key = format!("k-{bytes}");
        let path = format!("/large/{bytes}");
        let first = rig.post(&path, &key, "a").await;
        let again = rig.post(&path, &key, "a").await;
        assert_eq!((again.status, again.is_replay(), &again.body), (200, true, &first.body), "{bytes}");
    }
}

/// A stream's first piece arrives before its last was sent; the whole is stored.
#[tokio::test(flavor = "multi_thread")]
async fn a_stream_is_passed_on_while_it_is_recorded() {
    let rig = Rig::new("").await;
    let mut stream = tokio::net::TcpStream::connect(rig.gateway.address).await.unwrap();
    let request = "POST /stream HTTP/1.1\r\nhost: h\r\nidempotency-key: \"k\"\r\ncontent-length: 0\r\n\r\n";
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut got = Vec::new();
    let mut until = async |what: &str| {
        while !String::from_utf8_lossy(&got).contains(what) {
            let mut piece = [0; 1024];
            let length = stream.read(&mut piece).await.unwrap();
            assert_ne!(length, 0, "{}", String::from_utf8_lossy(&got));
            got.extend_from_slice(&piece[..length]);
        }
    };
    let pieces = &rig.service.state.pieces;
    pieces.add_permits(1);
    until("\r\n\r\n").await; // the head is passed on, the piece held back
    pieces.add_permits(1);
    until("piece 0").await;
    assert_eq!(rig.states("k").await, ["processing"], "some of it is here, and it is not stored yet");
    pieces.add_permits(3);
    until("\r\n0\r\n\r\n").await;
    assert_eq!(rig.states("k").await, ["succeeded"]);
    let again = rig.post("/stream", "k", "").await;
    assert!(again.is_replay());
    assert_eq!(again.body.as_ref(), b"piece 0\npiece 1\npiece 2\npiece 3\npiece 4\n");
}

/// Asks again while the flight is not over: the row is there a moment before those who follow are told.
async fn landed(rig: &Rig, path: &str, key: &str, body: &str) -> Reply {
    let asked = async {
        loop {
            let reply = rig.post(path, key, body).await;
            if reply.is_replay() || reply.problem() != "in-progress" {
                return reply;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(60), asked).await.expect("the flight ends")
}

/// A client that goes away in the middle does not take the outcome with it.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_changes_nothing() {
    let rig = Rig::new("").await;
    let mut stream = tokio::net::TcpStream::connect(rig.gateway.address).await.unwrap();
    let request = "POST /hold HTTP/1.1\r\nhost: h\r\nidempotency-key: \"k\"\r\ncontent-length: 1\r\n\r\na";
    stream.write_all(request.as_bytes()).await.unwrap();
    rig.service.state.arrived.notified().await;
    drop(stream);
    rig.service.state.gate.notify_one();
    pgonce_testkit::eventually("the outcome is stored", async || rig.states("k").await == ["succeeded"]).await;
    let again = landed(&rig, "/hold", "k", "a").await;
    assert!(again.is_replay());
    assert_eq!(rig.effects("k").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_guarded_streams_both_ways() {
    let rig = Rig::new("").await;
    let passed = rig.send("GET", "/large/3000000", &[], "").await;
    assert_eq!((passed.status, passed.body.len()), (200, 3_000_000));
    let large = "x".repeat(5_000_000);
    assert_eq!(rig.send("PUT", "/else", &[], &large).await.status, 200, "no limit where nothing is fingerprinted");
    let refused = rig.post("/orders", "k", &large).await;
    assert_eq!((refused.status, refused.problem().as_str()), (413, "body-too-large"));
    assert_eq!(rig.states("k").await, Vec::<String>::new());
}

/// A response that breaks off in the middle was not an outcome.
#[tokio::test(flavor = "multi_thread")]
async fn a_response_that_breaks_off_is_cut_for_the_client_too() {
    let rig = Rig::new("stale = \"hold\"").await;
    let cut = try_send(rig.gateway.address, "POST", "/cut", &[("idempotency-key", "\"k\"")], b"a").await;
    assert!(cut.is_err() || cut.as_ref().is_ok_and(|reply| reply.status == 502), "{cut:?}");
    pgonce_testkit::eventually("it is held", async || rig.states("k").await == ["uncertain"]).await;
    let again = landed(&rig, "/cut", "k", "a").await;
    assert_eq!((again.status, again.problem().as_str()), (409, "uncertain"));
    assert_eq!(rig.effects("k").await, 1);
}

/// Drained on a stop: what runs comes to its end, and its client gets the answer.
#[tokio::test(flavor = "multi_thread")]
async fn a_stop_lets_what_runs_finish() {
    let rig = Rig::new("").await;
    let address = rig.gateway.address;
    let held = tokio::spawn(async move { send(address, "POST", "/hold", &[("idempotency-key", "\"k\"")], b"a").await });
    rig.service.state.arrived.notified().await;
    let stopping = tokio::spawn(rig.gateway.stop());
    pgonce_testkit::eventually("it takes no new connection", async || {
        tokio::net::TcpStream::connect(address).await.is_err()
    })
    .await;
    rig.service.state.gate.notify_one();
    assert_eq!(held.await.unwrap().status, 201);
    tokio::time::timeout(Duration::from_secs(10), stopping).await.unwrap().unwrap();
}

/// A client that stops reading keeps nobody from the outcome, and gets the rest when it reads on.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_does_not_read_does_not_hold_the_outcome() {
    const BYTES: usize = 15_000_000;
    let rig = Rig::new("response_bytes_max = 16000000").await;
    let path = format!("/large/{BYTES}");
    let mut stream = tokio::net::TcpStream::connect(rig.gateway.address).await.unwrap();
    let request = format!(
        "POST {path} HTTP/1.1\r\nhost: h\r\nidempotency-key: \"k\"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    pgonce_testkit::eventually("it is stored", async || rig.states("k").await == ["succeeded"]).await;
    let again = landed(&rig, &path, "k", "").await;
    assert_eq!((again.status, again.is_replay(), again.body.len()), (200, true, BYTES));
    let mut read = Vec::new();
    stream.read_to_end(&mut read).await.unwrap();
    assert!(read.ends_with(&again.body), "{} bytes", read.len());
    assert_eq!(rig.effects("k").await, 1);
}
