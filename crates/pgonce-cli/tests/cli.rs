//! The operators' verbs, by the real binary, on a real database.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod common;

use std::io::Read as _;
use std::path::Path;
use std::process::{Command, Stdio};

use common::{command, pgonce, temp_dir};
use pgonce_testkit::TestDb;
use serde_json::Value;
use tokio_postgres::Client;

/// Succeeds an intent, with a response.
async fn succeed(client: &Client, scope: &str, key: &str, body: &[u8]) {
    let sql = "WITH c AS MATERIALIZED (SELECT (once.claim($1, $2, once.fingerprint_bytes($3))).claim_id AS id)
        SELECT once.succeed(p_scope => $1, p_key => $2, p_claim_id => c.id, p_response_body => $3, p_response_code => 201,
            p_result_type => 'order', p_result_id => 'o-1') FROM c";
    client.execute(sql, &[&scope, &key, &body]).await.unwrap();
}

/// Leaves a leased claim whose lease is over.
async fn go_stale(client: &Client, scope: &str, key: &str) {
    let sql = "SELECT once.claim(p_scope => $1, p_key => $2, p_fingerprint => once.fingerprint_bytes(''), p_mode => 'leased')";
    client.execute(sql, &[&scope, &key]).await.unwrap();
    let sql = "UPDATE once.intent SET locked_until = now() - interval '1 hour' WHERE scope = $1 AND key = $2";
    assert_eq!(client.execute(sql, &[&scope, &key]).await.unwrap(), 1);
}

async fn expire_all(client: &Client, ago: &str) {
    let sql = format!("UPDATE once.intent SET expires_at = now() - interval '{ago}' WHERE expires_at IS NOT NULL");
    client.batch_execute(&sql).await.unwrap();
}

async fn count(client: &Client, table: &str) -> i64 {
    client.query_one(&format!("SELECT count(*) FROM {table}"), &[]).await.unwrap().get(0)
}

/// A database without the schema, beside the test's own.
async fn empty_database(db: &TestDb) -> String {
    let name = format!("{}_empty", db.name());
    db.client().await.batch_execute(&format!("CREATE DATABASE {name} TEMPLATE template0")).await.unwrap();
    db.direct_url().replace(db.name(), &name)
}

/// The findings of one check.
fn findings(report: &Value, check: &str) -> Vec<(String, String)> {
    let all = report.as_array().unwrap().iter().filter(|finding| finding["check"] == check);
    all.map(|finding| (finding["level"].as_str().unwrap().to_owned(), finding["what"].as_str().unwrap().to_owned()))
        .collect()
}

fn doctor(url: &str) -> (i32, Value) {
    let ran = pgonce(url, &["doctor", "--json"]);
    (ran.code, ran.json())
}

#[tokio::test(flavor = "multi_thread")]
async fn migrate_shows_tries_and_applies() {
    let db = TestDb::new().await;
    let url = empty_database(&db).await;
    let status = pgonce(&url, &["migrate", "--status"]).done();
    assert!(status.stdout.starts_with("VERSION  NAME"), "{status:#?}");
    assert!(status.stdout.contains("pending") && status.stderr.contains("pgonce migrate"), "{status:#?}");

    let tried = pgonce(&url, &["migrate", "--dry-run"]).done();
    assert!(tried.stdout.contains("would apply 0001_intents"), "{tried:#?}");
    assert_eq!(pgonce(&url, &["migrate", "--status", "--json"]).done().json()[0]["state"], "pending", "rolled back");

    assert!(pgonce(&url, &["migrate"]).done().stdout.contains("applied 0001_intents"));
    assert_eq!(pgonce(&url, &["--json", "migrate", "--status"]).done().json()[0]["state"], "applied");
    let again = pgonce(&url, &["migrate", "--json"]).done().json();
    assert_eq!(again["applied"], serde_json::json!([]));
    assert!(again["functions"].as_u64() > Some(40));
    assert_eq!(doctor(&url).0, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn intents_are_listed_and_shown() {
    let db = TestDb::new().await;
    let client = db.client().await;
    succeed(&client, "create_order", "checkout-1", "{\"größe\": 1}".as_bytes()).await;
    succeed(&client, "create_order", "checkout-2", &[0xff, 0x00]).await;
    succeed(&client, "send_mail", "checkout-2", "x".repeat(3000).as_bytes()).await;
    let url = db.direct_url();

    let list = pgonce(url, &["intents", "list"]).done();
    assert_eq!(list.stdout.lines().count(), 4, "{list:#?}");
    let starts: Vec<_> = list.stdout.lines().map(|line| line.chars().count() >= 60).collect();
    assert!(list.stdout.starts_with("SCOPE         KEY         STATUS") && !starts.contains(&false), "{list:#?}");
    let listed = pgonce(url, &["intents", "list", "--scope", "create_order", "--json", "--limit", "1"]).done().json();
    assert_eq!(listed.as_array().unwrap().len(), 1);
    assert_eq!(listed[0]["key"], "checkout-2", "newest first");
    assert!(pgonce(url, &["intents", "list", "--status", "uncertain"]).done().stderr.contains("No intent"));
    let none = pgonce(url, &["intents", "list", "--tenant", "t", "--json"]).done().json();
    assert_eq!(none, serde_json::json!([]));

    let shown = pgonce(url, &["intents", "show", "checkout-1"]).done();
    assert!(shown.stdout.contains("status            succeeded"), "{shown:#?}");
    assert!(shown.stdout.contains("{\"größe\": 1}"), "{shown:#?}");
    let several = pgonce(url, &["intents", "show", "checkout-2"]).failed();
    assert!(several.stderr.contains("--scope") && several.stdout.contains("send_mail"), "{several:#?}");
    let hex = pgonce(url, &["intents", "show", "checkout-2", "--scope", "create_order", "--json"]).done().json();
    assert_eq!(hex["response_body"]["text"], "ff00");
    assert_eq!(hex["fingerprint"].as_str().unwrap().len(), 64);
    let cut = pgonce(url, &["intents", "show", "checkout-2", "--scope", "send_mail", "--tenant", ""]).done();
    assert!(cut.stdout.contains("--full") && cut.stdout.len() < 2500, "{cut:#?}");
    let full = pgonce(url, &["intents", "show", "checkout-2", "--scope", "send_mail", "--full"]).done();
    assert!(full.stdout.contains(&"x".repeat(3000)));
    assert!(pgonce(url, &["intents", "show", "nobody"]).failed().stderr.contains("never claimed"));
}

/// A table that is too large to be sorted is listed and sampled by its index.
#[tokio::test(flavor = "multi_thread")]
async fn large_tables_are_not_sorted() {
    let db = TestDb::new().await;
    let client = db.client().await;
    succeed(&client, "s", "first", b"x").await;
    succeed(&client, "s", "second", b"x").await;
    let sql = "UPDATE pg_catalog.pg_class SET reltuples = 1e8 WHERE oid = 'once.intent'::regclass";
    client.batch_execute(sql).await.unwrap();
    let list = pgonce(db.direct_url(), &["intents", "list", "--limit", "1", "--status", "succeeded"]).done();
    assert!(list.stderr.contains("Many intents") && list.stdout.contains("second"), "{list:#?}");
    let (code, report) = doctor(db.direct_url());
    assert_eq!((code, findings(&report, "keys")[0].0.as_str()), (0, "ok"));
}

#[tokio::test(flavor = "multi_thread")]
async fn stale_claims_are_recovered_and_uncertain_ones_settled() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let sql = r#"SELECT once.define_scope('again', '{"mode": "leased", "stale": "rerun"}')"#;
    client.batch_execute(sql).await.unwrap();
    go_stale(&client, "again", "k-again").await;
    for n in 0..3 {
        go_stale(&client, "pay", &format!("k-{n}")).await;
    }
    let url = db.direct_url();
    assert_eq!(pgonce(url, &["intents", "list", "--stale", "--json"]).done().json().as_array().unwrap().len(), 4);
    assert!(pgonce(url, &["intents", "list", "--stale"]).done().stdout.contains("OVERDUE"));

    let one = pgonce(url, &["intents", "recover", "--limit", "1"]).done();
    assert!(one.stdout.contains("safe_to_retry") && one.stderr.contains("1 sorted"), "{one:#?}");
    let rest = pgonce(url, &["intents", "recover", "--json"]).done().json();
    assert_eq!(rest.as_array().unwrap().len(), 3);
    assert_eq!(rest[0]["class"], "manual_review");
    assert_eq!(pgonce(url, &["intents", "recover", "--json"]).done().json(), serde_json::json!([]));
    assert_eq!(pgonce(url, &["intents", "list", "--uncertain", "--json"]).done().json().as_array().unwrap().len(), 3);

    let dir = temp_dir();
    let body = dir.path().join("body");
    std::fs::write(&body, b"\xfe raw").unwrap();
    let settle = ["intents", "settle", "k-0", "--scope", "pay", "--verdict", "succeeded", "--reason", "asked the bank"];
    let with_result = [
        "--result-type",
        "payment",
        "--result-id",
        "p-9",
        "--response-code",
        "200",
        "--response-body",
        body.to_str().unwrap(),
    ];
    let settled = pgonce(url, &[&settle[..], &with_result[..]].concat()).done();
    assert!(settled.stdout.starts_with("settled: succeeded"), "{settled:#?}");
    let again = pgonce(url, &settle).failed();
    assert!(again.stderr.contains("It has its outcome already") && again.stderr.contains("P4013"), "{again:#?}");
    let shown = pgonce(url, &["intents", "show", "k-0", "--json"]).done().json();
    assert_eq!((&shown["result_id"], &shown["response_body"]["text"]), (&"p-9".into(), &"fe20726177".into()));
    let last = shown["audit"].as_array().unwrap().last().unwrap();
    assert_eq!((&last["actor"], &last["reason"]), (&"tester".into(), &"asked the bank".into()));
    assert!(pgonce(url, &["intents", "show", "k-0"]).done().stdout.contains("asked the bank"));

    let retry = [
        "intents",
        "settle",
        "k-1",
        "--scope",
        "pay",
        "--verdict",
        "retry",
        "--reason",
        "r",
        "--actor",
        "ann",
        "--json",
    ];
    let retried = pgonce(url, &retry).done().json();
    assert_eq!((&retried["status"], &retried["actor"]), (&"failed_retryable".into(), &"ann".into()));
    let missing = ["intents", "settle", "none", "--scope", "pay", "--verdict", "failed", "--reason", "r"];
    assert!(pgonce(url, &missing).failed().stderr.contains("No such intent"));
    go_stale(&client, "pay", "k-1").await;
    let retried = pgonce(url, &["intents", "list", "--retried"]).done();
    assert!(retried.stdout.contains("k-1") && retried.stdout.lines().count() == 2, "{retried:#?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn purge_archives_into_the_history() {
    let db = TestDb::new().await;
    let client = db.client().await;
    for n in 0..5 {
        succeed(&client, "s", &format!("k-{n}"), b"body").await;
    }
    let url = db.direct_url();
    assert!(pgonce(url, &["purge"]).done().stdout.contains("purged 0 rows"), "nothing is due");
    expire_all(&client, "1 hour").await;
    assert!(pgonce(url, &["purge", "--limit", "1"]).done().stdout.contains("purged 1 rows"));
    let purged = pgonce(url, &["purge", "--batch", "2", "--archive", "history", "--json"]).done().json();
    assert_eq!(purged["purged"], 4);
    assert_eq!((count(&client, "once.intent").await, count(&client, "once.intent_history").await), (0, 4));
    let list = pgonce(url, &["archive", "list", "--json"]).done().json();
    assert_eq!((list.as_array().unwrap().len(), &list[0]["rows"]), (1, &4.into()));
    assert!(pgonce(url, &["archive", "list"]).done().stdout.starts_with("PARTITION"));
    let gone = pgonce(url, &["intents", "show", "k-3"]).failed();
    let archived =
        gone.stdout.contains("body") || pgonce(url, &["intents", "show", "k-0"]).failed().stdout.contains("body");
    assert!(archived && gone.stderr.contains("would run again"), "{gone:#?}");
}

/// Every line of every archive in the folder.
fn archived_lines(dir: &Path) -> Vec<Value> {
    let mut lines = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        assert!(path.to_str().unwrap().ends_with(".jsonl.gz"), "only finished files: {path:?}");
        let mut text = String::new();
        flate2::read::GzDecoder::new(std::fs::File::open(path).unwrap()).read_to_string(&mut text).unwrap();
        lines.extend(text.lines().map(|line| serde_json::from_str(line).unwrap()));
    }
    lines
}

#[tokio::test(flavor = "multi_thread")]
async fn purge_archives_into_files() {
    let db = TestDb::new().await;
    let client = db.client().await;
    for n in 0..7 {
        succeed(&client, "s", &format!("k-{n}"), format!("body {n}").as_bytes()).await;
    }
    expire_all(&client, "1 hour").await;
    let rows = client.query("SELECT to_jsonb(i) FROM once.intent i ORDER BY key", &[]).await.unwrap();
    let before: Vec<Value> = rows.iter().map(|row| row.get(0)).collect();
    let dir = temp_dir();
    let to = dir.path().join("archive");
    let ran = pgonce(db.direct_url(), &["archive", "--to", to.to_str().unwrap(), "--batch", "3"]).done();
    assert!(ran.stdout.contains("purged 7 rows"), "{ran:#?}");
    assert_eq!(std::fs::read_dir(&to).unwrap().count(), 3, "one file a batch");
    let mut lines = archived_lines(&to);
    lines.sort_by_key(|line| line["key"].to_string());
    assert_eq!(lines, before, "what is in the files is what was in the table");
    assert_eq!(count(&client, "once.intent").await, 0);
}

/// A stop is heeded between two batches: what is begun is finished, the rest is left.
#[tokio::test(flavor = "multi_thread")]
async fn purge_stops_between_two_batches() {
    let db = TestDb::new().await;
    let client = db.client().await;
    for n in 0..3 {
        succeed(&client, "s", &format!("k-{n}"), b"x").await;
    }
    expire_all(&client, "1 hour").await;
    let gate = "CREATE FUNCTION public.gate() RETURNS trigger LANGUAGE plpgsql AS
            'BEGIN PERFORM pg_advisory_xact_lock_shared(42); RETURN OLD; END';
        CREATE TRIGGER gate BEFORE DELETE ON once.intent FOR EACH ROW EXECUTE FUNCTION public.gate();
        SELECT pg_advisory_lock(42)";
    client.batch_execute(gate).await.unwrap();
    let dir = temp_dir();
    let mut purge = command(dir.path());
    purge.env("DATABASE_URL", db.direct_url()).args(["purge", "--batch", "1", "--json"]);
    let purge = purge.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    pgonce_testkit::lock_waiters(&client, 1).await;
    assert!(Command::new("kill").args(["-INT", &purge.id().to_string()]).status().unwrap().success());
    client.batch_execute("SELECT pg_advisory_unlock(42)").await.unwrap();
    let done = common::Ran::from(purge.wait_with_output().unwrap()).done().json();
    assert_eq!((&done["purged"], &done["interrupted"]), (&1.into(), &true.into()));
    assert_eq!(count(&client, "once.intent").await, 2);
}

/// The rows' deletion must not commit before their file is whole: here the commit is what fails.
#[tokio::test(flavor = "multi_thread")]
async fn a_failed_commit_leaves_rows_and_a_file() {
    let db = TestDb::new().await;
    let client = db.client().await;
    succeed(&client, "s", "k", b"body").await;
    expire_all(&client, "1 hour").await;
    let refuse = "CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE ''no''; END';
        CREATE CONSTRAINT TRIGGER refuse AFTER DELETE ON once.intent DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW EXECUTE FUNCTION public.refuse()";
    client.batch_execute(refuse).await.unwrap();
    let dir = temp_dir();
    let ran = pgonce(db.direct_url(), &["purge", "--archive", dir.path().to_str().unwrap()]).failed();
    assert!(ran.stderr.contains("the commit failed") && ran.stderr.contains("harmless"), "{ran:#?}");
    assert_eq!((count(&client, "once.intent").await, archived_lines(dir.path()).len()), (1, 1), "doubled, not lost");
    client.batch_execute("DROP TRIGGER refuse ON once.intent").await.unwrap();
    pgonce(db.direct_url(), &["purge", "--archive", dir.path().to_str().unwrap()]).done();
    assert_eq!((count(&client, "once.intent").await, archived_lines(dir.path()).len()), (0, 2));
}

/// Operators need no more than the role for operators.
#[tokio::test(flavor = "multi_thread")]
async fn an_operator_can_do_all_of_it() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let role = format!("ops_{}", db.name());
    client.batch_execute(&format!("CREATE ROLE {role} LOGIN IN ROLE once_ops")).await.unwrap();
    let url = db.direct_url().replace("postgres@", &format!("{role}@"));
    assert_ne!(url, db.direct_url());
    succeed(&client, "s", "k", b"x").await;
    go_stale(&client, "pay", "k-stale").await;
    let settle = ["intents", "settle", "k-stale", "--scope", "pay", "--verdict", "failed", "--reason", "r"];
    for args in [
        &["migrate", "--status"][..],
        &["intents", "list"],
        &["intents", "show", "k"],
        &["intents", "recover"],
        &settle,
        &["doctor"],
    ] {
        pgonce(&url, args).done();
    }
    expire_all(&client, "1 hour").await;
    assert_eq!(pgonce(&url, &["purge", "--archive", "history", "--json"]).done().json()["purged"], 2);
    assert_eq!(pgonce(&url, &["archive", "list", "--json"]).done().json()[0]["rows"], 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_is_content_with_a_good_database() {
    let db = TestDb::new().await;
    succeed(&db.client().await, "s", "secret-key", b"x").await;
    let ran = pgonce(db.direct_url(), &["doctor"]).done();
    assert!(ran.stdout.contains("ok    drift") && !ran.stdout.contains("secret-key"), "{ran:#?}");
    let (code, report) = doctor(db.direct_url());
    assert_eq!(code, 0);
    let bad =
        report.as_array().unwrap().iter().filter(|finding| finding["level"] == "fail" || finding["level"] == "warn");
    assert_eq!(bad.collect::<Vec<_>>(), Vec::<&Value>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_sees_settings_that_lose_commits() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client.batch_execute(&format!("ALTER DATABASE {} SET synchronous_commit = off", db.name())).await.unwrap();
    let (code, report) = doctor(db.direct_url());
    assert_eq!(code, 1);
    let found = findings(&report, "sync_commit");
    assert!(
        found.iter().any(|(level, what)| level == "fail" && what.contains(&format!("database {}", db.name()))),
        "{found:?}"
    );
    client.batch_execute(&format!("ALTER DATABASE {} RESET synchronous_commit", db.name())).await.unwrap();
    assert_eq!(doctor(db.direct_url()).0, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_sees_what_is_wrong_with_the_schema() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (code, report) = doctor(&empty_database(&db).await);
    assert_eq!((code, findings(&report, "schema")[0].0.as_str()), (1, "fail"));

    client
        .batch_execute(
            "CREATE OR REPLACE FUNCTION once.clock() RETURNS timestamptz LANGUAGE sql VOLATILE AS 'SELECT now()';
             DROP FUNCTION once.try_lock(text, text);
             CREATE FUNCTION once.mine() RETURNS int LANGUAGE sql SECURITY DEFINER AS 'SELECT 1';
             ALTER TABLE once.tally_day SET UNLOGGED",
        )
        .await
        .unwrap();
    let (code, report) = doctor(db.direct_url());
    assert_eq!(code, 1);
    let drift = findings(&report, "drift").into_iter().map(|(_, what)| what).collect::<Vec<_>>().join("; ");
    assert!(
        drift.contains("changed: clock") && drift.contains("missing: try_lock") && drift.contains("once.mine()"),
        "{drift}"
    );
    let privileges = findings(&report, "privileges");
    assert_eq!(privileges.len(), 2, "not pinned, and open to PUBLIC: {privileges:?}");
    assert!(findings(&report, "unlogged")[0].1.contains("tally_day"));
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_sees_what_waits_and_what_is_forgotten_too_soon() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let sql = r#"SELECT once.define_scope('short', '{"mode": "leased", "retention": "5s", "lease": "60s"}')"#;
    client.batch_execute(sql).await.unwrap();
    succeed(&client, "s", "k", b"x").await;
    expire_all(&client, "2 days").await;
    go_stale(&client, "pay", "k").await;
    let (code, report) = doctor(db.direct_url());
    assert_eq!(code, 1);
    assert_eq!(findings(&report, "purge")[0].0, "fail");
    assert_eq!(findings(&report, "stale")[0].0, "warn");
    let retention = findings(&report, "retention");
    assert!(retention.iter().any(|(level, what)| level == "fail" && what.contains("short")), "{retention:?}");
    pgonce(db.direct_url(), &["intents", "recover"]).done();
    pgonce(db.direct_url(), &["purge"]).done();
    let (_, report) = doctor(db.direct_url());
    assert_eq!(findings(&report, "purge")[0].0, "ok");
    assert_eq!(findings(&report, "uncertain")[0].0, "warn");
}

/// The one finding of a check.
#[track_caller]
fn finding(url: &str, check: &str) -> (String, String) {
    let found = findings(&doctor(url).1, check);
    assert_eq!(found.len(), 1, "{check}: {found:?}");
    found.into_iter().next().unwrap()
}

#[track_caller]
fn warns(url: &str, check: &str, words: &str) {
    let (level, what) = finding(url, check);
    assert!(level == "warn" && what.contains(words), "{check}: {level} {what}");
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_sees_an_outbox_that_is_not_at_home() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let url = db.direct_url();
    assert_eq!(finding(url, "outbox_home").0, "ok");
    client.batch_execute("UPDATE once.outbox_home SET database_oid = 1").await.unwrap();
    assert_eq!(finding(url, "outbox_home").0, "ok", "nothing could be passed over: it is at home with its first sink");
    client.batch_execute("SELECT once.open_sink('s'); UPDATE once.outbox_home SET database_oid = 1").await.unwrap();
    let (code, report) = doctor(url);
    let found = findings(&report, "outbox_home");
    assert!(code == 1 && found[0].0 == "fail" && found[0].1.contains("P4070"), "{found:?}");
    let purged = pgonce(url, &["purge", "--json"]).failed();
    assert!(purged.json()["purged"] == 0 && purged.stderr.contains("P4070"), "{purged:#?}");
    pgonce(url, &["outbox", "adopt", "--reason", "restored"]).done();
    assert_eq!(finding(url, "outbox_home").0, "ok");

    let role = format!("ops_{}", db.name());
    client.batch_execute(&format!("CREATE ROLE {role} LOGIN IN ROLE once_ops")).await.unwrap();
    let ops = url.replace("postgres@", &format!("{role}@"));
    assert_eq!(finding(&ops, "outbox_home").0, "info", "what only the owner sees is no alarm");
    let levels = findings(&doctor(&ops).1, "dedup").into_iter().map(|(level, _)| level).collect::<Vec<_>>();
    assert_eq!(levels, ["info", "ok"], "the other horizons are looked at");
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_sees_messages_that_nobody_takes() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let url = db.direct_url();
    assert_eq!(finding(url, "sinks").0, "ok");
    client.batch_execute("SELECT once.emit('orders', 'created', '{}', 'k')").await.unwrap();
    warns(url, "sinks", "no sink");
    client.batch_execute("SELECT once.open_sink('audit')").await.unwrap();
    warns(url, "sinks", "nobody relays to audit: 1 messages wait");
    let live = "INSERT INTO once.relay VALUES ('audit', 'r', clock_timestamp() + interval '1 hour')";
    client.batch_execute(live).await.unwrap();
    assert_eq!(finding(url, "sinks").0, "ok", "somebody is at it");
    client.batch_execute("UPDATE once.outbox SET at = at - interval '11 minutes'").await.unwrap();
    warns(url, "sinks", "audit is behind: 1 messages wait, the oldest for 11 minutes");
    client.batch_execute("SELECT once.disable_sink('audit', '410 Gone')").await.unwrap();
    warns(url, "sinks", "audit is disabled (410 Gone)");
    let held = "INSERT INTO once.held (sink, position, lane, message_id, tenant, lane_key, state, message)
        SELECT 'audit', n, 0, gen_random_uuid(), '', 'k', CASE n WHEN 1 THEN 'parked' ELSE 'behind' END, '{}'
        FROM generate_series(1, 3) n";
    client.batch_execute(held).await.unwrap();
    warns(url, "parked", "audit: 1 messages are parked, 2 wait behind them");
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_sees_an_outbox_that_cannot_turn() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let fill = "INSERT INTO once.outbox (segment, position, xid, at, message_id, tenant, topic, type, payload)
        SELECT s, s::bigint << 40, pg_current_xact_id(), now(), gen_random_uuid(), '', 't', 't', '{}'
        FROM generate_series(0, 14) s";
    client.batch_execute(fill).await.unwrap();
    let (level, what) = finding(db.direct_url(), "outbox_segments");
    assert!(level == "ok" && what.starts_with("15 of 16"), "{what}");
    client.batch_execute(&fill.replace("0, 14", "15, 15")).await.unwrap();
    warns(db.direct_url(), "outbox_segments", "cannot turn");
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_sees_stored_messages_that_stand_still() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let url = db.direct_url();
    let sql = "SELECT once.receive_batch('mailer', 's', ARRAY['a'], ARRAY['1']::bytea[]);
        SELECT once.inbox_fail(t.id, t.claim_id, false, 'no such customer') FROM once.inbox_take('mailer', 'w', 1) t;
        SELECT once.receive_batch('books', 's', ARRAY['a'], ARRAY['1']::bytea[]);
        SELECT once.receive_batch('stock', 's', ARRAY['a'], ARRAY['1']::bytea[], p_entities => ARRAY['e'],
            p_versions => ARRAY[7]::bigint[]);
        UPDATE once.inbox SET state = 'waiting' WHERE consumer = 'stock'";
    client.batch_execute(sql).await.unwrap();
    warns(url, "inbox", "consumer mailer: 1 messages have failed for good");
    client.batch_execute("UPDATE once.inbox SET received_at = received_at - interval '20 minutes'").await.unwrap();
    let found = findings(&doctor(url).1, "inbox");
    let said = |words: &str| found.iter().any(|(level, what)| level == "warn" && what.contains(words));
    assert!(said("consumer stock: 1 messages wait for a version before them, the oldest for 20 minutes"), "{found:?}");
    assert!(said("consumer books: 1 messages are received, the oldest for 20 minutes"), "{found:?}");
    assert_eq!(found.len(), 3, "{found:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_sees_consumers_that_forget_too_soon() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let url = db.direct_url();
    let set = async |sql: &str| client.batch_execute(sql).await.unwrap();
    assert_eq!(finding(url, "dedup").0, "ok", "7 days, and an outbox of 1");
    set(r#"SELECT once.define_consumer('short', '{"retention": "3h"}')"#).await;
    warns(url, "dedup", "consumer short forgets a message after 03:00:00; a message of this outbox that is replayed");
    set("SELECT once.keep_outbox('1 hour')").await;
    assert_eq!(finding(url, "dedup").0, "ok");

    // What is parked may be resumed or sent again whenever somebody finds it.
    set("SELECT once.open_sink('audit');
        INSERT INTO once.held (sink, position, lane, message_id, tenant, lane_key, state, message, held_at)
        VALUES ('audit', 1, 0, gen_random_uuid(), '', 'k', 'parked', '{}', now() - interval '4 hours')")
    .await;
    warns(url, "dedup", "the oldest message that a sink holds back, when it is resumed, up to 4 hours old");
    set("DELETE FROM once.held; SELECT once.receive_batch('mailer', 's', ARRAY['a'], ARRAY['1']::bytea[]);
        SELECT once.inbox_fail(t.id, t.claim_id, false, 'no') FROM once.inbox_take('mailer', 'w', 1) t;
        UPDATE once.inbox SET received_at = now() - interval '5 hours'")
    .await;
    warns(
        url,
        "dedup",
        "the oldest stored message that is parked, when its producer sends it again, up to 5 hours old",
    );
    set("DELETE FROM once.inbox; SELECT once.keep_outbox('1 second')").await;
    assert_eq!(finding(url, "dedup").0, "ok");

    let with_broker = |retention: &str| {
        let ran = pgonce(url, &["doctor", "--json", "--broker-retention", retention]).done();
        findings(&ran.json(), "dedup")
    };
    assert_eq!(with_broker("2h")[0].0, "ok");
    let found = with_broker("10d");
    assert_eq!(found.len(), 2, "the default of 7 days is too short, too: {found:?}");
    assert!(found.iter().all(|(level, what)| level == "warn" && what.contains("the broker still has")), "{found:?}");
    assert_eq!(pgonce(url, &["doctor", "--broker-retention", "soon"]).code, 2);

    set(r#"SELECT once.define_consumer('short', '{"retention": "100s"}')"#).await;
    warns(url, "dedup", "a message that the relay tries again, by its default settings, up to 3 minutes old");
    set(r#"SELECT once.define_consumer('short', '{"retention": "permanent"}')"#).await;
    assert_eq!(finding(url, "dedup").0, "ok");
}

#[tokio::test(flavor = "multi_thread")]
async fn purge_takes_the_inbox_and_old_segments_along() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let url = db.direct_url();
    let sql = "SELECT once.admit('books', 's', n::text, sha256('')) FROM generate_series(1, 5) n;
        UPDATE once.admitted SET at = now() - interval '8 days' WHERE message_id <> '5'";
    client.batch_execute(sql).await.unwrap();
    let archived = pgonce(url, &["archive", "--to", "history", "--json"]).done().json();
    assert_eq!((&archived["purged"], archived.get("inbox_purged")), (&0.into(), None), "cannot be kept, so it stays");
    let first = pgonce(url, &["purge", "--limit", "1"]).done();
    assert!(first.stdout.contains("purged 0 rows\npurged 1 records of the inbox"), "{first:#?}");
    let rest = pgonce(url, &["purge", "--batch", "2", "--json"]).done().json();
    assert_eq!((&rest["purged"], &rest["inbox_purged"], &rest["segments_emptied"]), (&0.into(), &3.into(), &0.into()));
    assert_eq!(count(&client, "once.admitted").await, 1);

    // A segment that every sink is past, and that is older than the retention.
    let sql = "SELECT once.emit('t', 't', '{}'); UPDATE once.outbox SET at = now() - interval '2 days';
        SELECT once.open_sink('audit', p_from_now => true);
        UPDATE once.outbox_home SET rotated_at = now() - interval '1 day'";
    client.batch_execute(sql).await.unwrap();
    assert_eq!(pgonce(url, &["purge", "--json"]).done().json()["segments_emptied"], 0, "the current one: it turns");
    client.batch_execute("UPDATE once.lane SET delivered = pg_current_snapshot()").await.unwrap();
    let emptied = pgonce(url, &["purge"]).done();
    assert!(emptied.stdout.contains("emptied 1 segments of the outbox"), "{emptied:#?}");
    assert_eq!(count(&client, "once.outbox").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_sees_keys_that_name_attempts() {
    let db = TestDb::new().await;
    let sql = "INSERT INTO once.intent (claim_id, created_at, status, attempt_count, tenant, scope, key, fingerprint)
        SELECT gen_random_uuid(), now(), 'succeeded', 1, '', k.scope, k.key, sha256(k.payload::text::bytea) FROM (
            SELECT 'by_time' AS scope, 'order-' || (1763201472 + n) AS key, n AS payload FROM generate_series(1, 30) n
            UNION ALL SELECT 'by_try', gen_random_uuid()::text, (n - 1) / 3 FROM generate_series(1, 30) n
            UNION ALL SELECT 'by_user', (n * 37)::text, n FROM generate_series(1, 30) n
            UNION ALL SELECT 'by_offset', n::text, n FROM generate_series(1, 30) n
            UNION ALL SELECT 'good', gen_random_uuid()::text, n FROM generate_series(1, 30) n) k";
    db.client().await.batch_execute(sql).await.unwrap();
    let (code, report) = doctor(db.direct_url());
    assert_eq!(code, 0, "advice, not a failure");
    let said = findings(&report, "keys").into_iter().map(|(_, what)| what).collect::<Vec<_>>();
    for expected in ["by_time: 30 of 30", "by_try: 30 of 30", "by_user: 30 of 30", "by_offset: 30 of 30"] {
        assert!(said.iter().any(|what| what.contains(expected)), "{expected}: {said:?}");
    }
    assert_eq!(said.len(), 4, "{said:?}");
}

#[test]
fn wrong_use_is_told_apart() {
    let dir = temp_dir();
    let run = |args: &[&str]| common::Ran::from(command(dir.path()).args(args).output().unwrap());
    for args in [
        &["bogus"][..],
        &["intents", "list"],
        &["intents", "list", "--status", "bogus", "--database-url", "postgres://h/d"],
        &["archive", "--database-url", "postgres://h/d"],
        &["up", "--demo-seconds", "5"],
        &["intents", "settle", "k", "--scope", "s", "--verdict", "maybe", "--reason", "r"],
        &["--config", "missing.toml", "doctor"],
    ] {
        let ran = run(args);
        assert_eq!(ran.code, 2, "{args:?}: {ran:#?}");
    }
    std::fs::write(
        dir.path().join("pgonce.toml"),
        "database_url = \"postgres://me:hidden@127.0.0.1:1/d\"\nbogus = 1\n",
    )
    .unwrap();
    let ran = run(&["doctor"]);
    assert!(ran.code == 2 && ran.stderr.contains("line 2") && ran.stderr.contains("bogus"), "{ran:#?}");
    std::fs::write(dir.path().join("pgonce.toml"), "database_url = \"postgres://me:hidden@127.0.0.1:1/d\"\n").unwrap();
    let ran = run(&["doctor"]);
    assert!(ran.code == 1 && ran.stdout.contains("postgres://me@127.0.0.1:1/d"), "{ran:#?}");
    let ran = run(&["intents", "list"]).failed();
    assert!(ran.stderr.contains("error:") && !ran.stderr.contains("hidden"), "{ran:#?}");
}

/// In a container nobody may be $USER: no decision is made in the name of nobody.
#[tokio::test(flavor = "multi_thread")]
async fn a_decision_needs_somebody() {
    let db = TestDb::new().await;
    go_stale(&db.client().await, "s", "k").await;
    let decisions: [&[&str]; 4] = [
        &["intents", "settle", "k", "--scope", "s", "--verdict", "retry", "--reason", "r"],
        &["inbox", "replay", "--consumer", "c", "--reason", "r"],
        &["outbox", "adopt", "--reason", "r"],
        &["outbox", "replay", "--sink", "stdout:", "--reason", "r"],
    ];
    for (args, user) in decisions.iter().flat_map(|args| [None, Some(" ")].map(|user| (args, user))) {
        let dir = temp_dir();
        let mut bare = command(dir.path());
        bare.env("DATABASE_URL", db.direct_url()).env_remove("USER").args(*args);
        if let Some(user) = user {
            bare.env("USER", user);
        }
        let ran = common::Ran::from(bare.output().unwrap());
        assert!(ran.code == 2 && ran.stderr.contains("--actor"), "{args:?} {user:?}: {ran:#?}");
    }
    assert_eq!(count(&db.client().await, "once.audit").await, 0);
    let named = ["intents", "settle", "k", "--scope", "s", "--verdict", "retry", "--reason", "r", "--actor", "anna"];
    pgonce(db.direct_url(), &named).done();
}

/// What the gateway is told is checked before anything is served, and told by its line.
#[test]
fn the_gateway_tells_what_is_wrong_with_its_configuration() {
    let dir = temp_dir();
    let run = |args: &[&str]| -> common::Ran {
        let mut command = command(dir.path());
        command.env("DATABASE_URL", "postgres://127.0.0.1:1/none").arg("gateway").args(args).output().unwrap().into()
    };
    let wrong = |args: &[&str], words: &str| {
        let ran = run(args);
        assert_eq!(ran.code, 2, "{ran:#?}");
        assert!(ran.stderr.contains(words) && !ran.stderr.contains("hunter2"), "{words}: {ran:#?}");
    };
    wrong(&[], "--listen");
    wrong(&["--listen", "127.0.0.1:0"], "--upstream");
    wrong(&["--listen", "127.0.0.1"], "a port");
    wrong(&["--upstream", "localhost:3000"], "scheme, host and port");
    wrong(&["--stale", "never"], "[possible values: rerun, probe, hold]");
    wrong(&["--lease", "2d"], "10ms to 1d");
    wrong(&["--max-body", "0"], "1 byte");
    wrong(&["--tenant-header", "a b"], "name of a header");
    wrong(&["--cache", "http://h"], "Redis");
    let flags = ["--listen", "127.0.0.1:0", "--upstream", "http://127.0.0.1:1"];
    std::fs::write(dir.path().join("pgonce.toml"), "[gateway.cache]\n\nsecret = \"hunter2\"\n").unwrap();
    wrong(&flags, "pgonce.toml, line 3: ");
    std::fs::write(dir.path().join("other.toml"), "[gateway]\nlisten = \"0.0.0.0:80\"\nupstrem = 1\n").unwrap();
    wrong(&["--config", "other.toml"], "other.toml, line 3: unknown field `upstrem`");
    std::fs::write(dir.path().join("pgonce.toml"), "[up]\nport = \"hunter2\"\n").unwrap();
    wrong(&flags, "pgonce.toml, line 2: ");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_inbox_is_shown_and_replayed() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let url = db.direct_url();
    assert!(pgonce(url, &["inbox", "status"]).done().stderr.contains("No message"));
    assert!(pgonce(url, &["inbox", "parked"]).done().stderr.contains("Nothing is parked"));
    let sql = "SELECT once.receive_batch('mailer', 's', ARRAY['a', 'b', 'c'], ARRAY['1', '2', '3']::bytea[],
            p_ordering_keys => ARRAY['k', 'k', NULL]);
        SELECT once.inbox_fail(t.id, t.claim_id, false, 'no such customer') FROM once.inbox_take('mailer', 'w', 1) t";
    client.batch_execute(sql).await.unwrap();

    let status = pgonce(url, &["inbox", "status", "--consumer", "mailer", "--json"]).done().json();
    assert_eq!((&status[0]["state"], &status[0]["messages"]), (&"failed_final".into(), &1.into()), "{status}");
    assert_eq!((&status[1]["state"], &status[1]["messages"]), (&"received".into(), &2.into()), "{status}");
    let parked = pgonce(url, &["inbox", "parked"]).done();
    assert!(parked.stdout.contains("no such customer") && parked.stdout.starts_with("ID  CONSUMER"), "{parked:#?}");
    assert_eq!(pgonce(url, &["inbox", "parked", "--json"]).done().json()[0]["behind"], 1);

    let replay = ["inbox", "replay", "--consumer", "mailer", "--reason", "restored"];
    let tried = pgonce(url, &[&replay[..], &["--dry-run"]].concat()).done();
    assert!(tried.stdout.contains("failed_final") && tried.stderr.contains("1 would be put back"), "{tried:#?}");
    assert_eq!(count(&client, "once.inbox_parked").await, 1, "a dry run changes nothing");
    let nobody = [&replay[..], &["--from", "2099-01-01", "--state", "failed_final", "--json"]].concat();
    assert_eq!(pgonce(url, &nobody).done().json()["replayed"], serde_json::json!([]));
    let done = pgonce(url, &[&replay[..], &["--json"]].concat()).done().json();
    assert_eq!(done["replayed"][0]["message_id"], "a", "{done}");
    assert_eq!((count(&client, "once.inbox_parked").await, count(&client, "once.audit_trail").await), (0, 1));
    let actor: String = client.query_one("SELECT actor FROM once.audit_trail", &[]).await.unwrap().get(0);
    assert_eq!(actor, "tester");

    assert_eq!(pgonce(url, &["inbox", "replay", "--consumer", "mailer", "--reason", " "]).code, 2);
    assert_eq!(pgonce(url, &["inbox", "replay", "--consumer", "mailer"]).code, 2, "no reason at all");
    assert_eq!(pgonce(url, &[&replay[..], &["--state", "processing"]].concat()).code, 2);
}
