//! Load, and what happens to everything around it meanwhile.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use pgonce_testkit::{RedisServer, cluster, eventually};
use tokio::sync::Notify;
use tokio::task::JoinSet;

use crate::book::{Order, Told};
use crate::http::{Got, send};
use crate::rig::{Config, Rig};
use crate::service::Options;

const CLIENTS: usize = 8;

/// How far a storm is.
#[derive(Debug, Default)]
struct Progress {
    count: AtomicUsize,
    changed: Notify,
}

impl Progress {
    fn step(&self) {
        self.count.fetch_add(1, Ordering::SeqCst);
        self.changed.notify_one();
    }

    /// Until so many more are done.
    async fn more(&self, count: usize) {
        let before = self.count.load(Ordering::SeqCst);
        while self.count.load(Ordering::SeqCst) < before + count {
            self.changed.notified().await;
        }
    }
}

/// PostgreSQL is killed with all its children while clients are at it, and comes back on the same data.
#[tokio::test(flavor = "multi_thread")]
async fn postgres_is_killed_under_load() {
    const KEYS: usize = 50;
    let mut cluster = tokio::task::spawn_blocking(cluster).await.unwrap();
    let url = cluster.url("postgres");
    let mut admin = pgonce::migrate::connect(&url).await.unwrap();
    pgonce::migrate::apply(&mut admin, false).await.unwrap();
    let effect = "CREATE TABLE public.effect (tenant text, scope text, key text, claim_id uuid)";
    admin.batch_execute(effect).await.unwrap();
    let rig = Arc::new(Rig::on(&url).await);
    let service = rig.service(Options::default()).await;
    let config = Config::new(service.address, "stale = \"probe\"\nprobe = \"public.was_done\"\nlease = \"2s\"");
    let gateways = [rig.gateway(&config).await, rig.gateway(&config).await];
    let addresses = gateways.each_ref().map(|gateway| gateway.address.clone());
    let progress = Arc::new(Progress::default());
    let mut clients = JoinSet::new();
    for client in 0..CLIENTS {
        let (rig, progress, addresses) = (Arc::clone(&rig), Arc::clone(&progress), addresses.clone());
        clients.spawn(async move {
            for turn in 0..KEYS {
                // Neighbours share keys, and come by different gateways.
                let key = format!("{}-{turn}", client / 2);
                let order = [addresses[client % 2].as_str(), addresses[(client + 1) % 2].as_str()];
                rig.book.until_definite(&order, &Order::new(&key)).await;
                progress.step();
            }
        });
    }
    progress.more(80).await;
    let down = Arc::clone(&rig);
    let mut cluster = tokio::task::spawn_blocking(move || {
        cluster.kill_9().unwrap();
        cluster
    })
    .await
    .unwrap();
    // Fail closed: what is guarded is refused, and what is not passes.
    let told = down.book.attempt(&addresses[0], &Order::new("away")).await;
    assert!(matches!(&told, Told::Problem { status: 503, effect, .. } if effect == "not_done"), "{told:?}");
    let passed = send(&addresses[0], "GET", "/orders", &[], "").await;
    assert!(matches!(&passed, Got::Reply(reply) if reply.text() == "passed"), "{passed:?}");
    let ready = send(&addresses[0], "GET", "/_pgonce/ready", &[], "").await;
    assert!(matches!(&ready, Got::Reply(reply) if reply.status == 503), "{ready:?}");
    let cluster = tokio::task::spawn_blocking(move || {
        cluster.restart().unwrap();
        cluster
    })
    .await
    .unwrap();
    clients.join_all().await;
    assert!(rig.book.until_definite(&[&addresses[0]], &Order::new("away")).await.ok().status == 201);
    let sql = "SELECT count(*), count(*) FILTER (WHERE status = 'succeeded') FROM once.intents";
    let row = rig.client().await.query_one(sql, &[]).await.unwrap();
    let all = i64::try_from(CLIENTS / 2 * KEYS + 1).unwrap();
    assert_eq!((row.get::<_, i64>(0), row.get::<_, i64>(1)), (all, all));
    rig.judge(&[]).await;
    tokio::task::spawn_blocking(move || drop(cluster)).await.unwrap();
}

/// All of a gateway's backends are terminated, again and again.
#[tokio::test(flavor = "multi_thread")]
async fn backends_are_terminated_under_load() {
    const FOR: Duration = Duration::from_secs(3);
    const EVERY: Duration = Duration::from_millis(50);
    let rig = Arc::new(Rig::new().await);
    let service = rig.service(Options::default()).await;
    let gateway = rig.gateway(&Config::new(service.address, "stale = \"hold\"\nlease = \"2s\"")).await;
    let done = Arc::new(AtomicBool::new(false));
    let mut clients = JoinSet::new();
    // Many: what is in flight together shares a connection, and a termination hits all of it.
    for client in 0..CLIENTS * 4 {
        let (rig, address, done) = (Arc::clone(&rig), gateway.address.clone(), Arc::clone(&done));
        clients.spawn(async move {
            let mut uncertain = Vec::new();
            for turn in 0.. {
                if done.load(Ordering::SeqCst) {
                    break;
                }
                let key = format!("{}-{turn}", client / 2);
                match rig.book.until_definite(&[&address], &Order::new(&key)).await {
                    Told::Ok(_) => {
                        // I5: another payload never runs and never sees the answer.
                        let other = rig.book.attempt(&address, &Order { body: "{1}", ..Order::new(&key) }).await;
                        assert!(!matches!(other, Told::Ok(_) | Told::Other(_)), "{other:?}");
                    }
                    told => {
                        assert_eq!(told.slug(), "uncertain", "{told:?}");
                        uncertain.push(key);
                    }
                }
            }
            uncertain
        });
    }
    let killer = rig.client().await;
    let (began, mut pace, mut killed) = (Instant::now(), tokio::time::interval(EVERY), 0);
    while began.elapsed() < FOR {
        pace.tick().await;
        let sql = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
                   WHERE datname = current_database() AND application_name = 'pgonce'";
        killed += killer.query_one(sql, &[]).await.unwrap().get::<_, i64>(0);
    }
    done.store(true, Ordering::SeqCst);
    let uncertain: BTreeSet<String> = clients.join_all().await.into_iter().flatten().collect();
    assert!(killed > 10, "only {killed} backends were there to be terminated");
    // I9: what is still claimed is so for a lease at most.
    eventually("nothing is stuck", async || {
        let sql = "SELECT count(*) = 0 FROM once.intents WHERE status = 'processing' AND locked_until > once.clock()";
        killer.query_one(sql, &[]).await.unwrap().get(0)
    })
    .await;
    let keys = killer.query("SELECT key, status FROM once.intents", &[]).await.unwrap();
    for key in &uncertain {
        rig.settle(key).await;
    }
    for row in &keys {
        let told = rig.book.until_definite(&[&gateway.address], &Order::new(row.get(0))).await;
        assert_eq!(told.ok().status, 201, "{}, which was {}", row.get::<_, &str>(0), row.get::<_, &str>(1));
    }
    eprintln!("{killed} backends terminated, {} keys, {} uncertain", keys.len(), uncertain.len());
    assert!(uncertain.len() * 4 < keys.len(), "{} of {} are uncertain", uncertain.len(), keys.len());
    rig.judge(&[]).await;
}

/// SIGTERM under load: what was sent is answered, what comes later is not let in, and the end is a clean one.
#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_that_is_told_to_stop_cuts_nobody_off() {
    let rig = Arc::new(Rig::new().await);
    let service = rig.service(Options::default()).await;
    let mut gateway = rig.gateway(&Config::new(service.address, "in_progress = \"wait\"")).await;
    let progress = Arc::new(Progress::default());
    let mut clients = JoinSet::new();
    for client in 0..CLIENTS * 2 {
        let (rig, address, progress) = (Arc::clone(&rig), gateway.address.clone(), Arc::clone(&progress));
        clients.spawn(async move {
            for turn in 0.. {
                let key = format!("{}-{turn}", client / 2);
                match rig.book.attempt(&address, &Order::new(&key)).await {
                    Told::Refused => return,
                    Told::Ok(_) => progress.step(),
                    told => panic!("cut off: {key}: {told:?}"),
                }
            }
        });
    }
    let (slow, address) = (Arc::clone(&rig), gateway.address.clone());
    let slow = tokio::spawn(async move {
        slow.book.attempt(&address, &Order { path: "/slow", ..Order::new("slow") }).await.ok().status
    });
    service.at_gate(1).await;
    progress.more(200).await;
    gateway.signal("-TERM").await;
    clients.join_all().await; // all are refused by now, and one is still at it
    service.open_gate();
    assert_eq!(slow.await.unwrap(), 201);
    assert_eq!(gateway.ended().await.code(), Some(0));
    let sql = "SELECT count(*) = 0 FROM once.intents WHERE status <> 'succeeded'";
    assert!(rig.client().await.query_one(sql, &[]).await.unwrap().get::<_, bool>(0), "everything has its outcome");
    rig.judge(&[]).await;
}

/// Every value is another intent's, rightly signed for that one.
const ANOTHER_INTENTS: &str = "EVAL \"local keys = redis.call('KEYS', 'pgonce:*') \
    for at, key in ipairs(keys) do redis.call('RENAME', key, 'moved:' .. at) end \
    for at, key in ipairs(keys) do redis.call('RENAME', 'moved:' .. (at % #keys + 1), key) end\" 0";
const NONSENSE: &str = "EVAL \"for _, key in ipairs(redis.call('KEYS', 'pgonce:*')) do \
    redis.call('SET', key, 'lies', 'PX', 60000) end\" 0";

/// Redis is killed, flushed and filled with lies: nobody is told anything else than before.
#[tokio::test(flavor = "multi_thread")]
async fn redis_is_killed_flushed_and_poisoned_under_load() {
    const KEYS: usize = 30;
    let rig = Arc::new(Rig::new().await);
    let service = rig.service(Options::default()).await;
    let mut redis = tokio::task::spawn_blocking(RedisServer::start).await.unwrap();
    let url = redis.url();
    let mut config = Config::new(service.address, "in_progress = \"wait\"");
    // Without a cache in the process every replay asks Redis.
    config.sections = "[gateway.cache]\nmemory_bytes = 0";
    config.flags = vec!["--cache", &url];
    let gateways = [rig.gateway(&config).await, rig.gateway(&config).await];
    let addresses = gateways.each_ref().map(|gateway| gateway.address.clone());
    let (done, progress) = (Arc::new(AtomicBool::new(false)), Arc::new(Progress::default()));
    let mut clients = JoinSet::new();
    for client in 0..CLIENTS {
        let (rig, addresses, done, progress) =
            (Arc::clone(&rig), addresses.clone(), Arc::clone(&done), Arc::clone(&progress));
        clients.spawn(async move {
            let mut answers = BTreeMap::<String, BTreeSet<Vec<u8>>>::new();
            for turn in client.. {
                if done.load(Ordering::SeqCst) {
                    break;
                }
                // New keys come all the time, beside the ones that are asked for again.
                let key = format!("{}-{}", turn / (KEYS * 4), turn % KEYS);
                let told = rig.book.attempt(&addresses[turn % 2], &Order::new(&key)).await;
                answers.entry(key).or_default().insert(told.ok().body.clone());
                progress.step();
            }
            answers
        });
    }
    let asked = async |results: &[&str]| {
        let mut sum = 0.0;
        for (gateway, result) in gateways.iter().flat_map(|gateway| results.iter().map(move |result| (gateway, result)))
        {
            let result = format!("result=\"{result}\"");
            sum += gateway.metric("pgonce_cache_requests_total", &["redis", &result]).await;
        }
        sum
    };
    // Until the fault is felt: more of these results than there were. What lies is soon overwritten by the truth, so
    // it is told again until somebody hears it.
    let felt = async |results: &[&str], before: f64, fault: Option<&str>| {
        eventually("the fault is felt", async || {
            if let Some(fault) = fault {
                command(&url, fault).await;
            }
            asked(results).await > before
        })
        .await;
    };
    for _ in 0..2 {
        felt(&["hit"], asked(&["hit"]).await, None).await;
        for lie in [ANOTHER_INTENTS, NONSENSE] {
            felt(&["invalid"], asked(&["invalid"]).await, Some(lie)).await;
            progress.more(50).await;
        }
        felt(&["miss"], asked(&["miss"]).await, Some("FLUSHALL")).await;
        progress.more(50).await;
        let away = ["error", "timeout", "skipped"];
        let before = asked(&away).await;
        redis.kill();
        felt(&away, before, None).await;
        progress.more(100).await;
        redis = tokio::task::spawn_blocking(move || {
            redis.start_again();
            redis
        })
        .await
        .unwrap();
        felt(&["hit"], asked(&["hit"]).await, None).await;
    }
    done.store(true, Ordering::SeqCst);
    let mut answers = BTreeMap::<String, BTreeSet<Vec<u8>>>::new();
    for (key, bodies) in clients.join_all().await.into_iter().flatten() {
        answers.entry(key).or_default().extend(bodies);
    }
    assert!(answers.values().all(|bodies| bodies.len() == 1), "all are told the same: {answers:?}");
    assert_eq!(service.requests(), answers.len(), "one run a key");
    rig.judge(&[]).await;
}

/// One command to a Redis, answered without an error.
async fn command(url: &str, command: &str) {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let address = url.trim_start_matches("redis://").trim_end_matches('/');
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    stream.write_all(format!("{command}\r\nQUIT\r\n").as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(!answer.starts_with('-'), "{command}: {answer}");
}

/// One tenant's flood is that tenant's problem.
#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_one_tenant_does_not_hurt_another() {
    const FLOOD: usize = 250;
    const INFLIGHT: usize = 20;
    /// Without any, the flood would be the machine's problem, not the gateway's.
    const PAUSE: Duration = Duration::from_millis(300);
    let rig = Arc::new(Rig::new().await);
    let service = rig.service(Options::default()).await;
    let limits = format!("[gateway.limits]\ntenant_inflight_max = {INFLIGHT}");
    let mut config = Config::new(service.address, "");
    config.sections = &limits;
    config.flags = vec!["--tenant-header", "x-tenant"];
    let gateway = rig.gateway(&config).await;
    let (done, refused) = (Arc::new(AtomicBool::new(false)), Arc::new(Progress::default()));
    let mut flood = JoinSet::new();
    for one in 0..FLOOD {
        let (rig, address, done, refused) =
            (Arc::clone(&rig), gateway.address.clone(), Arc::clone(&done), Arc::clone(&refused));
        flood.spawn(async move {
            let key = format!("a{one}");
            let order = Order { path: "/slow", tenant: "a", ..Order::new(&key) };
            // Again and again, until the others are through.
            loop {
                match rig.book.attempt(&address, &order).await {
                    Told::Ok(_) => return true,
                    Told::Problem { slug, status, .. } => assert_eq!((slug.as_str(), status), ("quota-exceeded", 429)),
                    told => panic!("{told:?}"),
                }
                refused.step();
                tokio::time::sleep(PAUSE).await;
                if done.load(Ordering::SeqCst) {
                    return false;
                }
            }
        });
    }
    service.at_gate(INFLIGHT).await;
    refused.more(FLOOD).await;
    let mut clients = JoinSet::new();
    for client in 0..CLIENTS {
        let (rig, address) = (Arc::clone(&rig), gateway.address.clone());
        clients.spawn(async move {
            let mut slowest = Duration::ZERO;
            for turn in 0..10 {
                let (began, key) = (Instant::now(), format!("b{client}-{turn}"));
                let told = rig.book.attempt(&address, &Order { tenant: "b", ..Order::new(&key) }).await;
                assert_eq!(told.ok().status, 201, "b is not refused");
                slowest = slowest.max(began.elapsed());
            }
            slowest
        });
    }
    let slowest = clients.join_all().await.into_iter().max().unwrap();
    done.store(true, Ordering::SeqCst);
    service.open_gate();
    let succeeded = flood.join_all().await.into_iter().filter(|succeeded| *succeeded).count();
    assert!((INFLIGHT..FLOOD).contains(&succeeded), "{succeeded} of the flood came through");
    eprintln!("{} refusals, b's slowest took {slowest:?}", refused.count.load(Ordering::SeqCst));
    rig.judge(&[]).await;
}
