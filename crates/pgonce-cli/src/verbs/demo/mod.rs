//! `pgonce up --demo`: duplicated, raced and crashed commands, and the proof that each had one effect.
//!
//! The orders table has nothing unique about it: a second effect would be a second row. Orders and intents
//! commit together, so their counts are equal in every snapshot, while it runs too. Each order's message commits with it, and
//! goes through the outbox, a broker and the inbox to a table with nothing unique about it either (`flow`).

mod book;
mod broker;
mod faults;
mod flow;

use std::io::{IsTerminal as _, Write as _};
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pgonce::{Error, Event, Once, Outcome, Settings};
use serde::Serialize;
use serde_json::json;
use tokio::task::JoinSet;
use tokio_postgres::Client;
use tokio_postgres::types::Type;
use uuid::Uuid;

use self::book::{Book, Counted};
use self::flow::{Flow, Observed};
use crate::Found;
use crate::database;
use crate::output::{Out, say};

const SCOPE: &str = "pgonce_demo";
/// About 44 intents a second, sent between 3 and 6 times each: some 200 attempts a second.
const INTENT_EVERY: Duration = Duration::from_micros(22_500);
const INTENTS_IN_FLIGHT_MAX: usize = 32;
const FINISH_LIMIT: Duration = Duration::from_secs(30);
/// How long the last messages may be on their way.
const ARRIVE_LIMIT: Duration = Duration::from_secs(60);

const PREPARE: &str = r#"
CREATE SCHEMA IF NOT EXISTS pgonce_demo;
CREATE TABLE IF NOT EXISTS pgonce_demo.orders (
    chapter text NOT NULL, key text NOT NULL, amount bigint NOT NULL, claim_id uuid NOT NULL,
    at timestamptz NOT NULL DEFAULT clock_timestamp());
CREATE INDEX IF NOT EXISTS orders_chapter ON pgonce_demo.orders (chapter);
ALTER TABLE pgonce_demo.orders ADD COLUMN IF NOT EXISTS message_id uuid;
CREATE TABLE IF NOT EXISTS pgonce_demo.deliveries (
    chapter text NOT NULL, key text NOT NULL, message_id text NOT NULL,
    at timestamptz NOT NULL DEFAULT clock_timestamp());
CREATE INDEX IF NOT EXISTS deliveries_chapter ON pgonce_demo.deliveries (chapter);
DELETE FROM pgonce_demo.orders WHERE at < clock_timestamp() - interval '1 hour';
DELETE FROM pgonce_demo.deliveries WHERE at < clock_timestamp() - interval '1 hour';
SELECT once.define_scope('pgonce_demo', '{"retention": "1h"}')"#;
/// What the callers saw.
#[derive(Debug, Default)]
struct Seen {
    attempts: AtomicU64,
    replays: AtomicU64,
    conflicts: AtomicU64,
    crashes: AtomicU64,
    unanswered: AtomicU64,
}

fn more(count: &AtomicU64) {
    count.fetch_add(1, Ordering::Relaxed);
}

/// The end, for people and programs.
#[derive(Debug, Serialize)]
struct Summary {
    intents: i64,
    attempts: u64,
    effects: i64,
    replays: u64,
    conflicts: u64,
    crashes_injected: u64,
    unanswered: u64,
    messages_emitted: i64,
    messages_delivered: i64,
    duplicates_absorbed: u64,
    broker: &'static str,
    effects_equal_intents: bool,
    deliveries_equal_orders: bool,
    /// While it runs, a message that is missing is on its way. One that came twice is wrong at any time.
    #[serde(skip)]
    on_their_way: i64,
}

impl std::fmt::Display for Summary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let yes_or_no = |yes: bool| if yes { "yes" } else { "NO" };
        write!(
            f,
            "{} intents, {} attempts, {} effects, {} replays, {} conflicts, {} crashes injected; {} messages emitted, \
             {} delivered, {} duplicates absorbed; ",
            self.intents,
            self.attempts,
            self.effects,
            self.replays,
            self.conflicts,
            self.crashes_injected,
            self.messages_emitted,
            self.messages_delivered,
            self.duplicates_absorbed,
        )?;
        match self.on_their_way {
            1.. => write!(f, "{} on their way", self.on_their_way)?,
            _ => write!(f, "deliveries = orders: {}", yes_or_no(self.deliveries_equal_orders))?,
        }
        write!(f, "; effects = intents: {}", yes_or_no(self.effects_equal_intents))
    }
}

struct Demo {
    once: Once,
    /// Counts, and terminates backends.
    observer: Client,
    seen: Seen,
    observed: Arc<Observed>,
}

/// Sends until stopped, or for so many seconds; then waits for what is on its way.
pub async fn run(
    url: &str,
    dir: &Path,
    seconds: Option<u64>,
    stop: Pin<&mut impl Future<Output = ()>>,
    out: Out,
) -> anyhow::Result<()> {
    tokio::task::LocalSet::new().run_until(show(url, dir, seconds, stop, out)).await
}

async fn show(
    url: &str,
    dir: &Path,
    seconds: Option<u64>,
    stop: Pin<&mut impl Future<Output = ()>>,
    out: Out,
) -> anyhow::Result<()> {
    let observer = database::connect(url).await?;
    observer.batch_execute(PREPARE).await.map_err(Error::from)?;
    let mut settings = Settings::from_url(url);
    settings.pool_max = 12;
    settings.claimed_by = Some("pgonce demo".into());
    let once = Once::with_settings(settings).await?;
    let observed = Arc::new(Observed::default());
    let flow = Flow::start(url, dir, &observer, Arc::clone(&observed)).await?;
    let demo = Arc::new(Demo { once, observer, seen: Seen::default(), observed });
    let mut book = Book::new();
    send(&demo, &mut book, flow.broker, seconds, stop).await?;
    flow.calm();
    arrive(&demo, &mut book, flow.broker).await?;
    let broker = flow.broker;
    flow.stop().await;
    let counted = book.count(&demo.observer).await?;
    let mut summary = demo.summary(counted, broker);
    summary.on_their_way = 0;
    live_end();
    match counted.has_arrived() {
        true => flow::forget(&demo.observer).await?,
        false => flow::say_kept(),
    }
    if out.json {
        out.value(&serde_json::to_value(&summary)?)?;
    } else {
        out.line(&summary.to_string())?;
    }
    let all_well = summary.effects_equal_intents && summary.deliveries_equal_orders && summary.intents > 0;
    if all_well { Ok(()) } else { Err(Found.into()) }
}

/// The storm, until it is time, and until its last command has come back.
async fn send(
    demo: &Arc<Demo>,
    book: &mut Book,
    broker: &'static str,
    seconds: Option<u64>,
    mut stop: Pin<&mut impl Future<Output = ()>>,
) -> anyhow::Result<()> {
    let mut sent = JoinSet::new();
    let mut next = tokio::time::interval(INTENT_EVERY);
    next.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut status = tokio::time::interval(Duration::from_secs(1));
    status.tick().await;
    let end = async {
        match seconds {
            Some(seconds) => tokio::time::sleep(Duration::from_secs(seconds)).await,
            None => std::future::pending().await,
        }
    };
    tokio::pin!(end);
    loop {
        tokio::select! {
            () = stop.as_mut() => break,
            () = &mut end => break,
            _ = next.tick(), if sent.len() < INTENTS_IN_FLIGHT_MAX => {
                sent.spawn(send_intent(Arc::clone(demo), book.open_chapter()));
            }
            Some(_) = sent.join_next() => {}
            _ = status.tick() => live(&demo.summary(book.count(&demo.observer).await?, broker)),
        }
    }
    let finish = async { while sent.join_next().await.is_some() {} };
    if tokio::time::timeout(FINISH_LIMIT, finish).await.is_err() {
        say("\nSome commands did not come back in time; they are cut off, as by a crash.");
        sent.shutdown().await;
    }
    Ok(())
}

/// Waits until the last message has arrived, for a time: also what a demo that was killed left on its way.
async fn arrive(demo: &Demo, book: &mut Book, broker: &'static str) -> anyhow::Result<()> {
    let (deadline, mut shown) = (Instant::now() + ARRIVE_LIMIT, Instant::now());
    loop {
        let counted = book.count(&demo.observer).await?;
        if (counted.has_arrived() && book::is_all_there(&demo.observer).await?) || Instant::now() > deadline {
            return Ok(());
        }
        if shown.elapsed() >= Duration::from_secs(1) {
            shown = Instant::now();
            live(&demo.summary(counted, broker));
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

impl Demo {
    fn summary(&self, counted: Counted, broker: &'static str) -> Summary {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Summary {
            intents: counted.intents,
            attempts: read(&self.seen.attempts),
            effects: counted.effects,
            replays: read(&self.seen.replays),
            conflicts: read(&self.seen.conflicts),
            crashes_injected: read(&self.seen.crashes) + read(&self.observed.crashes),
            unanswered: read(&self.seen.unanswered),
            messages_emitted: counted.emitted,
            messages_delivered: counted.delivered,
            duplicates_absorbed: read(&self.observed.duplicates),
            broker,
            effects_equal_intents: counted.effects == counted.intents,
            deliveries_equal_orders: counted.is_delivered(),
            on_their_way: if counted.delivered == counted.arrived { counted.effects - counted.arrived } else { 0 },
        }
    }
}

/// What happens to one attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Plain,
    /// The client goes away in the middle.
    Dropped,
    /// The server's side of the connection is killed, at any moment up to its commit and beyond.
    Killed,
    /// The same key with another payload.
    OtherPayload,
}

fn fate() -> Fate {
    match rand::random_range(0..100) {
        0..6 => Fate::Dropped,
        6..10 => Fate::Killed,
        10..15 => Fate::OtherPayload,
        _ => Fate::Plain,
    }
}

/// One intent: a storm of concurrent attempts, then one that insists on an answer, as a careful client does.
async fn send_intent(demo: Arc<Demo>, chapter: Arc<str>) {
    let key = format!("{chapter}-{}", Uuid::new_v4().simple());
    let mut storm = JoinSet::new();
    for _ in 0..rand::random_range(2..=5) {
        let (demo, chapter, key) = (Arc::clone(&demo), Arc::clone(&chapter), key.clone());
        storm.spawn(async move {
            tokio::time::sleep(random_time(8)).await;
            attempt(&demo, &chapter, &key, fate()).await
        });
    }
    while storm.join_next().await.is_some() {}
    for _ in 0..50 {
        if attempt(&demo, &chapter, &key, Fate::Plain).await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    tracing::error!("a demo intent got no answer in fifty attempts");
}

/// One attempt with its fate; whether it got a definite answer.
async fn attempt(demo: &Arc<Demo>, chapter: &str, key: &str, fate: Fate) -> bool {
    more(&demo.seen.attempts);
    let run = create_order(demo, chapter, key, fate);
    let answer = match fate {
        Fate::Dropped => match tokio::time::timeout(random_time(6), run).await {
            Ok(answer) => answer,
            Err(_) => {
                more(&demo.seen.crashes);
                return false;
            }
        },
        _ => run.await,
    };
    match answer {
        Ok(Outcome::Executed(_)) => {}
        Ok(Outcome::Replayed(_)) => more(&demo.seen.replays),
        Err(Error::Conflict) => more(&demo.seen.conflicts),
        Err(error) => {
            more(&demo.seen.unanswered);
            tracing::debug!(%error, "no answer");
            return false;
        }
    }
    true
}

async fn create_order(demo: &Arc<Demo>, chapter: &str, key: &str, fate: Fate) -> Result<Outcome<Uuid>, Error> {
    let amount: i64 = if fate == Fate::OtherPayload { 9_999 } else { 1_999 };
    // Killed once: the library's own retries then go through.
    let armed = AtomicBool::new(fate == Fate::Killed);
    demo.once
        .intent(SCOPE, key)
        .payload(&json!({"checkout": key, "amount": amount}))
        .run(async |tx| {
            if armed.swap(false, Ordering::Relaxed) {
                let row = tx.query_typed_one("SELECT pg_backend_pid()", &[]).await?;
                kill_soon(Arc::clone(demo), row.try_get(0)?);
            }
            let claim_id = tx.claim_id();
            // A new order has no rival for its key, so its row may come after its message, and carry its id.
            let told = json!({"chapter": chapter, "key": key, "amount": amount});
            let message_id = tx.emit(Event::new(flow::TOPIC, "order.created", &told).ordered_by(key)).await?;
            tx.execute_typed(
                "INSERT INTO pgonce_demo.orders (chapter, key, amount, claim_id, message_id) VALUES ($1, $2, $3, $4, $5)",
                &[
                    (&chapter, Type::TEXT),
                    (&key, Type::TEXT),
                    (&amount, Type::INT8),
                    (&claim_id, Type::UUID),
                    (&message_id, Type::UUID),
                ],
            )
            .await?;
            tx.made("order", claim_id.to_string());
            Ok(claim_id)
        })
        .await
}

/// Before the insert, between it and COMMIT, during COMMIT or after: whatever the moment turns out to be.
fn kill_soon(demo: Arc<Demo>, pid: i32) {
    tokio::spawn(async move {
        tokio::time::sleep(random_time(4)).await;
        let sql = "SELECT pg_terminate_backend($1)";
        let killed = demo.observer.query_typed_one(sql, &[(&pid, Type::INT4)]).await;
        if killed.and_then(|row| row.try_get::<_, bool>(0)).unwrap_or(false) {
            more(&demo.seen.crashes);
        }
    });
}

fn random_time(millis_max: u64) -> Duration {
    Duration::from_micros(rand::random_range(0..millis_max * 1000))
}

/// One line that changes, where somebody looks at it; else a line a second.
fn live(summary: &Summary) {
    let mut stderr = std::io::stderr().lock();
    let _ = match stderr.is_terminal() {
        true => write!(stderr, "\r\x1b[2K{summary}").and_then(|()| stderr.flush()),
        false => writeln!(stderr, "{summary}"),
    };
}

fn live_end() {
    if std::io::stderr().is_terminal() {
        say("");
    }
}
