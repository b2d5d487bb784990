//! The wire, both ways: HTTP/1.1, HTTP/2, TLS, upgrades, and what belongs to one connection only.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::Request;
use http_body_util::Full;
use pgonce_testkit::{TestDb, eventually};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::peers::{Authority, Bare, Wire, keyed, over, read_head, read_until, tls, tls_section};
use crate::rig::{Gateway, Rig, Service, raw, send, states};

#[tokio::test(flavor = "multi_thread")]
async fn http2_by_prior_knowledge_is_guarded_and_replayed() {
    let rig = Rig::new("").await;
    let connect = || TcpStream::connect(rig.gateway.address);
    let (first, _) = over(connect().await.unwrap(), true, keyed("/orders", "k")).await.unwrap();
    assert_eq!((first.status, first.is_replay()), (201, false), "{first:?}");
    assert_eq!(rig.service.header("host").unwrap(), "shop.example", "what HTTP/2 calls :authority");
    assert_eq!(rig.service.header("x-forwarded-host").unwrap(), "shop.example");
    assert_eq!(rig.service.header("via").unwrap(), "2 pgonce");
    let (again, _) = over(connect().await.unwrap(), true, keyed("/orders", "k")).await.unwrap();
    assert_eq!((again.status, again.is_replay(), &again.body), (201, true, &first.body));
    let (over_http1, _) = over(connect().await.unwrap(), false, keyed("/orders", "k")).await.unwrap();
    assert_eq!(over_http1.body, first.body, "the same request, whatever it came by");
    assert!(over_http1.is_replay());
    let mut split = keyed("/orders", "cookies");
    split.headers_mut().append("cookie", "a=1".parse().unwrap());
    split.headers_mut().append("cookie", "b=2".parse().unwrap());
    over(connect().await.unwrap(), true, split).await.unwrap();
    assert_eq!(rig.service.header("cookie").unwrap(), "a=1; b=2");
    assert_eq!(rig.effects("k").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_in_speaks_what_the_client_chooses() {
    let authority = Authority::new();
    let rig = Rig::new(&tls_section(&authority.sign("gateway"), None)).await;
    let mut bodies = Vec::new();
    for (alpn, chosen) in [(vec!["h2", "http/1.1"], Some("h2")), (vec!["http/1.1"], Some("http/1.1")), (vec![], None)] {
        let stream = tls(rig.gateway.address, &authority.client(None, &alpn)).await.unwrap();
        assert_eq!(stream.get_ref().1.alpn_protocol(), chosen.map(str::as_bytes));
        let (reply, _) = over(stream, chosen == Some("h2"), keyed("/orders", "k")).await.unwrap();
        assert_eq!((reply.status, reply.is_replay()), (201, !bodies.is_empty()));
        bodies.push(reply.body);
    }
    bodies.dedup();
    assert_eq!(bodies.len(), 1);
    assert_eq!(rig.service.header("x-forwarded-proto").unwrap(), "https");
    assert_eq!(rig.effects("k").await, 1);
    let plain = raw(rig.gateway.address, b"GET / HTTP/1.1\r\nhost: h\r\n\r\n").await;
    assert!(!plain.contains("HTTP/1.1 200"), "{plain:?}");
    assert_eq!(rig.service.requests(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_names_the_tenant_and_nobody_comes_without() {
    let (authority, stranger) = (Authority::new(), Authority::new());
    let section = tls_section(&authority.sign("gateway"), Some(&authority.ca()));
    let rig = Rig::new(&format!("{section}[gateway.tenant]\nsource = \"mtls\"")).await;
    let mut bodies = Vec::new();
    for tenant in ["shop-1", "shop-2", "shop-1"] {
        let client = authority.client(Some(&authority.sign(tenant)), &["h2"]);
        let stream = tls(rig.gateway.address, &client).await.unwrap();
        let (reply, _) = over(stream, true, keyed("/orders", "k")).await.unwrap();
        assert_eq!(reply.status, 201);
        if !reply.is_replay() {
            assert_eq!(rig.service.header("pgonce-tenant").unwrap(), tenant);
        }
        bodies.push(reply.body);
    }
    assert_ne!(bodies[0], bodies[1], "the same key of two tenants");
    assert_eq!(bodies[0], bodies[2]);
    assert_eq!((rig.effects("k").await, rig.service.requests()), (2, 2));
    // The client may learn of the refusal only when it reads.
    for identity in [None, Some(stranger.sign("shop-1"))] {
        let refused = async {
            let stream = tls(rig.gateway.address, &authority.client(identity.as_ref(), &["h2"])).await?;
            over(stream, true, keyed("/orders", "k")).await
        };
        assert!(refused.await.is_err(), "a handshake without a certificate of the authority");
    }
    assert_eq!(rig.service.requests(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_to_the_service_and_a_service_that_cannot_be_believed() {
    let (authority, stranger) = (Authority::new(), Authority::new());
    let db = TestDb::new().await;
    let service = Service::start(db.direct_url()).await;
    let wire = Wire::open(Some(authority.server(&["http/1.1"]))).await;
    wire.lead_to(service.address);
    let config = |authority: &Authority| {
        let (port, ca) = (wire.address.port(), authority.ca());
        format!(
            "stale = \"hold\"\nupstream.url = \"https://localhost:{port}\"\nupstream.ca_file = \"{}\"",
            ca.display()
        )
    };
    let key = [("idempotency-key", "\"k\"")];
    let doubting = Gateway::start(db.url(), service.address, &config(&stranger)).await;
    let away = send(doubting.address, "POST", "/orders", &key, b"a").await;
    assert_eq!((away.status, away.problem().as_str()), (502, "upstream-away"));
    assert_eq!(away.json()["effect"], "not_done");
    assert_eq!(states(&db, "k").await, Vec::<String>::new(), "the claim was given back");
    assert_eq!((service.requests(), wire.connections()), (0, 1));
    let trusting = Gateway::start(db.url(), service.address, &config(&authority)).await;
    assert_eq!(send(trusting.address, "POST", "/orders", &key, b"a").await.status, 201);
    assert_eq!(service.header("host").unwrap(), format!("localhost:{}", wire.address.port()));
    assert!(send(trusting.address, "POST", "/orders", &key, b"a").await.is_replay());
    assert_eq!(db.effects("k").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn http2_to_the_service_where_it_speaks_it() {
    let authority = Authority::new();
    let db = TestDb::new().await;
    let service = Service::start(db.direct_url()).await;
    for (offered, expected) in [
        (Some(vec!["h2", "http/1.1"]), http::Version::HTTP_2),
        (Some(vec!["http/1.1"]), http::Version::HTTP_11),
        (Some(vec![]), http::Version::HTTP_11),
        (None, http::Version::HTTP_2),
    ] {
        let wire = Wire::open(offered.as_ref().map(|alpn| authority.server(alpn))).await;
        wire.lead_to(service.address);
        let port = wire.address.port();
        let url = match offered {
            Some(_) => format!("https://localhost:{port}\"\nupstream.ca_file = \"{}", authority.ca().display()),
            None => format!("http://localhost:{port}"),
        };
        let config = format!("upstream.http2 = true\nupstream.url = \"{url}\"");
        let gateway = Gateway::start(db.url(), service.address, &config).await;
        let key = format!("\"{port}\"");
        let reply = send(gateway.address, "POST", "/orders", &[("idempotency-key", &key)], b"a").await;
        assert_eq!(reply.status, 201, "{offered:?}: {reply:?}");
        assert_eq!(*service.state.version.lock().unwrap(), expected, "{offered:?}");
        assert_eq!(send(gateway.address, "GET", "/else", &[], b"").await.status, 200);
        assert_eq!(db.effects(&port.to_string()).await, 1);
    }
}

/// Once both sides have switched, bytes go through as they are; nothing is claimed.
#[tokio::test(flavor = "multi_thread")]
async fn an_upgrade_passes_and_then_bytes_both_ways() {
    let service = Bare::start(|mut stream| async move {
        let head = read_head(&mut stream).await;
        if !head.contains("upgrade: websocket") {
            stream.write_all(b"HTTP/1.1 426 Upgrade Required\r\ncontent-length: 0\r\n\r\n").await.unwrap();
            return;
        }
        assert!(head.contains("connection: upgrade") && head.contains("sec-websocket-key: abc"), "{head}");
        let answer = "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\
                      sec-websocket-accept: xyz\r\n\r\nhello";
        stream.write_all(answer.as_bytes()).await.unwrap();
        let (mut from, mut to) = stream.split();
        let _ = tokio::io::copy(&mut from, &mut to).await;
        let _ = to.shutdown().await;
    })
    .await;
    let (db, gateway) = service.gateway("").await;
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    let ask = "GET /ws HTTP/1.1\r\nhost: h\r\nconnection: keep-alive, Upgrade\r\nupgrade: websocket\r\n\
               sec-websocket-key: abc\r\nidempotency-key: \"k\"\r\n\r\n";
    stream.write_all(ask.as_bytes()).await.unwrap();
    let head = read_until(&mut stream, "hello").await.to_ascii_lowercase();
    assert!(head.starts_with("http/1.1 101"), "{head}");
    assert!(head.contains("connection: upgrade") && head.contains("sec-websocket-accept: xyz"), "{head}");
    let (mut from, mut to) = stream.into_split();
    let sent: Vec<u8> = (0..1_000_000_u32).map(|n| (n % 251) as u8).collect();
    let sending = sent.clone();
    let writing = tokio::spawn(async move {
        to.write_all(&sending).await.unwrap();
        to.shutdown().await.unwrap();
    });
    let mut echoed = Vec::new();
    from.read_to_end(&mut echoed).await.unwrap();
    writing.await.unwrap();
    assert!(echoed == sent, "{} bytes of {}", echoed.len(), sent.len());
    // Asked without the word of Connection, it is no upgrade; the answer passes like any other.
    let refused = raw(gateway.address, b"GET /ws HTTP/1.1\r\nhost: h\r\nupgrade: websocket\r\n\r\n").await;
    assert!(refused.starts_with("HTTP/1.1 426"), "{refused}");
    assert_eq!(states(&db, "k").await, Vec::<String>::new());
}

/// Answers each request on a connection with the same bytes, and keeps the requests' heads.
pub async fn recorder(answer: &'static str) -> (Bare, Arc<std::sync::Mutex<Vec<String>>>) {
    let heads = Arc::new(std::sync::Mutex::new(Vec::new()));
    let kept = Arc::clone(&heads);
    let bare = Bare::start(move |mut stream| {
        let kept = Arc::clone(&kept);
        async move {
            let mut got = Vec::new();
            let mut piece = [0; 4096];
            while let Ok(length @ 1..) = stream.read(&mut piece).await {
                got.extend_from_slice(&piece[..length]);
                while let Some(end) = String::from_utf8_lossy(&got).find("\r\n\r\n") {
                    let rest = got.split_off(end + 4);
                    kept.lock().unwrap().push(String::from_utf8_lossy(&got).to_ascii_lowercase());
                    got = rest;
                    stream.write_all(answer.as_bytes()).await.unwrap();
                }
            }
        }
    })
    .await;
    (bare, heads)
}

#[tokio::test(flavor = "multi_thread")]
async fn what_belongs_to_one_connection_goes_no_further() {
    let (service, heads) = recorder(
        "HTTP/1.1 200 OK\r\nconnection: keep-alive, X-Theirs\r\nx-theirs: 1\r\nkeep-alive: timeout=5\r\n\
         proxy-authenticate: Basic\r\nproxy-connection: keep-alive\r\nte: gzip\r\nupgrade: h2c\r\nx-public: 2\r\n\
         content-length: 2\r\n\r\nok",
    )
    .await;
    let (_db, gateway) = service.gateway("").await;
    // Guarded and not: both are proxied.
    for (method, end) in
        [("GET", "\r\n"), ("POST", "idempotency-key: \"k\"\r\nx-end: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n")]
    {
        let answer = raw(
            gateway.address,
            format!(
                "{method} / HTTP/1.1\r\nhost: h\r\nconnection: X-Ours, keep-alive\r\nx-ours: 1\r\nkeep-alive: 5\r\n\
                 proxy-authorization: Basic eDp5\r\nproxy-connection: keep-alive\r\nte: gzip;q=0.5\r\nupgrade: h2c\r\n\
                 trailer: x-sum\r\nx-public: 2\r\n{end}"
            )
            .as_bytes(),
        )
        .await
        .to_ascii_lowercase();
        let head = heads.lock().unwrap().pop().unwrap();
        for name in ["x-ours", "x-theirs", "keep-alive", "proxy-", "te:", "upgrade", "transfer-encoding", "connection"]
        {
            let of = |text: &str| text.lines().any(|line| line.starts_with(name));
            assert!(!of(&head), "{method}: {name} reached the service: {head}");
            assert!(!of(&answer), "{method}: {name} reached the client: {answer}");
        }
        assert!(head.contains("x-public: 2") && answer.contains("x-public: 2"), "{head} {answer}");
        assert_eq!(head.contains("trailer: x-sum"), method == "GET", "a guarded request is whole: {head}");
        assert!(head.contains("via: 1.1 pgonce"), "{head}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_to_the_service_are_kept_and_used_again() {
    let db = TestDb::new().await;
    let service = Service::start(db.direct_url()).await;
    let wire = Wire::to(service.address).await;
    let gateway = Gateway::start(db.url(), wire.address, "").await;
    for n in 0..40 {
        let key = format!("\"k-{n}\"");
        let headers: &[(&str, &str)] = if n % 2 == 0 { &[("idempotency-key", &key)] } else { &[] };
        assert_eq!(send(gateway.address, "POST", "/orders", headers, b"a").await.status, 201);
    }
    // One that comes before the last connection is back in the pool may open another.
    assert!(wire.connections() <= 4, "{} connections for 40 requests", wire.connections());
}

#[tokio::test(flavor = "multi_thread")]
async fn who_expects_100_gets_it_when_the_body_is_wanted() {
    let rig = Rig::new("").await;
    let head = |path: &str, key: &str| {
        format!(
            "POST {path} HTTP/1.1\r\nhost: h\r\nidempotency-key: {key}\r\ncontent-length: 5\r\nexpect: 100-continue\r\n\r\n"
        )
    };
    for (path, key) in [("/orders", "\"k\""), ("/orders", "\"k\"")] {
        let mut stream = TcpStream::connect(rig.gateway.address).await.unwrap();
        stream.write_all(head(path, key).as_bytes()).await.unwrap();
        assert_eq!(read_until(&mut stream, "\r\n\r\n").await, "HTTP/1.1 100 Continue\r\n\r\n");
        stream.write_all(b"hello").await.unwrap();
        let answer = read_until(&mut stream, "}").await;
        assert!(answer.starts_with("HTTP/1.1 201") && answer.contains("\"bytes\":5"), "{answer}");
    }
    assert_eq!(rig.service.header("expect"), None);
    assert_eq!(rig.service.requests(), 1);
    // Refused by its head: no body is asked for, and what would have been one is no request.
    let mut stream = TcpStream::connect(rig.gateway.address).await.unwrap();
    stream.write_all(head("/orders", "\"\"").as_bytes()).await.unwrap();
    let answer = read_until(&mut stream, "}").await;
    assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
    assert_eq!(rig.service.requests(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn head_has_a_length_and_no_body_and_the_connection_stays_in_step() {
    let (service, heads) =
        recorder("HTTP/1.1 200 OK\r\ncontent-length: 1234\r\netag: \"v1\"\r\nconnection: keep-alive\r\n\r\n").await;
    let (_db, gateway) = service.gateway("").await;
    let head = "HEAD /page HTTP/1.1\r\nhost: h\r\n\r\n";
    let last = "HEAD /_pgonce/health HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n";
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    stream.write_all(format!("{head}{head}{last}").as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert_eq!(answer.matches("HTTP/1.1 200").count(), 3, "{answer}");
    assert_eq!(answer.matches("content-length: 1234").count(), 2, "{answer}");
    assert_eq!(answer.matches("etag: \"v1\"").count(), 2, "{answer}");
    assert!(answer.contains("content-length: 6") && !answer.contains("alive\n"), "{answer}");
    assert_eq!(heads.lock().unwrap().len(), 2);
    assert!(heads.lock().unwrap().iter().all(|head| head.starts_with("head /page ")));
}

const WITH_TRAILERS: &str = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntrailer: x-sum\r\n\r\n\
                             5\r\nhello\r\n6\r\n world\r\n0\r\nx-sum: 42\r\npgonce-claim: forged\r\n\r\n";

#[tokio::test(flavor = "multi_thread")]
async fn chunks_and_trailers_pass_to_who_takes_them() {
    let (service, heads) = recorder(WITH_TRAILERS).await;
    let (_db, gateway) = service.gateway("").await;
    let get = |te: &str| format!("GET / HTTP/1.1\r\nhost: h\r\n{te}connection: te, close\r\n\r\n");
    let ask = async |te: &str| {
        let mut stream = TcpStream::connect(gateway.address).await.unwrap();
        stream.write_all(get(te).as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        (answer, heads.lock().unwrap().pop().unwrap())
    };
    let (answer, head) = ask("te: trailers\r\n").await;
    assert!(answer.contains("trailer: x-sum") && answer.ends_with("0\r\nx-sum: 42\r\n\r\n"), "{answer}");
    assert!(answer.contains("hello") && answer.contains(" world"), "{answer}");
    assert!(head.contains("te: trailers") && head.contains("connection: te"), "{head}");
    let (answer, head) = ask("").await;
    assert!(answer.ends_with("0\r\n\r\n") && !answer.contains("x-sum: 42"), "{answer}");
    assert!(!head.contains("te: trailers"), "{head}");
    let request = Request::get("http://shop.example/").header("te", "trailers").body(Full::<Bytes>::default()).unwrap();
    let stream = TcpStream::connect(gateway.address).await.unwrap();
    let (reply, trailers) = over(stream, true, request).await.unwrap();
    assert_eq!((reply.body.as_ref(), trailers["x-sum"].to_str().unwrap()), (&b"hello world"[..], "42"));
    assert!(!trailers.contains_key("pgonce-claim"));
    // What is stored has a body and no trailers; the chunks are one body.
    let key = [("idempotency-key", "\"k\""), ("te", "trailers")];
    for _ in 0..2 {
        let reply = send(gateway.address, "POST", "/", &key, b"").await;
        assert_eq!((reply.status, reply.body.as_ref(), reply.header("trailer")), (200, &b"hello world"[..], None));
    }
}

/// A trailer is no header: what only the gateway says cannot be said behind a body either.
#[tokio::test(flavor = "multi_thread")]
async fn a_requests_trailers_forge_nothing() {
    let service = Bare::start(|mut stream| async move {
        let request = read_until(&mut stream, "x-sum: 42").await;
        let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{request}", request.len());
        stream.write_all(answer.as_bytes()).await.unwrap();
    })
    .await;
    let (_db, gateway) = service.gateway("").await;
    let request = "PUT / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\ntrailer: pgonce-claim, x-forwarded-for, x-sum\r\n\
                   connection: close\r\n\r\n1\r\na\r\n0\r\npgonce-claim: forged\r\nx-forwarded-for: forged\r\nx-sum: 42\r\n\r\n";
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.contains("x-sum: 42") && !answer.contains("forged"), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interim_answer_is_not_the_answer() {
    let (service, _) = recorder(
        "HTTP/1.1 103 Early Hints\r\nlink: </style.css>; rel=preload\r\n\r\nHTTP/1.1 102 Processing\r\n\r\n\
         HTTP/1.1 201 Created\r\ncontent-length: 4\r\n\r\ndone",
    )
    .await;
    let (db, gateway) = service.gateway("").await;
    for (headers, replayed) in
        [(&[][..], false), (&[("idempotency-key", "\"k\"")], false), (&[("idempotency-key", "\"k\"")], true)]
    {
        let reply = send(gateway.address, "POST", "/", headers, b"").await;
        assert_eq!((reply.status, reply.body.as_ref(), reply.is_replay()), (201, &b"done"[..], replayed));
    }
    assert_eq!(states(&db, "k").await, ["succeeded"]);
}

/// What a client does not read is not taken from the service, beyond what sockets hold.
#[tokio::test(flavor = "multi_thread")]
async fn a_slow_reader_is_not_read_ahead_for() {
    const TOTAL: usize = 128 * 1024 * 1024;
    let taken = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&taken);
    let service = Bare::start(move |mut stream| {
        let counted = Arc::clone(&counted);
        async move {
            read_head(&mut stream).await;
            stream.write_all(format!("HTTP/1.1 200 OK\r\ncontent-length: {TOTAL}\r\n\r\n").as_bytes()).await.unwrap();
            let piece = vec![b'x'; 64 * 1024];
            while counted.load(Ordering::SeqCst) < TOTAL {
                stream.write_all(&piece).await.unwrap();
                counted.fetch_add(piece.len(), Ordering::SeqCst);
            }
        }
    })
    .await;
    let (_db, gateway) = service.gateway("").await;
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n").await.unwrap();
    // Nobody reads: sooner or later the service cannot write any more.
    let (mut before, mut still) = (0, 0);
    eventually("the service is stopped", async || {
        tokio::time::sleep(Duration::from_millis(5)).await;
        let now = taken.load(Ordering::SeqCst);
        still = if now == before && now > 0 { still + 1 } else { 0 };
        before = now;
        still == 100
    })
    .await;
    assert!(before < TOTAL / 4, "{before} of {TOTAL} bytes taken for a client that reads nothing");
    let mut read = 0;
    let mut piece = vec![0; 256 * 1024];
    while let Ok(length @ 1..) = stream.read(&mut piece).await {
        read += length;
    }
    assert!(read > TOTAL, "and all of it arrives: {read}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_gateways_own_paths_never_reach_the_service() {
    let rig = Rig::new("").await;
    for path in ["/_pgonce/", "/_pgonce/unknown", "/_pgonce/status/x", "/_pgonce/../orders", "/_pgonce/problems/x"] {
        for method in ["GET", "HEAD", "POST", "DELETE"] {
            let reply = rig.send(method, path, &[("idempotency-key", "\"k\"")], "").await;
            let expected = if matches!(method, "GET" | "HEAD") { 404 } else { 405 };
            assert_eq!(reply.status, expected, "{method} {path}");
            assert_eq!(reply.header("allow"), (expected == 405).then_some("GET, HEAD"));
        }
    }
    let connect = raw(rig.gateway.address, b"CONNECT other.example:443 HTTP/1.1\r\nhost: other.example\r\n\r\n").await;
    assert!(connect.starts_with("HTTP/1.1 400") && connect.contains("malformed"), "{connect}");
    assert_eq!(rig.service.requests(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_nobody_guards_is_told_what_became_of_it() {
    let silent = Bare::start(|mut stream| async move {
        let head = read_head(&mut stream).await;
        if head.starts_with("get /late") {
            std::future::pending::<()>().await;
        }
    })
    .await;
    let (db, gateway) = silent.gateway("upstream.timeout = \"300ms\"").await;
    for (path, status, slug, effect) in
        [("/late", 504, "upstream-timeout", "unknown"), ("/cut", 502, "upstream-uncertain", "unknown")]
    {
        let reply = send(gateway.address, "GET", path, &[], b"").await;
        assert_eq!((reply.status, reply.problem().as_str()), (status, slug));
        assert_eq!(reply.json()["effect"], effect);
        assert_eq!(reply.header("link").unwrap(), format!("</_pgonce/problems/{slug}>; rel=\"help\""));
    }
    let dead = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let gateway = Gateway::start(db.url(), dead, "").await;
    for method in ["GET", "POST", "PUT"] {
        let reply = send(gateway.address, method, "/", &[], b"a").await;
        assert_eq!((reply.status, reply.problem().as_str()), (502, "upstream-away"));
        assert_eq!(
            (reply.json()["effect"].as_str(), reply.json()["retryable"].as_bool()),
            (Some("not_done"), Some(true))
        );
    }
}
