//! Consumers: a broker's deliveries, each applied once, acknowledged after its commit.
//!
//! [`Consumer`] runs a handler in the transaction that admits the message. [`Intake`] moves deliveries into the stored
//! inbox, for workers in other languages, other processes, or later.

pub mod handler;
mod intake;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use pgonce::{Failure, Incoming, MessageTx, Once, Processed};

pub use intake::Intake;

use crate::relay::backoff;
use crate::source::{Delivery, Source};
use crate::{Message, SourceError};

/// A consumer of a source.
#[derive(Debug)]
pub struct Consumer {
    source: Box<dyn Source>,
    at_once: usize,
    hand: Hand,
}

/// What applies a delivery; apart from the source, which cannot be shared between the deliveries of a batch.
#[derive(Debug)]
struct Hand {
    name: String,
    retry_max: Duration,
    /// How often what fails has failed here, by source and id: brokers do not all count.
    failed: Mutex<HashMap<(String, String), u32>>,
}

/// Failing messages that are counted; with more of them counting begins anew.
const FAILED_MAX: usize = 10_000;

impl<S: Source + 'static> From<S> for Consumer {
    fn from(source: S) -> Self {
        Self::of(Box::new(source))
    }
}

impl Consumer {
    /// A consumer of an opened source; see [`crate::source::open`].
    #[must_use]
    pub fn of(source: Box<dyn Source>) -> Self {
        let hand = Hand { name: "default".into(), retry_max: Duration::from_secs(60), failed: Mutex::default() };
        Self { source, at_once: 100, hand }
    }

    /// Its name in the inbox: another name applies every message again.
    #[must_use]
    pub fn named(mut self, name: impl Into<String>) -> Self {
        self.hand.name = name.into();
        self
    }

    /// Deliveries that are taken together; keys in parallel, each in its order.
    #[must_use]
    pub fn at_once(mut self, deliveries: usize) -> Self {
        self.at_once = deliveries.clamp(1, 10_000);
        self
    }

    /// The longest pause before a failed delivery comes again.
    #[must_use]
    pub fn retry_max(mut self, pause: Duration) -> Self {
        self.hand.retry_max = pause;
        self
    }

    /// Runs until `stop` resolves, then finishes what it holds. The handler runs in the message's transaction: what it writes
    /// and emits commits with the admission, once; the delivery is acknowledged after that. A refusal
    /// ([`Failure::refuse`]) is recorded as failed, and acknowledged; any other failure is rolled back, and the broker
    /// delivers again. Messages of one ordering key are handled in the order in which they came; after a failure the
    /// broker decides when they come again.
    pub async fn run<F, R>(self, once: &Once, stop: impl Future<Output = ()>, handler: F)
    where
        F: Fn(MessageTx, Arc<Message>) -> R,
        R: Future<Output = Result<(), Failure>>,
    {
        let Self { mut source, at_once, hand } = self;
        let mut stop = std::pin::pin!(stop);
        let mut failures = Failures::default();
        loop {
            let deliveries = tokio::select! {
                () = &mut stop => break,
                next = source.next(at_once) => match next {
                    Ok(deliveries) => deliveries,
                    Err(error) => {
                        tracing::warn!(consumer = %hand.name, %error, "the source is away; trying again");
                        tokio::select! {
                            () = &mut stop => break,
                            () = tokio::time::sleep(backoff(failures.away(), Duration::from_secs(5))) => continue,
                        }
                    }
                },
            };
            failures.away = 0;
            // Finished even when told to stop: what is not acknowledged would come again for nothing.
            let mut running: FuturesUnordered<_> =
                by_key(deliveries).into_iter().map(|queue| hand.handle(once, queue, &handler)).collect();
            while running.next().await.is_some() {}
        }
        source.close().await;
    }
}

impl Hand {
    /// The deliveries of one key, in order. After a failure the rest of them wait, too.
    async fn handle<F, R>(&self, once: &Once, queue: Vec<Delivery>, handler: &F)
    where
        F: Fn(MessageTx, Arc<Message>) -> R,
        R: Future<Output = Result<(), Failure>>,
    {
        let mut failed = false;
        for Delivery { message, source, place, receipt, .. } in queue {
            let message = Arc::new(message);
            let known = (source.clone(), message.id.clone());
            let ended = if failed {
                receipt.retry(backoff(2, self.retry_max)).await
            } else {
                match self.apply(once, source, &message, handler).await {
                    Ok(Applied::Unfit(error)) => {
                        tell_refused(&self.name, &place, &error);
                        receipt.refuse().await
                    }
                    Ok(Applied::Done) => {
                        self.failed().remove(&known);
                        fail::fail_point!("consume::before_ack");
                        receipt.ack().await
                    }
                    Err(error) => {
                        tracing::warn!(consumer = %self.name, kind = %message.kind, %error, "not applied; it comes again");
                        failed = true;
                        receipt.retry(backoff(self.count(known), self.retry_max)).await
                    }
                }
            };
            if let Err(error) = ended {
                // It comes again, and is then known.
                tracing::debug!(%error, "not acknowledged");
            }
        }
    }

    fn failed(&self) -> std::sync::MutexGuard<'_, HashMap<(String, String), u32>> {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count(&self, message: (String, String)) -> u32 {
        let mut failed = self.failed();
        if failed.len() >= FAILED_MAX {
            failed.clear();
        }
        let count = failed.entry(message).or_default();
        *count += 1;
        *count
    }

    async fn apply<F, R>(
        &self,
        once: &Once,
        source: String,
        message: &Arc<Message>,
        handler: &F,
    ) -> Result<Applied, pgonce::Error>
    where
        F: Fn(MessageTx, Arc<Message>) -> R,
        R: Future<Output = Result<(), Failure>>,
    {
        let inbox = once.consumer(&self.name).source(&source).tenant(&message.tenant);
        let incoming = Incoming::new(source, &message.id, &message.payload);
        let (refused, admitted) = (AtomicBool::new(false), AtomicBool::new(false));
        let handled = |tx| async {
            admitted.store(true, Ordering::Relaxed);
            let ended = handler(tx, Arc::clone(message)).await;
            refused.store(ended.as_ref().is_err_and(Failure::is_refusal), Ordering::Relaxed);
            ended
        };
        match inbox.process(&incoming, handled).await {
            Ok(Processed::Applied(()) | Processed::Duplicate) => Ok(Applied::Done),
            // It was not let in, and is not to blame on a handler.
            Err(error) if !admitted.load(Ordering::Relaxed) && is_unfit(&error) => Ok(Applied::Unfit(error)),
            // The handler's own no: recorded, so that it is not asked again. What broke under it (a mistake in its SQL, say)
            // is no reason to give a message up.
            Err(pgonce::Error::Failed { code, message }) if refused.load(Ordering::Relaxed) => {
                tracing::error!(consumer = %self.name, %code, reason = %message, "refused for good");
                inbox.set_aside(&incoming, true, None).await.map(|()| Applied::Done)
            }
            Err(error) => Err(error),
        }
    }
}

/// What came of a delivery, where something came of it.
enum Applied {
    Done,
    /// The inbox will not have it, this time or any other.
    Unfit(pgonce::Error),
}

/// Whether the inbox refuses a message for what it is: an id that was used with another body, or one that cannot be told or
/// stored at all (its id, tenant, body or headers are out of their limits). Whatever else it says may pass.
fn is_unfit(error: &pgonce::Error) -> bool {
    matches!(error.sqlstate(), Some("P4001" | "P4003" | "P4004" | "P4005" | "P4020" | "P4050" | "22021" | "22P05"))
}

/// Nobody gets such a message again: it is told where people look, with its place at the broker.
fn tell_refused(consumer: &str, place: &str, error: &pgonce::Error) {
    tracing::error!(consumer, place, %error, "refused: this message is not applied, and does not come again");
    metrics::counter!("pgonce_inbox_messages_total", "consumer" => consumer.to_owned(), "verdict" => "refused")
        .increment(1);
}

/// Deliveries by what they stay in order with.
fn by_key(deliveries: Vec<Delivery>) -> Vec<Vec<Delivery>> {
    let mut queues: Vec<Vec<Delivery>> = Vec::new();
    let mut places: HashMap<(String, String), usize> = HashMap::new();
    for delivery in deliveries {
        let (tenant, key) = delivery.message.lane_key();
        let place = *places.entry((tenant.to_owned(), key.to_owned())).or_insert_with(|| {
            queues.push(Vec::new());
            queues.len() - 1
        });
        queues[place].push(delivery);
    }
    queues
}

/// How often the source was away in a row.
#[derive(Debug, Default)]
struct Failures {
    away: u32,
}

impl Failures {
    fn away(&mut self) -> u32 {
        self.away += 1;
        self.away
    }
}

impl From<pgonce::Error> for SourceError {
    fn from(error: pgonce::Error) -> Self {
        Self(error.to_string())
    }
}
