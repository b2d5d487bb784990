//! From a source into the stored inbox: acknowledged when it is stored.

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::future::join_all;
use pgonce::{Arrival, Once, Verdict};

use crate::relay::backoff;
use crate::source::{Delivery, Source, SourceError};

/// Moves deliveries into a consumer's stored inbox.
#[derive(Debug)]
pub struct Intake {
    source: Box<dyn Source>,
    at_once: usize,
    store: Store,
}

/// What stores deliveries; apart from the source, which cannot be shared.
#[derive(Debug)]
struct Store {
    consumer: String,
}

impl Intake {
    /// From an opened source into a consumer's inbox.
    #[must_use]
    pub fn new(source: Box<dyn Source>, consumer: impl Into<String>) -> Self {
        Self { source, at_once: 500, store: Store { consumer: consumer.into() } }
    }

    /// Runs until `stop` resolves, then finishes what it holds. A delivery is acknowledged once its row has committed; one
    /// whose id is there with another body is never taken for it: it is refused, and told.
    pub async fn run(self, once: &Once, stop: impl Future<Output = ()>) {
        let Self { mut source, at_once, store } = self;
        let mut stop = std::pin::pin!(stop);
        let mut away = 0;
        loop {
            let next = tokio::select! {
                () = &mut stop => break,
                next = source.next(at_once) => next,
            };
            match next {
                Ok(deliveries) => {
                    away = 0;
                    store.all(once, deliveries).await;
                }
                Err(error) => {
                    away += 1;
                    tracing::warn!(consumer = %store.consumer, %error, "the source is away; trying again");
                    tokio::select! {
                        () = &mut stop => break,
                        () = tokio::time::sleep(backoff(away, Duration::from_secs(5))) => {}
                    }
                }
            }
        }
        source.close().await;
    }
}

impl Store {
    /// One statement for each tenant and source among them.
    async fn all(&self, once: &Once, deliveries: Vec<Delivery>) {
        let mut groups: BTreeMap<(String, String), Vec<Delivery>> = BTreeMap::new();
        for delivery in deliveries {
            groups.entry((delivery.message.tenant.clone(), delivery.source.clone())).or_default().push(delivery);
        }
        for ((tenant, source), group) in groups {
            self.group(once, &tenant, &source, group).await;
        }
    }

    async fn group(&self, once: &Once, tenant: &str, source: &str, group: Vec<Delivery>) {
        let arrivals: Vec<Arrival> = group.iter().map(arrival).collect();
        let inbox = once.consumer(&self.consumer).source(source).tenant(tenant);
        fail::fail_point!("consume::before_store");
        let stored = inbox.receive(&arrivals).await;
        fail::fail_point!("consume::after_store");
        match stored {
            Ok(verdicts) => {
                let ended = group.into_iter().zip(verdicts).map(|(delivery, verdict)| self.end(delivery, verdict));
                join_all(ended).await;
            }
            // One that cannot be stored must not keep the others out: each alone, then.
            Err(error) if !error.is_retryable() && group.len() > 1 => {
                for delivery in group {
                    Box::pin(self.group(once, tenant, source, vec![delivery])).await;
                }
            }
            Err(error) if super::is_unfit(&error) => {
                for delivery in group {
                    self.refuse(delivery, &error).await;
                }
            }
            Err(error) => {
                tracing::error!(consumer = %self.consumer, %error, "not stored; the broker keeps it");
                let pause = backoff(4, Duration::from_secs(30));
                join_all(group.into_iter().map(|delivery| delivery.receipt.retry(pause))).await;
            }
        }
    }

    async fn end(&self, delivery: Delivery, verdict: Verdict) {
        match verdict {
            Verdict::New | Verdict::Duplicate => known(delivery.receipt.ack().await),
            Verdict::Conflict => self.refuse(delivery, &pgonce::Error::OtherBody).await,
        }
    }

    /// Given again it would be the same: whoever waits behind it must not.
    async fn refuse(&self, delivery: Delivery, error: &pgonce::Error) {
        super::tell_refused(&self.consumer, &delivery.place, error);
        known(delivery.receipt.refuse().await);
    }
}

/// What the broker did not hear of comes again, and is then known.
fn known(ended: Result<(), SourceError>) {
    if let Err(error) = ended {
        tracing::debug!(%error, "not acknowledged; it comes again, and is then known");
    }
}

fn arrival(delivery: &Delivery) -> Arrival {
    let message = &delivery.message;
    let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    Arrival {
        id: message.id.clone(),
        body: message.payload.to_vec(),
        topic: some(&message.topic),
        kind: some(&message.kind),
        ordering_key: message.ordering_key.clone(),
        entity: message.aggregate.as_ref().map(|it| format!("{}/{}", it.kind, it.id)),
        version: message.aggregate.as_ref().and_then(|it| it.version),
        headers: (!message.headers.is_empty()).then(|| serde_json::json!(message.headers)),
        content_type: message.headers.get("content-type").cloned(),
    }
}
