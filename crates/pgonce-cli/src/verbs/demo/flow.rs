//! From the demo's outbox to its inbox: a relay, NATS between them where there is one, and a consumer. Each of them is
//! killed and started again while the demo runs.

use std::collections::{HashSet, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use pgonce::{Failure, Handled, MessageTx, Once, Settings, StoredMessage};
use pgonce_relay::relay::{self, RelaySettings, SinkSettings};
use pgonce_relay::{Intake, Sink, sink, source};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio_postgres::Client;
use tokio_postgres::types::Type;

use super::broker::{self, Broker};
use super::faults::{LossySink, LossySource};
use crate::database;
use crate::output::{explain, say};

/// Where the demo's messages go, and no others.
pub const TOPIC: &str = "pgonce_demo.orders";
/// The name of the sink and of the consumer.
const NAME: &str = "pgonce_demo";
/// Where the inbox has them from. With and without a broker the same, so that what came by one way is known by the other.
const SOURCE: &str = "nats:PGONCE_DEMO";
/// Short: what a killed relay or consumer held is soon another's.
const RELAY_LEASE: Duration = Duration::from_secs(2);
const WORK_LEASE: Duration = Duration::from_secs(4);
const BROKER_CRASH_FIRST: Duration = Duration::from_secs(3);
const BROKER_CRASH_EVERY: Duration = Duration::from_secs(20);
/// How long what is left of the flow may take at its end.
const STOP_LIMIT: Duration = Duration::from_secs(10);

/// An outbox's message may be replayed as long as it is kept, and has to be known that long.
const CONSUMER: &str = "SELECT once.define_consumer('pgonce_demo',
    jsonb_build_object('retention', (h.retention + interval '1 hour')::text)) FROM once.outbox_home h";
/// What was emitted before this sink was made is not its.
const OPEN: &str = "SELECT once.open_sink($1, p_topics => ARRAY[$2], p_from_now => true)";
const FORGET: &str = "SELECT to_jsonb(once.resume_sink($1, 'pgonce demo', 'the demo has ended', p_forget => true))";

/// What the flow counts while it runs.
#[derive(Debug, Default)]
pub struct Observed {
    pub duplicates: AtomicU64,
    pub crashes: AtomicU64,
    is_calm: AtomicBool,
    recent: Mutex<Recent>,
}

/// The ids of the last messages that got through: a repetition follows soon.
#[derive(Debug, Default)]
struct Recent {
    known: HashSet<String>,
    order: VecDeque<String>,
}

const RECENT_MAX: usize = 20_000;
/// One of so many answers is lost.
const LOST_OF: u32 = 50;

impl Observed {
    /// A message is in the inbox; one that was there before has been absorbed.
    pub fn stored(&self, id: &str) {
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        if !recent.known.insert(id.to_owned()) {
            self.duplicates.fetch_add(1, Ordering::Relaxed);
            return;
        }
        recent.order.push_back(id.to_owned());
        if recent.order.len() > RECENT_MAX
            && let Some(oldest) = recent.order.pop_front()
        {
            recent.known.remove(&oldest);
        }
    }

    /// Whether an answer gets lost, on purpose.
    pub fn loses_answer(&self) -> bool {
        let lost = !self.is_calm.load(Ordering::Relaxed) && rand::random_range(0..LOST_OF) == 0;
        if lost {
            self.crashed();
        }
        lost
    }

    fn crashed(&self) {
        self.crashes.fetch_add(1, Ordering::Relaxed);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Faults,
    Calm,
    Stop,
}

/// The running flow. Dropping it ends everything that it started.
pub struct Flow {
    phase: watch::Sender<Phase>,
    observed: Arc<Observed>,
    supervisor: JoinHandle<()>,
    /// What is between outbox and inbox, for people and programs.
    pub broker: &'static str,
}

impl Drop for Flow {
    fn drop(&mut self) {
        self.supervisor.abort();
    }
}

impl Flow {
    /// Makes the sink, before the first message; starts the broker, the relay and the consumer. To be called in a `LocalSet`.
    pub async fn start(url: &str, dir: &Path, observer: &Client, observed: Arc<Observed>) -> anyhow::Result<Self> {
        wait_for_the_last_one(observer).await?;
        let topic = crate::verbs::relay::like(TOPIC);
        let parameters: [database::Param<'_>; 2] = [(&NAME, Type::TEXT), (&topic, Type::TEXT)];
        observer.query_typed_one(OPEN, &parameters).await.map_err(pgonce::Error::from)?;
        // Only the owner reads how long messages are kept; for anybody else the default rules have to do.
        let _ = observer.batch_execute(CONSUMER).await;
        let broker = start_broker(dir, observer).await?;
        let mut settings = Settings::from_url(url);
        settings.pool_max = 8;
        settings.claimed_by = Some("pgonce demo".into());
        let once = Once::with_settings(settings).await?;
        let name = if broker.is_some() { "nats" } else { "none" };
        let (phase, phases) = watch::channel(Phase::Faults);
        let carried = Carried { url: url.to_owned(), topic, once, broker, observed: Arc::clone(&observed) };
        // Opened once here, so that what is wrong with a URL is told and not tried for ever.
        drop(carried.open_sink()?);
        Ok(Self { phase, observed, supervisor: tokio::task::spawn_local(carried.supervise(phases)), broker: name })
    }

    /// No more faults.
    pub fn calm(&self) {
        self.observed.is_calm.store(true, Ordering::Relaxed);
        self.phase.send_replace(Phase::Calm);
    }

    /// Lets what is on its way arrive, and ends.
    pub async fn stop(mut self) {
        self.phase.send_replace(Phase::Stop);
        let _ = tokio::time::timeout(STOP_LIMIT * 2, &mut self.supervisor).await;
    }
}

/// Nothing is kept for the demo any more. A relay that was killed is thought alive until its lease ends.
pub async fn forget(observer: &Client) -> anyhow::Result<()> {
    let deadline = Instant::now() + RELAY_LEASE * 3;
    while database::json_row(observer, FORGET, &[(&NAME, Type::TEXT)]).await? != true {
        anyhow::ensure!(Instant::now() < deadline, "the sink {NAME} was not forgotten: another relay uses it");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    // All of it has arrived. The next sink that somebody makes here starts at the oldest message that is kept: it is not to get
    // a demo's. Who may not touch the log leaves it as it is.
    let _ = observer.execute_typed("DELETE FROM once.outbox WHERE topic = $1", &[(&TOPIC, Type::TEXT)]).await;
    Ok(())
}

/// A sink that stays keeps the log: what to do about it.
pub fn say_kept() {
    say(&format!(
        "Some messages did not arrive in time. The sink {NAME} stays for them: the next demo goes on there, or \
         pgonce outbox forget-sink --sink {NAME} --reason '…' lets them go."
    ));
}

/// A demo that was killed a moment ago looks alive until its lease ends. One that lives would share our work, and take
/// half of it away at its end.
async fn wait_for_the_last_one(observer: &Client) -> anyhow::Result<()> {
    let sql = "SELECT to_jsonb(EXISTS (SELECT FROM once.sinks s WHERE s.sink = $1 AND s.relays > 0))";
    let deadline = Instant::now() + RELAY_LEASE * 3;
    while database::json_row(observer, sql, &[(&NAME, Type::TEXT)]).await? == true {
        anyhow::ensure!(Instant::now() < deadline, "another demo runs on this database: end it first");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    Ok(())
}

/// The broker, or a line that says why there is none.
async fn start_broker(dir: &Path, observer: &Client) -> anyhow::Result<Option<Broker>> {
    let Some(program) = broker::find() else {
        say("No nats-server here (scripts/setup.sh nats, or: apt-get install nats-server, brew install nats-server): \
             the demo's messages go from the outbox straight into the inbox.");
        return Ok(None);
    };
    // A store has one database's messages in it.
    let sql = "SELECT to_jsonb(c.system_identifier || '-' || d.oid) FROM pg_control_system() c, pg_database d
        WHERE d.datname = current_database()";
    let database = database::json_row(observer, sql, &[]).await?;
    let started = match own(dir) {
        Ok(dir) => Broker::start(program, dir.join("nats").join(database.as_str().unwrap_or("database"))).await,
        Err(error) => Err(error.into()),
    };
    Ok(match started {
        Ok(broker) => Some(broker),
        Err(error) => {
            say(&format!(
                "No NATS ({}): the demo's messages go from the outbox straight into the inbox.",
                explain(&error)
            ));
            None
        }
    })
}

/// Where the database is somebody else's, the directory is not there yet. The lock's file marks it as pgonce's, so that a
/// private server may move in later.
fn own(dir: &Path) -> std::io::Result<PathBuf> {
    let dir = std::path::absolute(dir)?;
    if !dir.exists() {
        std::fs::create_dir_all(&dir)?;
        std::fs::File::create(dir.join("pgonce.lock"))?;
    }
    Ok(dir)
}

/// What the supervisor keeps running.
struct Carried {
    url: String,
    topic: String,
    once: Once,
    broker: Option<Broker>,
    observed: Arc<Observed>,
}

impl Carried {
    async fn supervise(mut self, mut phases: watch::Receiver<Phase>) {
        let (mut relay, mut consumer) = (self.start_relay(), self.start_consumer());
        let mut relay_crash = soon(1..5);
        let mut consumer_crash = soon(2..7);
        let mut broker_crash = Instant::now() + BROKER_CRASH_FIRST;
        loop {
            let at = |time: Instant| tokio::time::sleep_until(time.into());
            tokio::select! {
                _ = phases.wait_for(|phase| *phase != Phase::Faults) => break,
                () = at(relay_crash) => {
                    relay.crash().await;
                    (relay, relay_crash) = (self.start_relay(), soon(3..8));
                    self.observed.crashed();
                }
                () = at(consumer_crash) => {
                    consumer.crash().await;
                    (consumer, consumer_crash) = (self.start_consumer(), soon(4..10));
                    self.observed.crashed();
                }
                () = at(broker_crash), if self.broker.is_some() => {
                    self.crash_broker().await;
                    broker_crash = Instant::now() + BROKER_CRASH_EVERY;
                }
            }
        }
        let _ = phases.wait_for(|phase| *phase == Phase::Stop).await;
        relay.stop().await;
        let is_idle = self.until_idle().await;
        consumer.stop().await;
        if let Some(broker) = self.broker.as_ref().filter(|_| is_idle)
            && let Err(error) = broker.clear().await
        {
            tracing::warn!("the demo's stream was not emptied: {}", explain(&error));
        }
    }

    async fn crash_broker(&mut self) {
        let Some(broker) = self.broker.as_mut() else { return };
        self.observed.crashed();
        if let Err(error) = broker.crash().await {
            tracing::error!("{}", explain(&error));
        }
    }

    /// What the relay sent twice is still to be seen, and known again. Then the stream may be emptied.
    async fn until_idle(&self) -> bool {
        let Some(broker) = &self.broker else { return true };
        let deadline = Instant::now() + STOP_LIMIT;
        while Instant::now() < deadline {
            if broker.is_idle(NAME).await.unwrap_or(false) {
                return true;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        false
    }

    fn open_sink(&self) -> anyhow::Result<Arc<dyn Sink>> {
        let Some(broker) = &self.broker else {
            anyhow::ensure!(self.url.contains("://"), "without a broker, give the database as postgres://…");
            let more = if self.url.contains('?') { '&' } else { '?' };
            let (_, sink) = sink::open(&format!("{}{more}consumer={NAME}&source={SOURCE}", self.url))?;
            return Ok(Arc::new(LossySink::new(sink, Arc::clone(&self.observed))));
        };
        let (_, sink) = sink::open(&format!("{}?timeout=2s", broker.url()))?;
        Ok(Arc::from(sink))
    }

    fn start_relay(&self) -> Carrier {
        let mut settings = RelaySettings::new(&self.url);
        settings.lease = RELAY_LEASE;
        let wanted = SinkSettings {
            name: NAME.into(),
            topics: vec![self.topic.clone()],
            from_now: true,
            ..SinkSettings::default()
        };
        let sink = self.open_sink();
        Carrier::start(async move |stop| {
            let ended = match sink {
                Ok(sink) => relay::run(&settings, &wanted, sink, stop, || ()).await.err().map(anyhow::Error::from),
                Err(error) => Some(error),
            };
            if let Some(error) = ended {
                tracing::error!("the demo's relay has ended: {}", explain(&error));
            }
        })
    }

    /// The inbox's worker and, behind a broker, who brings it the messages.
    fn start_consumer(&self) -> Carrier {
        let once = self.once.clone();
        let source = self
            .broker
            .as_ref()
            .map(|broker| source::open(&format!("{}/{}?ack_wait=2s&timeout=2s", broker.url(), broker::STREAM), NAME));
        let source = source.and_then(Result::ok);
        let observed = Arc::clone(&self.observed);
        Carrier::start(async move |stop| {
            let worker = once.consumer(NAME).worker().name("pgonce demo").at_once(4).lease(WORK_LEASE);
            let worker = worker.poll(Duration::from_millis(25));
            let work = worker.run_until(stopped(stop.clone()), deliver);
            match source {
                Some((_, source)) => {
                    let source = Box::new(LossySource::new(source, observed));
                    let intake = Intake::new(source, NAME).run(&once, stopped(stop));
                    tokio::join!(intake, work);
                }
                None => work.await,
            }
        })
    }
}

/// The effect: a row, with nothing unique about it.
async fn deliver(tx: MessageTx, message: Arc<StoredMessage>) -> Result<Handled, Failure> {
    let order: serde_json::Value =
        serde_json::from_slice(&message.body).map_err(|error| Failure::refuse("unreadable", error.to_string()))?;
    let field = |name: &str| order[name].as_str().unwrap_or_default().to_owned();
    let sql = "INSERT INTO pgonce_demo.deliveries (chapter, key, message_id) VALUES ($1, $2, $3)";
    let parameters: [database::Param<'_>; 3] =
        [(&field("chapter"), Type::TEXT), (&field("key"), Type::TEXT), (&message.id, Type::TEXT)];
    tx.execute_typed(sql, &parameters).await?;
    Ok(Handled::Applied)
}

async fn stopped(mut stop: watch::Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}

/// A random moment in so many seconds.
fn soon(seconds: std::ops::Range<u64>) -> Instant {
    Instant::now() + Duration::from_millis(rand::random_range(seconds.start * 1000..seconds.end * 1000))
}

/// One running part, to be killed or stopped. Dropping it kills it.
struct Carrier {
    stop: watch::Sender<bool>,
    task: JoinSet<()>,
}

impl Carrier {
    fn start<R: Future<Output = ()> + 'static>(run: impl FnOnce(watch::Receiver<bool>) -> R) -> Self {
        let (stop, stopped) = watch::channel(false);
        let mut task = JoinSet::new();
        // An intake may not change threads.
        task.spawn_local(run(stopped));
        Self { stop, task }
    }

    /// In the middle of whatever it does.
    async fn crash(mut self) {
        self.task.shutdown().await;
    }

    async fn stop(mut self) {
        self.stop.send_replace(true);
        let _ = tokio::time::timeout(STOP_LIMIT, self.task.join_next()).await;
    }
}
