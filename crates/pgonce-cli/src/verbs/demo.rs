//! `pgonce up --demo`: duplicated, raced and crashed commands, and the proof that each had one effect.
//!
//! The orders table has nothing unique about it: a second effect would be a second row. Orders and intents
//! commit together, so their counts are equal in every snapshot, while it runs too.

use std::io::{IsTerminal as _, Write as _};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pgonce::{Error, Once, Outcome, Settings};
use serde::Serialize;
use serde_json::json;
use tokio::task::JoinSet;
use tokio_postgres::Client;
use tokio_postgres::types::Type;
use uuid::Uuid;

use crate::Found;
use crate::database;
use crate::output::{Out, say};

const SCOPE: &str = "pgonce_demo";
/// About 44 intents a second, sent between 3 and 6 times each: some 200 attempts a second.
const INTENT_EVERY: Duration = Duration::from_micros(22_500);
const INTENTS_IN_FLIGHT_MAX: usize = 32;
/// Whatever runs for days is counted and cleared away by the chapter.
const CHAPTER: Duration = Duration::from_secs(60);
const FINISH_LIMIT: Duration = Duration::from_secs(30);

const PREPARE: &str = r#"
CREATE SCHEMA IF NOT EXISTS pgonce_demo;
CREATE TABLE IF NOT EXISTS pgonce_demo.orders (
    chapter text NOT NULL, key text NOT NULL, amount bigint NOT NULL, claim_id uuid NOT NULL,
    at timestamptz NOT NULL DEFAULT clock_timestamp());
CREATE INDEX IF NOT EXISTS orders_chapter ON pgonce_demo.orders (chapter);
DELETE FROM pgonce_demo.orders WHERE at < clock_timestamp() - interval '1 hour';
SELECT once.define_scope('pgonce_demo', '{"retention": "1h"}')"#;
/// One statement, one snapshot. In the order of bytes '.' follows '-': the range is the chapter's keys.
const COUNT: &str = "
SELECT jsonb_build_object(
    'effects', (SELECT count(*) FROM pgonce_demo.orders o WHERE o.chapter = $1),
    'intents', (SELECT count(*) FROM once.intents i WHERE i.tenant = '' AND i.scope = 'pgonce_demo'
                AND i.key >= $1 || '-' AND i.key < $1 || '.' AND i.status = 'succeeded'))";

/// What the database says.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Counted {
    effects: i64,
    intents: i64,
}

impl std::ops::Add for Counted {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { effects: self.effects + other.effects, intents: self.intents + other.intents }
    }
}

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
    effects_equal_intents: bool,
}

impl std::fmt::Display for Summary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} intents, {} attempts, {} effects, {} replays, {} conflicts, {} crashes injected; effects = intents: {}",
            self.intents,
            self.attempts,
            self.effects,
            self.replays,
            self.conflicts,
            self.crashes_injected,
            if self.effects_equal_intents { "yes" } else { "NO" }
        )
    }
}

struct Demo {
    once: Once,
    /// Counts, and terminates backends.
    observer: Client,
    seen: Seen,
}

/// Sends until stopped, or for so many seconds.
pub async fn run(
    url: &str,
    seconds: Option<u64>,
    mut stop: Pin<&mut impl Future<Output = ()>>,
    out: Out,
) -> anyhow::Result<()> {
    let observer = database::connect(url).await?;
    observer.batch_execute(PREPARE).await.map_err(Error::from)?;
    let mut settings = Settings::from_url(url);
    settings.pool_max = 12;
    settings.claimed_by = Some("pgonce demo".into());
    let demo = Arc::new(Demo { once: Once::with_settings(settings).await?, observer, seen: Seen::default() });
    let mut book = Book::new();
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
                sent.spawn(send_intent(Arc::clone(&demo), book.open_chapter()));
            }
            Some(_) = sent.join_next() => {}
            _ = status.tick() => live(&demo.summary(book.count(&demo.observer).await?)),
        }
    }
    let finish = async { while sent.join_next().await.is_some() {} };
    if tokio::time::timeout(FINISH_LIMIT, finish).await.is_err() {
        say("\nSome commands did not come back in time; they are cut off, as by a crash.");
        sent.shutdown().await;
    }
    let summary = demo.summary(book.count(&demo.observer).await?);
    live_end();
    if out.json {
        out.value(&serde_json::to_value(&summary)?)?;
    } else {
        out.line(&summary.to_string())?;
    }
    if summary.effects_equal_intents && summary.intents > 0 { Ok(()) } else { Err(Found.into()) }
}

impl Demo {
    fn summary(&self, counted: Counted) -> Summary {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Summary {
            intents: counted.intents,
            attempts: read(&self.seen.attempts),
            effects: counted.effects,
            replays: read(&self.seen.replays),
            conflicts: read(&self.seen.conflicts),
            crashes_injected: read(&self.seen.crashes),
            unanswered: read(&self.seen.unanswered),
            effects_equal_intents: counted.effects == counted.intents,
        }
    }
}

/// The chapters: the open one, those whose last commands are still on their way, and the sum of the others.
struct Book {
    open: Arc<str>,
    opened: Instant,
    closing: Vec<Arc<str>>,
    closed: Counted,
}

impl Book {
    fn new() -> Self {
        Self { open: chapter_name(), opened: Instant::now(), closing: Vec::new(), closed: Counted::default() }
    }

    fn open_chapter(&mut self) -> Arc<str> {
        if self.opened.elapsed() >= CHAPTER {
            self.closing.push(std::mem::replace(&mut self.open, chapter_name()));
            self.opened = Instant::now();
        }
        Arc::clone(&self.open)
    }

    /// Everything so far. A closed chapter that is right leaves the orders table; its intents go with their
    /// window. One that is wrong stays, for whoever wants to see it.
    async fn count(&mut self, observer: &Client) -> Result<Counted, Error> {
        for chapter in std::mem::take(&mut self.closing) {
            if Arc::strong_count(&chapter) > 1 {
                self.closing.push(chapter);
                continue;
            }
            let counted = count(observer, &chapter).await?;
            self.closed = self.closed + counted;
            if counted.effects == counted.intents {
                let sql = "DELETE FROM pgonce_demo.orders WHERE chapter = $1";
                observer.execute_typed(sql, &[(&&*chapter, Type::TEXT)]).await?;
            }
        }
        let mut all = self.closed + count(observer, &self.open).await?;
        for chapter in &self.closing {
            all = all + count(observer, chapter).await?;
        }
        Ok(all)
    }
}

fn chapter_name() -> Arc<str> {
    format!("demo_{}", Uuid::new_v4().simple()).into()
}

async fn count(observer: &Client, chapter: &str) -> Result<Counted, Error> {
    let row = database::json_row(observer, COUNT, &[(&chapter, Type::TEXT)]).await?;
    let read = |field: &str| row[field].as_i64().unwrap_or(0);
    Ok(Counted { effects: read("effects"), intents: read("intents") })
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
            tx.execute_typed(
                "INSERT INTO pgonce_demo.orders (chapter, key, amount, claim_id) VALUES ($1, $2, $3, $4)",
                &[(&chapter, Type::TEXT), (&key, Type::TEXT), (&amount, Type::INT8), (&claim_id, Type::UUID)],
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
