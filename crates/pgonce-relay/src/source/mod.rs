//! Where deliveries come from. One folder a source; all pass one contract suite against the real thing.

#[cfg(feature = "amqp")]
pub mod amqp;
#[cfg(feature = "kafka")]
pub mod kafka;
#[cfg(feature = "nats")]
pub mod nats;
#[cfg(feature = "redis")]
pub mod redis;
#[cfg(feature = "webhook")]
pub mod webhook;

use std::time::Duration;

use futures_util::future::BoxFuture;

use crate::{Message, Target, TargetError};

/// A delivery and the handle that ends it.
#[derive(Debug)]
pub struct Delivery {
    /// The message. Its id is the producer's where one was given, else the broker's own position of it: then a
    /// message that is published twice is two.
    pub message: Message,
    /// Where it came from, stable over restarts and redeliveries: `nats:ORDERS`. Half of a message's name.
    pub source: String,
    /// Where people find it at the broker, for the log: `nats:ORDERS 17`, `kafka:orders 0:17`.
    pub place: String,
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

    /// It never will be: the broker does not give it again to this consumer, and keeps it where it has a place for such
    /// messages (a dead-letter queue). Whoever refuses has told it first.
    fn refuse(self: Box<Self>) -> BoxFuture<'static, Result<(), SourceError>>;
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

    /// Reaches the broker, or says why not: what `next` begins with. For callers who want to know before they wait.
    fn reach(&mut self) -> BoxFuture<'_, Result<(), SourceError>>;

    /// Stops cleanly.
    fn close(&mut self) -> BoxFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }
}

/// The setting `prefetch`: deliveries that are out and not yet ended.
#[cfg(any(feature = "amqp", feature = "kafka", feature = "nats", feature = "redis"))]
const PREFETCH: u16 = 100;

/// The schemes that a feature brings.
const BROKERS: &[&str] = &["nats", "amqp", "amqps", "kafka", "redis", "rediss", "webhook"];

/// Opens the source that a URL names, for a consumer: the brokers keep its progress under that name. Nothing is
/// connected yet, so a broker that is away now is no error.
///
/// # Errors
/// A URL that cannot be read, a setting that this source does not know, or a source that this build leaves out.
pub fn open(url: &str, consumer: &str) -> Result<(Target, Box<dyn Source>), TargetError> {
    let (scheme, _) = url.split_once(':').ok_or_else(|| TargetError("a source is a URL: nats://host/STREAM".into()))?;
    if consumer.is_empty() {
        return Err(TargetError("a consumer has a name".into()));
    }
    match scheme {
        #[cfg(feature = "nats")]
        "nats" => opened(Target::parse(url, nats::SETTINGS)?, consumer, nats::open),
        #[cfg(feature = "amqp")]
        "amqp" | "amqps" => opened(Target::parse(url, amqp::SETTINGS)?, consumer, amqp::open),
        #[cfg(feature = "kafka")]
        "kafka" => opened(Target::parse(url, kafka::SETTINGS)?, consumer, kafka::open),
        #[cfg(feature = "redis")]
        "redis" | "rediss" => opened(Target::parse(url, redis::SETTINGS)?, consumer, redis::open),
        #[cfg(feature = "webhook")]
        "webhook" => opened(Target::parse(url, webhook::SETTINGS)?, consumer, webhook::open),
        _ if BROKERS.contains(&scheme) => {
            Err(TargetError(format!("this build of pgonce has no {scheme} in it: build it with that feature")))
        }
        _ => Err(TargetError(format!("there is no source for {scheme:?}"))),
    }
}

#[cfg(any(feature = "amqp", feature = "kafka", feature = "nats", feature = "redis", feature = "webhook"))]
fn opened<S: Source + 'static>(
    target: Target,
    consumer: &str,
    open: impl FnOnce(&Target, &str) -> Result<S, TargetError>,
) -> Result<(Target, Box<dyn Source>), TargetError> {
    let source = open(&target, consumer)?;
    Ok((target, Box::new(source)))
}

#[cfg(any(feature = "amqp", feature = "kafka", feature = "nats", feature = "redis"))]
fn prefetch(target: &Target) -> Result<u16, TargetError> {
    let given = target.number("prefetch", 1..=10_000)?;
    Ok(given.and_then(|given| u16::try_from(given).ok()).unwrap_or(PREFETCH))
}

impl SourceError {
    #[cfg(any(feature = "amqp", feature = "kafka", feature = "nats", feature = "redis"))]
    fn new(reason: impl std::fmt::Display) -> Self {
        Self(reason.to_string())
    }
}

#[cfg(all(test, feature = "nats", feature = "amqp", feature = "kafka", feature = "redis"))]
#[allow(clippy::expect_used, reason = "a test that cannot go on should stop, loudly")]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_said() {
        for (url, consumer, why) in [
            ("orders", "c", "a source is a URL"),
            ("gopher://user:secret@host", "c", "no source for"),
            ("nats://host/ORDERS", "", "a consumer has a name"),
            ("nats://user:secret@host", "c", "nats://host/STREAM"),
            ("nats://host/ORDERS", "a.b", "name"),
            ("amqp://user:secret@host/%2f", "c", "queue"),
            ("kafka://user:secret@host", "c", "topic"),
            ("redis://user:secret@host/0", "c", "stream"),
            ("redis://user:secret@host/0?stream=a&prefetch=0", "c", "prefetch"),
        ] {
            let error = open(url, consumer).map(|_| ()).expect_err(url).to_string();
            assert!(error.contains(why), "{url}: {error}");
            assert!(!error.contains("secret"), "{error}");
        }
    }
}
