//! Garbage on the wire: a clear answer, no claim left behind, and a connection in a sane state.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::rig::{Rig, raw};

async fn rows(rig: &Rig) -> i64 {
    rig.db.client().await.query_one("SELECT count(*) FROM once.intents", &[]).await.unwrap().get(0)
}

/// Each of these must be refused, or read in the one way that cannot be misunderstood; whatever follows on the
/// same connection is a request of its own or not read at all, never a part of the first.
#[tokio::test(flavor = "multi_thread")]
async fn no_request_is_smuggled() {
    let rig = Rig::new("").await;
    let smuggled = "GET /smuggled HTTP/1.1\r\nhost: h\r\n\r\n";
    let length = smuggled.len();
    let corpus = [
        // Two lengths.
        format!("POST /orders HTTP/1.1\r\nhost: h\r\ncontent-length: 0\r\ncontent-length: {length}\r\n\r\n{smuggled}"),
        format!("POST /orders HTTP/1.1\r\nhost: h\r\ncontent-length: 0, {length}\r\n\r\n{smuggled}"),
        format!("POST /orders HTTP/1.1\r\nhost: h\r\ncontent-length: +{length}\r\n\r\n{smuggled}"),
        format!("POST /orders HTTP/1.1\r\nhost: h\r\ncontent-length: -1\r\n\r\n{smuggled}"),
        format!("POST /orders HTTP/1.1\r\nhost: h\r\ncontent-length: {length} 0\r\n\r\n{smuggled}"),
        // Encodings that are not chunked at the end.
        format!("POST /orders HTTP/1.1\r\nhost: h\r\ntransfer-encoding: gzip\r\n\r\n{smuggled}"),
        format!("POST /orders HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked, gzip\r\n\r\n0\r\n\r\n{smuggled}"),
        format!("POST /orders HTTP/1.1\r\nhost: h\r\ntransfer-encoding: xchunked\r\n\r\n0\r\n\r\n{smuggled}"),
        format!("POST /orders HTTP/1.0\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n{smuggled}"),
        // Folded and spaced headers.
        format!(
            "POST /orders HTTP/1.1\r\nhost: h\r\ntransfer-encoding : chunked\r\ncontent-length: 0\r\n\r\n{smuggled}"
        ),
        format!(
            "POST /orders HTTP/1.1\r\nhost: h\r\nx: y\r\n transfer-encoding: chunked\r\ncontent-length: {length}\r\n\r\n{smuggled}"
        ),
        format!("POST /orders HTTP/1.1\r\nhost: h\r\ncontent-length\0: 0\r\n\r\n{smuggled}"),
        // Chunks that lie.
        format!("POST /orders HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n-1\r\n\r\n{smuggled}"),
        format!(
            "POST /orders HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n\r\n{smuggled}"
        ),
        format!("POST /orders HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n1\r\nab\r\n0\r\n\r\n{smuggled}"),
    ];
    for attack in &corpus {
        let keyed = attack.replacen("host: h\r\n", "host: h\r\nidempotency-key: \"k\"\r\n", 1);
        let before = rig.service.requests();
        let answer = raw(rig.gateway.address, keyed.as_bytes()).await;
        assert!(answer.starts_with("HTTP/1.1 400") || answer.is_empty(), "{keyed:?} → {answer:?}");
        assert_eq!(answer.matches("HTTP/1.1").count(), answer.len().min(1), "one answer, then the end: {answer:?}");
        assert_eq!(rig.service.requests(), before, "{keyed:?}");
    }
    assert_eq!(rows(&rig).await, 0);
}

/// A length beside an encoding: the encoding counts, the length goes no further, and the connection ends
/// (RFC 9112, 6.1 and 6.3).
#[tokio::test(flavor = "multi_thread")]
async fn a_length_beside_chunks_does_not_split_the_request() {
    let rig = Rig::new("").await;
    let orders = ["content-length: 4\r\ntransfer-encoding: chunked", "transfer-encoding: chunked\r\ncontent-length: 4"];
    for (n, order) in orders.iter().enumerate() {
        let head = format!("POST /orders HTTP/1.1\r\nhost: h\r\nidempotency-key: \"k-{n}\"\r\n{order}\r\n\r\n");
        let attack = format!("{head}5\r\nhello\r\n0\r\n\r\nGET /next HTTP/1.1\r\nhost: h\r\n\r\n");
        let answer = raw(rig.gateway.address, attack.as_bytes()).await;
        assert!(answer.contains("\"bytes\":5") && answer.contains("connection: close"), "{answer}");
        assert_eq!(answer.matches("HTTP/1.1").count(), 1, "{answer}");
        assert_eq!(rig.service.header("transfer-encoding"), None);
        assert_eq!(rig.service.header("content-length").unwrap(), "5");
    }
    assert_eq!(rig.service.requests(), 2);
}

/// A replay is answered after the body was read: the next request on the connection is what it is (trap 21).
#[tokio::test(flavor = "multi_thread")]
async fn a_replay_leaves_the_connection_in_step() {
    let rig = Rig::new("").await;
    rig.post("/orders", "k", "hello").await;
    let post = "POST /orders HTTP/1.1\r\nhost: h\r\nidempotency-key: \"k\"\r\ncontent-length: 5\r\n\r\nhello";
    let get = "GET /else HTTP/1.1\r\nhost: h\r\n\r\n";
    let answer = raw(rig.gateway.address, format!("{post}{get}{post}{get}").as_bytes()).await;
    assert_eq!(answer.matches("HTTP/1.1 201").count(), 2, "{answer}");
    assert_eq!(answer.matches("{\"GET\"").count(), 2, "{answer}");
    // Refused before its body was read: the connection ends, or the body is skipped; it is never a request.
    let body = "GET /smuggled HTTP/1.1\r\nhost: h\r\n\r\n";
    let bad = format!(
        "POST /orders HTTP/1.1\r\nhost: h\r\nidempotency-key: \"\"\r\ncontent-length: {}\r\n\r\n{body}{get}",
        body.len()
    );
    let before = rig.service.requests();
    let answer = raw(rig.gateway.address, bad.as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
    assert!(rig.service.requests() - before <= 1, "the body was taken for a request: {answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_that_do_not_come_leave_no_claim() {
    let rig = Rig::new("body_timeout = \"300ms\"").await;
    let head = "POST /orders HTTP/1.1\r\nhost: h\r\nidempotency-key: \"k\"\r\n";
    // Cut short.
    for body in ["content-length: 10\r\n\r\nabc", "transfer-encoding: chunked\r\n\r\n5\r\nab"] {
        let mut stream = TcpStream::connect(rig.gateway.address).await.unwrap();
        stream.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
        stream.shutdown().await.unwrap();
        let mut answer = Vec::new();
        let _ = tokio::time::timeout(Duration::from_secs(5), stream.read_to_end(&mut answer)).await.unwrap();
        let answer = String::from_utf8_lossy(&answer);
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 4"), "{answer}");
    }
    // Slow.
    let answer = raw(rig.gateway.address, format!("{head}content-length: 10\r\n\r\nabc").as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
    assert!(answer.contains("body-timeout"), "{answer}");
    assert_eq!(rows(&rig).await, 0);
    assert_eq!(rig.service.requests(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn large_headers_and_odd_bytes_are_refused() {
    let rig = Rig::new("").await;
    let large = format!("POST /orders HTTP/1.1\r\nhost: h\r\nx: {}\r\n\r\n", "x".repeat(100_000));
    let answer = raw(rig.gateway.address, large.as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 431"), "{answer:.80}");
    let many = format!("POST /orders HTTP/1.1\r\nhost: h\r\n{}\r\n", "x: y\r\n".repeat(5_000));
    let answer = raw(rig.gateway.address, many.as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 431"), "{answer:.80}");
    for bad in [
        "GARBAGE\r\n\r\n",
        "POST /a b HTTP/1.1\r\n\r\n",
        "\0\0\0\0",
        "POST /orders HTTP/1.1\r\nidempotency-key: \"a\0b\"\r\n\r\n",
    ] {
        let answer = raw(rig.gateway.address, bad.as_bytes()).await;
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 400"), "{bad:?} → {answer}");
    }
    let key = b"POST /orders HTTP/1.1\r\nhost: h\r\nidempotency-key: \"caf\xc3\xa9\"\r\ncontent-length: 0\r\n\r\n";
    let answer = raw(rig.gateway.address, key).await;
    assert!(answer.starts_with("HTTP/1.1 400") && answer.contains("key-malformed"), "{answer}");
    assert_eq!(rows(&rig).await, 0);
    assert_eq!(rig.service.requests(), 0);
}

/// A compressed body is bytes: it is neither opened nor judged.
#[tokio::test(flavor = "multi_thread")]
async fn a_compressed_body_is_not_opened() {
    let rig = Rig::new("").await;
    let headers = [("idempotency-key", "\"k\""), ("content-encoding", "gzip"), ("content-type", "application/json")];
    let first = rig.send("POST", "/orders", &headers, "no gzip at all").await;
    assert_eq!(first.status, 201);
    assert_eq!(rig.service.header("content-encoding").unwrap(), "gzip");
    assert!(rig.send("POST", "/orders", &headers, "no gzip at all").await.is_replay());
}

/// A refusal arrives also at a client that is still writing.
#[tokio::test(flavor = "multi_thread")]
async fn whoever_is_refused_gets_to_read_it() {
    let rig = Rig::new("[gateway.tenant]\nsource = \"header\"\nheader = \"x-tenant\"").await;
    let large = "x".repeat(8_000_000);
    for _ in 0..5 {
        let too_large = rig.send("POST", "/orders", &[("idempotency-key", "\"k\""), ("x-tenant", "a")], &large).await;
        assert_eq!((too_large.status, too_large.problem().as_str()), (413, "body-too-large"));
        let malformed = rig.send("POST", "/orders", &[("idempotency-key", "\"\""), ("x-tenant", "a")], &large).await;
        assert_eq!((malformed.status, malformed.problem().as_str()), (400, "key-malformed"));
        let nobody = rig.send("POST", "/orders", &[("idempotency-key", "\"k\"")], &large).await;
        assert_eq!((nobody.status, nobody.problem().as_str()), (401, "tenant-missing"));
    }
    assert_eq!((rows(&rig).await, rig.service.requests()), (0, 0));
}
