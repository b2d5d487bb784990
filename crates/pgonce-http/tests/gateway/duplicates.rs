//! Many at once, in one process and in two.

use std::time::Duration;

use crate::rig::{Gateway, Rig, send, send_kept};

#[tokio::test(flavor = "multi_thread")]
async fn waiters_get_the_winners_answer() {
    let rig = Rig::new("in_progress = \"wait\"").await;
    let address = rig.gateway.address;
    let key = [("idempotency-key", "\"k\"")];
    let mut clients = Vec::new();
    for _ in 0..40 {
        clients.push(tokio::spawn(async move { send(address, "POST", "/hold", &key, b"a").await }));
    }
    rig.service.state.arrived.notified().await;
    rig.service.state.gate.notify_one();
    let mut bodies = Vec::new();
    let mut replays = 0;
    for client in clients {
        let reply = client.await.unwrap();
        assert_eq!(reply.status, 201, "{reply:?}");
        replays += usize::from(reply.is_replay());
        bodies.push(reply.body);
    }
    bodies.dedup();
    assert_eq!((bodies.len(), replays), (1, 39));
    assert_eq!(rig.effects("k").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wait_is_bounded() {
    let rig = Rig::new("in_progress = \"wait\"\nwait_max = \"200ms\"").await;
    let address = rig.gateway.address;
    let key = [("idempotency-key", "\"k\"")];
    let first = tokio::spawn(async move { send(address, "POST", "/hold", &key, b"a").await });
    rig.service.state.arrived.notified().await;
    assert_eq!(rig.post("/hold", "k", "a").await.status, 409);
    rig.service.state.gate.notify_one();
    assert_eq!(first.await.unwrap().status, 201);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_status_url_tells_how_it_goes_to_its_owner_only() {
    let rig = Rig::new("in_progress = \"status\"\n[gateway.tenant]\nsource = \"header\"\nheader = \"x-tenant\"").await;
    let address = rig.gateway.address;
    let mine = [("idempotency-key", "\"k\""), ("x-tenant", "a")];
    let first = tokio::spawn(async move { send(address, "POST", "/hold", &mine, b"a").await });
    rig.service.state.arrived.notified().await;
    let again = rig.send("POST", "/hold", &mine, "a").await;
    assert_eq!(again.status, 202);
    let url = again.header("location").unwrap().to_owned();
    assert!(!url.contains("/k"), "the key is not in a URL");
    let status = rig.send("GET", &url, &mine, "").await;
    assert_eq!(status.json()["status"], "processing", "{status:?}");
    let theirs = [("idempotency-key", "\"k\""), ("x-tenant", "b")];
    assert_eq!(rig.send("GET", &url, &theirs, "").await.json()["status"], "claimable", "nothing of another tenant's");
    rig.service.state.gate.notify_one();
    assert_eq!(first.await.unwrap().status, 201);
    let status = rig.send("GET", &url, &mine, "").await.json();
    assert_eq!((status["status"].as_str(), status["response_status"].as_i64()), (Some("succeeded"), Some(201)));
    assert_eq!(rig.send("GET", "/_pgonce/status/http/zz", &mine, "").await.status, 404);
}

/// Two gateways before one service: the second sees the first one's claim.
#[tokio::test(flavor = "multi_thread")]
async fn another_gateways_request_is_waited_for() {
    let config = "in_progress = \"wait\"";
    let rig = Rig::new(config).await;
    let second = Gateway::start(rig.db.url(), rig.service.address, config).await;
    let (one, two) = (rig.gateway.address, second.address);
    let key = [("idempotency-key", "\"k\"")];
    let first = tokio::spawn(async move { send(one, "POST", "/hold", &key, b"a").await });
    rig.service.state.arrived.notified().await;
    let mut waiting = Vec::new();
    for _ in 0..20 {
        waiting.push(tokio::spawn(async move { send(two, "POST", "/hold", &key, b"a").await }));
    }
    let other = send(two, "POST", "/hold", &key, b"b").await;
    assert_eq!(other.status, 422, "422 wins over 409, also across gateways");
    rig.service.state.gate.notify_one();
    let first = first.await.unwrap();
    for waiter in waiting {
        let reply = waiter.await.unwrap();
        assert_eq!((reply.status, &reply.body), (201, &first.body), "{reply:?}");
    }
    assert_eq!(rig.effects("k").await, 1);
}

/// 50 clients, the same key each, for many keys, over two gateways.
#[tokio::test(flavor = "multi_thread")]
async fn fifty_clients_a_key() {
    const KEYS: usize = 1_000;
    let config = "in_progress = \"wait\"\nwait_max = \"20s\"";
    let rig = Rig::new(config).await;
    let second = Gateway::start(rig.db.url(), rig.service.address, config).await;
    let addresses = [rig.gateway.address, second.address];
    let mut clients = Vec::new();
    for client in 0..50 {
        let address = addresses[client % 2];
        clients.push(tokio::spawn(async move {
            let mut answers = Vec::with_capacity(KEYS);
            for n in 0..KEYS {
                let key = format!("\"key-{n}\"");
                let reply = send_kept(address, "POST", "/orders", &[("idempotency-key", &key)], b"a").await;
                assert_eq!(reply.status, 201, "{reply:?}");
                answers.push(reply.body);
            }
            answers
        }));
    }
    let mut seen: Option<Vec<_>> = None;
    for client in clients {
        let answers = client.await.unwrap();
        assert_eq!(seen.get_or_insert_with(|| answers.clone()), &answers, "everybody got the same bytes");
    }
    let row =
        rig.db.client().await.query_one("SELECT count(*), count(DISTINCT key) FROM public.effect", &[]).await.unwrap();
    assert_eq!((row.get::<_, i64>(0), row.get::<_, i64>(1)), (KEYS as i64, KEYS as i64));
}

/// A thousand waiters on one key hold no database connection each.
#[tokio::test(flavor = "multi_thread")]
async fn waiters_do_not_use_connections() {
    let rig = Rig::new("in_progress = \"wait\"\nwait_max = \"60s\"").await;
    let address = rig.gateway.address;
    let key = [("idempotency-key", "\"k\"")];
    let first = tokio::spawn(async move { send(address, "POST", "/hold", &key, b"a").await });
    rig.service.state.arrived.notified().await;
    let mut waiting = Vec::new();
    for _ in 0..1_000 {
        waiting.push(tokio::spawn(async move { send(address, "POST", "/hold", &key, b"a").await }));
    }
    let observer = rig.db.client().await;
    pgonce_testkit::eventually("all wait", async || {
        let page = rig.send("GET", "/_pgonce/metrics", &[], "").await;
        let page = String::from_utf8_lossy(&page.body).into_owned();
        page.lines().any(|line| line.starts_with("pgonce_gateway_waiters ") && line.ends_with(" 1000"))
    })
    .await;
    let sql = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()";
    let connections: i64 = observer.query_one(sql, &[]).await.unwrap().get(0);
    assert!(connections <= 10, "{connections}");
    rig.service.state.gate.notify_one();
    assert_eq!(first.await.unwrap().status, 201);
    for waiter in waiting {
        assert_eq!(tokio::time::timeout(Duration::from_secs(30), waiter).await.unwrap().unwrap().status, 201);
    }
    assert_eq!(rig.effects("k").await, 1);
}
