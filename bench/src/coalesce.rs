//! Leased intents of many callers: one by one through a pool, against gathered into batches.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use pgonce::{Answer, BatchSettings, Batcher, Claim, IntentName, Once, Recorded, Settings};
use uuid::Uuid;

use crate::Arguments;
use crate::measure::{Series, emit, report};
use crate::work::{self, Keys, client};

const CALLERS: usize = 256;
const SETTLED: usize = 1000;

/// First executions and replays of 256 callers, then of one: rates with their ratios, and latencies.
pub async fn coalesce(arguments: &Arguments, url: &str) -> Result<()> {
    let admin = client(url).await?;
    admin.batch_execute("SELECT once.define_scope('coalesce', '{\"mode\": \"leased\"}')").await?;
    let contenders = Contenders::new(url).await?;
    let settled = contenders.settle().await?;
    for (title, callers, keys) in [
        ("first executions, 256 callers", CALLERS, None),
        ("replays, 256 callers", CALLERS, Some(Arc::clone(&settled))),
        ("first executions, 1 caller", 1, None),
        ("replays, 1 caller", 1, Some(settled)),
    ] {
        let mut series = ["pool of 8", "Batcher"].map(|name| Series { name: name.to_owned(), rates: Vec::new() });
        let mut latencies = [Vec::new(), Vec::new()];
        for _ in 0..arguments.rounds {
            for (at, one) in series.iter_mut().enumerate() {
                let (rate, took) = run(&contenders, at == 1, callers, arguments.window(), keys.as_ref()).await?;
                one.rates.push(rate);
                latencies[at].extend(took);
            }
        }
        report(&format!("coalesce: {title} (ratio to one by one)"), &series);
        for (one, took) in series.iter().zip(&mut latencies) {
            took.sort_unstable();
            let at = |part: f64| took.get((took.len() as f64 * part) as usize).copied().unwrap_or_default();
            emit(&format!("        p50 {:>9.2?}  p99 {:>9.2?}  {}", at(0.50), at(0.99), one.name));
        }
    }
    Ok(())
}

#[derive(Clone)]
struct Contenders {
    once: Once,
    batcher: Batcher,
    keys: Keys,
    body: Arc<serde_json::Value>,
}

impl Contenders {
    async fn new(url: &str) -> Result<Self> {
        let mut settings = Settings::from_url(url);
        settings.pool_max = 8;
        settings.pool_wait = Duration::from_secs(60);
        let once = Once::with_settings(settings.clone()).await?;
        let batch = BatchSettings { claim_deadline: Duration::from_secs(60), ..BatchSettings::default() };
        let batcher = Batcher::connect(settings, batch).await?;
        Ok(Self { once, batcher, keys: Keys::new(), body: Arc::new(work::body()) })
    }

    /// Keys that are settled already, for replays.
    async fn settle(&self) -> Result<Arc<Vec<String>>> {
        let keys: Vec<String> = (0..SETTLED).map(|_| self.keys.fresh()).collect();
        let mut tasks = tokio::task::JoinSet::new();
        for key in &keys {
            let (contenders, key) = (self.clone(), key.clone());
            tasks.spawn(async move { contenders.batched(key).await });
        }
        while let Some(done) = tasks.join_next().await {
            done??;
        }
        Ok(Arc::new(keys))
    }

    async fn one_by_one(&self, key: String) -> Result<()> {
        let body = Arc::clone(&self.body);
        self.once.intent("coalesce", key).payload(&*self.body).run_leased(async |_| Ok((*body).clone())).await?;
        Ok(())
    }

    async fn batched(&self, key: String) -> Result<()> {
        let fingerprint = pgonce::fingerprint(&*self.body, "", "")?;
        let name = IntentName { tenant: String::new(), scope: "coalesce".into(), key, fingerprint };
        let claim_id = Uuid::new_v4();
        let observed = self.batcher.claim(&name, claim_id).await?;
        match observed.claim {
            Claim::Owned(owned) => {
                let _kept = self.batcher.keep(&name, claim_id, owned.lease.unwrap_or_default(), observed.asked_at);
                let answer = Answer { body: Some(serde_json::to_vec(&*self.body)?), ..Answer::default() };
                match self.batcher.succeed(&name, claim_id, answer).await? {
                    Recorded::Now { .. } => Ok(()),
                    Recorded::Before { .. } => bail!("recorded before"),
                }
            }
            Claim::Replay(answer) => {
                // The other contender reads its answer, too.
                let _: serde_json::Value = serde_json::from_slice(&answer.body.unwrap_or_default())?;
                Ok(())
            }
            other => bail!("neither owned nor replayed: {other:?}"),
        }
    }
}

async fn run(
    contenders: &Contenders,
    batched: bool,
    callers: usize,
    window: Duration,
    settled: Option<&Arc<Vec<String>>>,
) -> Result<(f64, Vec<Duration>)> {
    let started = Instant::now();
    let ends = started + window;
    let mut tasks = tokio::task::JoinSet::new();
    for caller in 0..callers {
        let (contenders, settled) = (contenders.clone(), settled.cloned());
        tasks.spawn(async move {
            let mut took = Vec::new();
            let mut turn = caller * 7;
            while Instant::now() < ends {
                turn += 1;
                let key = match &settled {
                    Some(keys) => keys[turn % keys.len()].clone(),
                    None => contenders.keys.fresh(),
                };
                let asked = Instant::now();
                if batched {
                    contenders.batched(key).await?;
                } else {
                    contenders.one_by_one(key).await?;
                }
                took.push(asked.elapsed());
            }
            anyhow::Ok(took)
        });
    }
    let mut all = Vec::new();
    while let Some(done) = tasks.join_next().await {
        all.extend(done??);
    }
    Ok((all.len() as f64 / started.elapsed().as_secs_f64(), all))
}
