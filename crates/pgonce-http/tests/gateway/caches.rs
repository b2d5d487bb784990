//! Replays that do not ask PostgreSQL, and the end of what they may say.

use std::time::{Duration, Instant};

use pgonce_testkit::{RedisServer, TestDb, eventually};
use tokio_postgres::Transaction;

use crate::rig::{Gateway, Rig, Service, send};

/// From here on nothing that asks for an intent gets an answer.
async fn lock(client: &mut tokio_postgres::Client) -> Transaction<'_> {
    let transaction = client.transaction().await.unwrap();
    transaction.batch_execute("LOCK TABLE once.intent IN ACCESS EXCLUSIVE MODE").await.unwrap();
    transaction
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replay_from_memory_does_not_ask_the_database() {
    let rig = Rig::new("").await;
    let first = rig.post("/orders", "k", "a").await;
    let mut locker = rig.db.client().await;
    let lock = lock(&mut locker).await;
    for _ in 0..50 {
        let again = rig.post("/orders", "k", "a").await;
        assert_eq!((again.status, again.is_replay(), &again.body), (201, true, &first.body));
        assert_eq!(again.all("link"), first.all("link"));
        let other = rig.post("/orders", "k", "b").await;
        assert_eq!((other.status, other.problem().as_str()), (422, "conflict"), "nor does a conflict");
    }
    drop(lock);
    assert_eq!((rig.effects("k").await, rig.service.requests()), (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn with_the_database_killed_what_is_cached_is_told_and_nothing_runs() {
    let cluster = tokio::task::spawn_blocking(pgonce_testkit::cluster).await.unwrap();
    let url = cluster.url("postgres");
    let mut admin = pgonce::migrate::connect(&url).await.unwrap();
    pgonce::migrate::apply(&mut admin, false).await.unwrap();
    let service = Service::start(&url).await;
    let gateway = Gateway::start(&url, service.address, "").await;
    let post = async |path: &str, key: &str| {
        send(gateway.address, "POST", path, &[("idempotency-key", &format!("\"{key}\""))], b"a").await
    };
    let first = post("/else", "cached").await;
    assert_eq!(first.status, 200);
    let mut cluster = cluster;
    let killed = tokio::task::spawn_blocking(move || {
        cluster.kill_9().unwrap();
        cluster
    });
    let _cluster = killed.await.unwrap();
    for n in 0..3 {
        // Before, while and after others wait in vain.
        let new = format!("new-{n}");
        let (refused, again) = tokio::join!(post("/else", &new), async {
            let mut replies = Vec::new();
            for _ in 0..20 {
                replies.push(post("/else", "cached").await);
            }
            replies
        });
        assert_eq!(refused.status, 503, "{refused:?}");
        assert_eq!(refused.json()["effect"], "not_done");
        for again in again {
            assert_eq!((again.status, again.is_replay(), &again.body), (200, true, &first.body), "{again:?}");
        }
    }
    assert_eq!(service.requests(), 1);
}

/// A cached answer ends with its row, by the time that was left when the database told it.
#[tokio::test(flavor = "multi_thread")]
async fn a_cached_answer_ends_with_its_row() {
    let rig = Rig::new("retention = \"1s\"").await;
    assert_eq!(rig.post("/orders", "k", "a").await.status, 201);
    let stored = Instant::now();
    let mut replays = 0;
    eventually("the row is over", async || {
        let asked = Instant::now();
        let reply = rig.post("/orders", "k", "a").await;
        if reply.is_replay() {
            assert!(asked < stored + Duration::from_secs(1), "it was over before we asked");
            replays += 1;
            return false;
        }
        assert_eq!((reply.status, reply.problem().as_str()), (410, "result-expired"));
        true
    })
    .await;
    assert!(replays > 0);
    assert_eq!(rig.effects("k").await, 1, "it is known as used");
}

/// The cache counts what is left; where the database's clock stands says nothing to it, and is all that counts to
/// a gateway that asks anew.
#[tokio::test(flavor = "multi_thread")]
async fn time_is_the_databases_and_is_asked_for_once() {
    let rig = Rig::new("retention = \"1h\"").await;
    assert_eq!(rig.post("/orders", "k", "a").await.status, 201);
    let key = [("idempotency-key", "\"k\"")];
    rig.db.travel(Duration::from_secs(3590)).await;
    let late = Gateway::start(rig.db.url(), rig.service.address, "retention = \"1h\"").await;
    let reply = send(late.address, "POST", "/orders", &key, b"a").await;
    assert!(reply.is_replay());
    let expires = httpdate::parse_http_date(reply.header("idempotency-expires").unwrap()).unwrap();
    let left = expires.duration_since(std::time::SystemTime::now()).unwrap_or_default();
    assert!(left <= Duration::from_secs(11), "what the database says is left: {left:?}");
    rig.db.travel(Duration::from_secs(7200)).await;
    assert!(rig.post("/orders", "k", "a").await.is_replay(), "an hour has not passed here");
    let later = Gateway::start(rig.db.url(), rig.service.address, "retention = \"1h\"").await;
    let reply = send(later.address, "POST", "/orders", &key, b"a").await;
    assert_eq!((reply.status, reply.problem().as_str()), (410, "result-expired"));
    assert_eq!((rig.effects("k").await, rig.service.requests()), (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn gateways_share_what_redis_holds_and_do_without_it() {
    let mut server = RedisServer::start();
    let config = format!("[gateway.cache]\nredis = \"{}\"\nredis_timeout = \"5s\"\n", server.url());
    let rig = Rig::new(&config).await;
    let first = rig.post("/orders", "k", "a").await;
    let client = redis::Client::open(server.url()).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();
    eventually("Redis has it", async || {
        let count: usize = redis::cmd("DBSIZE").query_async(&mut connection).await.unwrap();
        count == 1
    })
    .await;
    let other = Gateway::start(rig.db.url(), rig.service.address, &config).await;
    let key = [("idempotency-key", "\"k\"")];
    let mut locker = rig.db.client().await;
    let locked = lock(&mut locker).await;
    let again = send(other.address, "POST", "/orders", &key, b"a").await;
    assert_eq!((again.status, again.is_replay(), &again.body), (201, true, &first.body), "without PostgreSQL");
    drop(locked);
    server.kill();
    let third = Gateway::start(rig.db.url(), rig.service.address, &config).await;
    let again = send(third.address, "POST", "/orders", &key, b"a").await;
    assert_eq!((again.status, again.is_replay(), &again.body), (201, true, &first.body), "without Redis");
    assert_eq!(rig.effects("k").await, 1);
}

/// A key that is cached by one gateway and was settled otherwise nowhere: nothing that is not terminal is cached.
#[tokio::test(flavor = "multi_thread")]
async fn what_has_no_outcome_is_not_cached() {
    let db = TestDb::new().await;
    let service = Service::start(db.direct_url()).await;
    let gateway = Gateway::start(db.url(), service.address, "stale = \"hold\"").await;
    let key = [("idempotency-key", "\"k\"")];
    assert_eq!(send(gateway.address, "POST", "/status/500", &key, b"a").await.status, 502);
    assert_eq!(send(gateway.address, "POST", "/status/500", &key, b"a").await.problem(), "uncertain");
    let sql = "SELECT once.settle(p_scope => scope, p_key => key, p_verdict => 'succeeded', p_actor => 'me',
                   p_reason => 'looked', p_tenant => tenant, p_response_code => 201,
                   p_response_body => 'paid') FROM once.intents WHERE key = 'k'";
    db.client().await.execute(sql, &[]).await.unwrap();
    let told = send(gateway.address, "POST", "/status/500", &key, b"a").await;
    assert_eq!((told.status, told.is_replay()), (201, true), "{told:?}");
    assert_eq!(service.requests(), 1);
}

/// Two databases behind one Redis: the same key is two intents.
#[tokio::test(flavor = "multi_thread")]
async fn databases_that_share_a_redis_do_not_answer_for_each_other() {
    let server = RedisServer::start();
    let config = format!("[gateway.cache]\nredis = \"{}\"\nredis_timeout = \"5s\"\n", server.url());
    let (one, two) = (Rig::new(&config).await, Rig::new(&config).await);
    let client = redis::Client::open(server.url()).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();
    for (count, rig) in [(1, &one), (2, &two)] {
        let first = rig.post("/orders", "k", "a").await;
        assert_eq!((first.status, first.is_replay(), rig.effects("k").await), (201, false, 1));
        eventually("Redis has both", async || {
            redis::cmd("DBSIZE").query_async::<usize>(&mut connection).await.unwrap() == count
        })
        .await;
    }
    assert_eq!((one.service.requests(), two.service.requests()), (1, 1));
}
