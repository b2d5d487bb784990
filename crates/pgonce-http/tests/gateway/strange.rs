//! Services and clients whose messages could be read in two ways: one of them is chosen, and it is the safe one.

use crate::rig::{Rig, raw, send, states};
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

/// 101 to who did not ask to switch, or a status that HTTP does not have: nobody knows what was done.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_answer_is_doubt() {
    for (status, told) in [("101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x", 101), ("600 Odd", 600)] {
        let answer: &'static str = format!("HTTP/1.1 {status}\r\ncontent-length: 2\r\n\r\nok").leak();
        let (service, _) = recorder(answer).await;
        for (stale, slug, state) in
            [("hold", "upstream-uncertain", "uncertain"), ("rerun", "upstream-failed", "failed_retryable")]
        {
            let (db, gateway) = service.gateway(&format!("stale = \"{stale}\"")).await;
            let reply = send(gateway.address, "POST", "/", &[("idempotency-key", "\"k\"")], b"").await;
            assert_eq!((reply.status, reply.problem().as_str()), (502, slug), "{told}");
            assert_eq!(reply.json()["upstream_status"], told);
            assert_eq!(
                (reply.json()["effect"].as_str(), states(&db, "k").await.as_slice()),
                (Some("unknown"), [state.to_owned()].as_slice())
            );
        }
        if told == 101 {
            let (_db, gateway) = service.gateway("").await;
            let passed = send(gateway.address, "GET", "/", &[], b"").await;
            assert_eq!((passed.status, passed.problem().as_str()), (502, "upstream-uncertain"), "not guarded");
        }
    }
}

/// To a service behind CGI or WSGI, `Pgonce_Claim` is `Pgonce-Claim`.
#[tokio::test(flavor = "multi_thread")]
async fn another_spelling_of_what_the_gateway_says_is_dropped() {
    let (service, heads) = recorder("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await;
    let (_db, gateway) = service.gateway("").await;
    let forged = "Pgonce_Scope: forged\r\nPgonce_Tenant: forged\r\nPgonce_Claim: forged\r\nPgonce-Claim: forged\r\n\
                  Pgonce_Key: forged\r\nPgonce_Region-Hop: forged\r\nX_Forwarded_For: forged\r\n\
                  X-Forwarded_Proto: forged\r\nX_Forwarded_Host: forged\r\nIdempotency_Key: forged\r\n\
                  Transfer_Encoding: forged\r\nX-Mine: 1\r\nX_Mine: forged\r\nX_Yours: 2\r\n";
    for (method, end) in [("GET", ""), ("POST", "idempotency-key: \"k\"\r\ncontent-length: 0\r\n"), ("PUT", "")] {
        let request = format!("{method} / HTTP/1.1\r\nhost: h\r\n{forged}{end}\r\n");
        let answer = raw(gateway.address, request.as_bytes()).await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        let head = heads.lock().unwrap().pop().unwrap();
        assert!(!head.contains("forged"), "{head}");
        assert!(head.contains("x-mine: 1") && head.contains("x_yours: 2"), "{head}");
        assert_eq!(head.contains("pgonce-claim: "), method == "POST", "{head}");
    }
}

/// What the scope's pattern refuses is the client's to change.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_its_scope_refuses_is_told_so() {
    let rig = Rig::new("key_pattern = \"^[0-9]+$\"").await;
    for _ in 0..2 {
        let reply = rig.post("/orders", "abc", "a").await;
        assert_eq!((reply.status, reply.problem().as_str()), (400, "key-malformed"), "{reply:?}");
        assert_eq!(reply.json()["effect"], "not_done");
    }
    let together = (0..20).map(|n| {
        let (address, key) = (rig.gateway.address, if n % 2 == 0 { format!("\"{n}\"") } else { format!("\"x{n}\"") });
        tokio::spawn(async move { send(address, "POST", "/orders", &[("idempotency-key", &key)], b"a").await.status })
    });
    for (n, status) in together.collect::<Vec<_>>().into_iter().enumerate() {
        assert_eq!(status.await.unwrap(), if n % 2 == 0 { 201 } else { 400 });
    }
    assert_eq!(rig.states("abc").await, Vec::<String>::new());
    assert_eq!(rig.service.requests(), 10);
}
