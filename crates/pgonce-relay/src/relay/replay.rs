//! Sends again what a sink got before: asked for by an operator, recorded, resumable.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use uuid::Uuid;

use super::log::Log;
use super::rounds::{Round, Rounds};
use crate::sink::Sink;

/// Messages that are sent and recorded together.
const BATCH: usize = 500;

/// A replay that `once.ask_replay` made.
#[derive(Debug, Clone)]
pub struct Replay {
    /// Where the outbox is.
    pub database_url: String,
    /// Its number.
    pub id: i64,
    /// The sink that it is for: another one's is refused.
    pub sink: String,
}

/// How far it has come, in this run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Progress {
    /// Messages that the sink took.
    pub sent: u64,
    /// Messages that it did not: they are not parked, for it has had them before.
    pub failed: u64,
    /// Whether nothing is left.
    pub finished: bool,
}

impl Replay {
    /// Sends until it is finished or stopped; what is recorded is not sent by the next run.
    ///
    /// # Errors
    /// Where the database cannot be asked, or somebody else is carrying it out.
    pub async fn run(
        &self,
        sink: Arc<dyn Sink>,
        mut stop: watch::Receiver<bool>,
        mut shown: impl FnMut(Progress),
    ) -> Result<Progress, pgonce::Error> {
        let log = Log::connect(&self.database_url).await?;
        let claim = Uuid::new_v4();
        let mut progress = Progress::default();
        loop {
            let (places, rate) = log.continue_replay(self.id, &self.sink, claim).await?;
            if places.is_empty() {
                progress.finished = true;
                return Ok(progress);
            }
            // At most a second's worth at a time: the pause after it is short enough for the lease, and for Ctrl-C.
            let size = rate.and_then(|rate| usize::try_from(rate).ok()).map_or(BATCH, |rate| rate.clamp(1, BATCH));
            for batch in places.chunks(size) {
                let started = Instant::now();
                let mut rounds = Rounds::new(log.messages(batch).await?, batch, |_, _| false);
                if !send(&mut rounds, &sink, &stop).await {
                    // Nothing of this batch is recorded; whoever goes on may do so at once.
                    log.record_replay(self.id, claim, None, 0, true).await?;
                    return Ok(progress);
                }
                let (held, _, delivered) = rounds.end();
                progress.sent += delivered;
                progress.failed += held.len() as u64;
                let stopping = *stop.borrow();
                log.record_replay(self.id, claim, Some(batch[batch.len() - 1].position), delivered, stopping).await?;
                shown(progress);
                if stopping {
                    return Ok(progress);
                }
                if let Some(rate) = rate {
                    let due = Duration::from_secs_f64(batch.len() as f64 / f64::from(rate));
                    tokio::select! {
                        () = tokio::time::sleep(due.saturating_sub(started.elapsed())) => {}
                        () = super::told_to_stop(&mut stop) => {}
                    }
                }
            }
        }
    }
}

/// False: told to stop, or the sink takes no more, before all of it was sent.
async fn send(rounds: &mut Rounds, sink: &Arc<dyn Sink>, stop: &watch::Receiver<bool>) -> bool {
    while !rounds.is_done() {
        let verdicts = sink.send(&rounds.next()).await;
        match rounds.settle(verdicts, |_| ("parked", None)) {
            Round::Next => {}
            Round::Away(reason) => {
                tracing::warn!(%reason, "the sink is away; trying again");
                if *stop.borrow() {
                    return false;
                }
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
            Round::Disabled(reason) | Round::Closed(reason) => {
                tracing::warn!(%reason, "the sink takes no more: the replay can be resumed");
                return false;
            }
        }
    }
    true
}
