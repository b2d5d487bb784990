//! A batch tells each caller what it would be told alone, from every prior state.

use pgonce::IntentName;
use serde_json::json;
use tokio_postgres::{Client, Row};
use uuid::Uuid;

use crate::rows::{HOUR, answer, claim, define, ids, name, other, payload, peek, succeed};

const DAY: std::time::Duration = std::time::Duration::from_secs(86_400);

/// Every state that a row can be in when it is claimed, each for two intents: one is claimed alone, the other
/// in the batch.
const STATES: &[(&str, &str)] = &[
    ("day", "absent"),
    ("undefined", "absent"),
    ("pattern", "absent-1"),
    ("day", "succeeded"),
    ("day", "succeeded, large"),
    ("day", "succeeded atomically"),
    ("permanent", "succeeded"),
    ("reference", "succeeded"),
    ("status", "succeeded"),
    ("error", "succeeded"),
    ("day", "succeeded, expired"),
    ("tomb", "succeeded, expired"),
    ("tomb", "succeeded, stripped"),
    ("tomb_short", "succeeded, expired"),
    ("day", "retryable"),
    ("day", "retryable, expired"),
    ("day", "final"),
    ("error", "final"),
    ("day", "final, expired"),
    ("day", "processing"),
    ("rerun", "stale"),
    ("rerun", "stale after a failure"),
    ("twice", "stale after a failure"),
    ("hold", "stale"),
    ("hold", "uncertain"),
    ("probe", "stale, succeeded"),
    ("probe", "stale, not_done"),
    ("probe", "stale, unknown"),
];

fn intent(scope: &str, state: &str, way: &str) -> IntentName {
    IntentName { tenant: "acme".into(), ..name(scope, &format!("{state}-{way}")) }
}

async fn claim_alone(client: &Client, name: &IntentName) -> Result<Row, tokio_postgres::Error> {
    let sql =
        "SELECT * FROM once.claim($1, $2, $3, p_mode => 'leased', p_wait => '0', p_claimed_by => 'me', p_tenant => $4)";
    client.query_one(sql, &[&name.scope, &name.key, &name.fingerprint, &name.tenant]).await
}

async fn owned_alone(client: &Client, name: &IntentName) -> Uuid {
    claim_alone(client, name).await.unwrap().get::<_, Option<Uuid>>("claim_id").expect("it is to be had")
}

async fn make(client: &Client, name: &IntentName, state: &str) {
    let fail = async |retryable: bool| {
        let id = owned_alone(client, name).await;
        let sql = "SELECT once.fail($1, $2, $3, $4, 'no_stock', 'sold out', p_tenant => $5)";
        client.execute(sql, &[&name.scope, &name.key, &id, &retryable, &name.tenant]).await.unwrap();
    };
    match state.split([',', '-']).next().unwrap() {
        "absent" => {}
        "succeeded" => {
            let id = owned_alone(client, name).await;
            let body = if state.contains("large") { "x".repeat(100_000) } else { "answer".into() };
            let rows = succeed(client, std::slice::from_ref(name), &[id], &[answer(&body)]).await;
            assert_eq!(rows[0].get::<_, &str>("verdict"), "recorded");
        }
        "succeeded atomically" => {
            client.batch_execute("BEGIN").await.unwrap();
            let sql = "SELECT claim_id FROM once.claim($1, $2, $3, p_mode => 'atomic', p_tenant => $4)";
            let parameters: [&(dyn tokio_postgres::types::ToSql + Sync); 4] =
                [&name.scope, &name.key, &name.fingerprint, &name.tenant];
            let id: Uuid = client.query_one(sql, &parameters).await.unwrap().get(0);
            crate::rows::succeed_alone(client, name, id, "atomic").await.unwrap();
            client.batch_execute("COMMIT").await.unwrap();
        }
        "retryable" => fail(true).await,
        "final" => fail(false).await,
        "stale after a failure" => {
            fail(true).await;
            owned_alone(client, name).await;
        }
        _ => _ = owned_alone(client, name).await,
    }
}

/// What a claim is told, without what differs by chance: the claim's id and number, and the moment.
fn told(row: &Row) -> String {
    let (kind, id): (Option<&str>, Option<Uuid>) = (row.get("kind"), row.get("claim_id"));
    let (fence, retry): (Option<i64>, Option<i64>) = (row.get("fence"), row.get("retry_after_ms"));
    format!(
        "{kind:?} owned {} attempt {:?} code {:?} headers {:?} body {:?} type {:?} id {:?} failure {:?} {:?} fence {} retry {:?} lease {:?}",
        id.is_some(),
        row.get::<_, Option<i32>>("attempt_count"),
        row.get::<_, Option<i32>>("response_code"),
        row.get::<_, Option<serde_json::Value>>("response_headers"),
        row.get::<_, Option<Vec<u8>>>("response_body").map(|body| (body.len(), body.first().copied())),
        row.get::<_, Option<String>>("result_type"),
        // A probe answers with the key, which has the way in it.
        row.get::<_, Option<String>>("result_id").map(|id| id.replace("-batch", "-alone")),
        row.get::<_, Option<String>>("failure_code"),
        row.get::<_, Option<String>>("failure_message"),
        fence.is_some(),
        retry.map(|ms| ms / 60_000),
        row.get::<_, Option<i64>>("lease_ms"),
    )
}

/// What is left in the database, without what differs by chance.
async fn left(client: &Client, name: &IntentName) -> String {
    let sql = "SELECT coalesce((SELECT (to_jsonb(i) - '{key,claim_id,created_at,updated_at,completed_at,expires_at,locked_until,tombstone_until,fence}'::text[]
            || jsonb_build_object('lease', i.locked_until > once.clock() + interval '1 minute', 'expires', i.expires_at > once.clock(),
                'completed', i.completed_at IS NOT NULL, 'fence', i.fence IS NOT NULL))::text
        FROM once.intent i WHERE i.tenant = $1 AND i.scope = $2 AND i.key = $3), '')
        || (SELECT coalesce(string_agg(concat_ws(' ', a.actor, a.action, a.from_status, a.to_status, a.reason), '; ' ORDER BY a.id), '')
        FROM once.audit a WHERE a.tenant = $1 AND a.scope = $2 AND a.key = $3)";
    let row = client.query_one(sql, &[&name.tenant, &name.scope, &name.key]).await.unwrap();
    row.get::<_, String>(0).replace("-batch", "-alone")
}

/// Puts every state there, for both ways; the clock stands where they are what they are called.
async fn every_state() -> (pgonce_testkit::TestDb, Client) {
    let db = pgonce_testkit::TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute(
            "CREATE FUNCTION public.verdict(key text) RETURNS jsonb LANGUAGE sql AS $$
                 SELECT jsonb_build_object('verdict', split_part(split_part(key, ', ', 2), '-', 1), 'result_type', 'order', 'result_id', key) $$",
        )
        .await
        .unwrap();
    for (scope, policy) in [
        ("day", json!({"retention": "1d", "lease": "2h"})),
        ("permanent", json!({"retention": "permanent"})),
        ("pattern", json!({"key_pattern": "^absent-1"})),
        ("tomb", json!({"retention": "1d", "tombstone": "30d"})),
        ("tomb_short", json!({"retention": "1h", "tombstone": "1h"})),
        ("reference", json!({"retention": "30d", "response": "reference"})),
        ("status", json!({"retention": "30d", "response": "status"})),
        ("error", json!({"retention": "30d", "response": "error"})),
        ("rerun", json!({"stale": "rerun"})),
        ("twice", json!({"stale": "rerun", "attempts_max": 2})),
        ("hold", json!({"stale": "hold"})),
        ("probe", json!({"stale": "probe", "probe": "public.verdict"})),
    ] {
        define(&client, scope, policy).await;
    }
    let make_where = async |wanted: &dyn Fn(&str) -> bool| {
        for (scope, state) in STATES.iter().filter(|(_, state)| wanted(state)) {
            for way in ["alone", "batch"] {
                make(&client, &intent(scope, state, way), state).await;
            }
        }
    };
    make_where(&|state| state.contains("stripped")).await;
    db.travel(2 * DAY).await;
    assert_eq!(client.query_one("SELECT once.purge()", &[]).await.unwrap().get::<_, i64>(0), 2);
    make_where(&|state| state.contains("expired")).await;
    db.travel(4 * DAY).await;
    make_where(&|state| state.starts_with("stale") || state == "uncertain").await;
    db.travel(4 * DAY + HOUR).await;
    make_where(&|state| {
        !["stripped", "expired", "stale", "uncertain"].iter().any(|word| state.contains(word))
            && !state.starts_with("absent")
    })
    .await;
    for way in ["alone", "batch"] {
        let row = claim_alone(&client, &intent("hold", "uncertain", way)).await.unwrap();
        assert_eq!(row.get::<_, &str>("kind"), "uncertain");
    }
    (db, client)
}

fn all(way: &str) -> Vec<IntentName> {
    STATES.iter().map(|(scope, state)| intent(scope, state, way)).collect()
}

#[tokio::test]
async fn every_kind_from_every_state_is_what_claim_says_alone() {
    in_batches_of(usize::MAX).await;
}

/// A batch of one takes shorter ways: it is told the same.
#[tokio::test]
async fn every_kind_from_every_state_in_batches_of_one() {
    in_batches_of(1).await;
}

async fn in_batches_of(size: usize) {
    let (_db, client) = every_state().await;
    let (alone, batch) = (all("alone"), all("batch"));
    let claim_ids = ids(batch.len());
    let mut rows = Vec::new();
    for (names, ids) in batch.chunks(size.min(batch.len())).zip(claim_ids.chunks(size.min(batch.len()))) {
        rows.extend(claim(&client, names, ids).await);
    }
    let mut seen = std::collections::BTreeSet::new();
    for ((one, twin), (row, id)) in alone.iter().zip(&batch).zip(rows.iter().zip(&claim_ids)) {
        let expected = claim_alone(&client, one).await.unwrap();
        assert_eq!(told(row), told(&expected), "{}: {}", one.scope, one.key);
        assert_eq!(left(&client, twin).await, left(&client, one).await, "{}: {}", one.scope, one.key);
        assert_eq!(row.get::<_, Option<String>>("error"), None);
        assert!(row.get::<_, Option<Uuid>>("claim_id").is_none_or(|given| given == *id), "the caller's id");
        let expires = "SELECT floor(extract(epoch FROM $1::timestamptz - once.clock()) * 1000)::bigint";
        let (kind, expires_in): (&str, Option<i64>) = (row.get("kind"), row.get("expires_in_ms"));
        if kind == "replay_success" && one.scope != "permanent" {
            let sql =
                expires.replace("$1::timestamptz", "expires_at") + " FROM once.intent WHERE scope = $1 AND key = $2";
            let real: i64 = client.query_one(&sql, &[&twin.scope, &twin.key]).await.unwrap().get(0);
            assert!((real - expires_in.unwrap()).abs() < 60_000, "{}: {expires_in:?}, {real}", one.key);
        } else if kind != "final_failure" {
            assert_eq!(expires_in, None, "{}: {}", one.scope, one.key);
        }
        seen.insert(kind.to_owned());
    }
    assert_eq!(seen.len(), 8, "every kind was there: {seen:?}");
}

#[tokio::test]
async fn looking_tells_what_peek_says_alone_and_writes_nothing() {
    let (_db, client) = every_state().await;
    let before = pgonce_testkit::checksum(&client).await;
    let batch = all("batch");
    let looks = async |names: &[IntentName], size: usize| {
        let mut rows = Vec::new();
        for names in names.chunks(size) {
            rows.extend(peek(&client, names).await);
        }
        names.iter().cloned().zip(rows).collect::<Vec<_>>()
    };
    for (name, row) in looks(&batch, batch.len()).await.into_iter().chain(looks(&batch, 1).await) {
        let sql = "SELECT * FROM once.peek($1, $2, $3, $4)";
        let alone = client.query_one(sql, &[&name.scope, &name.key, &name.fingerprint, &name.tenant]).await.unwrap();
        assert_eq!(told(&row), told(&alone), "{}: {}", name.scope, name.key);
        let expires = row.get::<_, Option<i64>>("expires_in_ms");
        assert_eq!(
            expires.is_some(),
            matches!(row.get("kind"), Some("replay_success" | "final_failure")) && name.scope != "permanent"
        );
    }
    let others: Vec<IntentName> = batch.iter().map(other).collect();
    for (name, row) in looks(&others, others.len()).await.into_iter().chain(looks(&others, 1).await) {
        let sql = "SELECT * FROM once.peek($1, $2, $3, $4)";
        let alone = client.query_one(sql, &[&name.scope, &name.key, &name.fingerprint, &name.tenant]).await;
        match alone {
            Ok(alone) => assert_eq!(told(&row), told(&alone), "{}: {}", name.scope, name.key),
            Err(error) => {
                assert_eq!(Some(crate::rows::code(&error)), row.get::<_, Option<String>>("error"), "{}", name.key);
                assert_eq!(row.get::<_, Option<Vec<u8>>>("response_body"), None, "the body is the other payload's");
            }
        }
    }
    assert_eq!(pgonce_testkit::checksum(&client).await, before);
}

/// Conflicts, bad names and a broken policy stand between good neighbours, and cost them nothing.
#[tokio::test]
async fn what_is_refused_costs_its_neighbours_nothing() {
    let (_db, client) = every_state().await;
    client.batch_execute("UPDATE once.scope SET key_pattern = '(' WHERE scope = 'status'").await.unwrap();
    let mut intents: Vec<IntentName> = all("batch").iter().map(other).collect();
    let bad = |scope: &str, key: &str, tenant: &str| IntentName { tenant: tenant.into(), ..name(scope, key) };
    intents.extend([
        bad("", "k", ""),
        bad(&"s".repeat(129), "k", ""),
        bad("s\u{1}", "k", ""),
        bad("day", "", ""),
        bad("day", &"ü".repeat(128), ""),
        bad("day", "a\nb", ""),
        bad("day", "k", &"t".repeat(256)),
        bad("day", "k", "\u{7f}"),
        bad("pattern", "absent-2", ""),
        bad("status", "new", ""),
    ]);
    let mut expected = Vec::new();
    for one in &intents {
        client.batch_execute("BEGIN").await.unwrap();
        expected.push(match claim_alone(&client, one).await {
            Ok(row) => (None, row.get::<_, Option<String>>("kind")),
            Err(error) => (Some((crate::rows::code(&error), error.as_db_error().unwrap().message().to_owned())), None),
        });
        client.batch_execute("ROLLBACK").await.unwrap();
    }
    assert!(expected.iter().filter(|(error, _)| error.is_some()).count() > 20, "{expected:?}");
    // Good neighbours between all of them.
    let mut mixed = Vec::new();
    for (at, one) in intents.iter().enumerate() {
        mixed.extend([one.clone(), name("day", &format!("neighbour {at}"))]);
    }
    let rows = claim(&client, &mixed, &ids(mixed.len())).await;
    for (one, (error, _)) in intents.iter().zip(&expected).filter(|(_, (error, _))| error.is_some()) {
        let row = claim(&client, std::slice::from_ref(one), &ids(1)).await.remove(0);
        let got = row.get::<_, Option<String>>("error").map(|code| (code, row.get::<_, String>("message")));
        assert_eq!(got, *error, "in a batch of one: {} {}", one.scope, one.key);
    }
    for (pair, (one, (error, kind))) in rows.chunks(2).zip(intents.iter().zip(expected)) {
        let got = pair[0].get::<_, Option<String>>("error").map(|code| (code, pair[0].get::<_, String>("message")));
        assert_eq!((got, pair[0].get::<_, Option<String>>("kind")), (error, kind), "{}: {}", one.scope, one.key);
        assert_eq!(pair[1].get::<_, &str>("kind"), "new_claim");
    }
}

#[tokio::test]
async fn arrays_belong_together_and_are_limited() {
    let (_db, client) = crate::rows::database().await;
    let refused = async |sql: &str| crate::rows::code(&client.batch_execute(sql).await.unwrap_err());
    for call in [
        "claim_batch(NULL, NULL, NULL, NULL, NULL)",
        "claim_batch('{a,b}', '{s}', '{k}', ARRAY[sha256('x')], ARRAY[gen_random_uuid()])",
        "claim_batch('{a}', '{s}', '{k}', ARRAY[sha256('x')], '{}')",
        "claim_batch('[0:0]={a}', '[0:0]={s}', '[0:0]={k}', ARRAY[sha256('x')], ARRAY[gen_random_uuid()])",
        "peek_batch('{{a}}', '{{s}}', '{{k}}', ARRAY[[sha256('x')]])",
        "peek_batch('{a}', '{s}', '{k}', '{}')",
        "renew_batch('{a}', '{s}', '{k}', '{}')",
        "renew_batch('{}', '{}', '{}', '{}', '1 year')",
        "succeed_batch('{a}', '{s}', '{k}', ARRAY[gen_random_uuid()], '{1}', '{NULL}', '{NULL}', '{NULL}', NULL)",
    ] {
        assert_eq!(refused(&format!("SELECT once.{call}")).await, "P4020", "{call}");
    }
    let many: Vec<IntentName> = (0..1001).map(|at| name("s", &format!("k{at}"))).collect();
    let error = crate::rows::try_claim(&client, &many, &ids(1001)).await.unwrap_err();
    assert_eq!(crate::rows::code(&error), "P4020");
    let rows = claim(&client, &many[..1000], &ids(1000)).await;
    assert!(rows.iter().all(|row| row.get::<_, &str>("kind") == "new_claim"));
    assert!(claim(&client, &[], &[]).await.is_empty());
    assert!(succeed(&client, &[], &[], &[]).await.is_empty());
    // A missing element is its own intent's error.
    let sql = "SELECT error FROM once.claim_batch(ARRAY['', NULL, '', '', ''], ARRAY['s', 's', NULL, 's', 's'],
        ARRAY['n1', 'n2', 'n3', NULL, 'n5'], ARRAY[sha256('x'), sha256('x'), sha256('x'), sha256('x'), NULL],
        ARRAY[NULL, gen_random_uuid(), gen_random_uuid(), gen_random_uuid(), gen_random_uuid()]) ORDER BY ordinal";
    let rows = client.query(sql, &[]).await.unwrap();
    assert_eq!(crate::rows::texts(&rows, "error"), ["P4020", "P4004", "P4000", "P4001", "P4003"]);
}

/// Another payload under the same key is not answered by looking either, and a look without one sees nothing.
#[tokio::test]
async fn a_look_without_a_fingerprint_sees_nothing() {
    let (_db, client) = crate::rows::database().await;
    let one = crate::rows::names("s", &["k"]);
    let id = ids(1);
    claim(&client, &one, &id).await;
    succeed(&client, &one, &id, &[answer("secret")]).await;
    let sql = "SELECT kind, response_body FROM once.peek_batch('{\"\"}', '{s}', '{k}', ARRAY[NULL::bytea])";
    let row = client.query_one(sql, &[]).await.unwrap();
    assert_eq!((row.get::<_, Option<String>>(0), row.get::<_, Option<Vec<u8>>>(1)), (None, None));
    assert_ne!(payload("the payload"), payload("another payload"));
}
