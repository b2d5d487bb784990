//! The replay caches over a real redis-server: one that is dead, slow, flushed or lying is a miss, and is counted.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop, loudly")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use pgonce::{Answer, fingerprint_bytes};
use pgonce_http::cache::{CacheSettings, Caches, RedisSettings, Replay};
use pgonce_testkit::{RedisServer, eventually};
use redis::AsyncCommands as _;
use redis::aio::MultiplexedConnection;
use serde_json::json;

const TENANT: &str = "acme";
const SCOPE: &str = "create_order";
const KEY: &str = "checkout-3c51";
const HOUR: Duration = Duration::from_secs(3600);

/// The metrics of one test: its tasks all run on its own thread.
struct Counts {
    handle: PrometheusHandle,
    _guard: metrics::LocalRecorderGuard<'static>,
}

impl Counts {
    fn new() -> Self {
        let recorder = Box::leak(Box::new(PrometheusBuilder::new().build_recorder()));
        Self { handle: recorder.handle(), _guard: metrics::set_default_local_recorder(recorder) }
    }

    fn of(&self, metric: &str, cache: &str, result: &str) -> u64 {
        let line = format!(r#"{metric}{{cache="{cache}",result="{result}"}} "#);
        let text = self.handle.render();
        text.lines().find_map(|found| found.strip_prefix(&line)?.parse().ok()).unwrap_or(0)
    }

    fn reads(&self, result: &str) -> u64 {
        self.of("pgonce_cache_requests_total", "redis", result)
    }

    fn writes(&self, result: &str) -> u64 {
        self.of("pgonce_cache_writes_total", "redis", result)
    }
}

fn settings(server: &RedisServer) -> RedisSettings {
    // A busy machine is no slow Redis: the tests that want a slow one stop it.
    RedisSettings { timeout: Duration::from_secs(5), ..RedisSettings::new(server.url()) }
}

/// Redis only, unless a test says otherwise.
fn caches(redis: RedisSettings) -> Caches {
    Caches::new(CacheSettings { memory_bytes: 0, redis: Some(redis), ..CacheSettings::default() }, "db").unwrap()
}

fn replay(fresh_for: Option<Duration>) -> Replay {
    let answer = Answer {
        code: Some(201),
        headers: Some(json!([["content-type", "application/json"], [":sealed", "k1"], ["x-name", "Zoë"]])),
        body: Some((0..=255).cycle().take(5000).collect()),
        result_type: Some("order".into()),
        result_id: Some("42".into()),
    };
    Replay::new(fingerprint_bytes(b"payload", "POST", ""), answer, fresh_for, Instant::now())
}

async fn get(caches: &Caches) -> Option<Arc<Replay>> {
    caches.get(TENANT, SCOPE, KEY).await
}

/// Puts it, and waits until Redis has it.
async fn put(caches: &Caches, counts: &Counts, replay: Replay) {
    let before = counts.writes("written");
    caches.put(TENANT, SCOPE, KEY, replay);
    eventually("the write", async || counts.writes("written") > before).await;
}

async fn raw(server: &RedisServer) -> MultiplexedConnection {
    redis::Client::open(server.url()).unwrap().get_multiplexed_async_connection().await.unwrap()
}

#[tokio::test]
async fn what_one_gateway_puts_another_gets_to_the_byte() {
    let (server, counts) = (RedisServer::start(), Counts::new());
    let secret = RedisSettings { secret: Some(vec![7; 32]), ..settings(&server) };
    let (one, two) = (caches(secret.clone()), caches(secret));
    assert!(get(&two).await.is_none());
    assert_eq!(counts.reads("miss"), 1);
    let told = replay(Some(HOUR));
    put(&one, &counts, told.clone()).await;
    let found = get(&two).await.unwrap();
    assert_eq!((&found.answer, found.fingerprint), (&told.answer, told.fingerprint));
    assert_eq!(counts.reads("hit"), 1);
    let left = found.fresh_for().unwrap();
    assert!(left <= HOUR && left > HOUR / 2, "{left:?}: the row's life, not the cache's ten minutes");
    for (tenant, scope, key) in
        [("rival", SCOPE, KEY), (TENANT, "refund", KEY), (TENANT, SCOPE, "other"), ("", SCOPE, KEY)]
    {
        assert!(two.get(tenant, scope, key).await.is_none(), "another intent");
    }
    put(&one, &counts, replay(None)).await;
    assert_eq!(get(&two).await.unwrap().fresh_for(), None, "permanent");
}

#[tokio::test]
async fn redis_never_sees_a_raw_name_and_keeps_nothing_for_ever() {
    let (server, counts) = (RedisServer::start(), Counts::new());
    put(&caches(settings(&server)), &counts, replay(None)).await;
    let mut raw = raw(&server).await;
    let keys: Vec<String> = raw.keys("*").await.unwrap();
    let [key] = keys.as_slice() else { panic!("{keys:?}") };
    assert_eq!(key.len(), "pgonce:replay:".len() + 64);
    let value: Vec<u8> = raw.get(key).await.unwrap();
    for name in [TENANT, SCOPE, KEY] {
        assert!(!key.contains(name));
        assert!(!value.windows(name.len()).any(|window| window == name.as_bytes()), "{name}");
    }
    let ttl: i64 = raw.pttl(key).await.unwrap();
    assert!((1..=600_000).contains(&ttl), "{ttl}: ten minutes at most, permanent or not");
}

#[tokio::test]
async fn a_flushed_redis_is_a_miss() {
    let (server, counts) = (RedisServer::start(), Counts::new());
    let caches = caches(settings(&server));
    put(&caches, &counts, replay(Some(HOUR))).await;
    assert!(get(&caches).await.is_some());
    let () = redis::cmd("FLUSHALL").query_async(&mut raw(&server).await).await.unwrap();
    assert!(get(&caches).await.is_none());
    assert_eq!((counts.reads("hit"), counts.reads("miss")), (1, 1));
    put(&caches, &counts, replay(Some(HOUR))).await;
    assert!(get(&caches).await.is_some(), "and it fills again");
}

#[tokio::test]
async fn a_dead_redis_is_a_miss_and_is_used_again_when_it_is_back() {
    let (mut server, counts) = (RedisServer::start(), Counts::new());
    let caches = caches(settings(&server));
    put(&caches, &counts, replay(Some(HOUR))).await;
    server.kill();
    for _ in 0..20 {
        assert!(get(&caches).await.is_none());
    }
    assert_eq!(counts.reads("error"), 5, "the sixth does not ask any more");
    assert_eq!(counts.reads("skipped"), 15);
    server.start_again();
    eventually("a miss of an empty Redis", async || get(&caches).await.is_none() && counts.reads("miss") > 0).await;
    put(&caches, &counts, replay(Some(HOUR))).await;
    assert!(get(&caches).await.is_some());
}

#[tokio::test]
async fn a_connection_that_was_cut_costs_one_request() {
    let (mut server, counts) = (RedisServer::start(), Counts::new());
    let caches = caches(settings(&server));
    put(&caches, &counts, replay(Some(HOUR))).await;
    server.start_again();
    for _ in 0..3 {
        assert!(get(&caches).await.is_none());
    }
    assert_eq!((counts.reads("error"), counts.reads("miss")), (1, 2));
}

#[tokio::test]
async fn a_redis_that_was_never_there_is_no_error_at_the_start() {
    let (mut server, counts) = (RedisServer::start(), Counts::new());
    server.kill();
    let caches = caches(settings(&server));
    assert!(get(&caches).await.is_none());
    assert_eq!(counts.reads("error"), 1);
    server.start_again();
    eventually("a connection", async || get(&caches).await.is_none() && counts.reads("miss") > 0).await;
}

#[tokio::test]
async fn a_redis_that_refuses_us_is_a_miss_and_is_left_alone() {
    let (server, counts) = (RedisServer::start(), Counts::new());
    let () = redis::cmd("CONFIG").arg(&["SET", "requirepass", "x"]).query_async(&mut raw(&server).await).await.unwrap();
    let caches = caches(settings(&server));
    for _ in 0..20 {
        assert!(get(&caches).await.is_none());
    }
    assert_eq!((counts.reads("error"), counts.reads("skipped")), (5, 15));
}

#[tokio::test]
async fn a_slow_redis_is_a_miss_and_is_left_alone() {
    let (server, counts) = (RedisServer::start(), Counts::new());
    let quick = RedisSettings { timeout: Duration::from_millis(20), ..settings(&server) };
    let (patient, caches) = (caches(settings(&server)), caches(quick));
    put(&patient, &counts, replay(Some(HOUR))).await;
    eventually("a hit", async || get(&caches).await.is_some()).await;
    let (timeouts, skipped) = (counts.reads("timeout"), counts.reads("skipped"));
    server.stop_answering();
    for _ in 0..20 {
        assert!(get(&caches).await.is_none());
    }
    assert_eq!(counts.reads("timeout") - timeouts, 5);
    assert_eq!(counts.reads("skipped") - skipped, 15, "nobody waits for it any more");
    server.resume();
    eventually("a hit again", async || get(&caches).await.is_some()).await;
}

#[tokio::test]
async fn a_lying_redis_is_a_miss() {
    let (server, counts) = (RedisServer::start(), Counts::new());
    let secret = |byte| RedisSettings { secret: Some(vec![byte; 32]), ..settings(&server) };
    let caches_of = |byte| caches(secret(byte));
    let caches = caches_of(7);
    let mut raw = raw(&server).await;
    put(&caches, &counts, replay(Some(HOUR))).await;
    let ours: Vec<String> = raw.keys("*").await.unwrap();
    let ours = &ours[0];
    let good: Vec<u8> = raw.get(ours).await.unwrap();

    // Another intent's value, whole and rightly signed.
    caches.put("rival", SCOPE, KEY, replay(Some(HOUR)));
    eventually("two values", async || raw.keys::<_, Vec<String>>("*").await.unwrap().len() == 2).await;
    let all: Vec<String> = raw.keys("*").await.unwrap();
    let rivals: Vec<u8> = raw.get(all.iter().find(|key| *key != ours).unwrap()).await.unwrap();

    let mut flipped = good.clone();
    *flipped.last_mut().unwrap() ^= 1;
    let lies: [&[u8]; 7] = [b"", b"garbage", &[0; 10_000], &good[..good.len() - 1], &good[..40], &flipped, &rivals];
    let mut invalid = 0;
    for lie in lies {
        let () = raw.pset_ex(ours, lie, 60_000).await.unwrap();
        assert!(get(&caches).await.is_none());
        invalid += 1;
        assert_eq!(counts.reads("invalid"), invalid, "{} bytes", lie.len());
    }
    // What another kind of client might leave behind under our name.
    let () = raw.del(ours).await.unwrap();
    let () = raw.lpush(ours, "x").await.unwrap();
    assert!(get(&caches).await.is_none());
    let () = raw.set(ours, good.as_slice()).await.unwrap();
    assert!(get(&caches).await.is_none(), "we write nothing that stays for ever");
    let () = raw.pset_ex(ours, vec![0; 9 * 1024 * 1024], 60_000).await.unwrap();
    assert!(get(&caches).await.is_none(), "larger than anything of ours");
    assert_eq!(counts.reads("invalid"), invalid + 3);
    // A gateway with another secret, and one without.
    let () = raw.pset_ex(ours, good.as_slice(), 60_000).await.unwrap();
    assert!(get(&caches_of(8)).await.is_none());
    assert!(get(&self::caches(settings(&server))).await.is_none());
    assert_eq!(counts.reads("invalid"), invalid + 5);
    assert_eq!((counts.reads("error"), counts.reads("skipped")), (0, 0), "a lie is no failure");
    assert!(get(&caches).await.is_some(), "the truth is still believed");
}

#[tokio::test]
async fn nothing_outlives_its_row() {
    let (server, counts) = (RedisServer::start(), Counts::new());
    let both = || CacheSettings { redis: Some(settings(&server)), ..CacheSettings::default() };
    let (one, two) = (Caches::new(both(), "db").unwrap(), Caches::new(both(), "db").unwrap());
    let told = replay(Some(Duration::from_secs(1)));
    let end = Instant::now() + Duration::from_secs(1);
    one.put(TENANT, SCOPE, KEY, told.clone());
    eventually("the write", async || counts.writes("written") == 1).await;
    for caches in [&one, &two] {
        eventually("the end", async || {
            let asked_at = Instant::now();
            let found = get(caches).await;
            assert!(found.is_none() || asked_at < end, "it was over before we asked");
            found.is_none()
        })
        .await;
    }
    assert_eq!(told.fresh_for(), Some(Duration::ZERO));
    one.put(TENANT, SCOPE, KEY, told);
    one.put(TENANT, SCOPE, "later", replay(Some(HOUR)));
    eventually("the write", async || counts.writes("written") == 2).await;
    assert!(get(&one).await.is_none() && get(&two).await.is_none(), "what is over is not kept again");
}

#[tokio::test]
async fn the_cap_holds_from_cache_to_cache() {
    let (server, counts) = (RedisServer::start(), Counts::new());
    let capped = |lifetime_max| {
        let redis = Some(settings(&server));
        Caches::new(CacheSettings { lifetime_max, redis, ..CacheSettings::default() }, "db").unwrap()
    };
    let (short, long) = (capped(Duration::from_millis(300)), capped(HOUR));
    put(&short, &counts, replay(None)).await;
    // The other one's own cap is an hour; what it takes over from Redis ends when Redis's does.
    eventually("the end in both", async || get(&long).await.is_none() && get(&short).await.is_none()).await;
}

#[tokio::test]
async fn memory_answers_first_and_is_filled_from_redis() {
    let (mut server, counts) = (RedisServer::start(), Counts::new());
    let both = || CacheSettings { redis: Some(settings(&server)), ..CacheSettings::default() };
    let (one, two) = (Caches::new(both(), "db").unwrap(), Caches::new(both(), "db").unwrap());
    put(&one, &counts, replay(Some(HOUR))).await;
    assert!(get(&two).await.is_some(), "from Redis");
    server.kill();
    assert!(get(&one).await.is_some() && get(&two).await.is_some(), "from memory");
    assert_eq!(counts.reads("hit"), 1);
    let memory = |result| counts.of("pgonce_cache_requests_total", "memory", result);
    assert_eq!((memory("hit"), memory("miss")), (2, 1));
}

#[tokio::test]
async fn a_hundred_at_once_are_one_request() {
    let (server, counts) = (RedisServer::start(), Counts::new());
    let caches = caches(settings(&server));
    put(&caches, &counts, replay(Some(HOUR))).await;
    let found = join_all((0..100).map(|_| get(&caches))).await;
    assert!(found.iter().all(Option::is_some));
    assert_eq!(counts.reads("hit"), 1);
    let missed = join_all((0..100).map(|_| caches.get(TENANT, SCOPE, "nowhere"))).await;
    assert!(missed.iter().all(Option::is_none));
    assert_eq!(counts.reads("miss"), 1);
    assert!(get(&caches).await.is_some());
    assert_eq!(counts.reads("hit"), 2, "who comes later asks again");
}

#[tokio::test]
async fn writes_that_redis_does_not_take_are_dropped() {
    let (server, counts) = (RedisServer::start(), Counts::new());
    let caches = caches(settings(&server));
    put(&caches, &counts, replay(Some(HOUR))).await;
    server.stop_answering();
    let small = Arc::new(Replay::new(fingerprint_bytes(b"", "", ""), Answer::default(), None, Instant::now()));
    // No await in between: nothing is taken from the queue meanwhile.
    for n in 0..3000 {
        caches.put(TENANT, SCOPE, &n.to_string(), Arc::clone(&small));
    }
    assert_eq!(counts.writes("dropped"), 2000, "a thousand may wait");
    let large = Answer { body: Some(vec![0; 4 << 20]), ..Answer::default() };
    let large = Arc::new(Replay::new(small.fingerprint, large, None, Instant::now()));
    tokio::task::yield_now().await;
    eventually("errors", async || counts.writes("error") > 0).await;
    let dropped = counts.writes("dropped");
    for n in 0..20 {
        caches.put_shared(TENANT, SCOPE, &n.to_string(), Arc::clone(&large));
    }
    assert!(counts.writes("dropped") - dropped >= 12, "32 MiB may wait, not 80");
    server.resume();
    eventually("a write again", async || {
        let before = counts.writes("written");
        caches.put(TENANT, SCOPE, KEY, Arc::clone(&small));
        tokio::task::yield_now().await;
        counts.writes("written") > before
    })
    .await;
}

#[tokio::test]
async fn a_full_redis_still_answers_over_the_same_connection() {
    let (server, counts) = (RedisServer::start(), Counts::new());
    let caches = caches(settings(&server));
    put(&caches, &counts, replay(Some(HOUR))).await;
    let mut raw = raw(&server).await;
    let connections = async |raw: &mut MultiplexedConnection| -> String {
        let info: String = redis::cmd("INFO").arg("stats").query_async(raw).await.unwrap();
        info.lines().find(|line| line.starts_with("total_connections_received:")).unwrap().to_owned()
    };
    let before = connections(&mut raw).await;
    let () = redis::cmd("CONFIG").arg(&["SET", "maxmemory", "1"]).query_async(&mut raw).await.unwrap();
    caches.put(TENANT, SCOPE, "another", replay(Some(HOUR)));
    eventually("an error", async || counts.writes("error") == 1).await;
    assert!(get(&caches).await.is_some());
    assert_eq!(connections(&mut raw).await, before);
}

#[tokio::test]
async fn wrong_settings_are_told_without_what_they_say() {
    let new = |redis| Caches::new(CacheSettings { redis: Some(redis), ..CacheSettings::default() }, "db");
    let error = new(RedisSettings::new("http://user:hunter2@example")).unwrap_err().to_string();
    assert!(error.contains("Redis URL") && !error.contains("hunter2"), "{error}");
    let short = RedisSettings { secret: Some(b"hunter2".to_vec()), ..RedisSettings::new("redis://localhost") };
    let error = new(short).unwrap_err().to_string();
    assert!(error.contains("32 bytes") && !error.contains("hunter2"), "{error}");
    let settings = RedisSettings { secret: Some(vec![b'h'; 32]), ..RedisSettings::new("redis://:hunter2@localhost") };
    let caches = new(settings.clone()).unwrap();
    for shown in [format!("{settings:?}"), format!("{caches:?}")] {
        assert!(!shown.contains("hunter2") && !shown.contains("104"), "{shown}");
    }
}
