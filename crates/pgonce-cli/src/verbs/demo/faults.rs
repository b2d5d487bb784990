//! Answers that get lost on the way back: what was done is done, and is asked for again.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use pgonce_relay::source::Receipt;
use pgonce_relay::{Delivery, Message, Sink, Source, SourceError, Verdict};

use super::flow::Observed;

/// A sink that takes messages, and sometimes is not heard to say so.
#[derive(Debug)]
pub struct LossySink {
    inner: Box<dyn Sink>,
    observed: Arc<Observed>,
}

impl LossySink {
    pub fn new(inner: Box<dyn Sink>, observed: Arc<Observed>) -> Self {
        Self { inner, observed }
    }
}

impl Sink for LossySink {
    fn send<'a>(&'a self, messages: &'a [Message]) -> BoxFuture<'a, Vec<Verdict>> {
        Box::pin(async move {
            let verdicts = self.inner.send(messages).await;
            for (message, verdict) in messages.iter().zip(&verdicts) {
                if *verdict == Verdict::Delivered {
                    self.observed.stored(&message.id);
                }
            }
            if !self.observed.loses_answer() {
                return verdicts;
            }
            vec![Verdict::away("the answer was lost on purpose"); messages.len()]
        })
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        self.inner.close()
    }
}

/// A source whose consumer sometimes is gone between its commit and the acknowledgement.
#[derive(Debug)]
pub struct LossySource {
    inner: Box<dyn Source>,
    observed: Arc<Observed>,
}

impl LossySource {
    pub fn new(inner: Box<dyn Source>, observed: Arc<Observed>) -> Self {
        Self { inner, observed }
    }
}

impl Source for LossySource {
    fn next(&mut self, max: usize) -> BoxFuture<'_, Result<Vec<Delivery>, SourceError>> {
        Box::pin(async move {
            let deliveries = self.inner.next(max).await?;
            let lossy = |delivery: Delivery| {
                let (id, observed) = (delivery.message.id.clone(), Arc::clone(&self.observed));
                let receipt = Box::new(LossyReceipt { inner: delivery.receipt, id, observed });
                Delivery { receipt, ..delivery }
            };
            Ok(deliveries.into_iter().map(lossy).collect())
        })
    }

    fn reach(&mut self) -> BoxFuture<'_, Result<(), SourceError>> {
        self.inner.reach()
    }

    fn close(&mut self) -> BoxFuture<'_, ()> {
        self.inner.close()
    }
}

#[derive(Debug)]
struct LossyReceipt {
    inner: Box<dyn Receipt>,
    id: String,
    observed: Arc<Observed>,
}

impl Receipt for LossyReceipt {
    fn ack(self: Box<Self>) -> BoxFuture<'static, Result<(), SourceError>> {
        self.observed.stored(&self.id);
        if self.observed.loses_answer() {
            return Box::pin(async { Err(SourceError("lost on purpose".into())) });
        }
        self.inner.ack()
    }

    fn retry(self: Box<Self>, delay: Duration) -> BoxFuture<'static, Result<(), SourceError>> {
        self.inner.retry(delay)
    }

    fn refuse(self: Box<Self>) -> BoxFuture<'static, Result<(), SourceError>> {
        self.inner.refuse()
    }
}
