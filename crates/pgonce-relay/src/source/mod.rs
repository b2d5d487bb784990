//! Where deliveries come from. One folder a source; all pass one contract suite against the real thing.

use std::time::Duration;

use futures_util::future::BoxFuture;

use crate::Message;

/// A delivery and the handle that ends it.
#[derive(Debug)]
pub struct Delivery {
    /// The message. Its id is the producer's where one was given, else the broker's own position of it: then a
    /// message that is published twice is two.
    pub message: Message,
    /// Where it came from, stable over restarts and redeliveries: `nats:ORDERS`. Half of a message's name.
    pub source: String,
    /// Whether the broker says that it was delivered before.
    pub redelivered: bool,
    /// What ends it.
    pub receipt: Box<dyn Receipt>,
}

/// Ends a delivery, once.
pub trait Receipt: Send + std::fmt::Debug {
    /// It is dealt with, and its effect has committed: the broker may forget it.
    fn ack(self: Box<Self>) -> BoxFuture<'static, Result<(), SourceError>>;

    /// It is not: the broker gives it again, after the delay where it can count one.
    fn retry(self: Box<Self>, delay: Duration) -> BoxFuture<'static, Result<(), SourceError>>;
}

/// The broker could not be asked. Whatever was not acknowledged comes again.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct SourceError(pub String);

/// A place that gives deliveries.
pub trait Source: Send + std::fmt::Debug {
    /// The next deliveries, at least one and at most `max`; waits for the first. Connects again by itself; an error
    /// is for the caller to log and to ask again after a pause. Dropping the future loses nothing.
    fn next(&mut self, max: usize) -> BoxFuture<'_, Result<Vec<Delivery>, SourceError>>;

    /// Stops cleanly.
    fn close(&mut self) -> BoxFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }
}
