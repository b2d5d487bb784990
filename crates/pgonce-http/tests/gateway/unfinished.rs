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
