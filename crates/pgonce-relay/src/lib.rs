//! From the outbox to brokers and webhooks, and from brokers into the inbox.
//!
//! A [`Sink`] takes messages; each says of every message what became of it ([`Verdict`]). A [`Source`] gives
//! deliveries; each is acknowledged after its effect has committed, never before.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

#[cfg(feature = "amqp")]
mod amqp;
#[cfg(any(feature = "nats", feature = "webhook"))]
mod attribute;
#[cfg(feature = "webhook")]
pub mod call;
pub mod consume;
mod envelope;
#[cfg(feature = "kafka")]
mod kafka;
mod message;
#[cfg(feature = "nats")]
mod nats;
#[cfg(feature = "redis")]
mod redis;
pub mod relay;
pub mod sink;
pub mod source;
mod target;
#[cfg(any(feature = "amqp", feature = "nats", feature = "redis"))]
mod tls;
pub mod work;

pub use consume::{Consumer, Intake};
pub use envelope::{Encoded, Envelope, decode};
pub use message::{Aggregate, Message};
pub use sink::{Sink, Verdict};
pub use source::{Delivery, Source, SourceError};
pub use target::{Target, TargetError};
