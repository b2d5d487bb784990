//! SIGKILL at each point, SIGSTOP past the lease: of the gateway, and of the service behind it.

use futures_util::future::join_all;
use pgonce_testkit::{eventually, lock_waiters};

use crate::book::{Order, Told};
use crate::http::Reply;
use crate::rig::{Config, Rig, free_port};
use crate::service::{Options, Process};

/// Where a gateway dies, and whether the service had done its work, and the outcome was stored by then.
const POINTS: [(&str, bool, bool); 5] = [
    ("gateway::after_claim", false, false),
    ("gateway::after_forward", true, false),
    ("gateway::before_store", true, false),
    ("gateway::after_store", true, true),
    ("gateway::before_answer", true, true),
];
/// How long after the end of a lease its intent is decided at the latest: a claim's deadline, on a slow machine.
const CLAIM_S: f64 = 3.0;

const HOLD: &str = "stale = \"hold\"\nlease = \"1s\"";
const RERUN: &str = "stale = \"rerun\"\nlease = \"1s\"";
const PROBE: &str = "stale = \"probe\"\nprobe = \"public.was_done\"\nlease = \"1s\"";

/// A service that deduplicates by the key has its effect under the first claim that came, whoever completes: it is
/// the resource that takes the key here, not the fence (trap 3). So `rerun` promises all but this.
const WAIVED_FOR_RERUN: [&str; 1] = ["I7"];

/// Kills a gateway at each point under one key each; another gateway gets the retries. What it told in the end is
/// given to `then`, with whether the effect was there and whether the outcome was stored.
async fn gateways_killed_at_each_point(
    rig: &Rig,
    config: &Config<'_>,
    then: impl AsyncFn(&str, &str, bool, bool, Told),
) {
    let second = rig.gateway(config).await;
    join_all(POINTS.iter().map(async |&(point, done, stored)| {
        let mut first = rig.gateway(&config.env("PGONCE_KILL_AT", point)).await;
        let told = rig.book.attempt(&first.address, &Order::new(point)).await;
        assert!(matches!(told, Told::Cut(_)), "{point}: {told:?}");
        first.killed().await;
        assert_eq!(rig.effects(point).await, i64::from(done), "{point}");
        assert_eq!(rig.status(point).await, if stored { "succeeded" } else { "processing" }, "{point}");
        let client = rig.client().await;
        let late = "SELECT date_part('epoch', once.clock() - locked_until) FROM once.intents WHERE key = $1";
        let began = std::time::Instant::now();
        let lease_left: Option<f64> = client.query_one(late, &[&point]).await.unwrap().get(0);
        let told = rig.book.until_definite(&[&second.address], &Order::new(point)).await;
        if let Some(before) = lease_left {
            // I8 is the witness's; this is I9.
            let after = before + began.elapsed().as_secs_f64();
            assert!((0.0..CLAIM_S).contains(&after), "{point}: decided {after} s after the lease's end");
        }
        then(&second.address, point, done, stored, told).await;
        assert_eq!(rig.effects(point).await, 1, "{point}");
    }))
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_killed_at_each_point_leaves_it_uncertain_where_policy_says_hold() {
    let rig = Rig::new().await;
    let service = rig.service(Options::default()).await;
    let config = Config::new(service.address, HOLD);
    gateways_killed_at_each_point(&rig, &config, async |second, point, done, stored, told| {
        if stored {
            return assert!(told.ok().replayed, "{point}: {told:?}");
        }
        assert_eq!((told.slug(), rig.status(point).await.as_str()), ("uncertain", "uncertain"), "{point}");
        assert_eq!(rig.effects(point).await, i64::from(done), "{point}: nobody ran it again");
        rig.settle(point).await;
        let told = rig.book.until_definite(&[second], &Order::new(point)).await;
        assert_eq!((told.ok().status, told.ok().replayed), (201, done), "{point}: settled");
    })
    .await;
    assert_eq!(service.requests(), POINTS.len(), "one request a key");
    rig.judge(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_killed_at_each_point_is_made_good_by_the_probe() {
    let rig = Rig::new().await;
    let service = rig.service(Options::default()).await;
    let config = Config::new(service.address, PROBE);
    gateways_killed_at_each_point(&rig, &config, async |_, point, done, stored, told| {
        assert_eq!(rig.status(point).await, "succeeded", "{point}");
        match done && !stored {
            // What the probe finds has no response: that it is done is all that can be told.
            true => assert_eq!(told.slug(), "response-not-stored", "{point}"),
            false => assert_eq!((told.ok().status, told.ok().replayed), (201, stored), "{point}"),
        }
    })
    .await;
    assert_eq!(service.requests(), POINTS.len(), "one request a key");
    rig.judge(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_killed_at_each_point_is_rerun_before_a_service_that_deduplicates() {
    let rig = Rig::new().await;
    let service = rig.service(Options { deduplicates: true, ..Options::default() }).await;
    let config = Config::new(service.address, RERUN);
    gateways_killed_at_each_point(&rig, &config, async |_, point, _, stored, told| {
        assert_eq!((told.ok().status, told.ok().replayed), (201, stored), "{point}");
    })
    .await;
    assert_eq!(service.requests(), POINTS.len() + 2, "two were run again; one had not reached the service");
    rig.judge(&WAIVED_FOR_RERUN).await;
}

/// A long response is passed on while it is recorded. Whoever has the whole of it has an outcome that is stored:
/// while it cannot be stored, nobody gets the end of it, and then the gateway dies.
#[tokio::test(flavor = "multi_thread")]
async fn nobody_has_the_whole_of_an_answer_that_is_not_stored() {
    join_all(["/long/chunked", "/long/length"].map(async |path| {
        let rig = Rig::new().await;
        let service = rig.service(Options::default()).await;
        let config = Config::new(service.address, "lease = \"2s\"");
        let mut first = rig.gateway(&config).await;
        let order = Order { path, ..Order::new("k") };
        let address = first.address.clone();
        let kill = async {
            service.at_gate(1).await;
            let (holder, observer) = (rig.client().await, rig.client().await);
            holder.batch_execute("BEGIN; SELECT FROM once.intent WHERE key = 'k' FOR UPDATE").await.unwrap();
            service.open_gate();
            eventually("storing is tried", async || first.metric("pgonce_batch_size_count", &["succeed"]).await >= 3.0)
                .await;
            first.signal("-KILL").await;
            first.killed().await;
            // What it had sent is carried out even so: held until its backends have noticed.
            eventually("its backends are gone", async || {
                let sql = "SELECT count(*) = 0 FROM pg_stat_activity
                           WHERE datname = current_database() AND application_name = 'pgonce'";
                observer.query_one(sql, &[]).await.unwrap().get(0)
            })
            .await;
        };
        let (told, ()) = tokio::join!(rig.book.attempt(&address, &order), kill);
        assert!(matches!(&told, Told::Cut(why) if !why.ends_with(" 0 bytes")), "{path}: {told:?}");
        let second = rig.gateway(&config).await;
        let told = rig.book.until_definite(&[&second.address], &order).await;
        assert_eq!(told.slug(), "uncertain", "{path}: the default is to hold");
        rig.settle("k").await;
        assert_eq!(rig.book.until_definite(&[&second.address], &order).await.ok().body, b"settled");
        let whole = rig.book.attempt(&second.address, &Order { path, ..Order::new("other") }).await;
        assert!(whole.ok().body.len() > 100_000, "{path}: whole where nobody is killed");
        rig.judge(&[]).await;
    }))
    .await;
}

/// SIGSTOP past the lease, takeover by another gateway, SIGCONT: the row keeps what the new owner wrote.
#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_gateway_wakes_up_to_find_its_lease_lost() {
    join_all([("gateway::after_claim", 1, &[][..]), ("gateway::before_store", 2, &WAIVED_FOR_RERUN)].map(
        async |(point, requests, waived)| {
            let rig = Rig::new().await;
            let service = rig.service(Options { deduplicates: true, ..Options::default() }).await;
            let config = Config::new(service.address, RERUN);
            let first = rig.gateway(&config.env("PGONCE_STOP_AT", point)).await;
            let second = rig.gateway(&config).await;
            let order = Order::new("k");
            let wake = async {
                first.stopped().await;
                rig.lease_over("k").await;
                let told = rig.book.until_definite(&[&second.address], &order).await;
                let row = rig.row("k").await;
                first.signal("-CONT").await;
                (told.ok().clone(), row)
            };
            let (stale, (told, row)) = tokio::join!(rig.book.attempt(&first.address, &order), wake);
            assert_eq!((told.status, told.replayed), (201, false), "{point}: the second gateway ran it");
            assert_eq!(stale.ok().body, told.body, "{point}: and the first tells the same");
            assert_eq!(rig.row("k").await, row, "{point}: which stays as it was");
            assert_eq!(service.requests(), requests, "{point}: what has lost its lease is not sent any more");
            rig.judge(waived).await;
        },
    ))
    .await;
}

/// The same while the new owner is still at it: the fence is all that keeps the stale answer out (trap 1).
#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_gateway_does_not_complete_another_ones_claim() {
    let rig = Rig::new().await;
    let service = rig.service(Options { deduplicates: true, ..Options::default() }).await;
    // Long enough for the second gateway's claim to live while it is held.
    let config = Config::new(service.address, RERUN);
    let first = rig.gateway(&config.env("PGONCE_STOP_AT", "gateway::before_store")).await;
    let second = rig.gateway(&config).await;
    let order = Order::new("k");
    let (resumed, is_resumed) = tokio::sync::oneshot::channel();
    let stale = async {
        let told = rig.book.attempt(&first.address, &order).await;
        resumed.send(()).unwrap();
        told
    };
    let hold = async {
        first.stopped().await;
        rig.lease_over("k").await;
        let holder = rig.client().await;
        holder.batch_execute("BEGIN; LOCK TABLE public.effect IN EXCLUSIVE MODE").await.unwrap();
        let takeover = async {
            let told = rig.book.attempt(&second.address, &order).await;
            (told, rig.row("k").await)
        };
        let wake = async {
            lock_waiters(&holder, 1).await;
            let row = claim_of(&rig).await;
            first.signal("-CONT").await;
            is_resumed.await.unwrap();
            assert_eq!(claim_of(&rig).await, row, "still the new owner's, and processing");
            holder.batch_execute("COMMIT").await.unwrap();
        };
        tokio::join!(takeover, wake).0
    };
    let (stale, (told, row)) = tokio::join!(stale, hold);
    assert_eq!(stale.slug(), "lease-lost", "{stale:?}");
    let Reply { status, replayed, body } = told.ok();
    assert_eq!((*status, *replayed), (201, false));
    let again = rig.book.until_definite(&[&first.address, &second.address], &order).await;
    assert_eq!((&again.ok().body, rig.row("k").await), (body, row));
    rig.judge(&WAIVED_FOR_RERUN).await;
}

/// A service that takes longer than the lease keeps it: nobody takes over from a gateway that lives.
#[tokio::test(flavor = "multi_thread")]
async fn a_slow_service_does_not_lose_its_lease() {
    let rig = Rig::new().await;
    let service = rig.service(Options::default()).await;
    let config = Config::new(service.address, RERUN);
    let (first, second) = (rig.gateway(&config).await, rig.gateway(&config).await);
    let order = Order { path: "/slow", ..Order::new("k") };
    let wait = async {
        service.at_gate(1).await;
        let client = rig.client().await;
        eventually("three leases pass", async || {
            let told = rig.book.attempt(&second.address, &order).await;
            assert_eq!(told.slug(), "in-progress", "{told:?}");
            let sql = "SELECT once.clock() - created_at > interval '3 seconds' FROM once.intents WHERE key = 'k'";
            client.query_one(sql, &[]).await.unwrap().get(0)
        })
        .await;
        service.open_gate();
    };
    let (told, ()) = tokio::join!(rig.book.attempt(&first.address, &order), wait);
    assert_eq!((told.ok().status, service.requests()), (201, 1));
    rig.judge(&[]).await;
}

/// The database is away for longer than a lease while the service is at it. Nobody knows what the service does in
/// the end, so nobody is told that it did nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_was_sent_is_never_told_to_be_not_done() {
    let rig = Rig::new().await;
    let service = rig.service(Options::default()).await;
    let gateway = rig.gateway(&Config::new(service.address, HOLD)).await;
    // From now on the service has its connection; the gateway loses all of its own.
    assert_eq!(rig.book.attempt(&gateway.address, &Order::new("before")).await.ok().status, 201);
    let (url, database) = rig.url.rsplit_once('/').unwrap();
    let (admin, connection) = tokio_postgres::connect(&format!("{url}/postgres"), tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    let order = Order { path: "/slow", ..Order::new("k") };
    let away = async {
        service.at_gate(1).await;
        let sql = format!(
            "ALTER DATABASE {database} ALLOW_CONNECTIONS false; SELECT pg_terminate_backend(pid)
             FROM pg_stat_activity WHERE datname = '{database}' AND application_name = 'pgonce'"
        );
        admin.batch_execute(&sql).await.unwrap();
    };
    let (told, ()) = tokio::join!(rig.book.attempt(&gateway.address, &order), away);
    assert!(matches!(&told, Told::Problem { effect, .. } if effect == "unknown"), "{told:?}");
    service.open_gate();
    admin.batch_execute(&format!("ALTER DATABASE {database} ALLOW_CONNECTIONS true")).await.unwrap();
    let client = rig.client().await;
    eventually("the service is done", async || {
        client.query_one("SELECT count(*) = 2 FROM public.effect", &[]).await.unwrap().get(0)
    })
    .await;
    assert_eq!(rig.book.until_definite(&[&gateway.address], &order).await.slug(), "uncertain");
    rig.settle("k").await;
    assert_eq!(rig.book.until_definite(&[&gateway.address], &order).await.ok().body, b"settled");
    rig.judge(&[]).await;
}

async fn claim_of(rig: &Rig) -> (String, String) {
    let sql = "SELECT claim_id::text, status FROM once.intents WHERE key = 'k'";
    let row = rig.client().await.query_one(sql, &[]).await.unwrap();
    (row.get(0), row.get(1))
}

/// Where a service dies, and whether its effect is committed by then.
const SERVICE_POINTS: [(&str, bool); 3] = [("before_effect", false), ("after_effect", true), ("in_answer", true)];

/// Kills a service at each point, and starts it again. Its clients come again; uncertain ones are settled.
async fn service_killed_at_each_point(route: &str, deduplicates: bool, waived: &[&str]) {
    let rig = Rig::new().await;
    let port = free_port();
    let mut config = Config::new(([127, 0, 0, 1], port).into(), route);
    config.of_upstream = "breaker_open_for = \"50ms\"";
    let gateway = rig.gateway(&config).await;
    for (point, done) in SERVICE_POINTS {
        let options = Options { deduplicates, die_at: Some((point.to_owned(), rig.path(point))) };
        let service = Process::start(&rig.url, port, &options).await;
        let order = Order::new(point);
        let told = rig.book.attempt(&gateway.address, &order).await;
        service.died().await;
        assert_eq!(rig.effects(point).await, i64::from(done), "{point}");
        let away = rig.book.attempt(&gateway.address, &Order::new("away")).await;
        assert!(matches!(&away, Told::Problem { slug, effect, .. } if slug == "upstream-away" && effect == "not_done"));
        let service = Process::start(&rig.url, port, &options).await;
        let mut end = rig.book.until_definite(&[&gateway.address], &order).await;
        if route == HOLD {
            assert_eq!(end.slug(), "uncertain", "{point}: {told:?}");
            assert_eq!(rig.effects(point).await, i64::from(done), "{point}: nobody ran it again");
            rig.settle(point).await;
            end = rig.book.until_definite(&[&gateway.address], &order).await;
        }
        match route == PROBE && done {
            true => assert_eq!(end.slug(), "response-not-stored", "{point}"),
            false => assert_eq!((end.ok().status, end.ok().replayed), (201, done && route == HOLD), "{point}"),
        }
        assert_eq!((rig.status(point).await.as_str(), rig.effects(point).await), ("succeeded", 1), "{point}");
        service.kill().await;
    }
    rig.judge(waived).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_killed_at_each_point() {
    tokio::join!(
        service_killed_at_each_point(HOLD, false, &[]),
        service_killed_at_each_point(PROBE, false, &[]),
        service_killed_at_each_point(RERUN, true, &WAIVED_FOR_RERUN),
    );
}
