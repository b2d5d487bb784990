//! Where messages go. One folder a sink; all pass one contract suite against the real thing.

#[cfg(feature = "amqp")]
pub mod amqp;
#[cfg(feature = "kafka")]
pub mod kafka;
#[cfg(feature = "nats")]
pub mod nats;
pub mod postgres;
#[cfg(feature = "redis")]
pub mod redis;
pub mod stdout;
#[cfg(any(feature = "amqp", feature = "kafka", feature = "nats", feature = "redis"))]
mod template;
#[cfg(feature = "webhook")]
pub mod webhook;

use std::time::Duration;

use futures_util::future::BoxFuture;

use crate::{Message, Target, TargetError};

/// What became of one message that was sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The sink has acknowledged it: durably there.
    Delivered,
    /// Not now, for a reason that is this message's own or cannot be told apart from it. Nothing, or not
    /// everything, is known of its arrival: it is sent again, under the same id.
    Retry {
        /// For people.
        reason: String,
        /// When the sink wants to be asked again.
        after: Option<Duration>,
    },
    /// It will be refused every time: too large, no such topic, forbidden. It is parked with its key.
    Refused {
        /// For people.
        reason: String,
    },
    /// The sink itself cannot be reached or does not answer. No message is to blame; all wait.
    Away {
        /// For people.
        reason: String,
    },
    /// The sink wants no message ever again (a webhook that answered 410). Its work stops until somebody resumes it.
    Disabled {
        /// For people.
        reason: String,
    },
    /// The sink has ended for this process, and no waiting brings it back (standard output, when its reader has left). Its
    /// work ends here; nothing is to be resumed.
    Closed {
        /// For people.
        reason: String,
    },
}

/// A place that takes messages.
///
/// `send` gets messages that are independent of each other: no two of them have the same ordering key, so it may
/// send them in any order and all at once, and one that fails holds up none of the others. It returns one
/// verdict a message, in their order. `Delivered` means that the sink has said so. It connects, and connects again, by
/// itself, and bounds every wait: where no answer comes in time, it is `Away` or `Retry`, never `Delivered`.
pub trait Sink: Send + Sync + std::fmt::Debug {
    /// Sends, and waits for the acknowledgements.
    fn send<'a>(&'a self, messages: &'a [Message]) -> BoxFuture<'a, Vec<Verdict>>;

    /// Stops cleanly: connections are closed.
    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }
}

/// The schemes that a feature brings.
const BROKERS: &[&str] = &["nats", "amqp", "amqps", "kafka", "redis", "rediss", "http", "https"];

/// Opens the sink that a URL names: its scheme says which. Nothing is connected yet, so a broker that is away now
/// is no error.
///
/// # Errors
/// A URL that cannot be read, a setting that this sink does not know, or a sink that this build leaves out.
pub fn open(url: &str) -> Result<(Target, Box<dyn Sink>), TargetError> {
    let (scheme, _) = url.split_once(':').ok_or_else(|| TargetError("a sink is a URL: nats://host".into()))?;
    match scheme {
        #[cfg(feature = "nats")]
        "nats" => opened(Target::parse(url, nats::SETTINGS)?, nats::open),
        #[cfg(feature = "amqp")]
        "amqp" | "amqps" => opened(Target::parse(url, amqp::SETTINGS)?, amqp::open),
        #[cfg(feature = "kafka")]
        "kafka" => opened(Target::parse(url, kafka::SETTINGS)?, kafka::open),
        #[cfg(feature = "redis")]
        "redis" | "rediss" => opened(Target::parse(url, redis::SETTINGS)?, redis::open),
        "stdout" => opened(Target::parse(url, &[])?, stdout::open),
        "postgres" | "postgresql" => opened(Target::parse(url, postgres::SETTINGS)?, postgres::open),
        #[cfg(feature = "webhook")]
        "http" | "https" => opened(Target::parse(url, webhook::SETTINGS)?, webhook::open),
        _ if BROKERS.contains(&scheme) => {
            Err(TargetError(format!("this build of pgonce has no {scheme} in it: build it with that feature")))
        }
        _ => Err(TargetError(format!("there is no sink for {scheme:?}"))),
    }
}

fn opened<S: Sink + 'static>(
    target: Target,
    open: impl FnOnce(&Target) -> Result<S, TargetError>,
) -> Result<(Target, Box<dyn Sink>), TargetError> {
    let sink = open(&target)?;
    Ok((target, Box::new(sink)))
}

impl Verdict {
    /// For metrics.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Delivered => "delivered",
            Self::Retry { .. } => "retry",
            Self::Refused { .. } => "refused",
            Self::Away { .. } => "away",
            Self::Disabled { .. } => "disabled",
            Self::Closed { .. } => "closed",
        }
    }

    /// Not now; the sink names no time.
    #[must_use]
    pub fn retry(reason: impl std::fmt::Display) -> Self {
        Self::Retry { reason: reason.to_string(), after: None }
    }

    /// Never.
    #[must_use]
    pub fn refused(reason: impl std::fmt::Display) -> Self {
        Self::Refused { reason: reason.to_string() }
    }

    /// The sink itself is not there.
    #[must_use]
    pub fn away(reason: impl std::fmt::Display) -> Self {
        Self::Away { reason: reason.to_string() }
    }
}

/// What a sink says that was closed.
#[cfg(any(feature = "amqp", feature = "kafka", feature = "nats", feature = "redis"))]
const CLOSED: &str = "the sink is closed";

#[cfg(test)]
#[allow(clippy::expect_used, reason = "a test that cannot go on should stop, loudly")]
mod tests {
    use super::*;

    #[test]
    fn a_sink_that_is_not_there_says_so() {
        for (url, why) in [
            ("orders", "a sink is a URL"),
            ("gopher://user:secret@host", "no sink for"),
            #[cfg(not(feature = "nats"))]
            ("nats://host", "build it with that feature"),
            #[cfg(feature = "nats")]
            ("nats://user:secret@host?subjekt=x", "does not know the setting"),
            #[cfg(feature = "nats")]
            ("nats://user:secret@host?subject={tpoic}", "{tpoic}"),
        ] {
            let error = open(url).map(|_| ()).expect_err(url).to_string();
            assert!(error.contains(why), "{url}: {error}");
            assert!(!error.contains("secret"), "{error}");
        }
    }
}
