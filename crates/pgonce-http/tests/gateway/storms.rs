//! Too much at once: who is refused, how they are told, and who is spared.

use std::time::Duration;

use pgonce_testkit::{TestDb, eventually};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use crate::peers::{Bare, Wire, read_head, read_until};
use crate::rig::{Gateway, Reply, Rig, Service, send};

const BY_HEADER: &str = "[gateway.tenant]\nsource = \"header\"\nheader = \"x-tenant\"\n";

/// A request that runs until the service's gate opens, and has arrived there.
async fn hold(rig: &Rig, tenant: &'static str, key: &'static str) -> JoinHandle<Reply> {
    let held = later(rig, tenant, key);
    rig.service.state.arrived.notified().await;
    held
}

fn later(rig: &Rig, tenant: &'static str, key: &'static str) -> JoinHandle<Reply> {
    let address = rig.gateway.address;
    tokio::spawn(async move {
        let headers = [("idempotency-key", &*format!("\"{key}\"")), ("x-tenant", tenant)];
        send(address, "POST", "/hold", &headers, b"a").await
    })
}

async fn post(rig: &Rig, path: &str, tenant: &str, key: &str) -> Reply {
    rig.send("POST", path, &[("idempotency-key", &format!("\"{key}\"")), ("x-tenant", tenant)], "a").await
}

fn refused(reply: &Reply, status: u16, slug: &str) {
    assert_eq!((reply.status, reply.problem().as_str()), (status, slug), "{reply:?}");
    let wait: u64 = reply.header("retry-after").unwrap().parse().unwrap();
    assert!((1..=30).contains(&wait), "{wait}");
    assert_eq!(reply.json()["retry_after"], wait);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_has_its_quota_and_others_are_not_touched() {
    let rig = Rig::new(&format!("{BY_HEADER}[gateway.limits]\ntenant_inflight_max = 2")).await;
    let held = [hold(&rig, "flood", "1").await, hold(&rig, "flood", "2").await];
    for n in 3..10 {
        let reply = post(&rig, "/orders", "flood", &n.to_string()).await;
        refused(&reply, 429, "quota-exceeded");
        assert_eq!(reply.json()["effect"], "not_done");
        assert_eq!(rig.states(&n.to_string()).await, Vec::<String>::new());
    }
    assert_eq!(post(&rig, "/orders", "other", "1").await.status, 201);
    assert_eq!(rig.send("GET", "/else", &[], "").await.status, 200, "what is not guarded is not counted");
    for held in held {
        rig.service.state.gate.notify_one();
        assert_eq!(held.await.unwrap().status, 201);
    }
    eventually("there is room again", async || post(&rig, "/orders", "flood", "3").await.status == 201).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn all_together_have_their_limit() {
    let limits = "[gateway.limits]\ninflight_max = 2\ntenant_inflight_max = 2";
    let rig = Rig::new(&format!("{BY_HEADER}{limits}")).await;
    let held = [hold(&rig, "a", "1").await, hold(&rig, "b", "2").await];
    refused(&post(&rig, "/orders", "c", "3").await, 503, "overloaded");
    for held in held {
        rig.service.state.gate.notify_one();
        assert_eq!(held.await.unwrap().status, 201);
    }
    eventually("there is room again", async || post(&rig, "/orders", "c", "3").await.status == 201).await;
    assert_eq!(rig.effects("3").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn waiters_have_their_limits_by_key_by_tenant_and_in_all() {
    let limits = "[gateway.limits]\nwaiters_max = 5\ntenant_waiters_max = 3";
    let rig =
        Rig::new(&format!("in_progress = \"wait\"\nwait_max = \"60s\"\nwaiters_max = 2\n{BY_HEADER}{limits}")).await;
    let mut running = Vec::new();
    for (tenant, key) in [("a", "1"), ("a", "2"), ("b", "3"), ("b", "4"), ("c", "5")] {
        running.push(hold(&rig, tenant, key).await);
    }
    let mut waiting = Vec::new();
    let wait = async |tenant: &'static str, key: &'static str, waiting: &mut Vec<JoinHandle<Reply>>| {
        waiting.push(later(&rig, tenant, key));
        let expected = waiting.len() as f64;
        eventually("it waits", async || rig.metric("pgonce_gateway_waiters").await == expected).await;
    };
    wait("a", "1", &mut waiting).await;
    wait("a", "1", &mut waiting).await;
    refused(&post(&rig, "/hold", "a", "1").await, 409, "in-progress");
    wait("a", "2", &mut waiting).await;
    refused(&post(&rig, "/hold", "a", "2").await, 429, "quota-exceeded");
    wait("b", "3", &mut waiting).await;
    wait("b", "4", &mut waiting).await;
    refused(&post(&rig, "/hold", "c", "5").await, 503, "overloaded");
    for _ in 0..running.len() {
        rig.service.state.gate.notify_one();
        // A permit each: two at once would be one.
        let before = running.len();
        eventually("one has ended", async || running.iter().filter(|task| !task.is_finished()).count() < before).await;
        running.retain(|task| !task.is_finished());
    }
    for waiter in waiting {
        let reply = waiter.await.unwrap();
        assert_eq!((reply.status, reply.is_replay()), (201, true));
    }
    assert_eq!(rig.service.requests(), 5);
}

/// While claims wait for the database, new ones are shed; what needs no claim is answered all the same.
#[tokio::test(flavor = "multi_thread")]
async fn load_is_shed_while_the_database_is_slow() {
    let rig = Rig::new("[gateway.limits]\nshed_wait = \"20ms\"").await;
    let cached = rig.post("/orders", "cached", "a").await;
    assert_eq!(cached.status, 201);
    let mut locker = rig.db.client().await;
    let lock = locker.transaction().await.unwrap();
    lock.batch_execute("LOCK TABLE once.intent IN ACCESS EXCLUSIVE MODE").await.unwrap();
    let address = rig.gateway.address;
    let mut slow = Vec::new();
    let mut shed = None;
    eventually("one is shed", async || {
        let key = format!("\"slow-{}\"", slow.len());
        let asked =
            tokio::spawn(async move { send(address, "POST", "/orders", &[("idempotency-key", &key)], b"a").await });
        slow.push(asked);
        if let Some(done) = slow.iter().position(JoinHandle::is_finished) {
            shed = Some(slow.remove(done).await.unwrap());
        }
        shed.is_some()
    })
    .await;
    let shed = shed.unwrap();
    refused(&shed, 503, "overloaded");
    assert_eq!(shed.json()["effect"], "not_done");
    for _ in 0..20 {
        let again = rig.post("/orders", "cached", "a").await;
        assert_eq!((again.status, again.is_replay()), (201, true), "{again:?}");
    }
    assert_eq!(rig.send("POST", "/else", &[], "a").await.status, 200);
    drop(lock);
    for asked in slow {
        let reply = asked.await.unwrap();
        assert!(matches!(reply.status, 201 | 503), "{reply:?}");
    }
    eventually("over when it is over", async || rig.post("/orders", "after", "a").await.status == 201).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upstream_that_is_away_is_left_alone_and_found_again() {
    let db = TestDb::new().await;
    let service = Service::start(db.direct_url()).await;
    let mut wire = Wire::to(service.address).await;
    let config = "upstream.breaker_failures_max = 3\nupstream.breaker_open_for = \"3s\"\nupstream.idle_max = 0";
    let gateway = Gateway::start(db.url(), wire.address, config).await;
    let rig = Rig { db, service, gateway };
    assert_eq!(rig.post("/orders", "first", "a").await.status, 201);
    wire.cut().await;
    for n in 0..3 {
        assert_eq!(rig.metric("pgonce_gateway_upstream_away").await, 0.0, "after {n} failures");
        assert_eq!(rig.post("/orders", "k", "a").await.problem(), "upstream-away");
    }
    // It is back at once; nobody asks it yet, neither after a reload.
    wire.mend().await;
    let before = wire.connections();
    rig.gateway.reload(wire.address, &format!("key = \"required\"\n{config}")).await;
    eventually("reloaded", async || rig.send("POST", "/else", &[], "a").await.status == 400).await;
    let left_alone = rig.post("/orders", "k", "a").await;
    assert_eq!((left_alone.status, left_alone.problem().as_str()), (502, "upstream-away"));
    assert_eq!(rig.send("GET", "/else", &[], "").await.problem(), "upstream-away");
    assert_eq!(left_alone.json()["effect"], "not_done");
    assert_eq!(wire.connections(), before, "nothing was sent");
    assert_eq!(rig.states("k").await, Vec::<String>::new());
    eventually("it is asked again", async || rig.post("/orders", "k", "a").await.status == 201).await;
    assert_eq!(rig.metric("pgonce_gateway_upstream_away").await, 0.0);
    assert_eq!(rig.effects("k").await, 1);
}

const GET: &[u8] = b"GET /else HTTP/1.1\r\nhost: h\r\n\r\n";

#[tokio::test(flavor = "multi_thread")]
async fn connections_have_their_limit() {
    let rig = Rig::new("[gateway.limits]\nconnections_max = 2").await;
    let mut open = Vec::new();
    for _ in 0..2 {
        let mut stream = TcpStream::connect(rig.gateway.address).await.unwrap();
        stream.write_all(GET).await.unwrap();
        read_until(&mut stream, "}").await;
        open.push(stream);
    }
    // The system takes it; the gateway does not yet.
    let mut third = TcpStream::connect(rig.gateway.address).await.unwrap();
    third.write_all(GET).await.unwrap();
    for n in 0..30 {
        open[0].write_all(GET).await.unwrap();
        read_until(&mut open[0], "}").await;
        assert_eq!(rig.service.requests(), 3 + n, "the third waits for its turn");
    }
    drop(open.pop());
    read_until(&mut third, "}").await;
}

/// An upgraded connection is a connection.
#[tokio::test(flavor = "multi_thread")]
async fn upgraded_connections_count() {
    let service = Bare::start(|mut stream| async move {
        let head = read_head(&mut stream).await;
        if head.contains("upgrade: echo") {
            let switched = b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: echo\r\n\r\n";
            stream.write_all(switched).await.unwrap();
            let (mut from, mut to) = stream.split();
            let _ = tokio::io::copy(&mut from, &mut to).await;
        } else {
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").await;
        }
    })
    .await;
    let (_db, gateway) = service.gateway("[gateway.limits]\nconnections_max = 1").await;
    let mut upgraded = TcpStream::connect(gateway.address).await.unwrap();
    let ask = b"GET /ws HTTP/1.1\r\nhost: h\r\nconnection: upgrade\r\nupgrade: echo\r\n\r\n";
    upgraded.write_all(ask).await.unwrap();
    read_until(&mut upgraded, "\r\n\r\n").await;
    let mut second = TcpStream::connect(gateway.address).await.unwrap();
    second.write_all(GET).await.unwrap();
    for _ in 0..30 {
        upgraded.write_all(b"ping!").await.unwrap();
        read_until(&mut upgraded, "ping!").await;
        let mut byte = [0];
        assert!(second.try_read(&mut byte).is_err(), "the second waits for its turn");
    }
    drop(upgraded);
    tokio::time::timeout(Duration::from_secs(10), read_until(&mut second, "{}")).await.unwrap();
}
