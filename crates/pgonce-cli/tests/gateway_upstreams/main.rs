//! Services in Python and Node behind the real gateway, killed at every point, with the retrying clients of
//! requests, httpx and fetch before it: whatever dies, there is one order a key, and every client gets its bytes.
//!
//! The services commit order and outcome together (`examples/gateway-python`, `examples/gateway-node`), so
//! nothing is ever uncertain, and `--stale rerun` runs nothing twice.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests stop loudly")]

#[path = "../common/mod.rs"]
mod common;
mod rig;

use std::collections::BTreeMap;

use pgonce_testkit::{eventually, lock_waiters};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use rig::{Gateway, Language, Told, World};

/// Where a service dies, and what that is to the request that it hits.
const CRASH_POINTS: [(&str, Hit); 6] = [
    ("before_effect", Hit::NotDone),
    ("after_effect", Hit::NotDone),
    ("after_succeed", Hit::NotDone),
    ("after_commit", Hit::Done),
    ("before_answer", Hit::Done),
    ("in_answer", Hit::HalfAnswered),
];

#[derive(Debug, Clone, Copy)]
enum Hit {
    /// Not committed: the client is told that it is not known, and comes again.
    NotDone,
    /// Committed: the gateway finds the answer in the row, and the client never learns that anything happened.
    Done,
    /// The same, unless the half was passed on already: the gateway holds a beginning back for a moment only. Then
    /// the client sees it break off, comes again, and gets the replay.
    HalfAnswered,
}

impl Hit {
    fn explains(self, told: &Told) -> bool {
        match self {
            Self::NotDone => told.attempts > 1,
            Self::Done => told.attempts == 1,
            Self::HalfAnswered => told.attempts == 1 || told.replayed,
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn python_service_killed_at_every_point() {
    service_killed_at_every_point(Language::Python).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn node_service_killed_at_every_point() {
    service_killed_at_every_point(Language::Node).await;
}

async fn service_killed_at_every_point(language: Language) {
    let Some(world) = World::new(language).await else { return };
    for (number, (point, hit)) in CRASH_POINTS.into_iter().enumerate() {
        let rig = world.rig(Some(point), &[]).await;
        // Alone first: what the crash does to the request that it hits.
        let client = &world.clients[number % world.clients.len()];
        let alone = client.send(&rig, "alone", 1, 1).await;
        rig.died(1).await;
        assert!(hit.explains(&alone[0]), "{point}: {alone:?}");
        // Then among others.
        std::fs::remove_file(rig.mark()).unwrap();
        let crowd = world.all_send(&rig, 3, 1, |client| client.name.to_owned()).await;
        rig.died(2).await;
        rig.one_order_each(&[alone, crowd].concat()).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn python_service_commits_after_the_gateway_died() {
    service_commits_after_the_gateway_died(Language::Python).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn node_service_commits_after_the_gateway_died() {
    service_commits_after_the_gateway_died(Language::Node).await;
}

/// The gateway is killed while the service is at it. The service finishes: that is the outcome.
async fn service_commits_after_the_gateway_died(language: Language) {
    let Some(world) = World::new(language).await else { return };
    for client in &world.clients {
        let mut rig = world.rig(None, &[]).await;
        let held = rig.hold_inserts().await;
        let url = rig.gateway.url.clone();
        let sending = tokio::spawn(client.clone().send_to(url, "cut", 1, 1));
        lock_waiters(&rig.db.client().await, 1).await;
        rig.gateway.kill_9().await;
        held.let_go().await;
        let db = rig.db.client().await;
        eventually("the service commits", async || {
            db.query_one("SELECT count(*) FROM gateway_orders", &[]).await.unwrap().get::<_, i64>(0) == 1
        })
        .await;
        rig.gateway.restart().await;
        let told = sending.await.unwrap();
        assert!(told[0].attempts > 1 && told[0].replayed, "{}: {told:?}", client.name);
        rig.one_order_each(&told).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn python_service_is_fenced_when_another_gateway_took_over() {
    service_is_fenced_when_another_gateway_took_over(Language::Python).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn node_service_is_fenced_when_another_gateway_took_over() {
    service_is_fenced_when_another_gateway_took_over(Language::Node).await;
}

/// The gateway is killed while the service is at it; the lease ends, and the next gateway sends the retry to
/// the service as well. Both attempts insert. The first one's claim is over, so it rolls back.
async fn service_is_fenced_when_another_gateway_took_over(language: Language) {
    let Some(world) = World::new(language).await else { return };
    let client = &world.clients[0];
    let mut rig = world.rig(None, &[]).await;
    let held = rig.hold_inserts().await;
    let url = rig.gateway.url.clone();
    let sending = tokio::spawn(client.clone().send_to(url, "twice", 1, 1));
    let db = rig.db.client().await;
    lock_waiters(&db, 1).await;
    rig.gateway.kill_9().await;
    rig.gateway.restart().await;
    lock_waiters(&db, 2).await;
    held.let_go().await;
    let told = sending.await.unwrap();
    rig.both_attempts_ended().await;
    rig.one_order_each(&told).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn gateway_sleeps_past_its_lease_before_python() {
    gateway_sleeps_past_its_lease(Language::Python).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn gateway_sleeps_past_its_lease_before_node() {
    gateway_sleeps_past_its_lease(Language::Node).await;
}

/// The gateway is stopped while the service is at it; another one takes over. The first wakes to an answer under
/// a claim that is over: what its client gets is the other's.
async fn gateway_sleeps_past_its_lease(language: Language) {
    let Some(world) = World::new(language).await else { return };
    let (first, second) = (&world.clients[0], world.clients.last().unwrap());
    let rig = world.rig(None, &[]).await;
    let other = Gateway::start(&rig.db, &rig.service.url, &[]).await;
    let held = rig.hold_inserts().await;
    let waits = tokio::spawn(first.clone().send_to(rig.gateway.url.clone(), "slept", 1, 1));
    let db = rig.db.client().await;
    lock_waiters(&db, 1).await;
    rig.gateway.signal("STOP").await;
    let takes_over = tokio::spawn(second.clone().send_to(other.url.clone(), "slept", 1, 1));
    lock_waiters(&db, 2).await;
    held.let_go().await;
    let mut told = takes_over.await.unwrap();
    rig.gateway.signal("CONT").await;
    told.extend(waits.await.unwrap());
    rig.both_attempts_ended().await;
    rig.one_order_each(&told).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn storm_on_python() {
    storm(Language::Python).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn storm_on_node() {
    storm(Language::Node).await;
}

/// Twenty clients of each kind, all with the same fifty keys, all at once.
async fn storm(language: Language) {
    const CLIENTS: usize = 20;
    const KEYS: usize = 50;
    let Some(world) = World::new(language).await else { return };
    let rig = world.rig(None, &["--in-progress", "wait"]).await;
    let began = std::time::Instant::now();
    let told = world.all_send(&rig, KEYS, CLIENTS, |_| "storm".to_owned()).await;
    let took = began.elapsed();
    assert_eq!(told.len(), KEYS * CLIENTS * world.clients.len());
    rig.one_order_each(&told).await;
    let mut executed = BTreeMap::<&str, usize>::new();
    for answer in &told {
        *executed.entry(&answer.key).or_default() += usize::from(!answer.replayed);
    }
    assert!(executed.values().all(|count| *count == 1), "one answer a key is not a replay: {executed:?}");
    let attempts: usize = told.iter().map(|answer| answer.attempts).sum();
    eprintln!("{language:?}: {} answers, {attempts} attempts in {took:?}", told.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn python_service_gets_names_as_they_are() {
    service_gets_names_as_they_are(Language::Python).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn node_service_gets_names_as_they_are() {
    service_gets_names_as_they_are(Language::Node).await;
}

/// A tenant in UTF-8, a key with all that a quoted string can have: the service completes that very intent.
async fn service_gets_names_as_they_are(language: Language) {
    let Some(world) = World::new(language).await else { return };
    let rig = world.rig(None, &["--tenant-header", "x-tenant"]).await;
    let headers = [("x-tenant", "Zoë & Søn"), ("idempotency-key", r#""a b, \\ \"c\"; %20""#)];
    let first = post(&rig.gateway.url, &headers).await;
    assert!(first.starts_with("HTTP/1.1 201 "), "{first}");
    let again = post(&rig.gateway.url, &headers).await;
    assert!(again.contains("idempotency-replayed: true"), "{again}");
    assert_eq!(first.split("\r\n\r\n").nth(1), again.split("\r\n\r\n").nth(1));
    let client = rig.db.client().await;
    let sql = "SELECT i.key FROM once.intents i JOIN gateway_orders o USING (tenant) WHERE i.status = 'succeeded' AND tenant = 'Zoë & Søn'";
    let keys: Vec<String> = client.query(sql, &[]).await.unwrap().iter().map(|row| row.get(0)).collect();
    assert_eq!(keys, [r#"a b, \ "c"; %20"#], "one order, of one intent");
    // Called directly, it is a service like any other: nobody deduplicates.
    for _ in 0..2 {
        let direct = post(&rig.service.url, &headers).await;
        assert!(direct.starts_with("HTTP/1.1 201 "), "{direct}");
    }
    // A claim that was made up completes nothing.
    let made_up =
        [("pgonce-claim", "00000000-0000-4000-8000-000000000000"), ("pgonce-key", "k"), ("pgonce-scope", "s")];
    let refused = post(&rig.service.url, &made_up).await;
    assert!(refused.starts_with("HTTP/1.1 409 "), "{refused}");
    assert_eq!(client.query("SELECT FROM gateway_orders", &[]).await.unwrap().len(), 3);
}

/// One order, sent once, on a connection of its own: the whole response.
async fn post(url: &str, headers: &[(&str, &str)]) -> String {
    let address = url.strip_prefix("http://").unwrap();
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let body = r#"{"customer":"c-1","amount":5}"#;
    let mut request =
        format!("POST /orders HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\ncontent-length: {}\r\n", body.len());
    for (name, value) in headers {
        request.push_str(&format!("{name}: {value}\r\n"));
    }
    stream.write_all(format!("{request}\r\n{body}").as_bytes()).await.unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).await.unwrap();
    response
}
