//! What must be refused: each with its documented code, nothing changed, and nothing of it told back.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on should stop, loudly")]

use std::error::Error as _;

use pgonce_testkit::{TestDb, checksum};
use tokio_postgres::types::private::BytesMut;
use tokio_postgres::types::{IsNull, ToSql, Type, to_sql_checked};
use tokio_postgres::{Client, Error};
use uuid::Uuid;

/// Stands in every key and payload: whoever finds it in an error has found a leak.
const MARK: &str = "s3cr3t";

/// Bytes sent as a text, as they are.
#[derive(Debug)]
struct Raw(Vec<u8>);

impl ToSql for Raw {
    fn to_sql(&self, _: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn std::error::Error + Sync + Send>> {
        out.extend_from_slice(&self.0);
        Ok(IsNull::No)
    }

    fn accepts(kind: &Type) -> bool {
        *kind == Type::TEXT
    }

    to_sql_checked!();
}

/// A database with something in every table that a refused call might touch.
struct Victim {
    db: TestDb,
    client: Client,
    before: String,
    /// A lease that is running, on the key `MARK held`.
    held: Uuid,
}

impl Victim {
    async fn new() -> Self {
        let db = TestDb::new().await;
        let client = db.client().await;
        client
            .batch_execute(&format!(
                "SELECT once.define_scope('plain');
                 SELECT once.define_scope('digits', '{{\"key_pattern\": \"^[0-9]+$\"}}');
                 CREATE FUNCTION public.wrong(int) RETURNS text LANGUAGE sql AS 'SELECT ''''';
                 SELECT once.record_failure('plain', '{MARK} failed', sha256('x'), true, 'code');
                 SELECT once.tally('plain', '{{\"new_claim\": 1}}')"
            ))
            .await
            .unwrap();
        let sql = "SELECT (once.claim('plain', $1, sha256('x'), p_mode => 'leased')).claim_id";
        let held = client.query_one(sql, &[&format!("{MARK} held")]).await.unwrap().get(0);
        let before = checksum(&client).await;
        Self { db, client, before, held }
    }

    async fn refused(&self, what: &str, code: &str, told: Result<u64, Error>) {
        let error = told.expect_err(what);
        let db = error.as_db_error().unwrap_or_else(|| panic!("{what}: not the server's: {error}"));
        assert_eq!(db.code().code(), code, "{what}: {db:?}");
        let all = format!("{error} {:?} {db} {db:?} {:?}", error.source(), db.where_());
        assert!(!all.contains(MARK), "{what} tells what was sent: {all}");
        assert!(!all.contains("73336372"), "{what} tells what was sent, as hex: {all}");
        assert_eq!(checksum(&self.client).await, self.before, "{what} changed something");
    }

    /// One claim, refused: from a call and a scope that take the straight path, and from ones that do not.
    async fn claim(
        &self,
        what: &str,
        code: &str,
        scope: &(dyn ToSql + Sync),
        key: &(dyn ToSql + Sync),
        tenant: &(dyn ToSql + Sync),
    ) {
        for more in ["", ", p_mode => 'atomic'", ", p_mode => 'leased'", ", p_wait => '0'"] {
            let sql = format!("SELECT once.claim($1, $2, sha256('{MARK}'), p_tenant => $3{more})");
            let told =
                self.client.execute_typed(&sql, &[(scope, Type::TEXT), (key, Type::TEXT), (tenant, Type::TEXT)]).await;
            self.refused(&format!("claim{more}: {what}"), code, told).await;
        }
    }
}

/// A text of so many bytes, with the mark in it.
fn long(bytes: usize) -> String {
    format!("{MARK}{}", "x".repeat(bytes - MARK.len()))
}

#[tokio::test]
async fn keys_scopes_and_tenants_out_of_their_limits() {
    let victim = Victim::new().await;
    let (scope, key) = ("plain".to_owned(), format!("{MARK} key"));
    let null = None::<String>;
    let ten_mb = long(10 * 1024 * 1024);
    // 128 characters of two bytes are 256 bytes: one too many, though 128 characters.
    let wide = format!("{MARK}{}", "é".repeat(125));
    assert_eq!(wide.len(), 256);
    assert_eq!(wide.chars().count(), 131);
    let controls = ["\u{1}", "\t", "\n", "\r", "\u{1b}", "\u{7f}"].map(|control| format!("{MARK}{control}x"));

    for (what, bad) in [
        ("empty", String::new()),
        ("256 bytes", long(256)),
        ("256 bytes, wide", wide.clone()),
        ("10 MB", ten_mb.clone()),
    ] {
        victim.claim(&format!("key: {what}"), "P4001", &scope, &bad, &"").await;
    }
    for (what, bad) in
        [("empty", String::new()), ("129 bytes", long(129)), ("wide", wide.clone()), ("10 MB", ten_mb.clone())]
    {
        victim.claim(&format!("scope: {what}"), "P4000", &bad, &key, &"").await;
    }
    for (what, bad) in [("256 bytes", long(256)), ("wide", wide), ("10 MB", ten_mb)] {
        victim.claim(&format!("tenant: {what}"), "P4004", &scope, &key, &bad).await;
    }
    for bad in controls {
        victim.claim("key: control character", "P4001", &scope, &bad, &"").await;
        victim.claim("scope: control character", "P4000", &bad, &key, &"").await;
        victim.claim("tenant: control character", "P4004", &scope, &key, &bad).await;
    }
    victim.claim("key: NULL", "P4001", &scope, &null, &"").await;
    victim.claim("scope: NULL", "P4000", &null, &key, &"").await;
    victim.claim("tenant: NULL", "P4004", &scope, &key, &null).await;

    // And exactly at the limit they are fine: 255 bytes, of one or of two, 128 for a scope.
    for (scope, key, tenant) in
        [(long(128), long(255), long(255)), (scope, format!("{}x", "é".repeat(127)), "é".repeat(127))]
    {
        let sql = "SELECT (once.claim($1, $2, sha256('x'), p_tenant => $3)).kind";
        let kind: String = victim.client.query_one(sql, &[&scope, &key, &tenant]).await.unwrap().get(0);
        assert_eq!(kind, "new_claim");
    }
}

#[tokio::test]
async fn what_is_no_text_is_refused_by_the_server() {
    let victim = Victim::new().await;
    let fine = Raw(MARK.into());
    for (what, tail) in [
        ("NUL", &b"\0tail"[..]),
        ("0xff", b"\xff"),
        ("half a character", b"\xc3"),
        ("a surrogate", b"\xed\xa0\x80"),
        ("overlong", b"\xc0\xaf"),
    ] {
        let bad = Raw([MARK.as_bytes(), tail].concat());
        let scope = Raw(b"plain".to_vec());
        victim.claim(&format!("key: {what}"), "22021", &scope, &bad, &Raw(Vec::new())).await;
        victim.claim(&format!("scope: {what}"), "22021", &bad, &fine, &Raw(Vec::new())).await;
        victim.claim(&format!("tenant: {what}"), "22021", &scope, &fine, &bad).await;
    }
}

#[tokio::test]
async fn fingerprints_of_the_wrong_size() {
    let victim = Victim::new().await;
    let mut bad: Vec<Option<Vec<u8>>> = [0, 1, 31, 33, 64].map(|size| Some(vec![7; size])).to_vec();
    bad.push(None);
    bad.push(Some(MARK.repeat(1_000_000).into_bytes()));
    for fingerprint in bad {
        let size = fingerprint.as_ref().map(Vec::len);
        for mode in ["atomic", "leased"] {
            let sql = "SELECT once.claim('plain', $1, $2, p_mode => $3)";
            let told = victim.client.execute(sql, &[&format!("{MARK} key"), &fingerprint, &mode]).await;
            victim.refused(&format!("fingerprint of {size:?} bytes, {mode}"), "P4003", told).await;
        }
        let sql = "SELECT once.peek('plain', $1, $2)";
        let told = victim.client.execute(sql, &[&format!("{MARK} key"), &fingerprint]).await;
        victim.refused(&format!("peek, fingerprint of {size:?} bytes"), "P4003", told).await;
    }
    for sql in
        ["SELECT once.fingerprint(NULL)", "SELECT once.fingerprint_bytes(NULL)", "SELECT once.fingerprint('1e400')"]
    {
        victim.refused(sql, "P4003", victim.client.execute(sql, &[]).await).await;
    }
}

#[tokio::test]
async fn policies_that_do_not_exist() {
    let victim = Victim::new().await;
    let bad = [
        // One for every key: a value it cannot have, a type it cannot have, a limit it is beyond.
        r#"{"mode": "s3cr3t"}"#,
        r#"{"mode": 1}"#,
        r#"{"mode": null}"#,
        r#"{"mode": ["atomic"]}"#,
        r#"{"retention": "s3cr3t"}"#,
        r#"{"retention": 7}"#,
        r#"{"retention": null}"#,
        r#"{"retention": "-1d"}"#,
        r#"{"retention": "0s"}"#,
        r#"{"retention": "101 years"}"#,
        r#"{"retention": "999999999999 years"}"#,
        r#"{"tombstone": "s3cr3t"}"#,
        r#"{"tombstone": true}"#,
        r#"{"tombstone": "-1d"}"#,
        r#"{"lease": "s3cr3t"}"#,
        r#"{"lease": 30}"#,
        r#"{"lease": "-30s"}"#,
        r#"{"lease": "0s"}"#,
        r#"{"lease": "1 year"}"#,
        r#"{"lease": "25h"}"#,
        r#"{"lease": "9ms"}"#,
        r#"{"lease": ""}"#,
        r#"{"in_progress": "s3cr3t"}"#,
        r#"{"in_progress": false}"#,
        r#"{"wait_max": "s3cr3t"}"#,
        r#"{"wait_max": "1d"}"#,
        r#"{"wait_max": "-1s"}"#,
        r#"{"wait_max": 5}"#,
        r#"{"waiters_max": "s3cr3t"}"#,
        r#"{"waiters_max": -1}"#,
        r#"{"waiters_max": 1001}"#,
        r#"{"stale": "s3cr3t"}"#,
        r#"{"stale": "probe"}"#,
        r#"{"stale": {}}"#,
        r#"{"probe": "s3cr3t"}"#,
        r#"{"probe": "public.s3cr3t"}"#,
        r#"{"probe": "public.wrong"}"#,
        r#"{"probe": "once.clock"}"#,
        r#"{"probe": "pg_catalog.upper"}"#,
        r#"{"probe": "once.policy; DROP TABLE once.intent"}"#,
        r#"{"probe": 3}"#,
        r#"{"probe": ""}"#,
        r#"{"probe": "a.b.c.d"}"#,
        r#"{"probe": "other.public.wrong"}"#,
        r#"{"probe": "\"s3cr3t"}"#,
        r#"{"response": "s3cr3t"}"#,
        r#"{"response": 200}"#,
        r#"{"attempts_max": "s3cr3t"}"#,
        r#"{"attempts_max": 0}"#,
        r#"{"attempts_max": -1}"#,
        r#"{"attempts_max": 1.5}"#,
        r#"{"attempts_max": 1000001}"#,
        r#"{"attempts_max": 99999999999999999999}"#,
        r#"{"key_pattern": "(s3cr3t"}"#,
        r#"{"key_pattern": 1}"#,
        // A key that does not exist; among good ones, too; and what is no object.
        r#"{"sacrilege": 1}"#,
        r#"{"mode": "leased", "Lease": "30s"}"#,
        r#"{"": 1}"#,
        "[]",
        "\"leased\"",
        "null",
        "1",
    ];
    for policy in bad {
        for scope in ["plain", "another"] {
            let sql = format!("SELECT once.define_scope('{scope}', $1::text::jsonb)");
            let told = victim.client.execute_typed(&sql, &[(&policy, Type::TEXT)]).await;
            victim.refused(&format!("policy {policy}"), "P4020", told).await;
        }
    }
    let long_pattern = serde_json::json!({"key_pattern": MARK.repeat(100)});
    let told = victim.client.execute("SELECT once.define_scope('plain', $1)", &[&long_pattern]).await;
    victim.refused("a pattern of 600 characters", "P4020", told).await;
    let null = victim.client.execute("SELECT once.define_scope('plain', NULL)", &[]).await;
    victim.refused("no policy", "P4020", null).await;
    for (scope, code) in [(String::new(), "P4000"), (long(129), "P4000")] {
        let told = victim.client.execute("SELECT once.define_scope($1, '{}')", &[&scope]).await;
        victim.refused("defining a scope that cannot be named", code, told).await;
    }
}

#[tokio::test]
async fn calls_that_ask_too_much() {
    let victim = Victim::new().await;
    let key = format!("{MARK} key");
    for (what, code) in [
        ("p_mode => 's3cr3t'", "P4020"),
        ("p_mode => ''", "P4020"),
        ("p_mode => 'leased', p_lease => '-1 second'", "P4020"),
        ("p_mode => 'leased', p_lease => '0'", "P4020"),
        ("p_mode => 'leased', p_lease => '1 year'", "P4020"),
        ("p_lease => '-1 second'", "P4020"),
        ("p_wait => '1 day'", "P4020"),
        ("p_wait => '-1 second'", "P4020"),
        ("p_wait => '1 day', p_mode => 'leased'", "P4020"),
    ] {
        // An absent key, one that failed before, one that is being processed.
        for key in [&key, &format!("{MARK} failed"), &format!("{MARK} held")] {
            let sql = format!("SELECT once.claim('plain', $1, sha256('x'), {what})");
            victim.refused(what, code, victim.client.execute(&sql, &[key]).await).await;
        }
    }
    let held = format!("{MARK} held");
    for lease in ["-1 second", "0", "1 year", "1 day 1 second"] {
        let sql = format!("SELECT once.renew('plain', $1, $2, '{lease}')");
        victim.refused(lease, "P4020", victim.client.execute(&sql, &[&held, &victim.held]).await).await;
    }
    for bad in ["abc", "12a", " 12", "s3cr3t"] {
        for mode in ["atomic", "leased"] {
            let sql = "SELECT once.claim('digits', $1, sha256('x'), p_mode => $2)";
            victim.refused("key_pattern", "P4001", victim.client.execute(sql, &[&bad, &mode]).await).await;
        }
    }
    let fits: String =
        victim.client.query_one("SELECT (once.claim('digits', '12', sha256('x'))).kind", &[]).await.unwrap().get(0);
    assert_eq!(fits, "new_claim");
    for (resource, what) in [(String::new(), "empty"), (long(1025), "1025 bytes")] {
        let told = victim.client.execute("SELECT once.try_lock($1)", &[&resource]).await;
        victim.refused(&format!("resource: {what}"), "P4001", told).await;
    }
    for (verdict, actor, reason) in [("s3cr3t", "a", "r"), ("succeeded", "", "r"), ("succeeded", "a", " ")] {
        let sql = "SELECT once.settle('plain', $1, $2, $3, $4)";
        let told = victim.client.execute(sql, &[&format!("{MARK} failed"), &verdict, &actor, &reason]).await;
        victim.refused("settling without a verdict, an actor or a reason", "P4013", told).await;
    }
    for (key, what) in [(key, "an absent intent"), (held, "a live lease")] {
        let told = victim.client.execute("SELECT once.settle('plain', $1, 'failed', 'a', 'r')", &[&key]).await;
        victim.refused(&format!("settling {what}"), "P4013", told).await;
    }
}

#[tokio::test]
async fn completing_with_nothing_in_hand() {
    let victim = Victim::new().await;
    let key = format!("{MARK} held");
    let wrong = [(Some(key.clone()), None), (None, Some(victim.held)), (Some(long(1_000_000)), Some(victim.held))];
    for (key, claim) in wrong {
        for (call, code) in [
            ("once.succeed('plain', $1, $2)", "P4010"),
            ("once.succeed(NULL, $1, $2)", "P4010"),
            ("once.succeed('plain', $1, $2, p_tenant => NULL)", "P4010"),
            ("once.fail('plain', $1, $2, true, 's3cr3t', 's3cr3t')", "P4011"),
            ("once.renew('plain', $1, $2)", "P4012"),
            ("once.release('plain', $1, $2)", "P4012"),
        ] {
            let told = victim.client.execute(&format!("SELECT {call}"), &[&key, &claim]).await;
            victim.refused(call, code, told).await;
        }
    }
    // Texts about a failure are cut, not refused: the failure is what must not get lost.
    let fail = "SELECT once.fail('plain', $1, $2, false, $3, $3)";
    victim.client.execute(fail, &[&key, &victim.held, &long(1_000_000)]).await.unwrap();
    let kept = "SELECT length(failure_code), length(failure_message) FROM once.intents WHERE key = $1";
    let row = victim.client.query_one(kept, &[&key]).await.unwrap();
    assert_eq!((row.get::<_, i32>(0), row.get::<_, i32>(1)), (100, 2000));
}

#[tokio::test]
async fn answers_over_16_mib() {
    let victim = Victim::new().await;
    let held = format!("{MARK} held");
    let limit = 16 * 1024 * 1024;
    let body = |bytes: usize| long(bytes).into_bytes();
    let sql = "SELECT once.succeed('plain', $1, $2, p_response_body => $3)";
    let told = victim.client.execute(sql, &[&held, &victim.held, &body(limit + 1)]).await;
    victim.refused("a body of 16 MiB and a byte", "P4005", told).await;
    let json = "SELECT once.succeed('plain', $1, $2, p_response => to_jsonb($3::text))";
    let told = victim.client.execute(json, &[&held, &victim.held, &long(limit + 1)]).await;
    victim.refused("a JSON answer of more", "P4005", told).await;
    let failed = "SELECT once.fail('plain', $1, $2, false, 'code', 'message', p_response_body => $3)";
    let told = victim.client.execute(failed, &[&held, &victim.held, &body(limit + 1)]).await;
    victim.refused("the body of a failure", "P4005", told).await;

    victim.client.batch_execute("BEGIN").await.unwrap();
    let claim = "SELECT (once.claim('plain', $1, sha256('x'))).claim_id";
    let id: Uuid = victim.client.query_one(claim, &[&format!("{MARK} atomic")]).await.unwrap().get(0);
    let told = victim.client.execute(sql, &[&format!("{MARK} atomic"), &id, &body(limit + 1)]).await;
    victim.client.batch_execute("ROLLBACK").await.unwrap();
    victim.refused("an atomic claim's body", "P4005", told).await;

    victim.client.execute(sql, &[&held, &victim.held, &body(limit)]).await.unwrap();
    let length = "SELECT octet_length((once.claim('plain', $1, sha256('x'))).response_body)";
    let kept: i32 = victim.client.query_one(length, &[&held]).await.unwrap().get(0);
    assert_eq!(usize::try_from(kept).unwrap(), limit, "16 MiB themselves are kept");
}

/// What stands beside the body has its limits, too.
#[tokio::test]
async fn answers_over_the_limits_of_what_is_beside_the_body() {
    let victim = Victim::new().await;
    let held = format!("{MARK} held");
    for (what, part, over, within) in [
        ("headers", "p_response_headers => jsonb_build_object('h', $3::text)", 262_144, 262_000),
        ("a result's type", "p_result_type => $3, p_result_id => 'i'", 256, 255),
        ("a result's id", "p_result_type => 't', p_result_id => $3", 1025, 1024),
    ] {
        let succeed = format!("SELECT once.succeed('plain', $1, $2, {part})");
        let told = victim.client.execute(&succeed, &[&held, &victim.held, &long(over)]).await;
        victim.refused(what, "P4005", told).await;
        if what == "headers" {
            let fail = format!("SELECT once.fail('plain', $1, $2, true, 'code', 'message', {part})");
            let told = victim.client.execute(&fail, &[&held, &victim.held, &long(over)]).await;
            victim.refused("the headers of a failure", "P4005", told).await;
        }
        let settle = format!("SELECT once.settle('plain', $1, 'succeeded', 'me', $2::uuid::text, {part})");
        let failed = format!("{MARK} failed");
        let told = victim.client.execute(&settle, &[&failed, &victim.held, &long(over)]).await;
        victim.refused("a decision with it", "P4005", told).await;
        victim.client.batch_execute("BEGIN").await.unwrap();
        victim.client.execute(&succeed, &[&held, &victim.held, &long(within)]).await.unwrap();
        victim.client.batch_execute("ROLLBACK").await.unwrap();
    }
}

/// A flag that is NULL is neither: nothing is guessed.
#[tokio::test]
async fn flags_that_say_nothing() {
    let victim = Victim::new().await;
    let id = victim.held;
    for call in [
        format!("once.fail('plain', '{MARK} held', '{id}', NULL, 'code', 'message')"),
        format!("once.record_failure('plain', '{MARK} new', sha256('x'), NULL, 'code')"),
        format!("once.inbox_fail(1, '{id}', NULL, 'error')"),
        "once.purge(10, NULL)".into(),
        "once.purge_rows(10, NULL)".into(),
        "once.inbox_replay('c', 'me', 'why', p_dry_run => NULL)".into(),
        "once.open_sink('s', p_from_now => NULL)".into(),
        "once.resume_held('s', NULL, 'me', 'why', NULL)".into(),
        "once.resume_sink('s', 'me', 'why', NULL)".into(),
        "once.ask_replay('s', '{}', 'me', 'why', p_dry_run => NULL)".into(),
        format!("once.record_replay(1, '{id}', 1, 1, NULL)"),
    ] {
        let told = victim.client.execute(&format!("SELECT {call}"), &[]).await;
        victim.refused(&call, "P4020", told).await;
    }
}

/// What a claim refuses comes out of the crate without what was sent, too.
#[tokio::test]
async fn the_crate_tells_nothing_either() {
    let victim = Victim::new().await;
    let once = victim.db.once().await;
    let told = async |scope: &str, key: String, payload: &str| {
        let error = once.intent(scope, key).payload(payload).run(async |_| Ok(())).await.unwrap_err();
        let all = format!("{error} {error:?}");
        assert!(!all.contains(MARK), "{all}");
        assert_eq!(checksum(&victim.client).await, victim.before);
        error.sqlstate().map(str::to_owned)
    };
    assert_eq!(told("plain", long(256), MARK).await.as_deref(), Some("P4001"));
    assert_eq!(told("plain", format!("{MARK}\n"), MARK).await.as_deref(), Some("P4001"));
    assert_eq!(told("digits", MARK.into(), MARK).await.as_deref(), Some("P4001"));
    assert_eq!(told("", MARK.into(), MARK).await.as_deref(), Some("P4000"));
    assert_eq!(told("plain", format!("{MARK} failed"), "another payload").await.as_deref(), Some("P4002"));
    assert_eq!(told("plain", format!("{MARK}\0"), MARK).await.as_deref(), Some("22021"));
}
