//! The relay: reads the outbox's log, sends, records. Any number of them share a sink's work.
//!
//! A sink's work is divided into lanes, by hash of the ordering key. A relay holds lanes by lease (`holding`), reads what
//! one snapshot sees and the one before did not (`work`), sends it in rounds that keep each key's order (`carry`, `rounds`), and
//! records the snapshot as delivered, fenced. Whatever dies in between is sent again, under the same ids.

mod carry;
mod holding;
pub(crate) mod log;
pub mod replay;
mod rounds;
mod work;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use crate::sink::Sink;
pub use log::Lag;
use work::{Ended, Session};

/// How a relay works. The defaults are for production.
#[derive(Debug, Clone)]
pub struct RelaySettings {
    /// Where the outbox is.
    pub database_url: String,
    /// This relay among others: unique for each process and start.
    pub relay: String,
    /// How long a lane stays this relay's without a sign of life.
    pub lease: Duration,
    /// Messages that are read, sent and recorded together.
    pub batch_max: usize,
    /// The longest pause between two looks at an outbox in which nothing happens.
    pub poll_max: Duration,
    /// Failed attempts at a message before it is parked with its key.
    pub attempts_max: u32,
    /// The longest pause between two attempts at it.
    pub backoff_max: Duration,
    /// Keys that may fail at once; with more of them the sink itself is taken to be ill, and nothing new is sent.
    pub failing_max: usize,
    /// Stops as soon as nothing is left to send.
    pub until_empty: bool,
    /// How long the database may be away at the start; once it was there, it is waited for without end.
    pub wait_max: Duration,
}

impl RelaySettings {
    /// The defaults.
    #[must_use]
    pub fn new(database_url: impl Into<String>) -> Self {
        Self {
            database_url: database_url.into(),
            relay: format!("{}-{}", std::process::id(), uuid::Uuid::new_v4().simple()),
            lease: Duration::from_secs(15),
            batch_max: 1000,
            poll_max: Duration::from_millis(25),
            attempts_max: 10,
            backoff_max: Duration::from_secs(300),
            failing_max: 1000,
            until_empty: false,
            wait_max: Duration::MAX,
        }
    }
}

/// A sink's name and what it wants.
#[derive(Debug, Clone, Default)]
pub struct SinkSettings {
    /// The name under which its progress is kept: the same name goes on where it was.
    pub name: String,
    /// Patterns with `%` and `_`, as LIKE has them; none: all.
    pub topics: Vec<String>,
    /// The same for types.
    pub types: Vec<String>,
    /// Exact; none: all.
    pub tenants: Vec<String>,
    /// Whether a new sink starts at now, and not at the oldest message that is kept.
    pub from_now: bool,
}

/// Why a relay stopped before it was told to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RelayError {
    /// The database refuses the outbox as it is, or the login; trying again would not help.
    #[error(transparent)]
    Refused(#[from] pgonce::Error),
}

/// How it ended.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Finished {
    /// Messages delivered by this relay.
    pub delivered: u64,
    /// What was left when it stopped; nothing, where the database could not be asked.
    pub left: Option<Lag>,
}

/// Runs one sink's share of work until `stop` turns true, or until nothing is left where that is asked for. The database and
/// the sink may come and go meanwhile. `ready` is called once, when the first lanes are asked for.
///
/// # Errors
/// Where the database says no in a way that will not change by itself.
pub async fn run(
    settings: &RelaySettings,
    sink_settings: &SinkSettings,
    sink: Arc<dyn Sink>,
    mut stop: watch::Receiver<bool>,
    ready: impl FnOnce() + Send,
) -> Result<Finished, RelayError> {
    let mut ready = Some(ready);
    let mut finished = Finished { delivered: 0, left: None };
    let mut pause = Duration::from_millis(100);
    let started = Instant::now();
    let (mut reached, mut disabled) = (false, false);
    loop {
        let session = Session::open(settings, sink_settings, Arc::clone(&sink)).await;
        reached |= session.is_ok();
        let ended = match session {
            Ok(session) if session.disabled.is_some() => {
                finished.left = session.lag().await.ok();
                Ok(Ended::Disabled(session.disabled.unwrap_or_default()))
            }
            Ok(session) => {
                (pause, disabled) = (Duration::from_millis(100), false);
                if let Some(ready) = ready.take() {
                    ready();
                }
                session.run(&mut stop, &mut finished).await
            }
            Err(error) => Err(error),
        };
        match ended {
            Ok(Ended::Done) => {
                sink.close().await;
                return Ok(finished);
            }
            Ok(Ended::Disabled(reason)) => {
                if !std::mem::replace(&mut disabled, true) {
                    let what =
                        "the sink is disabled, and gets nothing until somebody resumes it: pgonce outbox resume-sink";
                    tracing::error!(sink = %sink_settings.name, %reason, "{what}");
                }
                if settings.until_empty {
                    say_goodbye(settings, &sink_settings.name).await;
                    sink.close().await;
                    return Ok(finished);
                }
                pause = Duration::from_secs(5);
            }
            Err(error) if !is_passing(&error) => return Err(error.into()),
            Err(error) if !reached && started.elapsed() >= settings.wait_max => return Err(error.into()),
            Err(error) => {
                let what =
                    if reached { "interrupted; nothing is lost, trying again" } else { "waiting for the database" };
                tracing::warn!(sink = %sink_settings.name, %error, "{what}");
            }
        }
        let stopping = tokio::select! {
            () = told_to_stop(&mut stop) => true,
            () = tokio::time::sleep(jitter(pause)) => false,
        };
        if stopping {
            say_goodbye(settings, &sink_settings.name).await;
            sink.close().await;
            return Ok(finished);
        }
        pause = (pause * 2).min(Duration::from_secs(5));
    }
}

/// Resolves when somebody says so; never, where nobody is left to say it.
pub(crate) async fn told_to_stop(stop: &mut watch::Receiver<bool>) {
    if stop.wait_for(|stop| *stop).await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// Told to stop while the connection was broken: the lanes are given back by another one, if that can be had soon. Else they
/// are free when their lease is over.
async fn say_goodbye(settings: &RelaySettings, sink: &str) {
    let goodbye = async {
        if let Ok(log) = log::Log::connect(&settings.database_url).await {
            let _ = log.drop_lanes(sink, &settings.relay, None).await;
        }
    };
    let _ = tokio::time::timeout(Duration::from_secs(2), goodbye).await;
}

/// Whether the database may take it another time.
fn is_passing(error: &pgonce::Error) -> bool {
    error.is_retryable() || error.sqlstate() == Some("P4071")
}

/// Full jitter: anything up to the limit.
pub(crate) fn jitter(limit: Duration) -> Duration {
    limit.mul_f64(rand::random::<f64>())
}

/// The pause before the next attempt, after so many.
pub(crate) fn backoff(attempts: u32, limit: Duration) -> Duration {
    jitter(Duration::from_millis(200).saturating_mul(1 << attempts.min(16)).min(limit))
}
