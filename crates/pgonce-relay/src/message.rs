//! What travels: a message of the outbox, and the same message as a consumer gets it.

use std::collections::BTreeMap;

use bytes::Bytes;

/// A message. Its id is stable: every delivery of it, by whatever relay, carries the same one.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Message {
    /// Derived from the intent, or random; at a consumer, whatever the producer or the broker gave.
    pub id: String,
    /// The tenant, empty where there is one only.
    pub tenant: String,
    /// Where it goes: a subject, a topic, a queue or a stream.
    pub topic: String,
    /// What it says happened: `order.created`.
    pub kind: String,
    /// Messages with the same key arrive in commit order; those without one, in any.
    pub ordering_key: Option<String>,
    /// The thing that it is about.
    pub aggregate: Option<Aggregate>,
    /// Further headers, trace context among them. Names are lower case.
    pub headers: BTreeMap<String, String>,
    /// The payload: JSON, where it came from the outbox.
    pub payload: Bytes,
    /// When it was emitted: RFC 3339, UTC; empty where a consumer was not told.
    pub time: String,
}

/// The aggregate of a message.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Aggregate {
    /// `order`
    pub kind: String,
    /// Which.
    pub id: String,
    /// Its version with this message, where the producer counts: each is the last one's plus one.
    pub version: Option<i64>,
}

impl Message {
    /// What must stay in order with itself: the ordering key, or the message alone. Tenants never share one.
    #[must_use]
    pub fn lane_key(&self) -> (&str, &str) {
        (&self.tenant, self.ordering_key.as_deref().unwrap_or(&self.id))
    }
}
