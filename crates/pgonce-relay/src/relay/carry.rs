//! One stream of a difference, from its first message to its last record.

use std::collections::{HashMap, HashSet};
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::{Either, OptionFuture, join, select};
use tokio::sync::watch;
use tracing::Instrument as _;
use uuid::Uuid;

use super::holding::Holding;
use super::log::{Cursor, Held, Log, Place};
use super::rounds::{Round, Rounds};
use super::{RelaySettings, backoff, jitter};
use crate::sink::Sink;
use crate::{Message, Verdict};

/// What became of some lanes' part of a difference.
pub(super) struct Stream {
    pub lanes: Vec<(i16, Uuid)>,
    pub reached: Reached,
    /// Keys that have something held since.
    pub blocked: Vec<(String, String)>,
    pub delivered: u64,
    pub failed: Option<Stopped>,
}

/// How far it is recorded.
pub(super) enum Reached {
    Nothing,
    Position(i64),
    All,
}

impl Reached {
    pub fn apply(&self, cursor: &mut Cursor, target: &str) {
        match self {
            Self::Nothing => {}
            Self::Position(position) => {
                (cursor.target, cursor.position) = (Some(target.to_owned()), Some(*position));
            }
            Self::All => *cursor = Cursor { delivered: target.to_owned(), target: None, position: None },
        }
    }
}

/// Why a piece of work was not finished: nothing of it is recorded.
pub(super) enum Stopped {
    /// The lease is over, or somebody wants us to end while the sink is away.
    Left,
    /// The sink wants nothing any more; the database knows.
    Disabled(String),
    /// The sink has ended.
    Closed(String),
    Broken(pgonce::Error),
}

impl From<pgonce::Error> for Stopped {
    fn from(error: pgonce::Error) -> Self {
        Self::Broken(error)
    }
}

impl From<tokio_postgres::Error> for Stopped {
    fn from(error: tokio_postgres::Error) -> Self {
        Self::Broken(error.into())
    }
}

/// What carries a stream, on a task of its own.
#[derive(Debug)]
pub(super) struct Carrier {
    pub settings: RelaySettings,
    pub name: String,
    pub sink: Arc<dyn Sink>,
    pub log: Arc<Log>,
    pub held: watch::Receiver<Holding>,
    /// As it was when the difference was read.
    pub blocked: Arc<HashSet<(String, String)>>,
}

/// What is to be recorded of a batch that was sent.
struct Sent {
    /// Up to here; nothing: the whole difference.
    position: Option<i64>,
    held: Vec<Held>,
    delivered: u64,
}

impl Carrier {
    /// Some lanes' part of a difference: batch after batch, each recorded when it was sent.
    pub async fn stream(
        &self,
        lanes: Vec<(i16, Uuid)>,
        places: Vec<Place>,
        target: &str,
        whole: bool,
        stop: &watch::Receiver<bool>,
    ) -> Stream {
        let mut stream = Stream { lanes, reached: Reached::Nothing, blocked: Vec::new(), delivered: 0, failed: None };
        stream.failed = self.carry(&mut stream, &places, target, whole, stop).await.err();
        stream
    }

    /// While a batch is sent, the next is read and the one before is recorded: at no time is anything recorded that was not
    /// acknowledged, and records go in order.
    async fn carry(
        &self,
        stream: &mut Stream,
        places: &[Place],
        target: &str,
        whole: bool,
        stop: &watch::Receiver<bool>,
    ) -> Result<(), Stopped> {
        let mut batches = places.chunks(self.settings.batch_max.clamp(1, 10_000)).peekable();
        let mut next = match batches.peek() {
            Some(batch) => self.log.messages(batch).await?,
            // Nothing of the difference is in these lanes.
            None if whole => {
                let all = Sent { position: None, held: Vec::new(), delivered: 0 };
                return self.record(stream, target, Some(all)).await;
            }
            None => return Ok(()),
        };
        let mut sent = None;
        while let Some(batch) = batches.next() {
            let messages = std::mem::take(&mut next);
            let blocked = std::mem::take(&mut stream.blocked);
            let read = OptionFuture::from(batches.peek().map(|batch| self.log.messages(batch)));
            let record = self.record(stream, target, sent.take());
            let work = recorded_first(record, self.send(messages, batch, &blocked, stop));
            // Polled in this order: what the database has to do is on its way before the messages are.
            let (read, now) = join(read, work).await;
            stream.blocked = blocked;
            let (held, newly_blocked, delivered) = now?;
            stream.blocked.extend(newly_blocked);
            let is_last = whole && batches.peek().is_none();
            let position = (!is_last).then_some(batch[batch.len() - 1].position);
            sent = Some(Sent { position, held, delivered });
            next = match read.transpose() {
                Ok(read) => read.unwrap_or_default(),
                Err(error) => {
                    self.record(stream, target, sent.take()).await?;
                    return Err(error.into());
                }
            };
            if *stop.borrow() {
                break;
            }
        }
        self.record(stream, target, sent).await
    }

    /// Records what was sent, fenced.
    async fn record(&self, stream: &mut Stream, target: &str, sent: Option<Sent>) -> Result<(), Stopped> {
        let Some(Sent { position, held, delivered }) = sent else { return Ok(()) };
        let (lanes, claims): (Vec<i16>, Vec<Uuid>) = stream.lanes.iter().copied().unzip();
        fail::fail_point!("relay::before_record");
        self.log.advance(&self.name, &lanes, &claims, target, position, &held).await?;
        fail::fail_point!("relay::after_record");
        stream.reached = position.map_or(Reached::All, Reached::Position);
        stream.delivered += delivered;
        Ok(())
    }

    /// Sends a batch, round by round; waits for a sink that is away for as long as the lanes are ours.
    async fn send(
        &self,
        messages: Vec<Message>,
        places: &[Place],
        blocked: &[(String, String)],
        stop: &watch::Receiver<bool>,
    ) -> Result<(Vec<Held>, Vec<(String, String)>, u64), Stopped> {
        let span = tracing::info_span!("pgonce.publish", sink = %self.name, messages = messages.len());
        async move {
            // Those from before, and those of this difference's earlier batches.
            let is_blocked = |tenant: &str, key: &str| {
                let any = !self.blocked.is_empty() || !blocked.is_empty();
                let key = any.then(|| (tenant.to_owned(), key.to_owned()));
                key.is_some_and(|key| self.blocked.contains(&key) || blocked.contains(&key))
            };
            let mut rounds = Rounds::new(messages, places, is_blocked);
            let mut pause = Duration::from_millis(50);
            while !rounds.is_done() {
                if is_expired(&self.held) {
                    return Err(Stopped::Left);
                }
                let started = Instant::now();
                fail::fail_point!("relay::before_send");
                let verdicts = self.sink.send(&rounds.next()).await;
                fail::fail_point!("relay::after_send");
                count(&self.name, &verdicts, started);
                match rounds.settle(verdicts, |verdict| fate(&self.settings, verdict, 1)) {
                    Round::Next => pause = Duration::from_millis(50),
                    Round::Away(reason) => {
                        tracing::warn!(sink = %self.name, %reason, "the sink is away; nothing is lost, trying again");
                        if *stop.borrow() {
                            return Err(Stopped::Left);
                        }
                        tokio::time::sleep(jitter(pause)).await;
                        pause = (pause * 2).min(Duration::from_secs(5));
                    }
                    Round::Disabled(reason) => {
                        self.log.disable_sink(&self.name, &reason).await?;
                        return Err(Stopped::Disabled(reason));
                    }
                    Round::Closed(reason) => return Err(Stopped::Closed(reason)),
                }
            }
            Ok(rounds.end())
        }
        .instrument(span)
        .await
    }
}

/// Both at once. A record that fails ends the sending: the lanes may be another's. A record that is on its way is waited for,
/// whatever became of the sending: the cursor here must not fall behind the one in the database.
async fn recorded_first<T>(
    record: impl Future<Output = Result<(), Stopped>>,
    send: impl Future<Output = Result<T, Stopped>>,
) -> Result<T, Stopped> {
    match select(pin!(record), pin!(send)).await {
        Either::Left((recorded, send)) => {
            recorded?;
            send.await
        }
        Either::Right((sent, record)) => {
            record.await?;
            sent
        }
    }
}

/// Whether the lanes may be another's by now.
pub(super) fn is_expired(held: &watch::Receiver<Holding>) -> bool {
    Instant::now() >= held.borrow().valid_until
}

/// What becomes of a message that was not taken, after so many attempts.
pub(super) fn fate(settings: &RelaySettings, verdict: &Verdict, attempts: u32) -> (&'static str, Option<i64>) {
    match verdict {
        Verdict::Retry { after, .. } if attempts < settings.attempts_max => {
            let pause = after.unwrap_or_else(|| backoff(attempts, settings.backoff_max));
            ("failing", Some(i64::try_from(pause.as_millis()).unwrap_or(i64::MAX)))
        }
        _ => ("parked", None),
    }
}

pub(super) fn count(sink: &str, verdicts: &[Verdict], started: Instant) {
    metrics::histogram!("pgonce_publish_duration_seconds", "sink" => sink.to_owned())
        .record(started.elapsed().as_secs_f64());
    let mut counts: HashMap<&'static str, u64> = HashMap::new();
    for verdict in verdicts {
        *counts.entry(verdict.name()).or_default() += 1;
    }
    for (verdict, count) in counts {
        metrics::counter!("pgonce_published_total", "sink" => sink.to_owned(), "verdict" => verdict).increment(count);
    }
}
