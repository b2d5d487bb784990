//! One sink's work on one connection to the database: differences read, sent and recorded, until something breaks.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::{OptionFuture, join, join_all};
use tokio::sync::watch;
use tracing::Instrument as _;
use uuid::Uuid;

use super::holding::Keeper;
use super::log::{Cursor, Due, Held, Lag, Log, Place, is_lost};
use super::rounds::{Round, Rounds};
use super::{Finished, RelaySettings, SinkSettings, backoff, jitter, told_to_stop};
use crate::sink::Sink;
use crate::{Message, Verdict};

/// Places of a difference that are held in memory at once: 16 bytes each.
const PLACES_MAX: i32 = 500_000;
/// Parts of a difference that are sent side by side.
const STREAMS_MAX: usize = 4;
/// Messages that are counted when it is told what is left.
const LEFT_MAX: i32 = 1_000_000;
/// How often the cursor follows when there is nothing that this sink wants.
const FOLLOW_EVERY: Duration = Duration::from_secs(30);

/// A connection with lanes, from its beginning to its end.
#[derive(Debug)]
pub(super) struct Session<'a> {
    settings: &'a RelaySettings,
    name: &'a str,
    sink: Arc<dyn Sink>,
    log: Log,
    keeper: Keeper,
    lanes: HashMap<i16, (Uuid, Cursor)>,
    /// Keys that have something held.
    blocked: HashSet<(String, String)>,
    /// Why this sink's work stands still, if it does: then there is nothing to run.
    pub disabled: Option<String>,
    followed: Instant,
    signal: Signal,
}

type Worked<T> = Result<T, pgonce::Error>;

/// What became of some lanes' part of a difference.
struct Stream {
    lanes: Vec<(i16, Uuid)>,
    reached: Reached,
    blocked: Vec<(String, String)>,
    delivered: u64,
    failed: Option<Stopped>,
}

/// How far it is recorded.
enum Reached {
    Nothing,
    Position(i64),
    All,
}

impl Reached {
    fn apply(&self, cursor: &mut Cursor, target: &str) {
        match self {
            Self::Nothing => {}
            Self::Position(position) => {
                (cursor.target, cursor.position) = (Some(target.to_owned()), Some(*position));
            }
            Self::All => *cursor = Cursor { delivered: target.to_owned(), target: None, position: None },
        }
    }
}

/// How a session ended that nothing broke.
#[derive(Debug)]
pub(super) enum Ended {
    /// Told to stop, nothing is left where that was asked for, or the sink has ended.
    Done,
    /// The sink wants nothing any more, for this reason.
    Disabled(String),
}

/// Why a piece of work was not finished: nothing of it is recorded.
enum Stopped {
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

impl<'a> Session<'a> {
    pub async fn open(
        settings: &'a RelaySettings,
        sink_settings: &'a SinkSettings,
        sink: Arc<dyn Sink>,
    ) -> Worked<Self> {
        let log = Log::connect(&settings.database_url).await?;
        let disabled = log.open_sink(sink_settings).await?;
        let keeper = Keeper::start(settings, sink_settings).await?;
        let mut session = Self {
            settings,
            name: &sink_settings.name,
            sink,
            log,
            keeper,
            lanes: HashMap::new(),
            blocked: HashSet::new(),
            disabled,
            followed: Instant::now(),
            signal: Signal::listen(&settings.database_url).await,
        };
        session.keeper.held.mark_changed();
        Ok(session)
    }

    /// Works until told to stop, or until nothing is left where that is asked for.
    pub async fn run(mut self, stop: &mut watch::Receiver<bool>, finished: &mut Finished) -> Worked<Ended> {
        let mut pause = Duration::ZERO;
        let mut ended = Ended::Done;
        while !*stop.borrow() {
            self.take_lanes().await?;
            let worked = match self.cycle(stop, finished).await {
                Ok(worked) => worked,
                Err(Stopped::Left) => {
                    // Until the keeper has told again what is ours there is nothing to do, and nothing to be busy with.
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    continue;
                }
                Err(Stopped::Disabled(reason)) => {
                    ended = Ended::Disabled(reason);
                    break;
                }
                Err(Stopped::Closed(reason)) => {
                    tracing::info!(sink = self.name, %reason, "the sink has ended");
                    break;
                }
                Err(Stopped::Broken(error)) => return Err(error),
            };
            if worked {
                pause = Duration::ZERO;
                continue;
            }
            if self.settings.until_empty && self.is_empty().await? {
                break;
            }
            pause = (pause * 2).clamp(Duration::from_millis(1), self.settings.poll_max);
            tokio::select! {
                () = told_to_stop(stop) => {}
                () = self.signal.wait() => {}
                () = tokio::time::sleep(pause) => {}
            }
        }
        // Whatever is not recorded comes again: it is not a failure to leave without a goodbye.
        let _ = self.log.drop_lanes(self.name, &self.settings.relay, None).await;
        finished.left = self.lag().await.ok();
        Ok(ended)
    }

    /// Whether nothing is left that comes by itself: what is parked waits for somebody, and what is behind it, too.
    async fn is_empty(&self) -> Worked<bool> {
        let lag = self.log.lag(self.name, 1).await?;
        Ok(lag.messages == 0 && lag.failing == 0)
    }

    /// Follows what the keeper was told: lanes come and go. A lane that we know under its claim has its cursor here; a
    /// new one, in the database.
    async fn take_lanes(&mut self) -> Worked<()> {
        if !self.keeper.held.has_changed().unwrap_or(false) {
            if self.is_expired() && self.keeper.held.has_changed().is_err() {
                return Err(pgonce::Error::Away { reason: "the lanes could not be kept".into() });
            }
            return Ok(());
        }
        let holding = self.keeper.held.borrow_and_update().clone();
        let before = std::mem::take(&mut self.lanes);
        let mut fresh = false;
        for lane in holding.lanes {
            let known = before.get(&lane.lane).filter(|(claim, _)| *claim == lane.claim_id);
            fresh |= known.is_none();
            self.lanes.insert(lane.lane, known.cloned().unwrap_or((lane.claim_id, lane.cursor)));
        }
        self.give_back(holding.share).await?;
        if fresh {
            self.reload_blocked().await?;
        }
        Ok(())
    }

    async fn reload_blocked(&mut self) -> Worked<()> {
        let lanes: Vec<i16> = self.lanes.keys().copied().collect();
        self.blocked = self.log.held_keys(self.name, &lanes).await?.into_iter().collect();
        Ok(())
    }

    /// More relays came: what is more than our share is theirs. Nothing is under way here.
    async fn give_back(&mut self, share: usize) -> Worked<()> {
        let more: Vec<i16> = self.lanes.keys().copied().skip(share.max(1)).collect();
        if !more.is_empty() {
            self.log.drop_lanes(self.name, &self.settings.relay, Some(&more)).await?;
            self.lanes.retain(|lane, _| !more.contains(lane));
        }
        Ok(())
    }

    fn is_expired(&self) -> bool {
        Instant::now() >= self.keeper.held.borrow().valid_until
    }

    /// Everything once: what is due again, then what is new, for each group of lanes that are equally far. Whether there
    /// was anything.
    async fn cycle(&mut self, stop: &watch::Receiver<bool>, finished: &mut Finished) -> Result<bool, Stopped> {
        let mut worked = self.try_held(finished).await?;
        if self.blocked.len() > self.settings.failing_max && self.is_ill().await? {
            return Ok(worked); // nothing new until it is better
        }
        let mut groups: HashMap<Cursor, Vec<(i16, Uuid)>> = HashMap::new();
        for (lane, (claim, cursor)) in &self.lanes {
            groups.entry(cursor.clone()).or_default().push((*lane, *claim));
        }
        for (cursor, group) in groups {
            worked |= match self.difference(&cursor, &group, stop, finished).await {
                Err(Stopped::Broken(error)) if error.sqlstate() == Some("P4071") => {
                    tracing::info!(sink = self.name, "another relay has taken over");
                    self.lanes.clear();
                    return Err(Stopped::Left);
                }
                other => other?,
            };
        }
        Ok(worked)
    }

    /// Whether so many keys fail that it must be the sink. Parked ones wait for somebody, and say nothing about it.
    async fn is_ill(&self) -> Result<bool, Stopped> {
        let failing = self.log.lag(self.name, 1).await?.failing;
        Ok(usize::try_from(failing).unwrap_or_default() > self.settings.failing_max)
    }

    /// What the sink has not got.
    pub async fn lag(&self) -> Worked<Lag> {
        Ok(self.log.lag(self.name, LEFT_MAX).await?)
    }

    /// One difference: from the lanes' snapshot to the present one, or to where it was going.
    async fn difference(
        &mut self,
        cursor: &Cursor,
        group: &[(i16, Uuid)],
        stop: &watch::Receiver<bool>,
        finished: &mut Finished,
    ) -> Result<bool, Stopped> {
        let (lanes, claims): (Vec<i16>, Vec<Uuid>) = group.iter().copied().unzip();
        let (target, places) = self.log.difference(self.name, &lanes, cursor, PLACES_MAX).await?;
        fail::fail_point!("relay::after_read");
        if places.is_empty() {
            if cursor.target.is_some() || (self.followed.elapsed() > FOLLOW_EVERY && target != cursor.delivered) {
                self.followed = Instant::now();
                self.log.advance(self.name, &lanes, &claims, &target, None, &[]).await?;
                for lane in &lanes {
                    if let Some((_, cursor)) = self.lanes.get_mut(lane) {
                        Reached::All.apply(cursor, &target);
                    }
                }
            }
            return Ok(false);
        }
        let whole = places.len() < usize::try_from(PLACES_MAX).unwrap_or_default();
        // Lanes share no key: each stream of them is sent and recorded by itself, and none waits for another's
        // acknowledgements. Few messages are one stream: a record is a commit.
        let streams = if places.len() <= self.settings.batch_max { 1 } else { STREAMS_MAX.min(group.len()) };
        let ended = join_all((0..streams).map(|number| {
            let lanes: Vec<(i16, Uuid)> = group.iter().copied().skip(number).step_by(streams).collect();
            let mine =
                places.iter().copied().filter(|place| lanes.iter().any(|(lane, _)| *lane == place.lane)).collect();
            self.stream(lanes, mine, &target, whole, stop)
        }))
        .await;
        let mut failed = None;
        for stream in ended {
            finished.delivered += stream.delivered;
            self.blocked.extend(stream.blocked);
            for (lane, _) in &stream.lanes {
                if let Some((_, cursor)) = self.lanes.get_mut(lane) {
                    stream.reached.apply(cursor, &target);
                }
            }
            failed = failed.or(stream.failed);
        }
        failed.map_or(Ok(true), Err)
    }

    /// Some lanes' part of a difference: batch after batch, each recorded when it was sent.
    async fn stream(
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

    async fn carry(
        &self,
        stream: &mut Stream,
        places: &[Place],
        target: &str,
        whole: bool,
        stop: &watch::Receiver<bool>,
    ) -> Result<(), Stopped> {
        let (lanes, claims): (Vec<i16>, Vec<Uuid>) = stream.lanes.iter().copied().unzip();
        let mut batches = places.chunks(self.settings.batch_max.clamp(1, 10_000)).peekable();
        let mut next = match batches.peek() {
            Some(batch) => self.log.messages(batch).await?,
            // Nothing of the difference is in these lanes.
            None if whole => {
                self.log.advance(self.name, &lanes, &claims, target, None, &[]).await?;
                stream.reached = Reached::All;
                return Ok(());
            }
            None => return Ok(()),
        };
        while let Some(batch) = batches.next() {
            let messages = std::mem::take(&mut next);
            // The next batch is read while this one is sent.
            let read = OptionFuture::from(batches.peek().map(|batch| self.log.messages(batch)));
            let (sent, read) = join(self.send(messages, batch, &stream.blocked, stop), read).await;
            let (held, blocked, delivered) = sent?;
            next = read.transpose()?.unwrap_or_default();
            stream.delivered += delivered;
            let is_last = whole && batches.peek().is_none();
            let position = (!is_last).then_some(batch[batch.len() - 1].position);
            fail::fail_point!("relay::before_record");
            self.log.advance(self.name, &lanes, &claims, target, position, &held).await?;
            fail::fail_point!("relay::after_record");
            stream.reached = position.map_or(Reached::All, Reached::Position);
            stream.blocked.extend(blocked);
            if *stop.borrow() {
                return Ok(());
            }
        }
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
        let span = tracing::info_span!("pgonce.publish", sink = self.name, messages = messages.len());
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
                if self.is_expired() {
                    return Err(Stopped::Left);
                }
                let started = Instant::now();
                fail::fail_point!("relay::before_send");
                let verdicts = self.sink.send(&rounds.next()).await;
                fail::fail_point!("relay::after_send");
                count(self.name, &verdicts, started);
                match rounds.settle(verdicts, |verdict| self.fate(verdict, 1)) {
                    Round::Next => pause = Duration::from_millis(50),
                    Round::Away(reason) => {
                        tracing::warn!(sink = self.name, %reason, "the sink is away; nothing is lost, trying again");
                        if *stop.borrow() {
                            return Err(Stopped::Left);
                        }
                        tokio::time::sleep(jitter(pause)).await;
                        pause = (pause * 2).min(Duration::from_secs(5));
                    }
                    Round::Disabled(reason) => {
                        self.log.disable_sink(self.name, &reason).await?;
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

    /// What becomes of a message that was not taken, after so many attempts.
    fn fate(&self, verdict: &Verdict, attempts: u32) -> (&'static str, Option<i64>) {
        match verdict {
            Verdict::Retry { after, .. } if attempts < self.settings.attempts_max => {
                let pause = after.unwrap_or_else(|| backoff(attempts, self.settings.backoff_max));
                ("failing", Some(i64::try_from(pause.as_millis()).unwrap_or(i64::MAX)))
            }
            _ => ("parked", None),
        }
    }

    /// Tries held messages again: the first of each key's queue.
    async fn try_held(&mut self, finished: &mut Finished) -> Result<bool, Stopped> {
        if self.blocked.is_empty() || self.is_expired() {
            return Ok(false);
        }
        let lanes: Vec<i16> = self.lanes.keys().copied().collect();
        let due = self.log.held_due(self.name, &lanes).await?;
        if due.is_empty() {
            return Ok(false);
        }
        let messages: Vec<Message> = due.iter().map(|due| due.message.clone()).collect();
        let started = Instant::now();
        let verdicts = self.sink.send(&messages).await;
        count(self.name, &verdicts, started);
        // Where the sink is away, the pause is that of an idle relay.
        let worked = verdicts.iter().any(|verdict| !matches!(verdict, Verdict::Away { .. }));
        for (due, verdict) in due.into_iter().zip(verdicts) {
            self.settle_held(&due, &verdict, finished).await?;
        }
        Ok(worked)
    }

    async fn settle_held(&mut self, due: &Due, verdict: &Verdict, finished: &mut Finished) -> Result<(), Stopped> {
        let Some((claim, _)) = self.lanes.get(&due.lane) else { return Ok(()) };
        let (state, reason, delay) = match verdict {
            Verdict::Delivered => ("delivered", None, None),
            Verdict::Away { .. } => return Ok(()), // it is still due
            Verdict::Disabled { reason } => {
                self.log.disable_sink(self.name, reason).await?;
                return Err(Stopped::Disabled(reason.clone()));
            }
            Verdict::Closed { reason } => return Err(Stopped::Closed(reason.clone())),
            Verdict::Retry { reason, .. } | Verdict::Refused { reason } => {
                let (state, delay) = self.fate(verdict, due.attempts + 1);
                (state, Some(reason.as_str()), delay)
            }
        };
        match self.log.settle_held(self.name, due.position, *claim, state, reason, delay).await {
            Ok(more) => {
                finished.delivered += u64::from(state == "delivered");
                if !more {
                    let (tenant, key) = due.message.lane_key();
                    self.blocked.remove(&(tenant.to_owned(), key.to_owned()));
                }
                Ok(())
            }
            Err(error) if is_lost(&error) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

fn count(sink: &str, verdicts: &[Verdict], started: Instant) {
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

/// The gauges of a sink.
#[allow(clippy::cast_precision_loss, reason = "gauges are floats")]
pub(super) fn show_lag(sink: &str, lag: Lag) {
    metrics::gauge!("pgonce_outbox_lag_messages", "sink" => sink.to_owned()).set(lag.messages as f64);
    metrics::gauge!("pgonce_outbox_lag_seconds", "sink" => sink.to_owned()).set(lag.seconds);
    metrics::gauge!("pgonce_parked", "sink" => sink.to_owned()).set(lag.parked as f64);
    metrics::gauge!("pgonce_failing", "sink" => sink.to_owned()).set(lag.failing as f64);
}

/// What wakes an idle relay before its next look. Where it cannot listen, it looks.
#[derive(Debug)]
struct Signal(Option<pgonce::Signals>);

impl Signal {
    async fn listen(url: &str) -> Self {
        let signals = pgonce::Signals::listen(url).await;
        Self(signals.inspect_err(|error| tracing::debug!(%error, "not listening; polling only")).ok())
    }

    async fn wait(&mut self) {
        if let Some(signals) = &mut self.0 {
            if signals.next().await {
                return;
            }
            self.0 = None;
        }
        std::future::pending().await
    }
}
