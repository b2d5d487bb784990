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
