//! Claims that nobody is going to work on: given back in the background, so that they do not become stale.

use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use uuid::Uuid;

use crate::Error;
use crate::claim::{IntentName, interval, release_parameters, resolve_parameters};
use crate::pool::Pool;
use crate::sql::Call;

use super::get;

/// The way to hand one over.
#[derive(Debug, Clone)]
pub(super) struct Orphans(mpsc::Sender<Orphan>);

#[derive(Debug)]
struct Orphan {
    name: IntentName,
    claim_id: Uuid,
    since: Instant,
}

const ORPHANS_MAX: usize = 10_000;
/// Leases are over by then, and policy has had its say.
const GIVE_UP: Duration = Duration::from_secs(600);

impl Orphans {
    pub(super) fn start(side: Pool) -> Self {
        let (sender, mut orphans) = mpsc::channel::<Orphan>(ORPHANS_MAX);
        tokio::spawn(async move {
            while let Some(orphan) = orphans.recv().await {
                orphan.give_back(&side).await;
            }
        });
        Self(sender)
    }

    pub(super) fn add(&self, name: IntentName, claim_id: Uuid) {
        if self.0.try_send(Orphan { name, claim_id, since: Instant::now() }).is_err() {
            tracing::warn!("too many claims to give back; this one ends with its lease");
        }
    }
}

impl Orphan {
    async fn give_back(self, side: &Pool) {
        while self.since.elapsed() < GIVE_UP {
            match self.try_once(side).await {
                Ok(given_back) => {
                    if given_back {
                        metrics::counter!("pgonce_orphans_total").increment(1);
                    }
                    return;
                }
                Err(error) if error.is_retryable() => {
                    tracing::debug!(%error, "claim not given back yet");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
                Err(error) => {
                    tracing::warn!(%error, "a claim could not be given back; it ends with its lease");
                    return;
                }
            }
        }
    }

    /// Whether there was one to give back. The lost transaction that makes it may still be open: it is
    /// waited for, by its lock, before the row is asked.
    async fn try_once(&self, side: &Pool) -> Result<bool, Error> {
        let connection = get(side).await?;
        let wait = interval(Duration::from_secs(1));
        let parameters = resolve_parameters(&self.name, &self.claim_id, &wait);
        let settled: Option<bool> = connection.call(Call::Resolve, &parameters).await?.try_get(0)?;
        if settled.is_some() {
            return Ok(false); // it was never made, or is somebody else's by now
        }
        match connection.call(Call::Release, &release_parameters(&self.name, &self.claim_id)).await {
            Ok(_) => Ok(true),
            Err(error) => match Error::from(error) {
                Error::LeaseLost => Ok(false),
                error => Err(error),
            },
        }
    }
}
