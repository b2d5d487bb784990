//! Which lanes are ours, and until when: a task of its own, on a connection of its own, so that a long read or a slow
//! sink does not cost the lease.

use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::log::{Lane, Log};
use super::{RelaySettings, SinkSettings};

/// How often the gauges are read and the segments looked after.
const HOUSEKEEPING: Duration = Duration::from_secs(5);

/// What the last sign of life brought.
#[derive(Debug, Clone)]
pub(super) struct Holding {
    pub lanes: Vec<Lane>,
    /// How many should be ours.
    pub share: usize,
    /// Counted from before the database was asked: never later than what it thinks.
    pub valid_until: Instant,
}

/// The task that keeps lanes; gone with this.
#[derive(Debug)]
pub(super) struct Keeper {
    pub held: watch::Receiver<Holding>,
    task: JoinHandle<()>,
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Keeper {
    /// Takes the first lanes, and goes on.
    pub async fn start(settings: &RelaySettings, sink: &SinkSettings) -> Result<Self, pgonce::Error> {
        let log = Log::connect(&settings.database_url).await?;
        let (relay, name, lease) = (settings.relay.clone(), sink.name.clone(), settings.lease);
        let first = hold(&log, &name, &relay, lease).await?;
        let (sender, held) = watch::channel(first);
        let task = tokio::spawn(async move {
            let (mut held, mut kept) = (Instant::now(), Instant::now());
            while !sender.is_closed() {
                tokio::time::sleep((lease / 3).min(HOUSEKEEPING)).await;
                if held.elapsed() >= lease / 3 {
                    held = Instant::now();
                    match hold(&log, &name, &relay, lease).await {
                        Ok(holding) => sender.send_replace(holding),
                        // The session ends with its own error, or with the lease.
                        Err(error) => {
                            tracing::debug!(%error, "lanes not renewed");
                            return;
                        }
                    };
                }
                if kept.elapsed() >= HOUSEKEEPING {
                    kept = Instant::now();
                    keep_house(&log, &name).await;
                }
            }
        });
        Ok(Self { held, task })
    }
}

async fn hold(log: &Log, sink: &str, relay: &str, lease: Duration) -> Result<Holding, pgonce::Error> {
    let asked = Instant::now();
    let lease_ms = i64::try_from(lease.as_millis()).unwrap_or(i64::MAX);
    let (lanes, share) = log.hold_lanes(sink, relay, lease_ms).await?;
    Ok(Holding { lanes, share, valid_until: asked + lease })
}

/// What any relay does now and then: the gauges of this sink, and the log's segments.
async fn keep_house(log: &Log, sink: &str) {
    match log.lag(sink, 100_000).await {
        Ok(lag) => super::work::show_lag(sink, lag),
        Err(error) => tracing::debug!(%error, "lag not read"),
    }
    if let Err(error) = log.rotate().await {
        tracing::debug!(%error, "segments not turned");
    }
}
