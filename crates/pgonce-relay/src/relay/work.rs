//! One sink's work on one connection to the database: differences read, sent and recorded, until something breaks.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::task::{JoinError, JoinSet};
use tracing::Instrument as _;
use uuid::Uuid;

use super::carry::{Carrier, Reached, Stopped, count, fate, is_expired};
use super::holding::Keeper;
use super::log::{Cursor, Due, Lag, Log, Place, is_lost};
use super::{Finished, RelaySettings, SinkSettings, told_to_stop};
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
    log: Arc<Log>,
    keeper: Keeper,
    lanes: HashMap<i16, (Uuid, Cursor)>,
    /// Keys that have something held; shared with the streams while they run.
    blocked: Arc<HashSet<(String, String)>>,
    /// Why this sink's work stands still, if it does: then there is nothing to run.
    pub disabled: Option<String>,
    followed: Instant,
    signal: Signal,
}

type Worked<T> = Result<T, pgonce::Error>;

/// How a session ended that nothing broke.
#[derive(Debug)]
pub(super) enum Ended {
    /// Told to stop, nothing is left where that was asked for, or the sink has ended.
    Done,
    /// The sink wants nothing any more, for this reason.
    Disabled(String),
}

impl<'a> Session<'a> {
    pub async fn open(
        settings: &'a RelaySettings,
        sink_settings: &'a SinkSettings,
        sink: Arc<dyn Sink>,
    ) -> Worked<Self> {
        let log = Arc::new(Log::connect(&settings.database_url).await?);
        let disabled = log.open_sink(sink_settings).await?;
        let keeper = Keeper::start(settings, sink_settings).await?;
        let mut session = Self {
            settings,
            name: &sink_settings.name,
            sink,
            log,
            keeper,
            lanes: HashMap::new(),
            blocked: Arc::default(),
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
        self.blocked = Arc::new(self.log.held_keys(self.name, &lanes).await?.into_iter().collect());
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
        is_expired(&self.keeper.held)
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
        // Tasks of their own, so that they use all cores; gone with this call.
        let mut running = JoinSet::new();
        for number in 0..streams {
            let lanes: Vec<(i16, Uuid)> = group.iter().copied().skip(number).step_by(streams).collect();
            let mine: Vec<Place> =
                places.iter().copied().filter(|place| lanes.iter().any(|(lane, _)| *lane == place.lane)).collect();
            let (carrier, stop, target) = (self.carrier(), stop.clone(), target.clone());
            running.spawn(async move { carrier.stream(lanes, mine, &target, whole, &stop).await }.in_current_span());
        }
        let mut failed = None;
        while let Some(ended) = running.join_next().await {
            // Nobody ends them but this call's own end: what is not a panic is that.
            let stream = match ended.map_err(JoinError::try_into_panic) {
                Ok(stream) => stream,
                Err(Ok(panic)) => std::panic::resume_unwind(panic),
                Err(Err(_)) => return Err(Stopped::Left),
            };
            finished.delivered += stream.delivered;
            if !stream.blocked.is_empty() {
                Arc::make_mut(&mut self.blocked).extend(stream.blocked);
            }
            for (lane, _) in &stream.lanes {
                if let Some((_, cursor)) = self.lanes.get_mut(lane) {
                    stream.reached.apply(cursor, &target);
                }
            }
            failed = failed.or(stream.failed);
        }
        failed.map_or(Ok(true), Err)
    }

    fn carrier(&self) -> Carrier {
        Carrier {
            settings: self.settings.clone(),
            name: self.name.to_owned(),
            sink: Arc::clone(&self.sink),
            log: Arc::clone(&self.log),
            held: self.keeper.held.clone(),
            blocked: Arc::clone(&self.blocked),
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
                let (state, delay) = fate(self.settings, verdict, due.attempts + 1);
                (state, Some(reason.as_str()), delay)
            }
        };
        match self.log.settle_held(self.name, due.position, *claim, state, reason, delay).await {
            Ok(more) => {
                finished.delivered += u64::from(state == "delivered");
                if !more {
                    let (tenant, key) = due.message.lane_key();
                    Arc::make_mut(&mut self.blocked).remove(&(tenant.to_owned(), key.to_owned()));
                }
                Ok(())
            }
            Err(error) if is_lost(&error) => Ok(()),
            Err(error) => Err(error.into()),
        }
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
