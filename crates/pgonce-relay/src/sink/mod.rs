//! Where messages go. One folder a sink; all pass one contract suite against the real thing.

use std::time::Duration;

use futures_util::future::BoxFuture;

use crate::Message;

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
