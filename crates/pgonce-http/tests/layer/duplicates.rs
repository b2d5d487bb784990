//! Many requests with one key: one effect, one answer, few connections.

use std::collections::HashSet;
use std::time::Duration;

use pgonce_http::{IdempotencyLayer, InProgress};
use pgonce_testkit::{TestDb, eventually};

use crate::client::{Reply, post, send};
use crate::shop::{Shop, open, policy, small_once};

/// The only connection is the handler's: whoever is told anything was told without one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_duplicate_of_a_running_request_is_refused_at_once() {
    let (db, shop) = (TestDb::new().await, Shop::default());
    let address = shop.serve(IdempotencyLayer::new(small_once(&db, 1).await, policy(|_| {}))).await;
    let running = tokio::spawn(send(address, post("/orders", "k", "{\"hold\": true}")));
    shop.reached.pass().await;
    let duplicate = send(address, post("/orders", "k", "{\"hold\": true}")).await;
    assert_eq!((duplicate.status, duplicate.problem().as_str()), (409, "in-progress"));
    assert_eq!(duplicate.header("retry-after"), Some("1"));
    let other = send(address, post("/orders", "k", "{}")).await;
    assert_eq!((other.status, other.problem().as_str()), (422, "conflict"), "422 wins over 409");
    shop.go.open();
    let first = running.await.unwrap();
    assert_eq!((first.status, first.is_replay()), (201, false));
    assert_eq!((shop.calls(), db.effects("k").await), (1, 1));
}

/// The same from another process, which can only ask the database.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_duplicate_elsewhere_is_refused_or_waits_by_policy() {
    let (db, shop, address) = open(|_| {}).await;
    let refusing = shop.serve(IdempotencyLayer::new(db.once().await, policy(|_| {}))).await;
    let waits = policy(|policy| policy.in_progress = InProgress::Wait);
    let waiting = shop.serve(IdempotencyLayer::new(small_once(&db, 1).await, waits)).await;
    let running = tokio::spawn(send(address, post("/orders", "k", "{\"hold\": true}")));
    shop.reached.pass().await;
    let refused = send(refusing, post("/orders", "k", "{\"hold\": true}")).await;
    assert_eq!((refused.status, refused.problem().as_str()), (409, "in-progress"));
    // Of twenty there, one waits in the database, and the others for that one.
    let waiters: Vec<_> =
        (0..20).map(|_| tokio::spawn(send(waiting, post("/orders", "k", "{\"hold\": true}")))).collect();
    pgonce_testkit::lock_waiters(&db.client().await, 1).await;
    shop.go.open();
    let first = running.await.unwrap();
    for waiter in waiters {
        let reply = waiter.await.unwrap();
        assert!(reply.is_replay(), "{reply:?}");
        assert_eq!(reply.body, first.body);
    }
    assert_eq!((shop.calls(), db.effects("k").await), (1, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_duplicates_hold_no_connection_and_get_the_winners_bytes() {
    let (db, shop) = (TestDb::new().await, Shop::default());
    let waits = policy(|policy| {
        policy.in_progress = InProgress::Wait;
        policy.wait_max = Duration::from_secs(60);
        policy.waiters_max = 30;
    });
    // One connection, and the handler has it.
    let address = shop.serve(IdempotencyLayer::new(small_once(&db, 1).await, waits)).await;
    let running = tokio::spawn(send(address, post("/orders", "k", "{\"hold\": true}")));
    shop.reached.pass().await;
    let waiters: Vec<_> =
        (0..30).map(|_| tokio::spawn(send(address, post("/orders", "k", "{\"hold\": true}")))).collect();
    let too_many = async || send(address, post("/orders", "k", "{\"hold\": true}")).await;
    let full = tokio::time::timeout(Duration::from_secs(10), async {
        loop {
            // Until the thirty have arrived one of these may itself be among them: then it is not answered soon.
            if let Ok(reply) = tokio::time::timeout(Duration::from_millis(200), too_many()).await {
                return reply;
            }
        }
    });
    assert_eq!(full.await.unwrap().problem(), "in-progress", "beyond waiters_max nobody waits");
    let other = send(address, post("/orders", "k", "{}")).await;
    assert_eq!(other.problem(), "conflict", "another payload does not wait to learn it");
    shop.go.open();
    let first = running.await.unwrap();
    let mut replies = Vec::new();
    for waiter in waiters {
        replies.push(waiter.await.unwrap());
    }
    let (answered, refused): (Vec<Reply>, Vec<Reply>) = replies.into_iter().partition(|reply| reply.status == 201);
    assert!(answered.len() >= 20 && answered.iter().all(|reply| reply.is_replay() && reply.body == first.body));
    assert!(refused.iter().all(|reply| reply.problem() == "in-progress"));
    assert_eq!((shop.calls(), db.effects("k").await), (1, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_duplicate_waits_no_longer_than_it_may() {
    let (db, shop, address) = open(|policy| {
        policy.in_progress = InProgress::Wait;
        policy.wait_max = Duration::from_millis(50);
    })
    .await;
    let running = tokio::spawn(send(address, post("/orders", "k", "{\"hold\": true}")));
    shop.reached.pass().await;
    let duplicate = send(address, post("/orders", "k", "{\"hold\": true}")).await;
    assert_eq!((duplicate.status, duplicate.problem().as_str()), (409, "in-progress"));
    shop.go.open();
    assert_eq!(running.await.unwrap().status, 201);
    assert_eq!(db.effects("k").await, 1);
}

/// The first one fails without an outcome: of those that waited, one runs, and the others get its answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn when_the_first_is_not_done_one_of_the_waiting_runs() {
    let (db, shop, address) = open(|policy| {
        policy.in_progress = InProgress::Wait;
        policy.wait_max = Duration::from_secs(60);
        policy.fingerprint.body = pgonce_http::BodyPart::None;
    })
    .await;
    let running = tokio::spawn(send(address, post("/orders", "k", "{\"hold\": true, \"status\": 503}")));
    shop.reached.pass().await;
    let waiters: Vec<_> =
        (0..10).map(|_| tokio::spawn(send(address, post("/orders", "k", "{\"hold\": true}")))).collect();
    shop.go.open();
    assert_eq!(running.await.unwrap().status, 503);
    shop.reached.pass().await;
    shop.go.open();
    let mut executed = 0;
    let mut bodies = HashSet::new();
    for waiter in waiters {
        let reply = waiter.await.unwrap();
        assert_eq!(reply.status, 201, "{reply:?}");
        executed += usize::from(!reply.is_replay());
        bodies.insert(reply.body);
    }
    assert_eq!((executed, bodies.len(), shop.calls(), db.effects("k").await), (1, 1, 2, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_clients_and_twenty_keys_are_twenty_effects() {
    for in_progress in [InProgress::Wait, InProgress::Refuse] {
        let (db, shop) = (TestDb::new().await, Shop::default());
        let once = small_once(&db, 4).await;
        let rules = policy(|policy| {
            policy.in_progress = in_progress;
            policy.wait_max = Duration::from_secs(60);
        });
        let address = shop.serve(IdempotencyLayer::new(once.clone(), rules)).await;
        let mut clients = tokio::task::JoinSet::new();
        for _ in 0..50 {
            for key in 0..20 {
                clients.spawn(async move {
                    loop {
                        let reply = send(address, post("/orders", &format!("k{key}"), "{}")).await;
                        if reply.status == 201 {
                            return (key, reply);
                        }
                        assert_eq!((in_progress, reply.problem().as_str()), (InProgress::Refuse, "in-progress"));
                        tokio::task::yield_now().await;
                    }
                });
            }
        }
        let (mut executed, mut bodies) = (vec![0; 20], vec![HashSet::new(); 20]);
        while let Some(done) = clients.join_next().await {
            let (key, reply) = done.unwrap();
            executed[key] += usize::from(!reply.is_replay());
            bodies[key].insert(reply.body);
        }
        assert_eq!(executed, vec![1; 20]);
        assert!(bodies.iter().all(|bodies| bodies.len() == 1));
        for key in 0..20 {
            assert_eq!(db.effects(&format!("k{key}")).await, 1);
        }
        assert_eq!(shop.calls(), 20);
        assert!(once.pool_status().connections <= 4);
    }
}

/// Nobody waits for its answer any more; its retry does not begin anew.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_goes_away_does_not_stop_its_request() {
    let (db, shop, address) = open(|_| {}).await;
    let gone = tokio::spawn(send(address, post("/orders", "k", "{\"hold\": true}")));
    shop.reached.pass().await;
    gone.abort();
    assert!(gone.await.unwrap_err().is_cancelled());
    let duplicate = send(address, post("/orders", "k", "{\"hold\": true}")).await;
    assert_eq!(duplicate.problem(), "in-progress");
    shop.go.open();
    eventually("it is done", async || db.effects("k").await == 1).await;
    eventually("its retry gets the answer", async || {
        send(address, post("/orders", "k", "{\"hold\": true}")).await.is_replay()
    })
    .await;
    assert_eq!((shop.calls(), db.effects("k").await), (1, 1));
}

/// The same key of two tenants is two intents: each gets its own answer, and neither is told of the other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_tenants_never_meet() {
    let (db, shop) = (TestDb::new().await, Shop::default());
    let layer =
        IdempotencyLayer::new(db.once().await, policy(|_| {})).tenant(|parts| match parts.headers.get("x-user") {
            Some(user) => Ok(user.to_str().unwrap().to_owned()),
            None => Err(pgonce_http::Problem::TenantMissing),
        });
    let address = shop.serve(layer).await;
    let of = |user: &str, body: &str| {
        let headers = format!("X-User: {user}\r\nIdempotency-Key: \"k\"\r\n");
        crate::client::post_with("/orders", &headers, body)
    };
    let running = tokio::spawn(send(address, of("ann", "{\"hold\": true}")));
    shop.reached.pass().await;
    // Neither a conflict nor in progress: bob's is another intent, with another payload at that.
    let bobs = send(address, of("bob", "{}")).await;
    assert_eq!((bobs.status, bobs.is_replay()), (201, false));
    shop.go.open();
    let anns = running.await.unwrap();
    assert_eq!(anns.status, 201);
    assert_ne!(anns.body, bobs.body);
    assert_eq!(send(address, of("bob", "{}")).await.body, bobs.body);
    assert_eq!(send(address, of("ann", "{\"hold\": true}")).await.body, anns.body);
    assert_eq!(send(address, of("bob", "{\"hold\": true}")).await.problem(), "conflict");
    let nobody = send(address, post("/orders", "k", "{}")).await;
    assert_eq!((nobody.status, nobody.problem().as_str()), (401, "tenant-missing"));
    assert_eq!(shop.calls(), 2);
}
