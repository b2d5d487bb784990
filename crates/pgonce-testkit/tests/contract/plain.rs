//! What only SQL callers see: every column of a claim's answer, `record_failure`, `resolve`, `peek`.

use std::time::Duration;

use pgonce_testkit::{TestDb, checksum, lock_waiters};
use tokio_postgres::{Client, Row};
use uuid::Uuid;

use crate::world::HOUR;

const CLAIM: &str = "SELECT * FROM once.claim(p_scope => $1, p_key => $2, p_fingerprint => sha256('x'), p_mode => $3,
    p_wait => '0')";

async fn claim(client: &Client, scope: &str, key: &str, mode: &str) -> Row {
    client.query_one(CLAIM, &[&scope, &key, &mode]).await.unwrap()
}

async fn define(client: &Client, scope: &str, policy: &str) {
    let sql = format!("SELECT once.define_scope('{scope}', '{policy}')");
    client.batch_execute(&sql).await.unwrap();
}

/// The columns that are set, in order.
async fn set_columns(client: &Client, scope: &str, key: &str, mode: &str) -> String {
    let sql = format!(
        "SELECT string_agg(e.key, ' ' ORDER BY e.place) FROM once.claim(p_scope => '{scope}', p_key => '{key}',
         p_fingerprint => sha256('x'), p_mode => '{mode}', p_wait => '0') c,
         json_each_text(row_to_json(c)) WITH ORDINALITY e (key, value, place) WHERE e.value IS NOT NULL"
    );
    client.query_one(&sql, &[]).await.unwrap().get(0)
}

#[tokio::test]
async fn each_kind_sets_its_columns_and_no_others() {
    let db = TestDb::new().await;
    let client = db.client().await;
    define(&client, "s", r#"{"lease": "1h", "stale": "rerun", "retention": "1d", "tombstone": "9d"}"#).await;
    define(&client, "hold", r#"{"lease": "1h"}"#).await;
    let done = "SELECT once.succeed('s', 'done', $1, p_response_body => 'b', p_response_code => 1,
        p_response_headers => '{}', p_result_type => 't', p_result_id => 'i')";
    let id: Uuid = claim(&client, "s", "done", "leased").await.get("claim_id");
    client.execute(done, &[&id]).await.unwrap();
    for (key, retryable) in [("retryable", true), ("final", false)] {
        let id: Uuid = claim(&client, "s", key, "leased").await.get("claim_id");
        client
            .execute("SELECT once.fail('s', $1, $2, $3, 'c', 'm', 1, '{}', 'b')", &[&key, &id, &retryable])
            .await
            .unwrap();
    }
    claim(&client, "s", "stale", "leased").await;
    claim(&client, "hold", "held", "leased").await;
    let lease = "kind claim_id attempt_count";
    let answer = "response_code response_headers response_body";
    assert_eq!(set_columns(&client, "s", "new a", "atomic").await, lease);
    assert_eq!(set_columns(&client, "s", "new l", "leased").await, format!("{lease} locked_until fence lease_ms"));
    assert_eq!(set_columns(&client, "s", "new l", "leased").await, "kind attempt_count locked_until retry_after_ms");
    let replay = format!("kind attempt_count {answer} result_type result_id expires_at");
    assert_eq!(set_columns(&client, "s", "done", "leased").await, replay);
    let failed = format!("kind attempt_count {answer} failure_code failure_message expires_at");
    assert_eq!(set_columns(&client, "s", "final", "leased").await, failed);
    let retry = format!("{lease} failure_code failure_message");
    assert_eq!(set_columns(&client, "s", "retryable", "atomic").await, retry);
    db.travel(2 * HOUR).await;
    assert_eq!(set_columns(&client, "s", "stale", "leased").await, format!("{lease} locked_until fence lease_ms"));
    let uncertain = "kind attempt_count failure_code failure_message";
    assert_eq!(set_columns(&client, "hold", "held", "leased").await, uncertain);
    db.travel(48 * HOUR).await;
    assert_eq!(set_columns(&client, "s", "done", "leased").await, "kind attempt_count");
}

#[tokio::test]
async fn fences_grow_and_a_lease_is_as_long_as_asked_for() {
    let db = TestDb::new().await;
    let client = db.client().await;
    define(&client, "s", r#"{"lease": "90s", "stale": "rerun", "mode": "leased"}"#).await;
    let mut last = 0_i64;
    for round in 0..3_u32 {
        db.travel(round * HOUR).await;
        let row = claim(&client, "s", "key", "leased").await;
        assert!(row.get::<_, i64>("fence") > last, "a later claim has a larger fence");
        assert_eq!(
            (row.get::<_, i64>("lease_ms"), row.get::<_, i32>("attempt_count")),
            (90_000, i32::try_from(round).unwrap() + 1)
        );
        last = row.get("fence");
    }
    let asked = "SELECT lease_ms FROM once.claim('s', 'asked', sha256('x'), p_lease => '7s')";
    assert_eq!(
        client.query_one(asked, &[]).await.unwrap().get::<_, i64>(0),
        7000,
        "the scope's mode, the call's lease"
    );
}

#[tokio::test]
async fn peek_observes_and_never_claims() {
    let db = TestDb::new().await;
    let client = db.client().await;
    define(&client, "s", r#"{"lease": "1h", "retention": "1d", "tombstone": "9d", "stale": "rerun"}"#).await;
    let peek = async |key: &str| -> Option<String> {
        client.query_one("SELECT kind FROM once.peek('s', $1, sha256('x'))", &[&key]).await.unwrap().get(0)
    };
    let id: Uuid = claim(&client, "s", "done", "leased").await.get("claim_id");
    client.execute("SELECT once.succeed('s', 'done', $1)", &[&id]).await.unwrap();
    claim(&client, "s", "running", "leased").await;
    let before = checksum(&client).await;
    assert_eq!(peek("absent").await, None);
    assert_eq!(peek("done").await.as_deref(), Some("replay_success"));
    assert_eq!(peek("running").await.as_deref(), Some("processing_active"));
    let other = client.query_one("SELECT once.peek('s', 'done', sha256('y'))", &[]).await.unwrap_err();
    assert_eq!(other.code().unwrap().code(), "P4002");
    db.travel(48 * HOUR).await;
    assert_eq!(peek("done").await.as_deref(), Some("result_expired"));
    assert_eq!(peek("running").await, None, "its lease is over: it could be owned");
    assert_eq!(checksum(&client).await, before);
}

#[tokio::test]
async fn record_failure_claims_and_fails_in_one_call() {
    let db = TestDb::new().await;
    let client = db.client().await;
    define(&client, "s", r#"{"lease": "1h", "stale": "rerun", "attempts_max": 3}"#).await;
    let record = async |key: &str, retryable: bool| -> (String, i32) {
        let sql = "SELECT kind, attempt_count FROM once.record_failure('s', $1, sha256('x'), $2, 'code', 'message')";
        let row = client.query_one(sql, &[&key, &retryable]).await.unwrap();
        (row.get(0), row.get::<_, Option<i32>>(1).unwrap_or(0))
    };
    let status = async |key: &str| db.status("s", key).await.unwrap();
    assert_eq!(record("r", true).await, ("new_claim".into(), 1));
    assert_eq!(status("r").await, "failed_retryable");
    assert_eq!(record("r", true).await, ("retryable_failure".into(), 2));
    assert_eq!(record("r", true).await, ("retryable_failure".into(), 3));
    assert_eq!(status("r").await, "failed_final", "the third attempt was the last");
    let before = checksum(&client).await;
    assert_eq!(record("r", true).await, ("final_failure".into(), 3));
    assert_eq!(checksum(&client).await, before, "what is terminal stays");
    assert_eq!(record("f", false).await.0, "new_claim");
    assert_eq!(status("f").await, "failed_final");

    let id: Uuid = claim(&client, "s", "leased", "leased").await.get("claim_id");
    assert_eq!(record("leased", true).await.0, "processing_active");
    assert_eq!(status("leased").await, "processing", "somebody else is at it: their outcome counts");
    db.travel(2 * HOUR).await;
    assert_eq!(record("leased", true).await.0, "processing_stale");
    assert_eq!(status("leased").await, "failed_retryable");
    let late = client.execute("SELECT once.succeed('s', 'leased', $1)", &[&id]).await.unwrap_err();
    assert_eq!(late.code().unwrap().code(), "P4010");

    // A rival in the middle of its atomic transaction is not overtaken.
    let rival = db.client().await;
    rival.batch_execute("BEGIN").await.unwrap();
    claim(&rival, "s", "open", "atomic").await;
    assert_eq!(record("open", true).await.0, "processing_active");
    assert_eq!(db.status("s", "open").await, None);
}

async fn resolve(client: &Client, scope: &str, key: &str, claim: Uuid) -> Option<bool> {
    client.query_one("SELECT once.resolve($1, $2, $3)", &[&scope, &key, &claim]).await.unwrap().get(0)
}

#[tokio::test]
async fn resolve_tells_what_became_of_a_commit() {
    let db = TestDb::new().await;
    let (client, lost) = (db.client().await, db.client().await);
    define(&client, "s", r#"{"lease": "1h", "stale": "rerun"}"#).await;
    define(&client, "none", r#"{"retention": "none"}"#).await;

    let atomic = async |key: &str, end: &str| -> Uuid {
        lost.batch_execute("BEGIN").await.unwrap();
        let id: Uuid = claim(&lost, "s", key, "atomic").await.get("claim_id");
        lost.execute("SELECT once.succeed('s', $1, $2)", &[&key, &id]).await.unwrap();
        lost.batch_execute(end).await.unwrap();
        id
    };
    let id = atomic("committed", "COMMIT").await;
    assert_eq!(resolve(&client, "s", "committed", id).await, Some(true));
    assert_eq!(resolve(&client, "s", "committed", Uuid::new_v4()).await, Some(false));
    let id = atomic("not", "ROLLBACK").await;
    assert_eq!(resolve(&client, "s", "not", id).await, Some(false));

    let id: Uuid = claim(&client, "s", "leased", "leased").await.get("claim_id");
    assert_eq!(resolve(&client, "s", "leased", id).await, None, "its completion may be on its way");
    client.execute("SELECT once.succeed('s', 'leased', $1)", &[&id]).await.unwrap();
    assert_eq!(resolve(&client, "s", "leased", id).await, Some(true));
    assert_eq!(resolve(&client, "none", "any", Uuid::new_v4()).await, None, "a row may have come and gone");

    for level in ["REPEATABLE READ", "SERIALIZABLE"] {
        client.batch_execute(&format!("BEGIN ISOLATION LEVEL {level}")).await.unwrap();
        let old = client.query_one("SELECT once.resolve('s', 'committed', $1)", &[&id]).await.unwrap_err();
        assert_eq!(old.code().unwrap().code(), "25001");
        client.batch_execute("ROLLBACK").await.unwrap();
    }
}

#[tokio::test]
async fn resolve_waits_for_the_lost_transaction() {
    let db = TestDb::new().await;
    let (client, lost, observer) = (db.client().await, db.client().await, db.client().await);
    define(&client, "s", "{}").await;
    for (key, end, expected) in [("commits", "COMMIT", true), ("rolls back", "ROLLBACK", false)] {
        lost.batch_execute("BEGIN").await.unwrap();
        let id: Uuid = claim(&lost, "s", key, "atomic").await.get("claim_id");
        lost.execute("SELECT once.succeed('s', $1, $2)", &[&key, &id]).await.unwrap();
        let (told, ()) = tokio::join!(resolve(&client, "s", key, id), async {
            lock_waiters(&observer, 1).await;
            lost.batch_execute(end).await.unwrap();
        });
        assert_eq!(told, Some(expected), "{key}");
    }
    // One that stays open is not decided, and lock_timeout is as it was.
    lost.batch_execute("BEGIN").await.unwrap();
    let id: Uuid = claim(&lost, "s", "open", "atomic").await.get("claim_id");
    client.batch_execute("SET lock_timeout = '7s'").await.unwrap();
    let sql = "SELECT once.resolve('s', 'open', $1, '10 milliseconds')";
    let open = client.query_one(sql, &[&id]).await.unwrap_err();
    assert_eq!(open.code().unwrap().code(), "55P03");
    client.batch_execute("BEGIN").await.unwrap();
    assert_eq!(resolve(&client, "s", "commits", id).await, Some(false));
    assert_eq!(client.query_one("SHOW lock_timeout", &[]).await.unwrap().get::<_, String>(0), "7s");
    client.batch_execute("COMMIT").await.unwrap();
}

#[tokio::test]
async fn refusing_and_bounded_waiting_leave_nothing_behind() {
    let db = TestDb::new().await;
    let (client, rival) = (db.client().await, db.client().await);
    define(&client, "wait", r#"{"wait_max": "20ms"}"#).await;
    define(&client, "refuse", r#"{"in_progress": "refuse"}"#).await;
    define(&client, "status", r#"{"in_progress": "status"}"#).await;
    define(&client, "full", r#"{"wait_max": "5m", "waiters_max": 0}"#).await;
    rival.batch_execute("BEGIN").await.unwrap();
    for scope in ["wait", "refuse", "status", "full"] {
        claim(&rival, scope, "key", "atomic").await;
        client.batch_execute("SET lock_timeout = '7s'; BEGIN").await.unwrap();
        let sql = "SELECT kind, claim_id, retry_after_ms FROM once.claim($1, 'key', sha256('x'))";
        let row =
            tokio::time::timeout(Duration::from_secs(20), client.query_one(sql, &[&scope])).await.unwrap().unwrap();
        assert_eq!((row.get(0), row.get(1), row.get(2)), ("processing_active", None::<Uuid>, 1000_i64), "{scope}");
        let kept = "SELECT current_setting('lock_timeout'), (SELECT count(*) FROM pg_locks
            WHERE locktype = 'advisory' AND pid = pg_backend_pid())";
        let row = client.query_one(kept, &[]).await.unwrap();
        assert_eq!((row.get(0), row.get(1)), ("7s", 0_i64), "{scope}: nothing stays behind");
        client.batch_execute("COMMIT").await.unwrap();
    }
}

#[tokio::test]
async fn recover_sorts_what_is_over_and_nothing_else() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute(
            "CREATE FUNCTION public.verdict(key text) RETURNS jsonb LANGUAGE plpgsql AS $$ BEGIN
                 IF key = 'raises' THEN RAISE EXCEPTION 'broken'; END IF;
                 RETURN jsonb_build_object('verdict', key, 'response_code', CASE key WHEN 'nonsense' THEN 'x' END);
             END $$",
        )
        .await
        .unwrap();
    define(&client, "rerun", r#"{"stale": "rerun", "lease": "1h"}"#).await;
    define(&client, "once", r#"{"stale": "rerun", "lease": "1h", "attempts_max": 1}"#).await;
    define(&client, "hold", r#"{"stale": "hold", "lease": "1h"}"#).await;
    define(&client, "probe", r#"{"stale": "probe", "probe": "public.verdict", "lease": "1h"}"#).await;
    define(&client, "live", r#"{"stale": "rerun", "lease": "24h"}"#).await;
    let expected = [
        ("rerun", "a", "safe_to_retry", "failed_retryable"),
        ("once", "a", "abandoned", "failed_final"),
        ("hold", "a", "manual_review", "uncertain"),
        ("probe", "succeeded", "already_succeeded", "succeeded"),
        ("probe", "not_done", "safe_to_retry", "failed_retryable"),
        ("probe", "raises", "manual_review", "uncertain"), // one broken answer does not stop the others
        ("probe", "unknown", "manual_review", "uncertain"),
    ];
    let mut owners = Vec::new();
    for (scope, key, ..) in expected {
        owners.push(claim(&client, scope, key, "leased").await.get::<_, Uuid>("claim_id"));
    }
    claim(&client, "live", "a", "leased").await;
    let before = checksum(&client).await;
    assert!(client.query("SELECT * FROM once.recover(100)", &[]).await.unwrap().is_empty(), "no lease is over");
    assert_eq!(checksum(&client).await, before);

    db.travel(2 * HOUR).await;
    let stale = "SELECT count(*) FROM once.stale_claims";
    assert_eq!(client.query_one(stale, &[]).await.unwrap().get::<_, i64>(0), 7);
    // An owner that is completing holds its row: it is left alone.
    let owner = db.client().await;
    owner.batch_execute("BEGIN").await.unwrap();
    owner.execute("SELECT once.succeed('rerun', 'a', $1)", &[&owners[0]]).await.unwrap();
    let mut sorted = Vec::new();
    for limit in [0, 2, 100, 100] {
        let rows = client.query("SELECT scope, key, class FROM once.recover($1, 'robot')", &[&limit]).await.unwrap();
        assert!(rows.len() <= usize::try_from(limit).unwrap());
        sorted
            .extend(rows.iter().map(|row| (row.get::<_, String>(0), row.get::<_, String>(1), row.get::<_, String>(2))));
    }
    owner.batch_execute("ROLLBACK").await.unwrap();
    let rest = client.query("SELECT scope, key, class FROM once.recover(100, 'robot')", &[]).await.unwrap();
    assert_eq!(rest.len(), 1, "the owner gave up");
    sorted.extend(rest.iter().map(|row| (row.get(0), row.get(1), row.get(2))));
    for ((scope, key, class, status), owner) in expected.into_iter().zip(owners) {
        assert!(sorted.contains(&(scope.into(), key.into(), class.into())), "{scope} {key}: {sorted:?}");
        assert_eq!(db.status(scope, key).await.as_deref(), Some(status), "{scope} {key}");
        let late = client.execute("SELECT once.succeed($1, $2, $3)", &[&scope, &key, &owner]).await.unwrap_err();
        assert_eq!(late.code().unwrap().code(), "P4010", "{scope} {key}: its owner comes back");
    }
    assert_eq!(sorted.len(), 7, "each once");
    assert_eq!(db.status("live", "a").await.as_deref(), Some("processing"));
    let uncertain = "SELECT count(*) FROM once.uncertain";
    assert_eq!(client.query_one(uncertain, &[]).await.unwrap().get::<_, i64>(0), 3);
    let audited = "SELECT count(*) FROM once.audit_trail WHERE actor = 'robot' AND from_claim <> to_claim";
    assert_eq!(client.query_one(audited, &[]).await.unwrap().get::<_, i64>(0), 7);
}

/// How long a claim waited stands beside its answer, for whoever measures; one that did not wait says nothing.
#[tokio::test]
async fn a_wait_is_told_beside_the_answer() {
    const SQL: &str = "SELECT c.kind, c.claim_id, nullif(current_setting('once.waited_ms', true), '')::bigint
        FROM once.claim('waited', 'k', sha256('x'), 'atomic') c";
    let db = TestDb::new().await;
    let (first, second, observer) = (db.client().await, db.client().await, db.client().await);
    first.batch_execute("BEGIN").await.unwrap();
    let row = first.query_one(SQL, &[]).await.unwrap();
    assert_eq!((row.get::<_, &str>(0), row.get::<_, Option<i64>>(2)), ("new_claim", None));
    let waiting = tokio::spawn(async move {
        let row = second.query_one(SQL, &[]).await.unwrap();
        let told = (row.get::<_, String>(0), row.get::<_, Option<i64>>(2).is_some());
        let row = second.query_one(SQL, &[]).await.unwrap();
        (told, row.get::<_, Option<i64>>(2))
    });
    lock_waiters(&observer, 1).await;
    first.execute("SELECT once.succeed('waited', 'k', $1)", &[&row.get::<_, Uuid>(1)]).await.unwrap();
    first.batch_execute("COMMIT").await.unwrap();
    assert_eq!(waiting.await.unwrap(), (("replay_success".to_owned(), true), None), "and it goes with its transaction");
}
