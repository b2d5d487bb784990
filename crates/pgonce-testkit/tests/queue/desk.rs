//! What the tests of this folder share: short calls of the functions, by a plain connection.

use std::time::{Duration, Instant};

use pgonce_testkit::TestDb;
use tokio_postgres::Client;
use tokio_postgres::types::ToSql;
use uuid::Uuid;

pub type Params<'a> = &'a [&'a (dyn ToSql + Sync)];

pub fn code(error: &tokio_postgres::Error) -> String {
    error.code().map_or_else(|| error.to_string(), |code| code.code().to_owned())
}

/// The one text that a statement returns, or its SQLSTATE.
pub async fn text(client: &Client, sql: &str, params: Params<'_>) -> Result<String, String> {
    let row = client.query_one(sql, params).await.map_err(|error| code(&error))?;
    Ok(row.get::<_, Option<String>>(0).unwrap_or_else(|| "NULL".into()))
}

pub async fn number(client: &Client, sql: &str) -> i64 {
    client.query_one(sql, &[]).await.unwrap().get(0)
}

pub async fn define(client: &Client, policy: &str) {
    client.execute("SELECT once.define_queue('q', $1::text::jsonb)", &[&policy]).await.unwrap();
}

/// Enqueues a job without anything; `more` is further arguments.
pub async fn enqueue(client: &Client, more: &str) -> i64 {
    number(client, &format!("SELECT once.enqueue('q', '{{}}'{more})")).await
}

/// So many plain jobs.
pub async fn enqueue_batch(client: &Client, jobs: i32) -> Vec<i64> {
    let sql = "SELECT once.enqueue_batch('q', array_fill('{}'::jsonb, ARRAY[$1::int]))";
    client.query_one(sql, &[&jobs]).await.unwrap().get(0)
}

/// A job of the key `key`.
pub async fn keyed(client: &Client, key: &str) -> i64 {
    enqueue(client, &format!(", p_key => '{key}'")).await
}

/// A job that was taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    pub id: i64,
    pub claim_id: Uuid,
    pub key: Option<String>,
    pub attempts: i32,
}

pub async fn try_take(client: &Client, limit: i32) -> Result<Vec<Held>, String> {
    let sql = "SELECT id, claim_id, key, attempts FROM once.take('q', 'w', $1)";
    let rows = client.query(sql, &[&limit]).await.map_err(|error| code(&error))?;
    Ok(rows
        .iter()
        .map(|row| Held { id: row.get(0), claim_id: row.get(1), key: row.get(2), attempts: row.get(3) })
        .collect())
}

pub async fn take(client: &Client, limit: i32) -> Vec<Held> {
    try_take(client, limit).await.unwrap()
}

pub async fn finish_batch(client: &Client, held: &[Held]) -> Result<(), tokio_postgres::Error> {
    let (ids, claims): (Vec<_>, Vec<_>) = held.iter().map(|one| (one.id, one.claim_id)).unzip();
    client.execute("SELECT once.finish_batch($1, $2)", &[&ids, &claims]).await.map(|_| ())
}

pub fn ids(held: &[Held]) -> Vec<i64> {
    held.iter().map(|one| one.id).collect()
}

impl Held {
    pub async fn finish(&self, client: &Client) -> Result<(), String> {
        let sql = "SELECT once.finish($1, $2)";
        client.execute(sql, &[&self.id, &self.claim_id]).await.map(|_| ()).map_err(|error| code(&error))
    }

    /// Any function of an id and a claim id, with further arguments: the one text that it returns.
    pub async fn say(&self, client: &Client, function: &str, more: &str) -> Result<String, String> {
        let sql = format!("SELECT once.{function}($1, $2{more})::text");
        text(client, &sql, &[&self.id, &self.claim_id]).await
    }
}

/// The state of a job that is alive or kept; `gone` where nothing is there.
pub async fn state(client: &Client, id: i64) -> String {
    let rows = client.query("SELECT state FROM once.look_job($1)", &[&id]).await.unwrap();
    assert!(rows.len() <= 1, "a job is alive or ended, not both");
    rows.first().map_or_else(|| "gone".into(), |row| row.get(0))
}

/// Every job by its state, in the order of ids.
pub async fn states(client: &Client) -> Vec<String> {
    let rows = client.query("SELECT state FROM once.jobs ORDER BY id", &[]).await.unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

/// Polls until the condition holds; panics after a minute.
pub async fn soon(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !condition().await {
        assert!(Instant::now() < deadline, "did not happen in time: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Takes until a job comes.
pub async fn take_soon(client: &Client, limit: i32) -> Vec<Held> {
    let mut held = Vec::new();
    soon("a job to take", async || {
        held = take(client, limit).await;
        !held.is_empty()
    })
    .await;
    held
}

/// Makes the database's clock stand, so many seconds after a day.
pub async fn stand(db: &TestDb, seconds: u32) {
    let sql = format!(
        "CREATE OR REPLACE FUNCTION once.clock() RETURNS timestamptz LANGUAGE sql VOLATILE
         AS 'SELECT timestamptz ''2030-01-01 00:00:00+00'' + interval ''{seconds} seconds'''"
    );
    db.client().await.batch_execute(&sql).await.unwrap();
}
