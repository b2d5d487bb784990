//! The work that every contender does, and the contenders: one business insert of about 200 bytes of jsonb
//! and one outbox insert, in one transaction.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Result, anyhow};
use deadpool::Runtime;
use deadpool::managed::{self, Metrics, QueueMode, RecycleError, RecycleResult, Timeouts};
use pgonce::{Event, Once, Settings};
use tokio_postgres::{Client, NoTls, Statement};

pub const BUSINESS: &str = "INSERT INTO bench.business (body) VALUES ($1)";
pub const OUTBOX: &str = "INSERT INTO bench.outbox (topic, key, body) VALUES ($1, $2, $3)";

pub const SCHEMA: &str = "
    DROP SCHEMA IF EXISTS bench CASCADE; CREATE SCHEMA bench;
    CREATE TABLE bench.business (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), body jsonb NOT NULL);
    CREATE TABLE bench.outbox (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, topic text NOT NULL,
        key text NOT NULL, body jsonb NOT NULL, at timestamptz NOT NULL DEFAULT clock_timestamp());
    CREATE TABLE bench.tutorial (scope text, key text, fingerprint bytea NOT NULL, status text NOT NULL,
        response_code int, response_body bytea, created_at timestamptz NOT NULL DEFAULT now(),
        updated_at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (scope, key));
    SELECT once.define_scope('bench', '{}')";

/// About 200 bytes, as the stored documents of a small service are.
pub fn body() -> serde_json::Value {
    serde_json::json!({"customer": "c-1234567890", "items": [{"sku": "abc-123456", "quantity": 2},
        {"sku": "def-9876543", "quantity": 1}], "total": 129_900, "currency": "EUR",
        "note": "please deliver in the morning, ring twice"})
}

/// Keys that no run has used before: a prefix for this process, then a counter.
#[derive(Debug, Clone)]
pub struct Keys {
    prefix: Arc<str>,
    next: Arc<AtomicU64>,
}

impl Keys {
    pub fn new() -> Self {
        Self { prefix: uuid::Uuid::new_v4().simple().to_string().into(), next: Arc::default() }
    }

    pub fn fresh(&self) -> String {
        format!("{}-{}", &self.prefix[..20], self.next.fetch_add(1, Ordering::Relaxed))
    }
}

pub async fn client(url: &str) -> Result<Client> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
    tokio::spawn(connection);
    Ok(client)
}

pub async fn once(url: &str, connections: usize) -> Result<Once> {
    let mut settings = Settings::from_url(url);
    settings.pool_max = connections;
    Ok(Once::with_settings(settings).await?)
}

/// Unprotected: begin, insert, insert, commit.
#[derive(Debug)]
pub struct Plain {
    client: Client,
    business: Statement,
    outbox: Statement,
}

impl Plain {
    pub async fn new(url: &str) -> Result<Self> {
        let client = client(url).await?;
        let (business, outbox) = (client.prepare(BUSINESS).await?, client.prepare(OUTBOX).await?);
        Ok(Self { client, business, outbox })
    }

    pub async fn write(&self, key: &str) -> Result<()> {
        let body = body();
        self.client.batch_execute("BEGIN").await?;
        self.client.execute(&self.business, &[&body]).await?;
        self.client.execute(&self.outbox, &[&"orders", &key, &body]).await?;
        self.client.batch_execute("COMMIT").await?;
        Ok(())
    }
}

/// Unprotected, through a pool: how a service that is not a benchmark has its connections, pgonce's own among them.
pub type PlainPool = managed::Pool<PlainConnections>;

/// Makes the pool's connections.
#[derive(Debug)]
pub struct PlainConnections(String);

impl managed::Manager for PlainConnections {
    type Type = Plain;
    type Error = anyhow::Error;

    async fn create(&self) -> Result<Plain> {
        Plain::new(&self.0).await
    }

    async fn recycle(&self, plain: &mut Plain, _: &Metrics) -> RecycleResult<anyhow::Error> {
        if plain.client.is_closed() { Err(RecycleError::message("closed")) } else { Ok(()) }
    }
}

/// A pool as pgonce's is.
pub fn plain_pool(url: &str, connections: usize) -> Result<PlainPool> {
    let limit = Some(Duration::from_secs(5));
    let pool = managed::Pool::builder(PlainConnections(url.to_owned()))
        .max_size(connections)
        .queue_mode(QueueMode::Lifo)
        .runtime(Runtime::Tokio1)
        .timeouts(Timeouts { wait: limit, create: limit, recycle: limit });
    Ok(pool.build()?)
}

/// The unprotected write on a connection of the pool.
pub async fn plain_pooled(pool: &PlainPool, key: &str) -> Result<()> {
    let plain = pool.get().await.map_err(|error| anyhow!("no connection: {error}"))?;
    plain.write(key).await
}

/// Protected, through the crate, atomic mode.
pub async fn protected(once: &Once, key: String) -> Result<()> {
    protected_with(once, key, &body()).await
}

/// The same with a payload that is there already.
pub async fn protected_with(once: &Once, key: String, body: &serde_json::Value) -> Result<()> {
    once.intent("bench", key.clone())
        .payload(body)
        .run(async |tx| {
            tx.execute(&tx.prepared(BUSINESS).await?, &[body]).await?;
            tx.execute(&tx.prepared(OUTBOX).await?, &[&"orders", &key, body]).await?;
            Ok(201)
        })
        .await?;
    Ok(())
}

/// The same with its message in pgonce's own outbox, as services write it.
pub async fn protected_emitting(once: &Once, key: String) -> Result<()> {
    let body = &body();
    once.intent("bench", key)
        .payload(body)
        .run(async |tx| {
            tx.execute(&tx.prepared(BUSINESS).await?, &[body]).await?;
            tx.emit(Event::new("orders", "order.created", body)).await?;
            Ok(201)
        })
        .await?;
    Ok(())
}

/// What tutorials teach: insert processing, select for update, work, update succeeded; a statement a round trip.
pub struct Tutorial {
    plain: Plain,
    insert: Statement,
    select: Statement,
    update: Statement,
}

impl Tutorial {
    pub async fn new(url: &str) -> Result<Self> {
        let plain = Plain::new(url).await?;
        let insert = plain.client.prepare("INSERT INTO bench.tutorial (scope, key, fingerprint, status) VALUES ($1, $2, $3, 'processing') ON CONFLICT DO NOTHING").await?;
        let select = plain.client.prepare("SELECT status, fingerprint, response_code, response_body FROM bench.tutorial WHERE scope = $1 AND key = $2 FOR UPDATE").await?;
        let update = plain.client.prepare("UPDATE bench.tutorial SET status = 'succeeded', response_code = $3, response_body = $4, updated_at = now() WHERE scope = $1 AND key = $2").await?;
        Ok(Self { plain, insert, select, update })
    }

    pub async fn write(&self, key: &str) -> Result<()> {
        let body = body();
        let fingerprint = pgonce::fingerprint(&body, "", "")?;
        let client = &self.plain.client;
        client.batch_execute("BEGIN").await?;
        client.execute(&self.insert, &[&"bench", &key, &fingerprint]).await?;
        let row = client.query_one(&self.select, &[&"bench", &key]).await?;
        if row.get::<_, &str>(0) == "processing" {
            client.execute(&self.plain.business, &[&body]).await?;
            client.execute(&self.plain.outbox, &[&"orders", &key, &body]).await?;
            client.execute(&self.update, &[&"bench", &key, &201, &b"201".as_slice()]).await?;
        }
        client.batch_execute("COMMIT").await?;
        Ok(())
    }
}
