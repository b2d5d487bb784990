//! Bodies that do not come to their end, either way: nothing of them is taken for whole.

use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Notify;

use crate::frames::{DATA, END_HEADERS, END_STREAM, Frames, HEADERS, STATUS_200, post};
use crate::peers::{Bare, read_until};
use crate::rig::{Rig, send, states, try_send};

/// What is not reset here waits for its gateway to say so: its own limits must not be what ends it.
const CONFIG: &str = "stale = \"hold\"\nupstream.http2 = true\nupstream.timeout = \"60s\"";

/// Answers each request with a head and a part of a body, and resets the stream when it is told to.
async fn resetting(reset: Arc<Notify>) -> Bare {
    Bare::start(move |stream| {
        let reset = Arc::clone(&reset);
        async move {
            let mut frames = Frames::accepted(stream).await;
            while let Some(frame) = frames.next().await {
                if frame.flags & END_STREAM == 0 || !matches!(frame.kind, DATA | HEADERS) {
                    continue;
                }
                frames.write(HEADERS, END_HEADERS, frame.stream, STATUS_200).await;
                frames.write(DATA, 0, frame.stream, b"a part").await;
                frames.all_is_there().await;
                reset.notified().await;
                frames.reset(frame.stream).await;
            }
        }
    })
    .await
}

/// The reset comes while the response is gathered, or when its head has been passed on: not an outcome either way.
#[tokio::test(flavor = "multi_thread")]
async fn a_reset_is_not_the_end_of_a_response() {
    let reset = Arc::new(Notify::new());
    let service = resetting(Arc::clone(&reset)).await;
    let (db, gateway) = service.gateway(CONFIG).await;
    reset.notify_one();
    let early = try_send(gateway.address, "POST", "/", &[("idempotency-key", "\"early\"")], b"a").await;
    if let Ok(early) = early {
        assert_eq!((early.status, early.problem().as_str()), (502, "upstream-uncertain"), "{early:?}");
    }
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    let request = "POST / HTTP/1.1\r\nhost: h\r\nidempotency-key: \"late\"\r\ncontent-length: 1\r\n\r\na";
    stream.write_all(request.as_bytes()).await.unwrap();
    let head = read_until(&mut stream, "\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    reset.notify_one();
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest).await;
    let rest = String::from_utf8_lossy(&rest).into_owned();
    assert!(!rest.ends_with("0\r\n\r\n"), "it looks whole: {rest:?}");
    for key in ["early", "late"] {
        pgonce_testkit::eventually("it is held", async || states(&db, key).await == ["uncertain"]).await;
        let again = send(gateway.address, "POST", "/", &[("idempotency-key", &format!("\"{key}\""))], b"a").await;
        assert_eq!((again.status, again.problem().as_str()), (409, "uncertain"));
    }
}

/// The same for what nobody guards: whoever reads it must see that something is missing.
#[tokio::test(flavor = "multi_thread")]
async fn a_reset_is_passed_on_as_a_cut() {
    let reset = Arc::new(Notify::new());
    let service = resetting(Arc::clone(&reset)).await;
    let (_db, gateway) = service.gateway(CONFIG).await;
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n").await.unwrap();
    read_until(&mut stream, "a part").await;
    reset.notify_one();
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest).await;
    let rest = String::from_utf8_lossy(&rest).into_owned();
    assert!(!rest.ends_with("0\r\n\r\n"), "it looks whole: {rest:?}");
}

/// A client that resets its request has not sent it: nothing is claimed, and nothing is sent on.
#[tokio::test(flavor = "multi_thread")]
async fn a_reset_is_not_the_end_of_a_request() {
    let rig = Rig::new("").await;
    let mut frames = Frames::connected(TcpStream::connect(rig.gateway.address).await.unwrap()).await;
    let head = |key: &str| post("/orders", &[("idempotency-key", key)]);
    for stream in [1, 3, 5, 7] {
        frames.write(HEADERS, END_HEADERS, stream, &head("\"cut\"")).await;
        frames.write(DATA, 0, stream, b"a part").await;
        frames.all_is_there().await;
        frames.reset(stream).await;
        frames.all_is_there().await;
    }
    frames.write(HEADERS, END_HEADERS, 9, &head("\"whole\"")).await;
    frames.write(DATA, END_STREAM, 9, b"a part").await;
    while frames.next().await.is_some_and(|frame| frame.stream != 9 || frame.flags & END_STREAM == 0) {}
    assert_eq!(rig.states("whole").await, ["succeeded"]);
    assert_eq!((rig.states("cut").await, rig.service.requests()), (Vec::<String>::new(), 1));
}

/// Answers with a head and a part of a body, and then with nothing.
async fn standing_still() -> Bare {
    Bare::start(|mut stream| async move {
        crate::peers::read_head(&mut stream).await;
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\na part").await.unwrap();
        std::future::pending::<()>().await;
    })
    .await
}

/// A service that stops in the middle of its answer holds neither the claim nor the client: the policy decides.
#[tokio::test(flavor = "multi_thread")]
async fn a_response_that_stands_still_is_doubt() {
    let service = standing_still().await;
    for limit in ["response_idle_timeout = \"300ms\"", "response_timeout = \"300ms\""] {
        for (stale, state) in [("hold", "uncertain"), ("rerun", "failed_retryable")] {
            let (db, gateway) = service.gateway(&format!("stale = \"{stale}\"\n{limit}")).await;
            let cut = try_send(gateway.address, "POST", "/", &[("idempotency-key", "\"k\"")], b"a").await;
            assert!(cut.is_err(), "it has a length, and less came: {cut:?}");
            pgonce_testkit::eventually("the policy decided", async || states(&db, "k").await == [state]).await;
            let sql = "SELECT failure_code FROM once.intents WHERE key = 'k'";
            let code: String = db.client().await.query_one(sql, &[]).await.unwrap().get(0);
            assert_eq!(code, "upstream_timeout");
            let passed = try_send(gateway.address, "GET", "/", &[], b"").await;
            assert!(passed.is_err(), "not guarded: {passed:?}");
        }
    }
}

/// Nothing of the body came: the client is told, and not cut off.
#[tokio::test(flavor = "multi_thread")]
async fn a_response_without_its_body_is_told_as_late() {
    let service = Bare::start(|mut stream| async move {
        crate::peers::read_head(&mut stream).await;
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n").await.unwrap();
        std::future::pending::<()>().await;
    })
    .await;
    let (db, gateway) = service.gateway("stale = \"hold\"\nresponse_idle_timeout = \"300ms\"").await;
    let late = send(gateway.address, "POST", "/", &[("idempotency-key", "\"k\"")], b"a").await;
    assert_eq!((late.status, late.problem().as_str()), (504, "upstream-timeout"));
    assert_eq!(
        (late.json()["effect"].as_str(), states(&db, "k").await),
        (Some("unknown"), vec!["uncertain".to_owned()])
    );
}

/// What keeps coming is not cut off, however long it takes in all.
#[tokio::test(flavor = "multi_thread")]
async fn a_response_that_moves_may_take_its_time() {
    const PIECES: usize = 20;
    let service = Bare::start(|mut stream| async move {
        crate::peers::read_head(&mut stream).await;
        let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {PIECES}\r\n\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        for _ in 0..PIECES {
            tokio::time::sleep(std::time::Duration::from_millis(200)).await;
            stream.write_all(b"x").await.unwrap();
        }
    })
    .await;
    // Longer than a pause by far, and shorter than all of them.
    let (db, gateway) = service.gateway("response_idle_timeout = \"3s\"").await;
    let key = [("idempotency-key", "\"k\"")];
    let (guarded, passed) =
        tokio::join!(send(gateway.address, "POST", "/", &key, b"a"), send(gateway.address, "GET", "/", &[], b""),);
    assert_eq!((guarded.body.len(), passed.body.len()), (PIECES, PIECES));
    assert_eq!(states(&db, "k").await, ["succeeded"]);
}
