use std::sync::Arc;
use std::time::Duration;

use pgonce::{Error, Once, Outcome, RetryPolicy};
use pgonce_testkit::history::{Final, History, Seen, check};
use pgonce_testkit::{TestDb, lock_waiters};
use serde_json::json;
use tokio::sync::Barrier;
use tokio::task::JoinSet;
use tokio_postgres::IsolationLevel;

/// Which door this copy of the suite goes through.
fn direct() -> bool {
    module_path!().ends_with("direct")
}

const LEVELS: [IsolationLevel; 3] =
    [IsolationLevel::ReadCommitted, IsolationLevel::RepeatableRead, IsolationLevel::Serializable];

fn patient() -> RetryPolicy {
    RetryPolicy { attempts_max: 1000, deadline: Duration::from_secs(60), ..RetryPolicy::default() }
}

/// One caller of the atomic mode; the answer's bytes are what everybody must see.
async fn atomic(once: &Once, key: &str, level: IsolationLevel) -> Result<Outcome<String>, Error> {
    once.intent("race", key)
        .payload(&json!({ "key": key }))
        .isolation(level)
        .retry(patient())
        .run(async |tx| {
            let claim = tx.claim_id();
            tx.execute("INSERT INTO public.effect (scope, key, claim_id) VALUES ('race', $1, $2)", &[&key, &claim])
                .await?;
            Ok(claim.to_string())
        })
        .await
}

async fn race(db: &TestDb, callers: usize, level: IsolationLevel) {
    let once = db.once_with(|settings| settings.pool_max = callers).await;
    let key = format!("k-{callers}-{level:?}");
    let (history, barrier) = (Arc::new(History::default()), Arc::new(Barrier::new(callers)));
    let mut tasks = JoinSet::new();
    for _ in 0..callers {
        let (once, key, history, barrier) = (once.clone(), key.clone(), Arc::clone(&history), Arc::clone(&barrier));
        tasks.spawn(async move {
            barrier.wait().await;
            let outcome = atomic(&once, &key, level).await;
            let seen = match &outcome {
                Ok(Outcome::Executed(body) | Outcome::Replayed(body)) => Seen::Ok(serde_json::to_vec(body).unwrap()),
                Err(Error::InProgress { .. }) => Seen::Unknown,
                Err(error) => panic!("{level:?} with {callers} callers: {error}"),
            };
            history.record("race", &key, seen);
            outcome.is_ok_and(|outcome| !outcome.is_replay())
        });
    }
    let executed = tasks.join_all().await.into_iter().filter(|executed| *executed).count();
    assert_eq!(executed, 1, "{level:?} with {callers} callers");
    assert_eq!(
        check(&history.events(), &Final::read(&db.client().await).await),
        [],
        "{level:?} with {callers} callers"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn atomic_callers_of_one_key_at_every_level() {
    let db = TestDb::new().await.through(direct());
    // Everybody waits for the winner: the default bound on waiters would refuse some of fifty.
    db.client()
        .await
        .batch_execute("SELECT once.define_scope('race', '{\"waiters_max\": 100, \"wait_max\": \"1m\"}')")
        .await
        .unwrap();
    for level in LEVELS {
        for callers in [2, 5, 20, 50] {
            race(&db, callers, level).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_keys_in_a_storm_have_one_effect_each() {
    let db = TestDb::new().await.through(direct());
    let once = db.once_with(|settings| settings.pool_max = 32).await;
    let history = Arc::new(History::default());
    let mut tasks = JoinSet::new();
    for caller in 0..32_usize {
        let (once, history) = (once.clone(), Arc::clone(&history));
        tasks.spawn(async move {
            for turn in 0..100_usize {
                let key = format!("storm-{}", (turn * 7 + caller * 3) % 100);
                match atomic(&once, &key, IsolationLevel::ReadCommitted).await {
                    Ok(outcome) => {
                        history.record("race", &key, Seen::Ok(serde_json::to_vec(&outcome.into_inner()).unwrap()));
                    }
                    Err(Error::InProgress { .. }) => history.record("race", &key, Seen::Unknown),
                    Err(error) => panic!("{error}"),
                }
            }
        });
    }
    tasks.join_all().await;
    let state = Final::read(&db.client().await).await;
    assert_eq!(state.effects.len(), 100);
    assert_eq!(check(&history.events(), &state), []);
}

/// Leased callers whose effect shares the transaction with the fenced completion.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leased_callers_of_one_key_at_every_level() {
    let db = TestDb::new().await.through(direct());
    db.client()
        .await
        .batch_execute("SELECT once.define_scope('leased', '{\"mode\": \"leased\", \"lease\": \"30s\"}')")
        .await
        .unwrap();
    for level in ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"] {
        for callers in [2, 5, 20, 50] {
            let key = format!("k-{callers}-{level}");
            let barrier = Arc::new(Barrier::new(callers));
            let mut tasks = JoinSet::new();
            for _ in 0..callers {
                let (client, key, barrier) = (db.client().await, key.clone(), Arc::clone(&barrier));
                tasks.spawn(async move {
                    barrier.wait().await;
                    loop {
                        match leased(&client, &key, level).await {
                            Ok(Some(won)) => return won,
                            Ok(None) => {}
                            Err(code) => assert_eq!(code, "40001", "only a serialization failure asks for another try"),
                        }
                    }
                });
            }
            let won = tasks.join_all().await.into_iter().filter(|won| *won).count();
            assert_eq!((won, db.effects(&key).await), (1, 1), "{level} with {callers} callers");
        }
    }
}

/// Claims, then completes with the effect; Some(true) for the one who did, None to ask again.
async fn leased(client: &tokio_postgres::Client, key: &str, level: &str) -> Result<Option<bool>, String> {
    let code = |error: tokio_postgres::Error| error.code().unwrap().code().to_owned();
    client.batch_execute(&format!("BEGIN ISOLATION LEVEL {level}")).await.map_err(code)?;
    let claimed = client.query_one("SELECT kind, claim_id FROM once.claim('leased', $1, sha256('x'))", &[&key]).await;
    let row = match claimed {
        Ok(row) => row,
        Err(error) => {
            client.batch_execute("ROLLBACK").await.unwrap();
            return Err(code(error));
        }
    };
    client.batch_execute("COMMIT").await.map_err(code)?;
    match row.get::<_, &str>(0) {
        "replay_success" => Ok(Some(false)),
        "processing_active" => Ok(None),
        "new_claim" => {
            let claim: uuid::Uuid = row.get(1);
            loop {
                let sql = format!(
                    "BEGIN ISOLATION LEVEL {level};
                     INSERT INTO public.effect (scope, key, claim_id) VALUES ('leased', '{key}', '{claim}');
                     SELECT once.succeed('leased', '{key}', '{claim}'); COMMIT"
                );
                match client.batch_execute(&sql).await {
                    Ok(()) => return Ok(Some(true)),
                    Err(error) => {
                        assert_eq!(code(error), "40001");
                        client.batch_execute("ROLLBACK").await.unwrap();
                    }
                }
            }
        }
        other => panic!("unexpected {other}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_are_bounded_and_the_rest_is_refused() {
    let db = TestDb::new().await.through(direct());
    let observer = db.client().await;
    observer
        .batch_execute("SELECT once.define_scope('bounded', '{\"waiters_max\": 3, \"wait_max\": \"1m\"}')")
        .await
        .unwrap();
    let winner = db.client().await;
    winner.batch_execute("BEGIN").await.unwrap();
    let claim: uuid::Uuid =
        winner.query_one("SELECT claim_id FROM once.claim('bounded', 'k', sha256('x'))", &[]).await.unwrap().get(0);
    let mut tasks = JoinSet::new();
    for _ in 0..10 {
        let client = db.client().await;
        tasks.spawn(async move {
            let row = client.query_one("SELECT kind FROM once.claim('bounded', 'k', sha256('x'))", &[]).await.unwrap();
            row.get::<_, String>(0)
        });
    }
    // Seven are refused while the winner still holds it; three wait.
    let mut kinds = Vec::new();
    for _ in 0..7 {
        kinds.push(tasks.join_next().await.unwrap().unwrap());
    }
    assert_eq!(kinds, vec!["processing_active"; 7]);
    lock_waiters(&observer, 3).await;
    winner.execute("SELECT once.succeed('bounded', 'k', $1)", &[&claim]).await.unwrap();
    winner.batch_execute("COMMIT").await.unwrap();
    assert_eq!(tasks.join_all().await, vec!["replay_success"; 3]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_ends_at_its_limit_and_leaves_lock_timeout_as_it_was() {
    let db = TestDb::new().await.through(direct());
    let (winner, loser) = (db.client().await, db.client().await);
    winner.batch_execute("BEGIN; SELECT once.claim('s', 'k', sha256('x'))").await.unwrap();
    loser.batch_execute("SET lock_timeout = '1234ms'; BEGIN").await.unwrap();
    let sql = "SELECT kind, retry_after_ms FROM once.claim('s', 'k', sha256('x'), p_wait => '50ms')";
    let row = loser.query_one(sql, &[]).await.unwrap();
    assert_eq!((row.get::<_, &str>(0), row.get::<_, i64>(1)), ("processing_active", 1000));
    let row = loser.query_one("SELECT current_setting('lock_timeout')", &[]).await.unwrap();
    assert_eq!(row.get::<_, &str>(0), "1234ms", "the wait's own limit is gone with it");
    // Refused observers hold nothing: when the winner is gone, a third can own it while the loser idles.
    winner.batch_execute("ROLLBACK").await.unwrap();
    let third = db.client().await;
    let row = third.query_one("SELECT kind FROM once.claim('s', 'k', sha256('x'), p_wait => '0')", &[]).await.unwrap();
    assert_eq!(row.get::<_, &str>(0), "new_claim");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rolled_back_winner_hands_over_to_exactly_one_waiter() {
    let db = TestDb::new().await.through(direct());
    let observer = db.client().await;
    let winner = db.client().await;
    winner.batch_execute("BEGIN; SELECT once.claim('race', 'k-heir', sha256('{\"key\":\"k-heir\"}'))").await.unwrap();
    let once = db.once_with(|settings| settings.pool_max = 12).await;
    let mut tasks = JoinSet::new();
    for _ in 0..12 {
        let once = once.clone();
        tasks.spawn(async move { atomic(&once, "k-heir", IsolationLevel::ReadCommitted).await.unwrap().is_replay() });
    }
    lock_waiters(&observer, 12).await;
    winner.batch_execute("ROLLBACK").await.unwrap();
    let executed = tasks.join_all().await.into_iter().filter(|replay| !replay).count();
    assert_eq!((executed, db.effects("k-heir").await), (1, 1));
}

/// Trap 24: a rival commits between this transaction's look and its lock. The loser gets 40001, never 23505.
#[tokio::test]
async fn losing_at_the_very_end_is_a_serialization_failure() {
    let db = TestDb::new().await.through(direct());
    for level in ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"] {
        let (slow, fast) = (db.client().await, db.client().await);
        slow.batch_execute(&format!("BEGIN ISOLATION LEVEL {level}; SELECT 1")).await.unwrap();
        // The race's window is inside claim; entering it by hand: the claim's note and its lock, without its look.
        let claim = uuid::Uuid::new_v4();
        if level == "READ COMMITTED" {
            fast_intent(&fast, level).await;
        } else {
            slow.query_one("SELECT kind FROM once.claim($1, 'k', sha256('x'))", &[&"elsewhere"]).await.unwrap();
            fast_intent(&fast, level).await;
        }
        slow.query_one(
            "SELECT pg_try_advisory_xact_lock(once.lock_key('', $1, 'k')),
                    set_config('once.claims', $2 || lpad(to_hex(once.lock_key('', $1, 'k')), 16, '0')
                        || encode(sha256('x'), 'hex') || '7 days||full|', true)",
            &[&level, &claim.to_string()],
        )
        .await
        .unwrap();
        let error = slow.execute("SELECT once.succeed($1, 'k', $2)", &[&level, &claim]).await.unwrap_err();
        assert_eq!(error.code().unwrap().code(), "40001", "{level}");
        slow.batch_execute("ROLLBACK").await.unwrap();
    }
}

async fn fast_intent(client: &tokio_postgres::Client, scope: &str) {
    client.batch_execute("BEGIN").await.unwrap();
    let row = client.query_one("SELECT claim_id FROM once.claim($1, 'k', sha256('x'))", &[&scope]).await.unwrap();
    client.execute("SELECT once.succeed($1, 'k', $2)", &[&scope, &row.get::<_, uuid::Uuid>(0)]).await.unwrap();
    client.batch_execute("COMMIT").await.unwrap();
}

/// A wait that ends well leaves nothing behind either: no lock, no changed lock_timeout.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_that_got_its_answer_holds_nothing() {
    let db = TestDb::new().await.through(direct());
    let (winner, waiter) = (db.client().await, db.client().await);
    winner.batch_execute("BEGIN").await.unwrap();
    let claim: uuid::Uuid =
        winner.query_one("SELECT claim_id FROM once.claim('s', 'k', sha256('x'))", &[]).await.unwrap().get(0);
    let waiting = tokio::spawn(async move {
        waiter.batch_execute("SET lock_timeout = '1234ms'; BEGIN").await.unwrap();
        let sql = "SELECT kind FROM once.claim('s', 'k', sha256('x'), p_wait => '1m')";
        let kind: String = waiter.query_one(sql, &[]).await.unwrap().get(0);
        let sql = "SELECT current_setting('lock_timeout'),
                          (SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory')";
        let row = waiter.query_one(sql, &[]).await.unwrap();
        (kind, row.get::<_, String>(0), row.get::<_, i64>(1))
    });
    lock_waiters(&db.client().await, 1).await;
    winner.execute("SELECT once.succeed('s', 'k', $1)", &[&claim]).await.unwrap();
    winner.batch_execute("COMMIT").await.unwrap();
    assert_eq!(waiting.await.unwrap(), ("replay_success".to_owned(), "1234ms".to_owned(), 0));
}

/// Who meets an owner in the middle of its completion is told "in progress", and must not keep others from
/// taking over when that owner is gone.
#[tokio::test]
async fn an_observer_that_owns_nothing_keeps_nobody_out() {
    let db = TestDb::new().await.through(direct());
    let (owner, observer, third) = (db.client().await, db.client().await, db.client().await);
    owner.batch_execute("SELECT once.define_scope('l', '{\"mode\": \"leased\", \"stale\": \"rerun\"}')").await.unwrap();
    let claim = "SELECT kind, claim_id FROM once.claim('l', 'k', sha256('x'))";
    let mine: uuid::Uuid = owner.query_one(claim, &[]).await.unwrap().get(1);
    db.travel(Duration::from_secs(3600)).await;
    owner.batch_execute("BEGIN").await.unwrap();
    owner.execute("SELECT once.succeed('l', 'k', $1)", &[&mine]).await.unwrap();
    observer.batch_execute("BEGIN").await.unwrap();
    assert_eq!(observer.query_one(claim, &[]).await.unwrap().get::<_, &str>(0), "processing_active");
    owner.batch_execute("ROLLBACK").await.unwrap();
    // The observer's transaction is still open.
    assert_eq!(third.query_one(claim, &[]).await.unwrap().get::<_, &str>(0), "processing_stale");
}
