//! What the tests of this folder share: short calls of the functions, by a plain connection.

use pgonce_testkit::TestDb;
use tokio_postgres::Client;
use tokio_postgres::types::ToSql;
use uuid::Uuid;

pub type Params<'a> = &'a [&'a (dyn ToSql + Sync)];

/// The isolation levels, as SQL writes them.
pub const LEVELS: [&str; 3] = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"];

pub fn code(error: &tokio_postgres::Error) -> String {
    error.code().map_or_else(|| error.to_string(), |code| code.code().to_owned())
}

/// The one text that a statement returns, or its SQLSTATE.
pub async fn text(client: &Client, sql: &str, params: Params<'_>) -> Result<String, String> {
    client.query_one(sql, params).await.map(|row| row.get(0)).map_err(|error| code(&error))
}

pub async fn texts(client: &Client, sql: &str, params: Params<'_>) -> Vec<String> {
    client.query(sql, params).await.unwrap().iter().map(|row| row.get(0)).collect()
}

pub async fn number(client: &Client, sql: &str) -> i64 {
    client.query_one(sql, &[]).await.unwrap().get(0)
}

/// Admits `id`, whose body's hash is `hash`, for the consumer `c` of the source `s`.
pub async fn admit(client: &Client, id: &str, hash: &[u8]) -> Result<String, String> {
    text(client, "SELECT once.admit('c', 's', $1, $2)", &[&id, &hash]).await
}

pub async fn effect(client: &Client, key: &str) {
    let sql = "INSERT INTO public.effect (scope, key, claim_id) VALUES ('inbox', $1, gen_random_uuid())";
    client.execute(sql, &[&key]).await.unwrap();
}

/// A message that was taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    pub number: i64,
    pub claim_id: Uuid,
    pub id: String,
    pub attempts: i32,
}

pub async fn take(client: &Client, limit: i32) -> Vec<Held> {
    let sql = "SELECT id, claim_id, message_id, attempts FROM once.inbox_take('c', 'w', $1)";
    let rows = client.query(sql, &[&limit]).await.unwrap();
    rows.iter()
        .map(|row| Held { number: row.get(0), claim_id: row.get(1), id: row.get(2), attempts: row.get(3) })
        .collect()
}

pub fn ids(held: &[Held]) -> Vec<&str> {
    held.iter().map(|one| one.id.as_str()).collect()
}

impl Held {
    pub async fn finish(&self, client: &Client) -> Result<(), String> {
        let sql = "SELECT once.inbox_finish($1, $2)";
        client.execute(sql, &[&self.number, &self.claim_id]).await.map(|_| ()).map_err(|error| code(&error))
    }

    pub async fn fail(&self, client: &Client, retryable: bool, error: &str) -> Result<String, String> {
        let sql = "SELECT once.inbox_fail($1, $2, $3, $4)";
        text(client, sql, &[&self.number, &self.claim_id, &retryable, &error]).await
    }

    pub async fn wait(&self, client: &Client) -> Result<String, String> {
        text(client, "SELECT once.inbox_wait($1, $2)", &[&self.number, &self.claim_id]).await
    }
}

/// Stores a message of an ordering key, with an entity's version where one is given.
pub async fn receive(client: &Client, id: &str, key: Option<&str>, version: Option<i64>) {
    let entity = version.map(|_| "e");
    let sql = "SELECT once.receive('c', 's', $1, convert_to($1, 'UTF8'), p_ordering_key => $2, p_entity => $3, p_version => $4)";
    assert_eq!(text(client, sql, &[&id, &key, &entity, &version]).await.unwrap(), "new");
}

pub async fn advance(client: &Client, entity: &str, version: i64) -> Result<String, String> {
    text(client, "SELECT once.advance('c', $1, $2)", &[&entity, &version]).await
}

pub async fn state(client: &Client, id: &str) -> String {
    text(client, "SELECT state FROM once.inbox_messages WHERE message_id = $1", &[&id]).await.unwrap()
}

pub async fn define(db: &TestDb, policy: &str) {
    db.client().await.execute("SELECT once.define_consumer('c', $1::text::jsonb)", &[&policy]).await.unwrap();
}
