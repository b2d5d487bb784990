//! What goes, when, and what stays; and what an intent costs while it is there.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on should stop, loudly")]

use std::time::Duration;

use pgonce_testkit::{TestDb, checksum, cluster, lock_waiters};
use serde_json::Value;
use tokio_postgres::Client;
use uuid::Uuid;

const DAY: Duration = Duration::from_secs(86_400);

/// One intent with an outcome, made in one transaction.
async fn make(client: &Client, scope: &str, key: &str, outcome: &str) {
    let sql = match outcome {
        "succeeded" => {
            "SELECT once.succeed($1, $2, c.claim_id, p_response_body => convert_to($2, 'UTF8'), p_response_code => 200)"
        }
        "retryable" => "SELECT once.fail($1, $2, c.claim_id, true, 'code')",
        "final" => "SELECT once.fail($1, $2, c.claim_id, false, 'code')",
        _ => "SELECT c.claim_id",
    };
    let mode = if outcome == "processing" { "leased" } else { "atomic" };
    let sql = format!("{sql} FROM once.claim($1, $2, sha256('x'), p_mode => '{mode}', p_wait => '0') c");
    assert_eq!(client.query_typed(&sql, &[(&scope, TEXT), (&key, TEXT)]).await.unwrap().len(), 1);
}

const TEXT: tokio_postgres::types::Type = tokio_postgres::types::Type::TEXT;

async fn define(client: &Client, scope: &str, policy: &str) {
    client.batch_execute(&format!("SELECT once.define_scope('{scope}', '{policy}')")).await.unwrap();
}

async fn purge(client: &Client, limit: i32) -> i64 {
    client.query_one("SELECT once.purge($1)", &[&limit]).await.unwrap().get(0)
}

async fn keys(client: &Client) -> Vec<String> {
    let sql = "SELECT key FROM once.intents ORDER BY key COLLATE \"C\"";
    client.query(sql, &[]).await.unwrap().iter().map(|row| row.get(0)).collect()
}

async fn claim(client: &Client, scope: &str, key: &str, mode: &str) -> String {
    let sql =
        "SELECT to_jsonb(c) - 'claim_id' - 'locked_until' - 'fence' - 'expires_at' FROM once.claim($1, $2, sha256('x'),
        p_mode => $3, p_wait => '0') c";
    client.query_one(sql, &[&scope, &key, &mode]).await.unwrap().get::<_, Value>(0).to_string()
}

#[tokio::test]
async fn purge_takes_what_is_over_and_nothing_else() {
    let db = TestDb::new().await;
    let client = db.client().await;
    define(&client, "day", r#"{"retention": "1d", "lease": "1h"}"#).await;
    define(&client, "week", r#"{"retention": "7d"}"#).await;
    define(&client, "permanent", r#"{"retention": "permanent", "tombstone": "1d"}"#).await;
    for scope in ["day", "week", "permanent"] {
        for outcome in ["succeeded", "retryable", "final", "processing"] {
            make(&client, scope, &format!("{scope} {outcome}"), outcome).await;
        }
    }
    make(&client, "day", "day uncertain", "processing").await;
    let before = checksum(&client).await;
    assert_eq!(purge(&client, 1000).await, 0, "nothing is over yet");
    assert_eq!(without_samples(&checksum(&client).await), without_samples(&before));

    db.travel(2 * DAY).await;
    assert!(claim(&client, "day", "day uncertain", "leased").await.contains("\"uncertain\""));
    assert_eq!(purge(&client, 1000).await, 3);
    assert_eq!(purge(&client, 1000).await, 0);
    let left = [
        "day processing",
        "day uncertain",
        "permanent final",
        "permanent processing",
        "permanent retryable",
        "permanent succeeded",
        "week final",
        "week processing",
        "week retryable",
        "week succeeded",
    ];
    assert_eq!(keys(&client).await, left);
    db.travel(36_500 * DAY).await;
    assert_eq!(purge(&client, 1000).await, 3, "the week is over too");
    let for_ever = "SELECT count(*) FROM once.intents WHERE scope = 'permanent'";
    assert_eq!(client.query_one(for_ever, &[]).await.unwrap().get::<_, i64>(0), 4, "a century later");
    assert!(claim(&client, "permanent", "permanent succeeded", "atomic").await.contains("replay_success"));
}

/// A purge notes sizes, also where it takes nothing.
fn without_samples(checksum: &str) -> String {
    checksum.lines().filter(|line| !line.starts_with("once.size_sample")).collect()
}

#[tokio::test]
async fn oldest_first_at_most_so_many_and_locked_ones_later() {
    let db = TestDb::new().await;
    let (client, holder) = (db.client().await, db.client().await);
    // Made in another order than they expire in.
    for (key, days) in [("c", 3), ("a", 1), ("e", 5), ("b", 2), ("d", 4)] {
        define(&client, key, &format!("{{\"retention\": \"{days}d\"}}")).await;
        make(&client, key, key, "succeeded").await;
    }
    db.travel(30 * DAY).await;
    assert_eq!(purge(&client, 0).await, 0);
    assert_eq!(purge(&client, -1).await, 0);
    holder.batch_execute("BEGIN; SELECT 1 FROM once.intent WHERE key = 'a' FOR UPDATE").await.unwrap();
    assert_eq!(purge(&client, 2).await, 2, "the oldest is locked: the next two");
    assert_eq!(keys(&client).await, ["a", "d", "e"]);
    holder.batch_execute("ROLLBACK").await.unwrap();
    assert_eq!(purge(&client, 1).await, 1);
    assert_eq!(keys(&client).await, ["d", "e"], "now it could be had");
    assert_eq!(purge(&client, 1000).await, 2);
}

#[tokio::test]
async fn expired_and_purged_are_the_same_to_a_claim() {
    let (expired, purged) = (TestDb::new().await, TestDb::new().await);
    let mut answers = Vec::new();
    for (db, purges) in [(&expired, false), (&purged, true)] {
        let client = db.client().await;
        define(&client, "day", r#"{"retention": "1d", "lease": "1h", "stale": "rerun"}"#).await;
        define(&client, "tomb", r#"{"retention": "1d", "tombstone": "9d"}"#).await;
        define(&client, "over", r#"{"retention": "1d", "tombstone": "1h"}"#).await;
        define(&client, "none", r#"{"retention": "none"}"#).await;
        define(&client, "gone", r#"{"retention": "none", "tombstone": "9d"}"#).await;
        let scopes = ["day", "tomb", "over", "none", "gone"];
        for scope in scopes {
            for outcome in ["succeeded", "retryable", "final", "processing"] {
                for mode in ["atomic", "leased", "peek", "settle", "record", "other"] {
                    make(&client, scope, &format!("{outcome} {mode}"), outcome).await;
                }
            }
        }
        db.travel(2 * DAY).await;
        if purges {
            assert!(purge(&client, 10_000).await > 0);
        }
        let mut told = Vec::new();
        for scope in scopes {
            for outcome in ["succeeded", "retryable", "final", "processing"] {
                let key = |mode: &str| format!("{outcome} {mode}");
                for mode in ["atomic", "leased"] {
                    told.push((scope, key(mode), claim(&client, scope, &key(mode), mode).await));
                    let rows =
                        "SELECT count(*) || coalesce(max(status), '') FROM once.intents WHERE scope = $1 AND key = $2
                                AND status = 'processing'";
                    let row: String = client.query_one(rows, &[&scope, &key(mode)]).await.unwrap().get(0);
                    told.push((scope, key(mode), row));
                }
                for (mode, call) in [
                    ("peek", "to_jsonb(once.peek($1, $2, sha256('x'))) - 'expires_at' - 'locked_until'"),
                    ("settle", "once.settle($1, $2, 'succeeded', 'a', 'r')"),
                    (
                        "record",
                        "to_jsonb(once.record_failure($1, $2, sha256('x'), true, 'c')) - 'claim_id' - 'expires_at'",
                    ),
                    ("other", "to_jsonb(once.claim($1, $2, sha256('y'), p_wait => '0')) - 'claim_id' - 'locked_until'"),
                ] {
                    let sql = format!("SELECT ({call})::text");
                    let answer = match client.query_typed_one(&sql, &[(&scope, TEXT), (&key(mode), TEXT)]).await {
                        Ok(row) => row.get::<_, Option<String>>(0).unwrap_or_default(),
                        Err(error) => error.code().unwrap().code().to_owned(),
                    };
                    told.push((scope, key(mode), answer));
                }
            }
        }
        answers.push(told);
    }
    let [expired, purged] = answers.try_into().unwrap();
    assert!(expired.iter().any(|(.., told)| told.contains("result_expired")), "the list has tombstones in it");
    for (left, right) in expired.iter().zip(&purged) {
        assert_eq!(left, right);
    }
}

#[tokio::test]
async fn a_tombstone_outlives_the_answer() {
    let db = TestDb::new().await;
    let client = db.client().await;
    define(&client, "tomb", r#"{"retention": "1d", "tombstone": "9d"}"#).await;
    define(&client, "ever", r#"{"retention": "1d", "tombstone": "permanent"}"#).await;
    for scope in ["tomb", "ever"] {
        make(&client, scope, "done", "succeeded").await;
        make(&client, scope, "failed", "final").await; // a failure leaves none: there is nothing to protect
    }
    let stripped =
        "SELECT count(*) FROM once.intents WHERE result_expired AND response_body IS NULL AND response_code IS NULL";
    for purges in [false, true] {
        db.travel(2 * DAY).await;
        if purges {
            assert_eq!(purge(&client, 100).await, 4);
            assert_eq!(client.query_one(stripped, &[]).await.unwrap().get::<_, i64>(0), 2, "answers go, intents stay");
            assert_eq!(purge(&client, 100).await, 0, "once");
        }
        for scope in ["tomb", "ever"] {
            for mode in ["atomic", "leased"] {
                assert!(claim(&client, scope, "done", mode).await.contains("result_expired"));
            }
        }
    }
    db.travel(20 * DAY).await;
    assert!(claim(&client, "ever", "done", "atomic").await.contains("result_expired"));
    client.batch_execute("BEGIN").await.unwrap();
    assert!(claim(&client, "tomb", "done", "atomic").await.contains("new_claim"), "the tombstone is over");
    client.batch_execute("ROLLBACK").await.unwrap();
    assert_eq!(purge(&client, 100).await, 1);
    assert_eq!(keys(&client).await, ["done"]);
    db.travel(36_500 * DAY).await;
    assert_eq!(purge(&client, 100).await, 0);
    assert!(claim(&client, "ever", "done", "atomic").await.contains("result_expired"));
}

/// No window: rivals are still kept apart while one runs, and nothing is remembered afterwards.
#[tokio::test]
async fn retention_none_remembers_nothing() {
    let db = TestDb::new().await;
    let (client, rival) = (db.client().await, db.client().await);
    define(&client, "none", r#"{"retention": "none"}"#).await;
    for _ in 0..3 {
        make(&client, "none", "key", "succeeded").await;
    }
    client.batch_execute("BEGIN").await.unwrap();
    assert!(claim(&client, "none", "key", "atomic").await.contains("new_claim"));
    assert!(claim(&rival, "none", "key", "atomic").await.contains("processing_active"));
    client.batch_execute("ROLLBACK").await.unwrap();
    assert_eq!(purge(&client, 10).await, 1);
    assert!(keys(&client).await.is_empty());
}

#[tokio::test]
async fn what_is_archived_is_complete() {
    let db = TestDb::new().await;
    let client = db.client().await;
    define(&client, "day", r#"{"retention": "1d"}"#).await;
    define(&client, "tomb", r#"{"retention": "1d", "tombstone": "9d"}"#).await;
    let every_byte: Vec<u8> = (0..=255).collect();
    for scope in ["day", "tomb"] {
        let sql = "SELECT once.succeed($1, 'bytes', c.claim_id, p_response_body => $2, p_response_code => 201,
            p_response_headers => '{\"a\": [1, \"é\"]}', p_result_type => 't', p_result_id => 'i', p_tenant => 'acme')
            FROM once.claim($1, 'bytes', sha256('x'), p_tenant => 'acme') c";
        client.query_typed(sql, &[(&scope, TEXT), (&every_byte, tokio_postgres::types::Type::BYTEA)]).await.unwrap();
        make(&client, scope, "failed", "final").await;
    }
    let rows = "SELECT to_jsonb(i) FROM once.intent i ORDER BY scope, key";
    let before: Vec<Value> = client.query(rows, &[]).await.unwrap().iter().map(|row| row.get(0)).collect();
    db.travel(2 * DAY).await;
    assert_eq!(client.query_one("SELECT once.purge(10, p_archive => true)", &[]).await.unwrap().get::<_, i64>(0), 4);
    let history = "SELECT record, tenant, scope, key FROM once.history ORDER BY scope, key";
    let kept = client.query(history, &[]).await.unwrap();
    for (row, was) in kept.iter().zip(&before) {
        assert_eq!(row.get::<_, Value>(0), *was, "the whole row, as it was");
        assert_eq!(
            (was["tenant"].as_str(), was["scope"].as_str(), was["key"].as_str()),
            (row.get(1), row.get(2), row.get(3))
        );
    }
    assert_eq!(kept.len(), before.len());
    let bytes =
        "SELECT (jsonb_populate_record(NULL::once.intent, record)).response_body FROM once.history WHERE key = 'bytes'";
    for row in client.query(bytes, &[]).await.unwrap() {
        assert_eq!(row.get::<_, Vec<u8>>(0), every_byte);
    }
    // The tombstone's turn comes later: another month, another partition.
    db.travel(70 * DAY).await;
    assert_eq!(client.query_one("SELECT once.purge(10, true)", &[]).await.unwrap().get::<_, i64>(0), 1);
    let partitions = "SELECT count(*) FROM pg_inherits WHERE inhparent = 'once.intent_history'::regclass";
    assert_eq!(client.query_one(partitions, &[]).await.unwrap().get::<_, i64>(0), 2);
    let public = "SELECT count(*) FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
        WHERE has_table_privilege('once_app', c.oid, 'SELECT') OR c.relowner <> 'once_owner'::regrole";
    assert_eq!(
        client.query_one(public, &[]).await.unwrap().get::<_, i64>(0),
        0,
        "partitions are as private as the rest"
    );
}

/// Sessions print intervals, bytes and times as they like: what is stored does not depend on it.
#[tokio::test]
async fn settings_of_the_session_do_not_matter() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute("SET TimeZone = 'Asia/Kolkata'; SET DateStyle = 'SQL, DMY'; SET bytea_output = 'escape'")
        .await
        .unwrap();
    for style in ["postgres", "postgres_verbose", "sql_standard", "iso_8601"] {
        client.batch_execute(&format!("SET IntervalStyle = '{style}'")).await.unwrap();
        define(&client, style, r#"{"retention": "1 day 2 hours", "tombstone": "1 month 3 days 4 hours"}"#).await;
        make(&client, style, "key", "succeeded").await;
        let kept = "SELECT expires_at = created_at + interval '1 day 2 hours'
            AND tombstone_until = expires_at + interval '1 month 3 days 4 hours' FROM once.intents WHERE scope = $1";
        assert!(client.query_one(kept, &[&style]).await.unwrap().get::<_, bool>(0), "{style}");
    }
    db.travel(2 * DAY).await;
    assert_eq!(client.query_one("SELECT once.purge(10, true)", &[]).await.unwrap().get::<_, i64>(0), 4);
    let bodies = "SELECT DISTINCT record ->> 'response_body' FROM once.history";
    let rows = client.query(bodies, &[]).await.unwrap();
    assert_eq!(rows.iter().map(|row| row.get(0)).collect::<Vec<String>>(), ["\\x6b6579"], "hex, as documented");
    let plain = db.client().await;
    plain.batch_execute("SET TimeZone = 'UTC'").await.unwrap();
    let bounds = "SELECT pg_get_expr(c.relpartbound, c.oid) FROM pg_class c JOIN pg_inherits i ON i.inhrelid = c.oid
        WHERE i.inhparent = 'once.intent_history'::regclass";
    let bound: String = plain.query_one(bounds, &[]).await.unwrap().get(0);
    assert_eq!(bound.matches("-01 00:00:00+00").count(), 2, "a month of UTC: {bound}");
}

#[tokio::test]
async fn a_purge_that_is_rolled_back_loses_nothing() {
    let db = TestDb::new().await;
    let client = db.client().await;
    define(&client, "day", r#"{"retention": "1d"}"#).await;
    for key in ["a", "b", "c"] {
        make(&client, "day", key, "succeeded").await;
    }
    db.travel(2 * DAY).await;
    let before = checksum(&client).await;
    client.batch_execute("BEGIN").await.unwrap();
    let rows = client.query("SELECT * FROM once.purge_rows(2)", &[]).await.unwrap();
    let gone: Vec<Value> = rows.iter().map(|row| row.get(0)).collect();
    assert_eq!(gone.len(), 2);
    assert_eq!(gone[0]["response_body"], "\\x61", "each row as it was, for whoever writes it away first");
    client.batch_execute("ROLLBACK").await.unwrap();
    assert_eq!(checksum(&client).await, before);
}

#[tokio::test]
async fn two_purgers_take_each_row_once() {
    let db = TestDb::new().await;
    let (first, second) = (db.client().await, db.client().await);
    define(&first, "day", r#"{"retention": "1d"}"#).await;
    let fill =
        "SELECT count(once.record_failure('day', 'k' || n, sha256('x'), false, 'c')) FROM generate_series(1, 100) n";
    first.execute(fill, &[]).await.unwrap();
    db.travel(2 * DAY).await;
    let rows = "SELECT r ->> 'key' FROM once.purge_rows(60) r";
    // The second runs while the first has its rows and has not committed: it takes others, and does not wait.
    first.batch_execute("BEGIN").await.unwrap();
    let mut taken: Vec<String> = first.query(rows, &[]).await.unwrap().iter().map(|row| row.get(0)).collect();
    second.batch_execute("SET lock_timeout = '10ms'").await.unwrap();
    taken.extend(second.query(rows, &[]).await.unwrap().iter().map(|row| row.get::<_, String>(0)));
    first.batch_execute("COMMIT").await.unwrap();
    taken.sort();
    taken.dedup();
    assert_eq!(taken.len(), 100);
    assert!(keys(&first).await.is_empty());
}

/// A claim that meets a purge of its row: whichever way it goes, the claim gets an answer (trap 13).
#[tokio::test]
async fn a_claim_waits_out_a_purge() {
    let db = TestDb::new().await;
    let (purger, claimer, observer) = (db.client().await, db.client().await, db.client().await);
    define(&purger, "day", r#"{"retention": "1d", "lease": "1h"}"#).await;
    for end in ["COMMIT", "ROLLBACK"] {
        for mode in ["atomic", "leased"] {
            db.travel(Duration::ZERO).await;
            make(&purger, "day", &format!("{end} {mode}"), "final").await;
            db.travel(2 * DAY).await;
            purger.batch_execute("BEGIN; SELECT once.purge_rows(10)").await.unwrap();
            let key = format!("{end} {mode}");
            let told = claim(&claimer, "day", &key, mode).await;
            assert!(told.contains("processing_active"), "the purger has the row: {told}");
            purger.batch_execute(end).await.unwrap();
            assert!(claim(&claimer, "day", &key, mode).await.contains("new_claim"));
        }
    }
    lock_waiters(&observer, 0).await;
}

#[tokio::test]
async fn sizes_and_growth_are_seen() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let fill =
        "SELECT count(once.record_failure('s', 'k' || n, sha256('x'), false, 'c')) FROM generate_series(1, 500) n";
    purge(&client, 10).await;
    client.execute(fill, &[]).await.unwrap();
    client.batch_execute("ANALYZE once.intent").await.unwrap();
    purge(&client, 10).await;
    let samples = "SELECT count(*) FROM once.growth";
    assert_eq!(client.query_one(samples, &[]).await.unwrap().get::<_, i64>(0), 1, "at most once an hour");
    db.travel(DAY / 12).await;
    purge(&client, 10).await;
    let grown = client
        .query_one("SELECT rows_added, bytes_added FROM once.growth ORDER BY at DESC LIMIT 1", &[])
        .await
        .unwrap();
    assert_eq!(grown.get::<_, i64>(0), 500);
    assert!(grown.get::<_, i64>(1) > 0);
    let size = "SELECT rows_estimated, table_bytes, index_bytes FROM once.sizes WHERE relation = 'intent'";
    let row = client.query_one(size, &[]).await.unwrap();
    assert_eq!(row.get::<_, i64>(0), 500);
    assert!(row.get::<_, i64>(1) > 0 && row.get::<_, i64>(2) > 0);
}

/// On a cluster of its own: nobody else writes WAL there.
#[tokio::test]
async fn a_replay_writes_nothing_at_all() {
    let cluster = tokio::task::spawn_blocking(cluster).await.unwrap();
    let mut client = pgonce::migrate::connect(&cluster.url("postgres")).await.unwrap();
    pgonce::migrate::apply(&mut client, false).await.unwrap();
    define(&client, "s", "{}").await;
    make(&client, "s", "key", "succeeded").await;
    let replays = "DO $$ BEGIN FOR i IN 1 .. 1000 LOOP
        IF (once.claim('s', 'key', sha256('x'))).kind <> 'replay_success' THEN RAISE 'no replay'; END IF;
        END LOOP;
        IF pg_current_xact_id_if_assigned() IS NOT NULL THEN RAISE 'a replay took a transaction id'; END IF;
        IF EXISTS (SELECT 1 FROM pg_locks WHERE locktype = 'advisory') THEN RAISE 'a replay took a lock'; END IF;
        END $$";
    client.batch_execute(replays).await.unwrap(); // hint bits and catalog caches
    client.batch_execute("CHECKPOINT").await.unwrap();
    let lsn =
        async || -> String { client.query_one("SELECT pg_current_wal_insert_lsn()::text", &[]).await.unwrap().get(0) };
    let mut written = Vec::new();
    for _ in 0..20 {
        let before = lsn().await;
        client.batch_execute(replays).await.unwrap();
        let after = lsn().await;
        if before == after {
            return;
        }
        written.push((before, after)); // the background writer or a statistics flush: not every time
    }
    panic!("a thousand replays wrote WAL every time: {written:?}");
}

#[tokio::test]
async fn an_atomic_intent_is_one_row_version() {
    let db = TestDb::new().await;
    let client = db.client().await;
    define(&client, "s", "{}").await;
    client.batch_execute("BEGIN").await.unwrap();
    let id: Uuid = client.query_one("SELECT (once.claim('s', 'key', sha256('x'))).claim_id", &[]).await.unwrap().get(0);
    let writes =
        "SELECT n_tup_ins, n_tup_upd, n_tup_del FROM pg_stat_xact_all_tables WHERE relid = 'once.intent'::regclass";
    let counted = async || -> (i64, i64, i64) {
        let row = client.query_one(writes, &[]).await.unwrap();
        (row.get(0), row.get(1), row.get(2))
    };
    assert_eq!(counted().await, (0, 0, 0), "the claim writes nothing");
    client.execute("SELECT once.succeed('s', 'key', $1)", &[&id]).await.unwrap();
    assert_eq!(counted().await, (1, 0, 0), "the outcome is the row's first and only version");
    client.batch_execute("COMMIT").await.unwrap();
    let place = "SELECT ctid::text FROM once.intent WHERE key = 'key'";
    assert_eq!(client.query_one(place, &[]).await.unwrap().get::<_, String>(0), "(0,1)");
}
