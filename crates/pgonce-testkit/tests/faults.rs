//! Everything is killed: the wire at COMMIT, the backend, the postmaster, the client process at each point
//! of each flow. What clients were told is recorded and held against the database.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests stop loudly")]

use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use pgonce::{Error, Once, Outcome, RetryPolicy, Settings};
use pgonce_testkit::history::{Final, History, Seen, check};
use pgonce_testkit::{Cut, FaultProxy, TestDb, eventually};
use serde_json::json;
use tokio::process::Command;
use tokio::sync::Notify;
use tokio::task::JoinSet;

async fn effect(once: &Once, key: &str) -> Result<Outcome<String>, Error> {
    once.intent("s", key)
        .payload(&json!({ "key": key }))
        .run(async |tx| {
            let claim = tx.claim_id();
            tx.execute("INSERT INTO public.effect (scope, key, claim_id) VALUES ('s', $1, $2)", &[&key, &claim])
                .await?;
            Ok(claim.to_string())
        })
        .await
}

fn seen(outcome: &Result<Outcome<String>, Error>) -> Seen {
    match outcome {
        Ok(Outcome::Executed(body) | Outcome::Replayed(body)) => Seen::Ok(serde_json::to_vec(body).unwrap()),
        Err(Error::InDoubt { .. } | Error::InProgress { .. } | Error::Overloaded { .. }) => Seen::Unknown,
        // Retryable: this attempt did nothing, another attempt of the same call may have.
        Err(error) if error.is_retryable() => Seen::Unknown,
        Err(_) => Seen::Fail,
    }
}

#[tokio::test]
async fn a_commit_that_never_arrives_is_run_again() {
    let db = TestDb::new().await;
    let proxy = FaultProxy::before(db.direct_url()).await;
    let once = Once::with_settings(Settings::from_url(&proxy.url(db.direct_url()))).await.unwrap();
    for turn in 0..5 {
        proxy.arm(Cut::BeforeCommit);
        let outcome = effect(&once, &format!("k{turn}")).await.unwrap();
        assert!(matches!(outcome, Outcome::Executed(_)), "the first transaction is gone, the second did it");
        assert_eq!((db.effects(&format!("k{turn}")).await, proxy.fired()), (1, turn + 1));
    }
}

#[tokio::test]
async fn a_commit_whose_answer_is_lost_is_resolved_and_not_run_again() {
    let db = TestDb::new().await;
    let proxy = FaultProxy::before(db.direct_url()).await;
    let once = Once::with_settings(Settings::from_url(&proxy.url(db.direct_url()))).await.unwrap();
    for turn in 0..5 {
        proxy.arm(Cut::AnswerOfCommit);
        let tries = AtomicUsize::new(0);
        let key = format!("k{turn}");
        let outcome = once
            .intent("s", &key)
            .run(async |tx| {
                tries.fetch_add(1, Ordering::SeqCst);
                let claim = tx.claim_id();
                tx.execute("INSERT INTO public.effect (scope, key, claim_id) VALUES ('s', $1, $2)", &[&key, &claim])
                    .await?;
                Ok(1)
            })
            .await;
        assert_eq!(outcome.unwrap(), Outcome::Executed(1));
        assert_eq!((db.effects(&key).await, tries.load(Ordering::SeqCst), proxy.fired()), (1, 1, turn + 1));
    }
}

/// Trap 11: the lost transaction is still open, because the server has not noticed; asking must wait for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn resolving_waits_for_the_transaction_that_is_still_open() {
    let db = TestDb::new().await;
    let (zombie, asker) = (db.client().await, db.client().await);
    zombie.batch_execute("BEGIN").await.unwrap();
    let claim: uuid::Uuid =
        zombie.query_one("SELECT claim_id FROM once.claim('s', 'k', sha256('x'))", &[]).await.unwrap().get(0);
    let early = asker.query_one("SELECT once.resolve('s', 'k', $1, '20ms')", &[&claim]).await.unwrap_err();
    assert_eq!(early.code().unwrap().code(), "55P03", "still open: no answer is the only right one");
    let asking = tokio::spawn(async move {
        asker.query_one("SELECT once.resolve('s', 'k', $1, '30s')", &[&claim]).await.unwrap().get::<_, Option<bool>>(0)
    });
    pgonce_testkit::lock_waiters(&db.client().await, 1).await;
    zombie.execute("SELECT once.succeed('s', 'k', $1)", &[&claim]).await.unwrap();
    zombie.batch_execute("COMMIT").await.unwrap();
    assert_eq!(asking.await.unwrap(), Some(true));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn terminated_backends_under_load() {
    let db = TestDb::new().await;
    let once = db.once_with(|settings| settings.pool_max = 8).await;
    let history = Arc::new(History::default());
    let done = Arc::new(AtomicBool::new(false));
    let killer = tokio::spawn({
        let (client, done) = (db.client().await, Arc::clone(&done));
        async move {
            let mut killed = 0_i64;
            while !done.load(Ordering::SeqCst) {
                let sql = "SELECT count(pg_terminate_backend(pid)) FROM (SELECT pid FROM pg_stat_activity WHERE datname = current_database()
                           AND application_name = 'pgonce' AND state <> 'idle' ORDER BY random() LIMIT 1) victim";
                killed += client.query_one(sql, &[]).await.unwrap().get::<_, i64>(0);
            }
            killed
        }
    });
    let mut tasks = JoinSet::new();
    for caller in 0..8_usize {
        let (once, history) = (once.clone(), Arc::clone(&history));
        tasks.spawn(async move {
            for turn in 0..40_usize {
                let key = format!("k{}", (turn * 3 + caller) % 60);
                let outcome = effect(&once, &key).await;
                if let Err(error) = &outcome {
                    assert!(error.is_retryable(), "{error}");
                }
                history.record("s", &key, seen(&outcome));
            }
        });
    }
    tasks.join_all().await;
    done.store(true, Ordering::SeqCst);
    let killed = killer.await.unwrap();
    assert!(killed > 0, "the fault never fired");
    assert_eq!(check(&history.events(), &Final::read(&db.client().await).await), [], "{killed} backends terminated");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_postmaster_is_killed_under_load_and_every_acknowledged_effect_is_there_once() {
    let mut cluster = tokio::task::spawn_blocking(pgonce_testkit::cluster).await.unwrap();
    let url = cluster.url("postgres");
    let mut admin = pgonce::migrate::connect(&url).await.unwrap();
    pgonce::migrate::apply(&mut admin, false).await.unwrap();
    admin
        .batch_execute("CREATE TABLE public.effect (tenant text DEFAULT '', scope text, key text, claim_id uuid)")
        .await
        .unwrap();
    let mut settings = Settings::from_url(&url);
    settings.retry = RetryPolicy { attempts_max: 10_000, deadline: Duration::from_secs(60), ..RetryPolicy::default() };
    settings.pool_wait = Duration::from_secs(30);
    let once = Once::with_settings(settings).await.unwrap();
    let history = Arc::new(History::default());
    let (done, acknowledged) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let progress = Arc::new(Notify::new());
    let mut tasks = JoinSet::new();
    for caller in 0..8_usize {
        let (once, history, done, acknowledged, progress) =
            (once.clone(), Arc::clone(&history), Arc::clone(&done), Arc::clone(&acknowledged), Arc::clone(&progress));
        tasks.spawn(async move {
            for turn in 0.. {
                if done.load(Ordering::SeqCst) {
                    return;
                }
                // Neighbours share keys: a duplicate is under way when the server dies.
                let key = format!("k{}-{turn}", caller / 2);
                let outcome = effect(&once, &key).await;
                if outcome.is_ok() {
                    acknowledged.fetch_add(1, Ordering::SeqCst);
                    progress.notify_one();
                }
                history.record("s", &key, seen(&outcome));
            }
        });
    }
    for _ in 0..3 {
        let before = acknowledged.load(Ordering::SeqCst);
        while acknowledged.load(Ordering::SeqCst) < before + 100 {
            progress.notified().await;
        }
        cluster = tokio::task::spawn_blocking(move || {
            cluster.kill_9().unwrap();
            cluster.restart().unwrap();
            cluster
        })
        .await
        .unwrap();
    }
    let before = acknowledged.load(Ordering::SeqCst);
    while acknowledged.load(Ordering::SeqCst) < before + 50 {
        progress.notified().await;
    }
    done.store(true, Ordering::SeqCst);
    tasks.join_all().await;
    let client = pgonce::migrate::connect(&url).await.unwrap();
    assert_eq!(check(&history.events(), &Final::read(&client).await), []);
    tokio::task::spawn_blocking(move || drop(cluster)).await.unwrap();
}

async fn victim(db: &TestDb, arguments: &[&str]) -> (bool, String) {
    let child = Command::new(env!("CARGO_BIN_EXE_pgonce-victim"))
        .arg(db.direct_url())
        .args(arguments)
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(Duration::from_secs(60), child).await.expect("the victim ends").unwrap();
    (output.status.success(), String::from_utf8(output.stdout).unwrap())
}

/// Kills a client at each point of the atomic flow: afterwards a retry finds nothing or everything.
#[tokio::test]
async fn clients_killed_at_each_point_of_the_atomic_flow() {
    let db = TestDb::new().await;
    for (point, executed) in
        [("pgonce::after_claim", true), ("pgonce::before_commit", true), ("pgonce::after_commit", false)]
    {
        let key = format!("k-{point}");
        let (lived, told) = victim(&db, &["atomic", "s", &key, point, "abort"]).await;
        assert!(!lived && told.is_empty(), "{point} never fired: {told}");
        let (lived, told) = victim(&db, &["atomic", "s", &key]).await;
        let expected = if executed { "executed" } else { "replayed" };
        assert!(lived && told.starts_with(expected), "{point}: {told}");
        assert_eq!(db.effects(&key).await, 1, "{point}");
    }
    assert_eq!(check(&[], &Final::read(&db.client().await).await), []);
}

/// Kills a client at each point of the leased flow: the row says so, and the scope's policy decides.
#[tokio::test]
async fn clients_killed_at_each_point_of_the_leased_flow() {
    for (stale, point, class, effects) in [
        ("rerun", "pgonce::leased_after_claim", "safe_to_retry", 1),
        ("hold", "pgonce::leased_after_claim", "manual_review", 0),
        ("probe", "pgonce::leased_after_claim", "safe_to_retry", 1),
        ("hold", "pgonce::leased_before_complete", "manual_review", 1),
        ("probe", "pgonce::leased_before_complete", "already_succeeded", 1),
        ("rerun", "pgonce::leased_after_complete", "", 1),
    ] {
        let db = TestDb::new().await;
        let client = db.client().await;
        client
            .batch_execute(&format!(
                "CREATE FUNCTION public.probe(p_key text) RETURNS boolean LANGUAGE sql SECURITY DEFINER
                     AS 'SELECT EXISTS (SELECT 1 FROM public.effect e WHERE e.key = p_key)';
                 SELECT once.define_scope('l', '{{\"mode\": \"leased\", \"stale\": \"{stale}\", \"probe\": \"public.probe\"}}')"
            ))
            .await
            .unwrap();
        let (lived, told) = victim(&db, &["leased", "l", "k", point, "abort"]).await;
        assert!(!lived && told.is_empty(), "{point} never fired: {told}");
        let live = client.query("SELECT * FROM once.recover()", &[]).await.unwrap();
        assert!(live.is_empty(), "{stale}, {point}: the lease still runs, nobody may take it (I8)");
        db.travel(Duration::from_secs(3600)).await;
        let sorted = client.query("SELECT class FROM once.recover()", &[]).await.unwrap();
        let classes: Vec<&str> = sorted.iter().map(|row| row.get(0)).collect();
        assert_eq!(classes, if class.is_empty() { vec![] } else { vec![class] }, "{stale}, {point}");
        let (_, told) = victim(&db, &["leased", "l", "k"]).await;
        let expected = match class {
            "safe_to_retry" => "executed",
            "manual_review" => "unknown",
            _ => "replayed",
        };
        // A row that recovery marked has no body to replay: the answer says that the effect is there.
        let found =
            told.starts_with(expected) || (class == "already_succeeded" && told.contains("the effect is there"));
        assert!(found, "{stale}, {point}: {told}");
        assert_eq!(db.effects("k").await, effects, "{stale}, {point}");
    }
}

/// SIGSTOP past the lease, takeover by somebody else, SIGCONT: the stale owner's write raises.
#[tokio::test]
async fn a_stopped_owner_wakes_up_to_find_its_lease_lost() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute("SELECT once.define_scope('l', '{\"mode\": \"leased\", \"stale\": \"rerun\"}')")
        .await
        .unwrap();
    let child = Command::new(env!("CARGO_BIN_EXE_pgonce-victim"))
        .args([db.direct_url(), "leased", "l", "k", "pgonce::leased_before_complete", "stop"])
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let pid = child.id().unwrap();
    eventually("the victim is stopped", async || {
        std::fs::read_to_string(format!("/proc/{pid}/stat"))
            .is_ok_and(|stat| stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('T')))
    })
    .await;
    db.travel(Duration::from_secs(3600)).await;
    let fingerprint = pgonce::fingerprint(&json!({ "key": "k" }), "", "").unwrap();
    let row = client.query_one("SELECT kind, claim_id FROM once.claim('l', 'k', $1)", &[&fingerprint]).await.unwrap();
    assert_eq!(row.get::<_, &str>(0), "processing_stale");
    let taken: uuid::Uuid = row.get(1);
    assert!(Command::new("kill").args(["-CONT", &pid.to_string()]).status().await.unwrap().success());
    let output = tokio::time::timeout(Duration::from_secs(30), child.wait_with_output()).await.unwrap().unwrap();
    let told = String::from_utf8(output.stdout).unwrap();
    assert!(told.starts_with("failed the lease was lost"), "{told}");
    client.execute("SELECT once.succeed('l', 'k', $1)", &[&taken]).await.expect("the new owner's claim is untouched");
}

/// Trap 12: the synchronous standby is gone and the wait for it is cancelled. The server says COMMIT, with only
/// a warning; that is no success until the standby is there again, or no longer asked for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_that_the_standby_did_not_confirm_is_in_doubt() {
    let cluster = tokio::task::spawn_blocking(pgonce_testkit::cluster).await.unwrap();
    let url = cluster.url("postgres");
    let mut admin = pgonce::migrate::connect(&url).await.unwrap();
    pgonce::migrate::apply(&mut admin, false).await.unwrap();
    admin
        .batch_execute("CREATE TABLE public.effect (tenant text DEFAULT '', scope text, key text, claim_id uuid)")
        .await
        .unwrap();
    let once = Once::with_settings(Settings::from_url(&url)).await.unwrap();
    assert!(matches!(effect(&once, "before").await.unwrap(), Outcome::Executed(_)));
    admin.batch_execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'").await.unwrap();
    admin.batch_execute("SELECT pg_reload_conf()").await.unwrap();
    eventually("a standby is asked for", async || {
        admin.query_one("SELECT current_setting('synchronous_standby_names') = 'nobody'", &[]).await.unwrap().get(0)
    })
    .await;
    let running = tokio::spawn(async move { effect(&once, "k").await });
    // Each commit that waits for the standby is cancelled: the effect's own, and those that ask for it.
    let waiting = "SELECT count(pg_cancel_backend(pid)) FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
    let mut cancelled = 0;
    eventually("several cancelled waits", async || {
        cancelled += admin.query_one(waiting, &[]).await.unwrap().get::<_, i64>(0);
        cancelled >= 3
    })
    .await;
    assert!(!running.is_finished(), "a cancelled wait was taken for success");
    admin.batch_execute("ALTER SYSTEM RESET synchronous_standby_names").await.unwrap();
    admin.batch_execute("SELECT pg_reload_conf()").await.unwrap();
    assert!(matches!(running.await.unwrap().unwrap(), Outcome::Executed(_)));
    let count: i64 = admin.query_one("SELECT count(*) FROM public.effect WHERE key = 'k'", &[]).await.unwrap().get(0);
    assert_eq!(count, 1);
    tokio::task::spawn_blocking(move || drop(cluster)).await.unwrap();
}
