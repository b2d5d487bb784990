//! The crate's `Batcher`, while nothing breaks.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pgonce::{BatchSettings, Batcher, Claim, Error, IntentName, Observed, Owned, OwnedKind, Recorded, Settings};
use pgonce_testkit::{TestDb, eventually};
use rand::seq::SliceRandom as _;
use serde_json::json;
use tokio::task::JoinSet;
use uuid::Uuid;

use crate::rows::{HOUR, answer, database, define, name, other, status_of, succeed_alone};

pub async fn batcher(db: &TestDb) -> Batcher {
    batcher_with(db, |_| {}).await
}

pub async fn batcher_with(db: &TestDb, change: impl FnOnce(&mut BatchSettings)) -> Batcher {
    batcher_at(db.url(), change).await
}

pub async fn batcher_at(url: &str, change: impl FnOnce(&mut BatchSettings)) -> Batcher {
    let mut batch = BatchSettings::default();
    change(&mut batch);
    let mut settings = Settings::from_url(url);
    settings.claimed_by = Some("me".into());
    Batcher::connect(settings, batch).await.unwrap()
}

pub fn owned(observed: Observed) -> Owned {
    match observed.claim {
        Claim::Owned(owned) => owned,
        other => panic!("it was not to be had: {other:?}"),
    }
}

pub async fn own(batcher: &Batcher, name: &IntentName) -> Uuid {
    let id = Uuid::new_v4();
    let owned = owned(batcher.claim(name, id).await.unwrap());
    assert_eq!(owned.claim_id, id, "the caller's choice");
    id
}

#[tokio::test]
async fn one_intent_from_its_claim_to_its_replay() {
    let (db, client) = database().await;
    from_claim_to_replay(&batcher(&db).await, &client).await;
}

/// As behind a pooler in transaction mode, where no statement is prepared and answers come as columns.
#[tokio::test]
async fn the_same_without_prepared_statements() {
    let (db, client) = database().await;
    let url = format!("{}{}pgbouncer=true", db.direct_url(), if db.direct_url().contains('?') { "&" } else { "?" });
    let mut settings = Settings::from_url(&url);
    settings.claimed_by = Some("me".into());
    from_claim_to_replay(&Batcher::connect(settings, BatchSettings::default()).await.unwrap(), &client).await;
}

async fn from_claim_to_replay(batcher: &Batcher, client: &tokio_postgres::Client) {
    let one = name("s", "k");
    assert!(batcher.peek(&one).await.unwrap().is_none(), "it could be owned");
    let id = Uuid::new_v4();
    let asked = Instant::now();
    let observed = batcher.claim(&one, id).await.unwrap();
    assert!(observed.asked_at >= asked && observed.expires_in.is_none());
    let had = owned(observed);
    assert_eq!((had.claim_id, had.attempt, had.kind, had.lease), (id, 1, OwnedKind::New, Some(HOUR)));
    assert!(had.fence.is_some());
    let rival = batcher.claim(&one, Uuid::new_v4()).await.unwrap();
    assert!(matches!(rival.claim, Claim::InProgress { retry_after } if retry_after > Duration::from_secs(3000)));
    assert!(matches!(batcher.peek(&one).await.unwrap().unwrap().claim, Claim::InProgress { .. }));
    assert!(matches!(batcher.claim(&other(&one), Uuid::new_v4()).await, Err(Error::Conflict)));
    assert!(matches!(batcher.peek(&other(&one)).await, Err(Error::Conflict)));

    let week = Duration::from_secs(7 * 86_400);
    match batcher.succeed(&one, id, answer("body")).await.unwrap() {
        Recorded::Now { expires_in: Some(left) } => assert!(left <= week && left > week - Duration::from_secs(60)),
        other => panic!("{other:?}"),
    }
    match batcher.succeed(&one, id, answer("again")).await.unwrap() {
        Recorded::Before { answer: stored, expires_in: Some(left) } => {
            assert_eq!(stored, answer("body"));
            assert!(left <= week && left > week - Duration::from_secs(60));
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(batcher.succeed(&one, Uuid::new_v4(), answer("x")).await, Err(Error::LeaseLost)));
    let replays = [batcher.claim(&one, Uuid::new_v4()).await.unwrap(), batcher.peek(&one).await.unwrap().unwrap()];
    for replay in replays {
        assert!(matches!(&replay.claim, Claim::Replay(stored) if *stored == answer("body")), "{replay:?}");
        assert!(replay.expires_in.is_some_and(|left| left <= week && left > week - Duration::from_secs(60)));
    }
    let by: String = client.query_one("SELECT claimed_by FROM once.intent", &[]).await.unwrap().get(0);
    assert_eq!(by, "me");
}

#[tokio::test]
async fn the_other_ends_of_a_claim() {
    let (db, client) = database().await;
    let batcher = batcher(&db).await;
    let [failed, retryable, doubted, released, late] =
        ["failed", "retryable", "doubted", "released", "late"].map(|key| name("rerun", key));
    let id = own(&batcher, &failed).await;
    batcher.fail(&failed, id, false, "no_stock", "sold out").await.unwrap();
    assert!(matches!(batcher.fail(&failed, id, false, "no_stock", "sold out").await, Err(Error::LeaseLost)));
    let seen = batcher.claim(&failed, Uuid::new_v4()).await.unwrap().claim;
    assert!(matches!(&seen, Claim::FailedBefore { code, .. } if code == "no_stock"), "{seen:?}");
    assert!(
        matches!(batcher.succeed(&failed, id, answer("x")).await, Err(Error::FailedBefore { code, .. }) if code == "no_stock")
    );

    let id = own(&batcher, &retryable).await;
    batcher.fail(&retryable, id, true, "later", "not now").await.unwrap();
    let again = owned(batcher.claim(&retryable, Uuid::new_v4()).await.unwrap());
    assert_eq!((again.kind, again.attempt), (OwnedKind::AfterFailure, 2));

    let id = own(&batcher, &doubted).await;
    assert_eq!(batcher.doubt(&doubted, id, "timeout", "30 s").await.unwrap(), "failed_retryable");
    assert!(matches!(batcher.doubt(&doubted, id, "timeout", "30 s").await, Err(Error::LeaseLost)));
    let late_outcome = succeed_alone(&client, &doubted, id, "late").await.unwrap_err();
    assert_eq!(crate::rows::code(&late_outcome), "P4010");

    let id = own(&batcher, &released).await;
    batcher.release(&released, id).await.unwrap();
    assert_eq!(status_of(&client, &released).await, None);
    assert!(matches!(batcher.release(&released, id).await, Err(Error::LeaseLost)));

    own(&batcher, &late).await;
    db.travel(2 * HOUR).await;
    let taken = owned(batcher.claim(&late, Uuid::new_v4()).await.unwrap());
    assert_eq!((taken.kind, taken.attempt), (OwnedKind::Takeover, 2));
}

/// Bad names, and texts that PostgreSQL does not take at all, among good neighbours in the same batches.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_bad_caller_costs_nobody_else() {
    let (db, _client) = database().await;
    let batcher = batcher_with(&db, |batch| batch.claim_connections = 1).await;
    let mut tasks = JoinSet::new();
    for at in 0..60 {
        let batcher = batcher.clone();
        tasks.spawn(async move {
            let key = format!("k{at}");
            let (bad, sqlstate) = match at % 6 {
                0 => (name("s", "nul\0"), "22021"),
                1 => (name("s", ""), "P4001"),
                2 => (name("s\0", &key), "22021"),
                _ => (name("s", &key), ""),
            };
            match batcher.claim(&bad, Uuid::new_v4()).await {
                Err(Error::Refused { sqlstate: got, message }) => {
                    assert_eq!(got, sqlstate, "{message}");
                    let looked = batcher.peek(&bad).await;
                    assert_eq!(looked.is_err(), sqlstate == "22021", "{looked:?}");
                }
                Ok(observed) => {
                    assert_eq!(sqlstate, "");
                    let id = owned(observed).claim_id;
                    let mut stored = answer("x");
                    if at % 6 == 3 {
                        stored.headers = Some(json!([["x", "\0"]]));
                    }
                    match batcher.succeed(&bad, id, stored).await {
                        Ok(Recorded::Now { .. }) => assert_ne!(at % 6, 3),
                        Err(Error::Refused { sqlstate, .. }) => {
                            assert_eq!((at % 6, sqlstate.as_str()), (3, "22P05"));
                            batcher.succeed(&bad, id, answer("without")).await.unwrap();
                        }
                        other => panic!("{other:?}"),
                    }
                }
                other => panic!("{other:?}"),
            }
        });
    }
    tasks.join_all().await;
}

#[tokio::test]
async fn an_answer_that_is_too_large_is_refused() {
    let (db, client) = database().await;
    let batcher = batcher(&db).await;
    let one = name("s", "k");
    let id = own(&batcher, &one).await;
    let mut large = answer("");
    large.body = Some(vec![7; (16 << 20) + 1]);
    let refused = batcher.succeed(&one, id, large).await;
    assert!(matches!(&refused, Err(Error::Refused { sqlstate, .. }) if sqlstate == "P4005"), "{refused:?}");
    assert_eq!(status_of(&client, &one).await.as_deref(), Some("processing"));
    batcher.succeed(&one, id, answer("small")).await.unwrap();
}

/// Fifty callers want the same two hundred keys, through two batchers: each key is run once, and everybody gets
/// that run's answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_key_has_one_owner() {
    let (db, client) = database().await;
    let batchers = [batcher(&db).await, batcher_with(&db, |batch| batch.batch_max = 7).await];
    let ran: Arc<Mutex<HashSet<String>>> = Arc::default();
    let mut tasks = JoinSet::new();
    for caller in 0..50 {
        let (batcher, ran) = (batchers[caller % 2].clone(), Arc::clone(&ran));
        tasks.spawn(async move {
            let mut keys: Vec<String> = (0..200).map(|at| format!("k{at}")).collect();
            keys.shuffle(&mut rand::rng());
            for key in keys {
                let one = name("s", &key);
                loop {
                    let id = Uuid::new_v4();
                    match batcher.claim(&one, id).await.unwrap().claim {
                        Claim::Owned(_) => {
                            assert!(ran.lock().unwrap().insert(key.clone()), "{key} has two owners");
                            let recorded = batcher.succeed(&one, id, answer(&key)).await.unwrap();
                            assert!(matches!(recorded, Recorded::Now { .. }), "{recorded:?}");
                            break;
                        }
                        Claim::Replay(stored) => {
                            assert_eq!(stored, answer(&key));
                            break;
                        }
                        Claim::InProgress { .. } => tokio::time::sleep(Duration::from_millis(2)).await,
                        other => panic!("{other:?}"),
                    }
                }
            }
        });
    }
    tasks.join_all().await;
    let sql = "SELECT count(*), count(*) FILTER (WHERE status = 'succeeded' AND attempt_count = 1) FROM once.intent";
    let row = client.query_one(sql, &[]).await.unwrap();
    assert_eq!((row.get::<_, i64>(0), row.get::<_, i64>(1)), (200, 200));
    assert_eq!(ran.lock().unwrap().len(), 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kept_lease_is_renewed_until_it_is_dropped() {
    let (db, client) = database().await;
    define(&client, "short", json!({"mode": "leased", "lease": "2s", "stale": "rerun"})).await;
    let batcher = batcher(&db).await;
    let one = name("short", "k");
    let id = Uuid::new_v4();
    let kept = {
        // The handle that it was made with may go.
        let other = crate::batcher::batcher(&db).await;
        let observed = other.claim(&one, id).await.unwrap();
        let asked_at = observed.asked_at;
        other.keep(&one, id, owned(observed).lease.unwrap(), asked_at)
    };
    let lease = Duration::from_secs(2);
    let first_end = kept.ends().unwrap();
    tokio::select! {
        () = kept.lost() => panic!("it is being renewed"),
        () = eventually("three renewals", async || kept.ends().is_some_and(|end| end > first_end + lease)) => {}
    }
    let rival = batcher.claim(&one, Uuid::new_v4()).await.unwrap().claim;
    assert!(matches!(rival, Claim::InProgress { .. }), "{rival:?}");
    drop(kept);
    eventually("its lease ends", async || {
        matches!(batcher.claim(&one, Uuid::new_v4()).await.unwrap().claim, Claim::Owned(_))
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_lease_is_told_and_a_settled_one_is_not_lost() {
    let (db, client) = database().await;
    define(&client, "short", json!({"mode": "leased", "lease": "1500ms"})).await;
    let batcher = batcher(&db).await;
    let keep = async |key: &str| {
        let one = name("short", key);
        let id = Uuid::new_v4();
        let observed = batcher.claim(&one, id).await.unwrap();
        let kept = batcher.keep(&one, id, Duration::from_millis(1500), observed.asked_at);
        (one, id, kept)
    };
    // The work recorded its outcome itself: there is nothing to renew, and nothing lost.
    let (one, id, settled) = keep("settled").await;
    succeed_alone(&client, &one, id, "the work's").await.unwrap();
    eventually("the heartbeat has noticed", async || settled.ends().is_none()).await;
    let lost = tokio::time::timeout(Duration::from_millis(1600), settled.lost()).await;
    assert!(lost.is_err(), "its lease is not lost");

    // By the database's word: its clock says that the lease is over, ours does not.
    let (_, _, kept) = keep("lost").await;
    db.travel(HOUR).await;
    tokio::time::timeout(Duration::from_secs(5), kept.lost()).await.expect("told by the next renewal");
    assert_eq!(kept.ends(), None);
    db.travel(Duration::ZERO).await;

    // By our own clock: nobody renews in time.
    let (_, _, kept) = keep("unheard").await;
    client.batch_execute("BEGIN; LOCK TABLE once.intent IN ACCESS EXCLUSIVE MODE").await.unwrap();
    tokio::time::timeout(Duration::from_secs(5), kept.lost()).await.expect("the lease's end by our clock");
    client.batch_execute("ROLLBACK").await.unwrap();
}

/// The table is locked, so nothing moves: callers beyond the limit are told at once, and the queue's wait shows.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn too_many_callers_are_refused_at_once() {
    let (db, client) = database().await;
    let batcher = batcher_with(&db, |batch| {
        batch.claim_connections = 1;
        batch.queue_max = 3;
        batch.claim_deadline = Duration::from_secs(30);
    })
    .await;
    assert!(batcher.is_ready().await);
    client.batch_execute("BEGIN; LOCK TABLE once.intent IN ACCESS EXCLUSIVE MODE").await.unwrap();
    let ask = |key: String| {
        let batcher = batcher.clone();
        Box::pin(async move { batcher.claim(&name("s", &key), Uuid::new_v4()).await })
    };
    let mut waiting = vec![ask("first".into())];
    let ended = tokio::time::timeout(Duration::ZERO, &mut waiting[0]).await;
    assert!(ended.is_err());
    pgonce_testkit::lock_waiters(&db.client().await, 1).await;
    for at in 0..3 {
        let mut one = ask(format!("k{at}"));
        // Polled once: it is in the queue.
        assert!(tokio::time::timeout(Duration::ZERO, &mut one).await.is_err());
        waiting.push(one);
    }
    let refused = ask("more".into()).await;
    assert!(matches!(refused, Err(Error::Overloaded { .. })), "{refused:?}");
    drop(waiting.remove(1));
    waiting.push(ask("again".into()));
    let ended = tokio::time::timeout(Duration::ZERO, &mut waiting[3]).await;
    assert!(ended.is_err(), "who left makes room");
    assert!(batcher.is_ready().await, "completions have connections of their own");
    eventually("the wait shows", async || batcher.queue_wait() > Duration::from_millis(20)).await;
    client.batch_execute("ROLLBACK").await.unwrap();
    for one in waiting {
        assert!(matches!(one.await.unwrap().claim, Claim::Owned(_)));
    }
}

/// A single caller is not kept waiting for company, and many are sent together.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn callers_that_wait_go_together() {
    let (db, client) = database().await;
    client
        .batch_execute(
            "CREATE TABLE public.calls (at serial); GRANT ALL ON ALL TABLES IN SCHEMA public TO PUBLIC; GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO PUBLIC;
             CREATE FUNCTION public.counted() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN INSERT INTO public.calls DEFAULT VALUES; RETURN NULL; END';
             CREATE TRIGGER counted AFTER INSERT ON once.intent FOR EACH STATEMENT EXECUTE FUNCTION public.counted()",
        )
        .await
        .unwrap();
    let batcher = batcher_with(&db, |batch| batch.claim_connections = 1).await;
    own(&batcher, &name("s", "alone")).await;
    client.batch_execute("BEGIN; LOCK TABLE once.intent IN SHARE MODE").await.unwrap();
    let mut waiting = JoinSet::new();
    for at in 0..101 {
        let batcher = batcher.clone();
        waiting.spawn(async move { own(&batcher, &name("s", &format!("k{at}"))).await });
        if at == 0 {
            pgonce_testkit::lock_waiters(&db.client().await, 1).await;
        }
    }
    eventually("a hundred wait", async || batcher.queue_wait() > Duration::from_millis(5)).await;
    client.batch_execute("COMMIT").await.unwrap();
    waiting.join_all().await;
    let calls: i64 = client.query_one("SELECT count(*) FROM public.calls", &[]).await.unwrap().get(0);
    assert!(calls < 20, "102 claims in {calls} calls");
}

#[tokio::test]
async fn answers_are_counted() {
    let (db, client) = database().await;
    let mut settings = Settings::from_url(db.url());
    settings.tally_every = Duration::from_millis(20);
    let batcher = Batcher::connect(settings, BatchSettings::default()).await.unwrap();
    let one = name("s", "k");
    let id = own(&batcher, &one).await;
    batcher.succeed(&one, id, answer("x")).await.unwrap();
    for _ in 0..2 {
        batcher.claim(&one, Uuid::new_v4()).await.unwrap();
    }
    batcher.peek(&one).await.unwrap();
    batcher.peek(&name("s", "nothing there")).await.unwrap();
    eventually("the counts are there", async || {
        let sql = "SELECT coalesce(sum(count) FILTER (WHERE kind = 'new_claim'), 0)::int8, coalesce(sum(count) FILTER (WHERE kind = 'replay_success'), 0)::int8 FROM once.tally_day";
        let row = client.query_one(sql, &[]).await.unwrap();
        (row.get::<_, i64>(0), row.get::<_, i64>(1)) == (1, 3)
    })
    .await;
}

#[tokio::test]
async fn limits_and_schemas_are_checked() {
    let db = TestDb::new().await;
    let connect = async |batch_max| {
        Batcher::connect(Settings::from_url(db.url()), BatchSettings { batch_max, ..BatchSettings::default() }).await
    };
    let for_ever = BatchSettings { deadline: Duration::MAX, ..BatchSettings::default() };
    let refused = Batcher::connect(Settings::from_url(db.url()), for_ever).await;
    assert!(matches!(refused, Err(Error::Invalid(_))));
    for batch_max in [0, 1001] {
        assert!(matches!(connect(batch_max).await, Err(Error::Invalid(_))));
    }
    db.client().await.batch_execute("DROP SCHEMA once CASCADE").await.unwrap();
    assert!(matches!(connect(128).await, Err(Error::Schema(_))));
    let nowhere = Settings::from_url("postgres://127.0.0.1:1/nowhere?sslmode=disable");
    assert!(matches!(Batcher::connect(nowhere, BatchSettings::default()).await, Err(Error::Database(_))));
}

/// What was handed over is done, also when the last handle is dropped right after.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_completion_outlives_its_caller_and_the_batcher() {
    let (db, client) = database().await;
    let batcher = batcher(&db).await;
    let one = name("s", "k");
    let id = own(&batcher, &one).await;
    client.batch_execute("BEGIN; LOCK TABLE once.intent IN ACCESS EXCLUSIVE MODE").await.unwrap();
    let caller = tokio::spawn({
        let (batcher, one) = (batcher.clone(), one.clone());
        async move { batcher.succeed(&one, id, answer("x")).await }
    });
    pgonce_testkit::lock_waiters(&db.client().await, 1).await;
    caller.abort();
    assert!(caller.await.unwrap_err().is_cancelled());
    drop(batcher);
    client.batch_execute("ROLLBACK").await.unwrap();
    eventually("recorded", async || status_of(&client, &one).await.as_deref() == Some("succeeded")).await;
}
