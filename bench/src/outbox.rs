//! What a message costs its writer, how fast the relay sends a backlog, and how soon a message is at the broker.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use async_nats::jetstream::{self, context::PublishAckFuture};
use futures_util::StreamExt as _;
use pgonce_relay::relay::{self, RelaySettings, SinkSettings};
use pgonce_relay::sink;
use pgonce_testkit::{KafkaServer, NatsServer};
use tokio::sync::watch;
use tokio_postgres::{Client, Statement};

use crate::Arguments;
use crate::measure::{Series, emit as show, rate, report};
use crate::relay::{Sends, kafka_config, kafka_topic, nats_stream, raw_kafka, raw_nats};
use crate::work::{body, client};

/// Messages of a backlog.
const BACKLOG: usize = 50_000;

const TABLES: &str = "DROP TABLE IF EXISTS bench.bare, bench.queue;
    -- The same columns, as a table that somebody would write by hand: one primary key.
    CREATE TABLE bench.bare (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, at timestamptz NOT NULL, message_id uuid NOT NULL,
        aggregate_version bigint, tenant text NOT NULL, topic text NOT NULL, type text NOT NULL, ordering_key text,
        aggregate_type text, aggregate_id text, scope text, key text, headers jsonb, payload jsonb NOT NULL);
    -- The usual outbox: a row that is updated when it was sent.
    CREATE TABLE bench.queue (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, topic text NOT NULL, payload jsonb NOT NULL,
        published_at timestamptz);
    CREATE INDEX ON bench.queue (id) WHERE published_at IS NULL";
const BARE: &str = "INSERT INTO bench.bare (at, message_id, tenant, topic, type, ordering_key, payload)
    VALUES (clock_timestamp(), gen_random_uuid(), '', 'orders', 'order.created', $1, $2)";
const EMIT: &str = "SELECT once.emit('orders', 'order.created', $2, $1)";
/// What `Tx::emit` posts: an id that is derived cannot be there already unless the intent ran before.
const DIRECT: &str = include_str!("../../sql/direct/emit.sql");
const ON_CONFLICT: &str = "ON CONFLICT DO NOTHING";

/// `emit` against the bare insert, in a transaction of its own, at 8 connections.
pub async fn emit(arguments: &Arguments, url: &str) -> Result<()> {
    client(url).await?.batch_execute(TABLES).await?;
    let names = ["bare insert", "once.emit", "emit by the direct statement"];
    let mut series = names.map(|name| Series { name: name.to_owned(), rates: Vec::new() });
    for _ in 0..arguments.rounds {
        for (kind, one) in series.iter_mut().enumerate() {
            let got = rate(8, arguments.window(), async |worker| {
                let writer = Arc::new(Writer::new(url, kind, worker).await?);
                Ok(move || {
                    let writer = Arc::clone(&writer);
                    async move { writer.write().await }
                })
            });
            one.rates.push(got.await?);
        }
    }
    report("emit, 8 connections, one a transaction (ratio to a bare insert of the same row)", &series);
    emit_many(arguments, url).await
}

const BARE_MANY: &str = "INSERT INTO bench.bare (at, message_id, tenant, topic, type, ordering_key, payload)
    SELECT clock_timestamp(), gen_random_uuid(), '', 'orders', 'order.created', m.key, m.payload
    FROM unnest($1::text[], $2::jsonb[]) m (key, payload)";
const EMIT_MANY: &str =
    "SELECT count(*) FROM once.emit_batch(array_fill('orders'::text, ARRAY[cardinality($1::text[])]),
    array_fill('order.created'::text, ARRAY[cardinality($1)]), $2::jsonb[], $1)";
/// Messages of a batch.
const MANY: usize = 100;

/// `emit_batch` against a bare insert of as many rows.
async fn emit_many(arguments: &Arguments, url: &str) -> Result<()> {
    let names = ["bare insert of many rows", "once.emit_batch"];
    let mut series = names.map(|name| Series { name: name.to_owned(), rates: Vec::new() });
    for _ in 0..arguments.rounds {
        for (kind, one) in series.iter_mut().enumerate() {
            let got = rate(8, arguments.window(), async |worker| {
                let client = client(url).await?;
                let statement = client.prepare([BARE_MANY, EMIT_MANY][kind]).await?;
                let work = Arc::new((client, statement, vec![format!("order-{worker}"); MANY], vec![body(); MANY]));
                Ok(move || {
                    let work = Arc::clone(&work);
                    async move {
                        let (client, statement, keys, payloads) = &*work;
                        client.execute(statement, &[keys, payloads]).await?;
                        Ok(())
                    }
                })
            });
            one.rates.push(got.await? * MANY as f64);
        }
    }
    report(
        &format!("emit, messages/s in batches of {MANY}, 8 connections (ratio to a bare insert of many rows)"),
        &series,
    );
    Ok(())
}

struct Writer {
    client: Client,
    statement: Statement,
    kind: usize,
    key: String,
}

impl Writer {
    async fn new(url: &str, kind: usize, worker: usize) -> Result<Self> {
        let client = client(url).await?;
        let posted = DIRECT.trim_end().trim_end_matches(ON_CONFLICT);
        let statement = client.prepare([BARE, EMIT, posted][kind]).await?;
        Ok(Self { client, statement, kind, key: format!("order-{worker}") })
    }

    async fn write(&self) -> Result<()> {
        let none = None::<&str>;
        if self.kind < 2 {
            self.client.execute(&self.statement, &[&self.key, &body()]).await?;
        } else {
            let id = uuid::Uuid::new_v4();
            let (headers, version) = (None::<serde_json::Value>, None::<i64>);
            self.client
                .execute(
                    &self.statement,
                    &[
                        &"orders",
                        &"order.created",
                        &body(),
                        &self.key,
                        &none,
                        &none,
                        &version,
                        &headers,
                        &none,
                        &none,
                        &id,
                        &"",
                    ],
                )
                .await?;
        }
        Ok(())
    }
}

/// A backlog through the relay, against the broker's client alone and against the usual loop.
pub async fn relay(arguments: &Arguments, url: &str) -> Result<()> {
    client(url).await?.batch_execute(TABLES).await?;
    let nats = tokio::task::spawn_blocking(NatsServer::start).await?;
    let kafka = tokio::task::spawn_blocking(KafkaServer::shared_url).await?;
    for broker in [nats.url(), kafka] {
        let scheme = broker.split(':').next().unwrap_or_default().to_owned();
        let mut contenders = vec![
            Contender::Alone(Sends::Payloads),
            Contender::Alone(Sends::Events),
            Contender::Relay { held: false },
            Contender::Relay { held: true },
        ];
        if scheme == "nats" {
            contenders.extend([Contender::Loop { batch: 1 }, Contender::Loop { batch: 100 }]);
        }
        let mut series: Vec<Series> =
            contenders.iter().map(|one| Series { name: one.name(), rates: Vec::new() }).collect();
        for _ in 0..arguments.rounds.min(5) {
            for (contender, one) in contenders.iter().zip(&mut series) {
                one.rates.push(contender.rate(url, &broker).await?);
            }
        }
        let title = format!("relay, a backlog of {BACKLOG} messages to {scheme}, acknowledged");
        report(&format!("{title} (ratio to the client alone)"), &series);
        report(&format!("{title} (ratio to the client that sends the same bytes)"), &series[1..4]);
    }
    latency(url, &nats.url()).await
}

/// Who empties a backlog.
#[derive(Debug, Clone, Copy)]
enum Contender {
    /// The broker's own client, without a database.
    Alone(Sends),
    /// The relay; `held`: while a transaction is open.
    Relay { held: bool },
    /// What is usually written, with so many rows a transaction.
    Loop { batch: i64 },
}

impl Contender {
    fn name(self) -> String {
        match self {
            Self::Alone(Sends::Payloads) => "the client alone, bare payloads".into(),
            Self::Alone(Sends::Events) => "the client alone, the bytes that the relay sends".into(),
            Self::Relay { held: false } => "pgonce relay".into(),
            Self::Relay { held: true } => "pgonce relay, a transaction open for long".into(),
            Self::Loop { batch } => format!("select for update skip locked, publish, update: by {batch}"),
        }
    }

    async fn rate(self, url: &str, broker: &str) -> Result<f64> {
        let nats = broker.starts_with("nats");
        // A row a transaction is so slow that a part of the backlog shows it.
        let messages = if matches!(self, Self::Loop { batch: 1 }) { BACKLOG / 10 } else { BACKLOG };
        let took = match self {
            Self::Alone(sends) if nats => raw_nats(broker, messages, sends).await?,
            Self::Alone(sends) => raw_kafka(broker, messages, sends).await?,
            Self::Relay { held } => through_relay(url, broker, held).await?,
            Self::Loop { batch } => usual_loop(url, broker, batch, messages).await?,
        };
        Ok(messages as f64 / took.as_secs_f64())
    }
}

async fn topic(broker: &str) -> Result<String> {
    if broker.starts_with("nats") {
        return nats_stream(&jetstream::new(async_nats::connect(broker).await?)).await;
    }
    kafka_topic(&kafka_config(broker)).await
}

/// From the first look at the outbox to the last record, with the backlog made before.
async fn through_relay(url: &str, broker: &str, held: bool) -> Result<Duration> {
    let topic = topic(broker).await?;
    let client = client(url).await?;
    let idle = crate::work::client(url).await?;
    if held {
        idle.batch_execute("BEGIN; CREATE TEMP TABLE held (n int); SELECT pg_current_xact_id()").await?;
    }
    let fill = "SELECT count(once.emit($1, 'order.created', $2, 'order-' || n)) FROM generate_series(1, $3::int) n";
    client.query_one(fill, &[&topic, &body(), &i32::try_from(BACKLOG)?]).await?;
    let (_, sink) = sink::open(broker).context("no sink")?;
    let mut settings = RelaySettings::new(url);
    settings.until_empty = true;
    let wanted = SinkSettings { name: topic.clone(), topics: vec![topic.clone()], ..SinkSettings::default() };
    let (_stop, stopped) = watch::channel(false);
    let began = Instant::now();
    let finished = relay::run(&settings, &wanted, Arc::from(sink), stopped, || {}).await?;
    let took = began.elapsed();
    anyhow::ensure!(finished.delivered == BACKLOG as u64, "{finished:?}");
    client.execute("SELECT once.resume_sink($1, 'bench', 'done', true)", &[&topic]).await?;
    // The next run's differences begin after this one's: a fresh sink would read them all.
    client.batch_execute("TRUNCATE once.outbox").await?;
    Ok(took)
}

/// What is usually written: a batch locked, published with the same client, marked.
async fn usual_loop(url: &str, broker: &str, batch: i64, messages: usize) -> Result<Duration> {
    let topic = topic(broker).await?;
    let mut client = client(url).await?;
    client.batch_execute("TRUNCATE bench.queue").await?;
    let fill = "INSERT INTO bench.queue (topic, payload) SELECT $1, $2 FROM generate_series(1, $3::int)";
    client.execute(fill, &[&topic, &body(), &i32::try_from(messages)?]).await?;
    let context = jetstream::new(async_nats::connect(broker).await?);
    let take = client.prepare("SELECT id, topic, payload::text FROM bench.queue WHERE published_at IS NULL ORDER BY id LIMIT $1 FOR UPDATE SKIP LOCKED").await?;
    let mark = client.prepare("UPDATE bench.queue SET published_at = now() WHERE id = ANY ($1)").await?;
    let began = Instant::now();
    loop {
        let transaction = client.transaction().await?;
        let rows = transaction.query(&take, &[&batch]).await?;
        if rows.is_empty() {
            return Ok(began.elapsed());
        }
        let mut acks: Vec<PublishAckFuture> = Vec::with_capacity(rows.len());
        for row in &rows {
            acks.push(context.publish(row.get::<_, String>(1), row.get::<_, String>(2).into()).await?);
        }
        for ack in acks {
            ack.await?;
        }
        let ids: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
        transaction.execute(&mark, &[&ids]).await?;
        transaction.commit().await?;
    }
}

/// From the commit to the broker's subscriber, one message at a time.
async fn latency(url: &str, broker: &str) -> Result<()> {
    let topic = topic(broker).await?;
    let mut arrivals = async_nats::connect(broker).await?.subscribe(topic.clone()).await?;
    let (_, sink) = sink::open(broker).context("no sink")?;
    let (stop, stopped) = watch::channel(false);
    let (settings, wanted) = (
        RelaySettings::new(url),
        SinkSettings { name: topic.clone(), topics: vec![topic.clone()], from_now: true, ..SinkSettings::default() },
    );
    let (ready, is_ready) = tokio::sync::oneshot::channel();
    let tell = move || {
        let _ = ready.send(());
    };
    let running = tokio::spawn(async move { relay::run(&settings, &wanted, Arc::from(sink), stopped, tell).await });
    is_ready.await?; // from now on, and not before
    let client = client(url).await?;
    let mut committed: HashMap<i64, Instant> = HashMap::new();
    let mut took = Vec::new();
    for n in 0..300_i64 {
        client
            .execute("SELECT once.emit($1, 'x', jsonb_build_object('n', $2::bigint), $2::text)", &[&topic, &n])
            .await?;
        committed.insert(n, Instant::now());
        let message = tokio::time::timeout(Duration::from_secs(10), arrivals.next()).await?.context("no message")?;
        let arrived = Instant::now();
        let payload: serde_json::Value = serde_json::from_slice(&message.payload)?;
        if let Some(at) = payload["n"].as_i64().and_then(|n| committed.remove(&n)) {
            took.push(arrived.saturating_duration_since(at));
        }
        tokio::time::sleep(Duration::from_millis(17)).await;
    }
    stop.send_replace(true);
    running.await??;
    took.sort_unstable();
    let at = |share: f64| took[((took.len() - 1) as f64 * share) as usize].as_secs_f64() * 1000.0;
    show(&format!(
        "light load, commit to broker, emitted from SQL (polling only): p50 {:.1} ms  p99 {:.1} ms",
        at(0.5),
        at(0.99)
    ));
    Ok(())
}
