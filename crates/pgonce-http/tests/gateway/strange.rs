//! Services and clients whose messages could be read in two ways: one of them is chosen, and it is the safe one.

use crate::rig::{raw, send, states};
use crate::wire::recorder;

/// The chunks are the body; the length beside them goes no further (RFC 9112, 6.3).
#[tokio::test(flavor = "multi_thread")]
async fn a_length_beside_chunks_does_not_frame_the_answer() {
    let (service, _) = recorder(
        "HTTP/1.1 200 OK\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n",
    )
    .await;
    let (db, gateway) = service.gateway("").await;
    let get = raw(gateway.address, b"GET / HTTP/1.1\r\nhost: h\r\n\r\n").await;
    assert!(!get.contains("content-length") && get.contains("hello") && get.ends_with("0\r\n\r\n"), "{get:?}");
    for replayed in [false, true] {
        let reply = send(gateway.address, "POST", "/", &[("idempotency-key", "\"k\"")], b"").await;
        assert_eq!((reply.body.as_ref(), reply.is_replay()), (&b"hello world"[..], replayed));
        assert_eq!(reply.header("content-length"), Some("11"));
    }
    assert_eq!(states(&db, "k").await, ["succeeded"]);
}
