//! An owner that does not know whether its effect happened.

use pgonce_testkit::{eventually, lock_waiters};
use serde_json::json;
use uuid::Uuid;

use crate::rows::{claim, code, database, define, ids, kinds, name, names, renew, succeed, succeed_alone, verdicts};

const DOUBT: &str = "SELECT once.doubt($1, $2, $3, 'upstream_timeout', 'no answer in 30 s')";

#[tokio::test]
async fn the_scopes_policy_decides_at_once() {
    let (_db, client) = database().await;
    client
        .batch_execute(
            "CREATE FUNCTION public.verdict(key text) RETURNS jsonb LANGUAGE sql
                 AS $$ SELECT jsonb_build_object('verdict', key, 'response_code', 201) $$",
        )
        .await
        .unwrap();
    define(&client, "last", json!({"mode": "leased", "stale": "rerun", "attempts_max": 1})).await;
    define(&client, "probe", json!({"mode": "leased", "stale": "probe", "probe": "public.verdict"})).await;
    define(&client, "terse", json!({"mode": "leased", "response": "error"})).await;
    let expected = [
        ("rerun", "k", "failed_retryable", "safe_to_retry", Some("upstream_timeout"), "retryable_failure"),
        ("last", "k", "failed_final", "abandoned", Some("abandoned"), "final_failure"),
        ("s", "k", "uncertain", "manual_review", Some("upstream_timeout"), "uncertain"),
        ("terse", "k", "uncertain", "manual_review", Some("upstream_timeout"), "uncertain"),
        ("probe", "succeeded", "succeeded", "already_succeeded", None, "replay_success"),
        ("probe", "not_done", "failed_retryable", "safe_to_retry", Some("upstream_timeout"), "retryable_failure"),
        ("probe", "unknown", "uncertain", "manual_review", Some("upstream_timeout"), "uncertain"),
    ];
    for (scope, key, status, class, failure, kind) in expected {
        let (intent, mine) = (vec![name(scope, key)], ids(1));
        claim(&client, &intent, &mine).await;
        let told: String = client.query_one(DOUBT, &[&scope, &key, &mine[0]]).await.unwrap().get(0);
        assert_eq!(told, status, "{scope} {key}");
        let sql = "SELECT i.status::text, i.failure_code, i.failure_message, a.actor, a.action, a.reason, a.from_claim, a.to_claim, i.claim_id
            FROM once.intent i JOIN once.audit a USING (tenant, scope, key) WHERE i.scope = $1 AND i.key = $2";
        let row = client.query_one(sql, &[&scope, &key]).await.unwrap();
        assert_eq!((row.get(0), row.get(1)), (status, failure), "{scope} {key}");
        let message: Option<&str> = row.get(2);
        match (failure, scope) {
            (Some("abandoned"), _) => assert!(message.unwrap().ends_with("upstream_timeout: no answer in 30 s")),
            (Some(_), "terse") => assert_eq!(message, None, "its policy keeps codes only"),
            (Some(_), _) => assert_eq!(message, Some("no answer in 30 s")),
            (None, _) => assert_eq!(message, None),
        }
        assert_eq!((row.get::<_, &str>(3), row.get::<_, &str>(4)), ("me", class));
        assert!(row.get::<_, &str>(5).starts_with("doubt: upstream_timeout"), "{scope} {key}");
        let (from, to, current): (Uuid, Uuid, Uuid) = (row.get(6), row.get(7), row.get(8));
        assert!(from == mine[0] && to == current && to != mine[0], "the claim id is spent");

        // The work comes back with an outcome after all: it must not get through, by any way.
        let late = succeed_alone(&client, &intent[0], mine[0], "late").await.unwrap_err();
        assert_eq!(code(&late), "P4010", "{scope} {key}");
        assert_eq!(verdicts(&succeed(&client, &intent, &mine, &[crate::rows::answer("late")]).await), ["lost"]);
        assert_eq!(verdicts(&renew(&client, &intent, &mine, None).await), ["lost"]);
        let again = client.query_one(DOUBT, &[&scope, &key, &mine[0]]).await.unwrap_err();
        assert_eq!(code(&again), "P4011", "{scope} {key}");
        assert_eq!(kinds(&claim(&client, &intent, &ids(1)).await), [kind], "{scope} {key}");
    }
}

#[tokio::test]
async fn only_the_owner_may_doubt() {
    let (_db, client) = database().await;
    let (intent, mine) = (names("s", &["k"]), ids(1));
    let refused = async |key: &str, id: Uuid| code(&client.query_one(DOUBT, &[&"s", &key, &id]).await.unwrap_err());
    assert_eq!(refused("k", mine[0]).await, "P4011", "nothing is there");
    claim(&client, &intent, &mine).await;
    let before = pgonce_testkit::checksum(&client).await;
    assert_eq!(refused("k", Uuid::new_v4()).await, "P4011");
    assert_eq!(refused("elsewhere", mine[0]).await, "P4011");
    assert_eq!(pgonce_testkit::checksum(&client).await, before);
    // What is recorded under the claim is no doubt, and told.
    succeed_alone(&client, &intent[0], mine[0], "done").await.unwrap();
    let before = pgonce_testkit::checksum(&client).await;
    assert_eq!(client.query_one(DOUBT, &[&"s", &"k", &mine[0]]).await.unwrap().get::<_, &str>(0), "succeeded");
    assert_eq!(pgonce_testkit::checksum(&client).await, before);
}

/// The work's own completion and its owner's doubt, at the same time: the row's lock puts one after the other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn doubt_and_completion_come_one_after_the_other() {
    let (db, observer) = database().await;
    for (key, end, status) in [("commits", "COMMIT", "succeeded"), ("rolls back", "ROLLBACK", "uncertain")] {
        let (work, owner) = (db.client().await, db.client().await);
        let (intent, mine) = (names("s", &[key]), ids(1));
        claim(&owner, &intent, &mine).await;
        work.batch_execute("BEGIN").await.unwrap();
        succeed_alone(&work, &intent[0], mine[0], "the work's").await.unwrap();
        let (told, ()) = tokio::join!(
            async { owner.query_one(DOUBT, &[&"s", &key, &mine[0]]).await.unwrap().get::<_, String>(0) },
            async {
                lock_waiters(&observer, 1).await;
                work.batch_execute(end).await.unwrap();
            }
        );
        assert_eq!(told, status, "{key}");
        let status = if status == "succeeded" { "replay_success" } else { "uncertain" };
        assert_eq!(kinds(&claim(&owner, &intent, &ids(1)).await), [status]);
    }
    // Doubt first: the work's completion waits for it, and raises.
    let (work, owner) = (db.client().await, db.client().await);
    let (intent, mine) = (names("rerun", &["doubted"]), ids(1));
    claim(&owner, &intent, &mine).await;
    owner.batch_execute("BEGIN").await.unwrap();
    owner.query_one(DOUBT, &[&"rerun", &"doubted", &mine[0]]).await.unwrap();
    let (late, ()) = tokio::join!(succeed_alone(&work, &intent[0], mine[0], "late"), async {
        lock_waiters(&observer, 1).await;
        owner.batch_execute("COMMIT").await.unwrap();
    });
    assert_eq!(code(&late.unwrap_err()), "P4010");
    // The refused transaction may hold the row for a moment yet, and nobody waits for it.
    eventually("it can be claimed again", async || {
        kinds(&claim(&owner, &intent, &ids(1)).await) == ["retryable_failure"]
    })
    .await;
}
