//! The `Batcher` while connections break, answers get lost and callers leave.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pgonce::{BatchSettings, Batcher, Claim, Error, Recorded, Settings};
use pgonce_testkit::history::{Final, History, Seen, check};
use pgonce_testkit::{Cut, FaultProxy, TestDb, eventually, lock_waiters};
use serde_json::json;
use tokio::task::JoinSet;
use tokio_postgres::Client;
use uuid::Uuid;

use crate::batcher::{batcher, batcher_with, own, owned};
use crate::rows::{answer, database, define, name, row_of, status_of};

async fn through(proxy: &FaultProxy, db: &TestDb) -> Batcher {
    let settings = Settings::from_url(&proxy.url(db.direct_url()));
    // One connection each, so that the armed fault meets the call that is meant.
    let batch = BatchSettings { claim_connections: 1, complete_connections: 1, ..BatchSettings::default() };
    Batcher::connect(settings, batch).await.unwrap()
}

#[tokio::test]
async fn a_lost_answer_is_asked_for_again() {
    let (db, client) = database().await;
    let proxy = FaultProxy::before(db.direct_url()).await;
    let batcher = through(&proxy, &db).await;
    let warm = name("s", "warm");
    let id = own(&batcher, &warm).await;
    batcher.succeed(&warm, id, answer("x")).await.unwrap();
    let mut fired = 0;
    for (turn, cut) in [Cut::AnswerOfStatement, Cut::BeforeStatement].into_iter().cycle().take(6).enumerate() {
        let one = name("s", &format!("k{turn}"));
        proxy.arm(cut);
        let id = own(&batcher, &one).await;
        fired += 1;
        assert_eq!(proxy.fired(), fired, "the claim's answer was cut");
        let row = row_of(&client, &one).await.unwrap();
        assert!(row.contains(&id.to_string()), "one claim, the caller's");
        // The statement of the new connection is prepared by a claim that nothing happens to.
        own(&batcher, &name("s", &format!("warm {turn}"))).await;

        proxy.arm(cut);
        let recorded = batcher.succeed(&one, id, answer("body")).await.unwrap();
        fired += 1;
        assert_eq!(proxy.fired(), fired, "the completion's answer was cut");
        match (cut, recorded) {
            (Cut::AnswerOfStatement, Recorded::Before { answer: stored, .. }) => assert_eq!(stored, answer("body")),
            (Cut::BeforeStatement, Recorded::Now { .. }) => {}
            other => panic!("{other:?}"),
        }
        assert_eq!(status_of(&client, &one).await.as_deref(), Some("succeeded"));
    }
    let attempts: i32 = client.query_one("SELECT max(attempt_count) FROM once.intent", &[]).await.unwrap().get(0);
    assert_eq!(attempts, 1);
}

/// Holds every claim of a key that begins with `slow` inside its transaction until the lock 42 is free.
pub const SLOW: &str = "CREATE FUNCTION public.slow() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN IF NEW.key LIKE 'slow%' THEN PERFORM pg_advisory_xact_lock_shared(42); END IF; RETURN NEW; END $$;
    CREATE TRIGGER slow BEFORE INSERT ON once.intent FOR EACH ROW EXECUTE FUNCTION public.slow();
    SELECT pg_advisory_lock(42)";

/// The first sending's transaction is still open when the second comes: that one sees somebody at it, which is
/// ourselves. What the first then leaves behind is given back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_of_our_own_that_comes_too_late_is_given_back() {
    let (db, client) = database().await;
    let proxy = FaultProxy::before(db.direct_url()).await;
    let batcher = through(&proxy, &db).await;
    own(&batcher, &name("s", "warm")).await;
    client.batch_execute(SLOW).await.unwrap();
    let one = name("s", "slow");
    proxy.arm(Cut::AnswerOfStatement);
    let told = batcher.claim(&one, Uuid::new_v4()).await.unwrap().claim;
    assert_eq!(proxy.fired(), 1);
    assert!(matches!(told, Claim::InProgress { .. }), "{told:?}");
    assert_eq!(status_of(&client, &one).await, None, "its transaction is open");
    client.batch_execute("SELECT pg_advisory_unlock(42)").await.unwrap();
    let watcher = db.client().await;
    eventually("the lost claim is given back", async || {
        // Made, and gone again: a claim can own it anew.
        let sql = "SELECT kind FROM once.claim('s', 'slow', $1, p_mode => 'leased', p_wait => '0')";
        watcher.query_one(sql, &[&one.fingerprint]).await.unwrap().get::<_, String>(0) == "new_claim"
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_whose_caller_left_is_given_back() {
    let (db, client) = database().await;
    let batcher = batcher_with(&db, |batch| batch.claim_connections = 1).await;
    own(&batcher, &name("s", "warm")).await;
    client.batch_execute(SLOW).await.unwrap();
    let ask = |key: &'static str| {
        let batcher = batcher.clone();
        tokio::spawn(async move { batcher.claim(&name("s", key), Uuid::new_v4()).await })
    };
    let left = ask("slow and left");
    lock_waiters(&db.client().await, 1).await;
    // These wait in the queue: one stays, one leaves before it is sent.
    let (stays, leaves) = (ask("stays"), ask("leaves"));
    eventually("both are queued", async || batcher.queue_wait() > Duration::from_millis(5)).await;
    for gone in [&left, &leaves] {
        gone.abort();
    }
    client.batch_execute("SELECT pg_advisory_unlock(42)").await.unwrap();
    let _ = owned(stays.await.unwrap().unwrap());
    eventually("given back", async || {
        status_of(&client, &name("s", "slow and left")).await.is_none()
            && status_of(&client, &name("s", "leaves")).await.is_none()
    })
    .await;
    assert_eq!(status_of(&client, &name("s", "stays")).await.as_deref(), Some("processing"));
}

/// Nobody can connect any more, and everybody is thrown out.
async fn go_away(admin: &Client, db: &TestDb) {
    let name = db.name();
    // Committed first: who is thrown out before comes back at once.
    admin.batch_execute(&format!("ALTER DATABASE {name} ALLOW_CONNECTIONS false")).await.unwrap();
    eventually("nobody is there", async || {
        let sql = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = $1";
        admin.query_one(sql, &[&name]).await.unwrap().get::<_, i64>(0) == 0
    })
    .await;
}

async fn come_back(admin: &Client, db: &TestDb) {
    admin.batch_execute(&format!("ALTER DATABASE {} ALLOW_CONNECTIONS true", db.name())).await.unwrap();
}

/// PostgreSQL itself: a pooler has its own ideas about a database that is away.
async fn without_pooler(db: &TestDb, change: impl FnOnce(&mut BatchSettings)) -> Batcher {
    let mut batch = BatchSettings::default();
    change(&mut batch);
    Batcher::connect(Settings::from_url(db.direct_url()), batch).await.unwrap()
}

/// A connection to another database of the same server.
async fn admin(db: &TestDb) -> Client {
    pgonce::migrate::connect(&db.direct_url().replace(db.name(), "postgres")).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_the_database_is_away() {
    let (db, client) = database().await;
    define(&client, "short", json!({"mode": "leased", "lease": "500ms"})).await;
    let admin = admin(&db).await;
    let batcher = without_pooler(&db, |_| {}).await;
    assert!(batcher.is_ready().await);
    let [done, failed, doubted, released] = ["done", "failed", "doubted", "released"].map(|key| name("s", key));
    let mut claims = Vec::new();
    for one in [&done, &failed, &doubted, &released] {
        claims.push(own(&batcher, one).await);
    }
    let short = name("short", "k");
    let id = Uuid::new_v4();
    let observed = batcher.claim(&short, id).await.unwrap();
    let kept = batcher.keep(&short, id, Duration::from_millis(500), observed.asked_at);
    go_away(&admin, &db).await;
    tokio::time::timeout(Duration::from_secs(5), kept.lost()).await.expect("nobody renews it");
    assert!(!batcher.is_ready().await);
    let new = name("s", "new");
    let (claimed, looked) = tokio::join!(batcher.claim(&new, Uuid::new_v4()), batcher.peek(&done));
    for told in [claimed.map(Some), looked] {
        assert!(matches!(&told, Err(error @ Error::Away { .. }) if error.is_retryable()), "{told:?}");
    }
    // Completions are tried until the deadline: the database comes back before it.
    let ends = {
        let (batcher, claims) = (batcher.clone(), claims.clone());
        let (done, failed, doubted, released) = (done.clone(), failed.clone(), doubted.clone(), released.clone());
        tokio::spawn(async move {
            tokio::join!(
                batcher.succeed(&done, claims[0], answer("done")),
                batcher.fail(&failed, claims[1], false, "no", "no"),
                batcher.doubt(&doubted, claims[2], "timeout", ""),
                batcher.release(&released, claims[3]),
            )
        })
    };
    tokio::time::timeout(Duration::from_millis(100), async {
        while !ends.is_finished() {
            tokio::task::yield_now().await
        }
    })
    .await
    .expect_err("nothing can be done yet");
    come_back(&admin, &db).await;
    let (succeeded, fail, doubt, release) = ends.await.unwrap();
    assert!(matches!(succeeded.unwrap(), Recorded::Now { .. }));
    fail.unwrap();
    assert_eq!(doubt.unwrap(), "uncertain");
    release.unwrap();
    eventually("ready again", async || batcher.is_ready().await).await;
    own(&batcher, &new).await;
    let client = db.client().await;
    assert_eq!(status_of(&client, &released).await, None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_completion_that_cannot_be_told_in_time_is_in_doubt() {
    let (db, _client) = database().await;
    let admin = admin(&db).await;
    let batcher = without_pooler(&db, |batch| batch.deadline = Duration::from_millis(300)).await;
    let one = name("s", "k");
    let id = own(&batcher, &one).await;
    go_away(&admin, &db).await;
    let told = batcher.succeed(&one, id, answer("x")).await;
    assert!(matches!(&told, Err(error @ Error::InDoubt { .. }) if error.is_retryable()), "{told:?}");
    let told = batcher.fail(&one, id, true, "c", "m").await;
    assert!(matches!(&told, Err(error @ Error::Away { .. }) if error.is_retryable()), "{told:?}");
    come_back(&admin, &db).await;
}

/// Trap 12: the standby is gone and the wait for it is cancelled. Neither a claim nor a completion is told as done.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_standby_did_not_confirm_is_not_told_as_done() {
    let cluster = tokio::task::spawn_blocking(pgonce_testkit::cluster).await.unwrap();
    let url = cluster.url("postgres");
    let mut admin = pgonce::migrate::connect(&url).await.unwrap();
    pgonce::migrate::apply(&mut admin, false).await.unwrap();
    let batch = BatchSettings {
        claim_deadline: Duration::from_secs(60),
        deadline: Duration::from_secs(60),
        ..BatchSettings::default()
    };
    let batcher = Batcher::connect(Settings::from_url(&url), batch).await.unwrap();
    let one = name("s", "k");
    let id = own(&batcher, &one).await;
    let standby = async |names: &str| {
        admin.batch_execute(&format!("ALTER SYSTEM SET synchronous_standby_names = '{names}'")).await.unwrap();
        admin.batch_execute("SELECT pg_reload_conf()").await.unwrap();
        eventually("the setting is there", async || {
            admin.query_one("SHOW synchronous_standby_names", &[]).await.unwrap().get::<_, &str>(0) == names
        })
        .await;
    };
    standby("nobody").await;
    let ends = {
        let batcher = batcher.clone();
        tokio::spawn(async move {
            let new = name("s", "new");
            tokio::join!(batcher.succeed(&one, id, answer("x")), batcher.claim(&new, Uuid::new_v4()))
        })
    };
    let waiting = "SELECT pid FROM (SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep' OFFSET 0) waiting
        WHERE pg_cancel_backend(pid)";
    let mut cancelled: HashMap<i32, u32> = HashMap::new();
    eventually("several cancelled waits of each", async || {
        for row in admin.query(waiting, &[]).await.unwrap() {
            *cancelled.entry(row.get(0)).or_default() += 1;
        }
        cancelled.values().filter(|times| **times >= 2).count() >= 2
    })
    .await;
    assert!(!ends.is_finished(), "a cancelled wait was taken for success");
    standby("").await;
    let (recorded, claimed) = ends.await.unwrap();
    assert!(matches!(recorded.unwrap(), Recorded::Before { answer: stored, .. } if stored == answer("x")));
    let _ = owned(claimed.unwrap());
    tokio::task::spawn_blocking(move || drop((batcher, cluster))).await.unwrap();
}

/// Connections are terminated all the time, under load: no key is owned twice, every success that was told is
/// there, and nothing is left behind.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn terminated_backends_under_load() {
    let (db, _client) = database().await;
    let batchers = [batcher(&db).await, batcher_with(&db, |batch| batch.batch_max = 9).await];
    let history = Arc::new(History::default());
    let done = Arc::new(AtomicBool::new(false));
    let killer = tokio::spawn({
        let (client, done) = (db.client().await, Arc::clone(&done));
        async move {
            let mut killed = 0_i64;
            while !done.load(Ordering::SeqCst) {
                let sql = "SELECT count(pg_terminate_backend(pid)) FROM (SELECT pid FROM pg_stat_activity
                           WHERE datname = current_database() AND application_name = 'pgonce' AND state <> 'idle'
                           ORDER BY random() LIMIT 1) victim";
                killed += client.query_one(sql, &[]).await.unwrap().get::<_, i64>(0);
                tokio::time::sleep(Duration::from_millis(3)).await;
            }
            killed
        }
    });
    let mut tasks = JoinSet::new();
    for caller in 0..24_usize {
        let (batcher, history) = (batchers[caller % 2].clone(), Arc::clone(&history));
        let effects = db.client().await;
        tasks.spawn(async move {
            for turn in 0..40_usize {
                let one = name("s", &format!("k{}", (turn * 7 + caller) % 120));
                let id = Uuid::new_v4();
                let seen = match batcher.claim(&one, id).await {
                    Ok(observed) => match observed.claim {
                        Claim::Owned(_) => {
                            let sql = "INSERT INTO public.effect (scope, key, claim_id) VALUES ('s', $1, $2)";
                            effects.execute(sql, &[&one.key, &id]).await.unwrap();
                            match batcher.succeed(&one, id, answer(&id.to_string())).await {
                                Ok(Recorded::Now { .. }) => Seen::Ok(id.to_string().into()),
                                Ok(Recorded::Before { answer, .. }) => Seen::Ok(answer.body.unwrap()),
                                Err(error) => panic!("its lease is an hour, its deadline ten seconds: {error}"),
                            }
                        }
                        Claim::Replay(answer) => Seen::Ok(answer.body.unwrap()),
                        Claim::InProgress { .. } => Seen::Unknown,
                        other => panic!("{other:?}"),
                    },
                    Err(error) => {
                        assert!(error.is_retryable(), "{error}");
                        Seen::Unknown
                    }
                };
                history.record("s", &one.key, seen);
            }
        });
    }
    tasks.join_all().await;
    done.store(true, Ordering::SeqCst);
    let killed = killer.await.unwrap();
    assert!(killed > 20, "the fault fired {killed} times");
    let client = db.client().await;
    eventually("claims that nobody heard of are given back", async || {
        let sql = "SELECT count(*) FROM once.intent WHERE status = 'processing'";
        client.query_one(sql, &[]).await.unwrap().get::<_, i64>(0) == 0
    })
    .await;
    assert_eq!(check(&history.events(), &Final::read(&client).await), [], "{killed} backends terminated");
}
