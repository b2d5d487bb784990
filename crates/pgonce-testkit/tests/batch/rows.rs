//! The set-based functions, called as plain SQL.

use pgonce::{Answer, Fingerprint, IntentName, fingerprint_bytes};
use pgonce_testkit::TestDb;
use serde_json::Value;
use tokio_postgres::{Client, Row};
use uuid::Uuid;

pub const HOUR: std::time::Duration = std::time::Duration::from_secs(3600);

pub fn payload(text: &str) -> Fingerprint {
    fingerprint_bytes(text.as_bytes(), "", "")
}

pub fn name(scope: &str, key: &str) -> IntentName {
    IntentName { tenant: String::new(), scope: scope.into(), key: key.into(), fingerprint: payload("the payload") }
}

pub fn other(name: &IntentName) -> IntentName {
    IntentName { fingerprint: payload("another payload"), ..name.clone() }
}

pub fn names(scope: &str, keys: &[&str]) -> Vec<IntentName> {
    keys.iter().map(|key| name(scope, key)).collect()
}

pub fn ids(count: usize) -> Vec<Uuid> {
    (0..count).map(|_| Uuid::new_v4()).collect()
}

pub async fn define(client: &Client, scope: &str, policy: Value) {
    client.execute("SELECT once.define_scope($1, $2)", &[&scope, &policy]).await.unwrap();
}

/// A database with a leased scope `s` (hold, one hour) and one that reruns, `rerun`.
pub async fn database() -> (TestDb, Client) {
    let db = TestDb::new().await;
    let client = db.client().await;
    define(&client, "s", serde_json::json!({"mode": "leased", "lease": "1h"})).await;
    define(&client, "rerun", serde_json::json!({"mode": "leased", "lease": "1h", "stale": "rerun"})).await;
    (db, client)
}

struct Columns<'a> {
    tenants: Vec<&'a str>,
    scopes: Vec<&'a str>,
    keys: Vec<&'a str>,
}

fn columns(names: &[IntentName]) -> Columns<'_> {
    Columns {
        tenants: names.iter().map(|name| name.tenant.as_str()).collect(),
        scopes: names.iter().map(|name| name.scope.as_str()).collect(),
        keys: names.iter().map(|name| name.key.as_str()).collect(),
    }
}

fn fingerprints(names: &[IntentName]) -> Vec<Fingerprint> {
    names.iter().map(|name| name.fingerprint).collect()
}

pub async fn try_claim(client: &Client, names: &[IntentName], ids: &[Uuid]) -> Result<Vec<Row>, tokio_postgres::Error> {
    let all = columns(names);
    let sql = "SELECT * FROM once.claim_batch($1, $2, $3, $4, $5, 'me') ORDER BY ordinal";
    client.query(sql, &[&all.tenants, &all.scopes, &all.keys, &fingerprints(names), &ids]).await
}

pub async fn claim(client: &Client, names: &[IntentName], ids: &[Uuid]) -> Vec<Row> {
    let rows = try_claim(client, names, ids).await.unwrap();
    assert_eq!(rows.len(), names.len(), "one row an intent");
    rows
}

pub async fn peek(client: &Client, names: &[IntentName]) -> Vec<Row> {
    let all = columns(names);
    let sql = "SELECT * FROM once.peek_batch($1, $2, $3, $4) ORDER BY ordinal";
    let rows = client.query(sql, &[&all.tenants, &all.scopes, &all.keys, &fingerprints(names)]).await.unwrap();
    assert_eq!(rows.len(), names.len(), "one row an intent");
    rows
}

pub async fn try_succeed(
    client: &Client,
    names: &[IntentName],
    ids: &[Uuid],
    answers: &[Answer],
) -> Result<Vec<Row>, tokio_postgres::Error> {
    let all = columns(names);
    let codes: Vec<Option<i32>> = answers.iter().map(|answer| answer.code).collect();
    let headers: Vec<&Option<Value>> = answers.iter().map(|answer| &answer.headers).collect();
    let bodies: Vec<&Option<Vec<u8>>> = answers.iter().map(|answer| &answer.body).collect();
    let types: Vec<&Option<String>> = answers.iter().map(|answer| &answer.result_type).collect();
    let results: Vec<&Option<String>> = answers.iter().map(|answer| &answer.result_id).collect();
    let sql = "SELECT * FROM once.succeed_batch($1, $2, $3, $4, $5, $6, $7, $8, $9) ORDER BY ordinal";
    let parameters: [&(dyn tokio_postgres::types::ToSql + Sync); 9] =
        [&all.tenants, &all.scopes, &all.keys, &ids, &codes, &headers, &bodies, &types, &results];
    client.query(sql, &parameters).await
}

pub async fn succeed(client: &Client, names: &[IntentName], ids: &[Uuid], answers: &[Answer]) -> Vec<Row> {
    let rows = try_succeed(client, names, ids, answers).await.unwrap();
    assert_eq!(rows.len(), names.len(), "one row an intent");
    rows
}

pub async fn renew(client: &Client, names: &[IntentName], ids: &[Uuid], lease: Option<&str>) -> Vec<Row> {
    let all = columns(names);
    let sql = "SELECT * FROM once.renew_batch($1, $2, $3, $4, $5::text::interval) ORDER BY ordinal";
    let rows = client.query(sql, &[&all.tenants, &all.scopes, &all.keys, &ids, &lease]).await.unwrap();
    assert_eq!(rows.len(), names.len(), "one row an intent");
    rows
}

/// A column of every row; NULL is empty.
pub fn texts(rows: &[Row], column: &str) -> Vec<String> {
    rows.iter().map(|row| row.get::<_, Option<String>>(column).unwrap_or_default()).collect()
}

pub fn verdicts(rows: &[Row]) -> Vec<String> {
    texts(rows, "verdict")
}

pub fn kinds(rows: &[Row]) -> Vec<String> {
    texts(rows, "kind")
}

pub fn answer(body: &str) -> Answer {
    Answer {
        code: Some(201),
        headers: Some(serde_json::json!([["content-type", "text/plain"]])),
        body: Some(body.into()),
        result_type: Some("order".into()),
        result_id: Some("4711".into()),
    }
}

pub fn stored(row: &Row) -> Answer {
    Answer {
        code: row.get("response_code"),
        headers: row.get("response_headers"),
        body: row.get("response_body"),
        result_type: row.get("result_type"),
        result_id: row.get("result_id"),
    }
}

/// The row's whole text, for comparing.
pub async fn row_of(client: &Client, name: &IntentName) -> Option<String> {
    let sql = "SELECT i::text FROM once.intent i WHERE tenant = $1 AND scope = $2 AND key = $3";
    client.query_opt(sql, &[&name.tenant, &name.scope, &name.key]).await.unwrap().map(|row| row.get(0))
}

pub async fn status_of(client: &Client, name: &IntentName) -> Option<String> {
    let sql = "SELECT status::text FROM once.intent WHERE tenant = $1 AND scope = $2 AND key = $3";
    client.query_opt(sql, &[&name.tenant, &name.scope, &name.key]).await.unwrap().map(|row| row.get(0))
}

/// One completion by the claim's holder in a transaction of its own, as an upstream would.
pub async fn succeed_alone(
    client: &Client,
    name: &IntentName,
    id: Uuid,
    body: &str,
) -> Result<(), tokio_postgres::Error> {
    let sql = "SELECT once.succeed($1, $2, $3, p_response_body => $4, p_response_code => 200, p_tenant => $5)";
    client.execute(sql, &[&name.scope, &name.key, &id, &body.as_bytes(), &name.tenant]).await.map(|_| ())
}

pub fn code(error: &tokio_postgres::Error) -> String {
    error.code().unwrap().code().to_owned()
}
