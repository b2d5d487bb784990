//! Messages that commit with the effect, and nowhere else.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::Serialize;
use sha2::{Digest, Sha256};
use tokio_postgres::GenericClient;
use tokio_postgres::types::{ToSql, Type};
use uuid::Uuid;

use crate::Error;
use crate::claim::IntentName;
use crate::sql::{self, Call};

/// A message for the outbox: what happened, for whoever is interested.
///
/// ```
/// # use pgonce::Event;
/// let event = Event::new("orders", "order.created", &serde_json::json!({"order": 7}))
///     .ordered_by("order-7")
///     .about("order", "7", Some(1))
///     .header("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01");
/// ```
#[derive(Debug, Clone)]
pub struct Event {
    topic: String,
    kind: String,
    payload: Result<serde_json::Value, String>,
    ordering_key: Option<String>,
    aggregate: Option<(String, String, Option<i64>)>,
    headers: serde_json::Map<String, serde_json::Value>,
    ordinal: i32,
    message_id: Option<Uuid>,
}

impl Event {
    /// Where it goes, what happened, and the payload.
    pub fn new(topic: impl Into<String>, kind: impl Into<String>, payload: &impl Serialize) -> Self {
        Self {
            topic: topic.into(),
            kind: kind.into(),
            payload: serde_json::to_value(payload).map_err(|error| error.to_string()),
            ordering_key: None,
            aggregate: None,
            headers: serde_json::Map::new(),
            ordinal: 0,
            message_id: None,
        }
    }

    /// Messages with the same key arrive in commit order, if each is emitted after the row that it tells of was
    /// written: that row's lock is what orders them.
    #[must_use]
    pub fn ordered_by(mut self, key: impl ToString) -> Self {
        self.ordering_key = Some(key.to_string());
        self
    }

    /// The thing that it is about, and its version, where versions are counted.
    #[must_use]
    pub fn about(mut self, kind: impl Into<String>, id: impl ToString, version: Option<i64>) -> Self {
        self.aggregate = Some((kind.into(), id.to_string(), version));
        self
    }

    /// A header: one line of text. Trace context goes here. Names that belong to the event, the broker or the request (`ce-…`,
    /// `nats-…`, `content-type` and others, docs/reference/sql.md) are refused.
    #[must_use]
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.headers.insert(name.into(), serde_json::Value::String(value.into()));
        self
    }

    /// The second and further messages of one type by one intent: each has its own number.
    #[must_use]
    pub fn ordinal(mut self, ordinal: i32) -> Self {
        self.ordinal = ordinal;
        self
    }

    /// An id of the caller's own, in place of the derived one.
    #[must_use]
    pub fn id(mut self, id: Uuid) -> Self {
        self.message_id = Some(id);
        self
    }

    fn payload(&self) -> Result<&serde_json::Value, Error> {
        self.payload
            .as_ref()
            .map_err(|reason| Error::Invalid(format!("the message cannot be written as JSON: {reason}")))
    }
}

/// Adds a message in the caller's own transaction. With an intent's scope and key its id is derived from them;
/// without, it is random.
///
/// # Errors
/// What the database says: P4040 where the message cannot be emitted, P4041 where its id is taken by another one.
pub async fn emit(
    transaction: &impl GenericClient,
    tenant: &str,
    intent: Option<(&str, &str)>,
    event: &Event,
) -> Result<Uuid, Error> {
    let (scope, key) = intent.unzip();
    let wire = Wire::new(event)?;
    let parameters = wire.parameters(event, &tenant, &scope, &key);
    let row = transaction.query_typed_one(sql::text(Call::Emit, true), &parameters).await?;
    Ok(row.try_get(0)?)
}

/// The parts of an event as parameters.
pub(crate) struct Wire<'a> {
    payload: &'a serde_json::Value,
    headers: Option<serde_json::Value>,
    aggregate_kind: Option<&'a str>,
    aggregate_id: Option<&'a str>,
    aggregate_version: Option<i64>,
}

impl<'a> Wire<'a> {
    pub(crate) fn new(event: &'a Event) -> Result<Self, Error> {
        let aggregate = event.aggregate.as_ref();
        Ok(Self {
            payload: event.payload()?,
            headers: (!event.headers.is_empty()).then(|| serde_json::Value::Object(event.headers.clone())),
            aggregate_kind: aggregate.map(|(kind, _, _)| kind.as_str()),
            aggregate_id: aggregate.map(|(_, id, _)| id.as_str()),
            aggregate_version: aggregate.and_then(|(_, _, version)| *version),
        })
    }

    /// For `once.emit`.
    pub(crate) fn parameters<'b>(
        &'b self,
        event: &'b Event,
        tenant: &'b (impl ToSql + Sync),
        scope: &'b (impl ToSql + Sync),
        key: &'b (impl ToSql + Sync),
    ) -> [(&'b (dyn ToSql + Sync), Type); 13] {
        [
            (&event.topic, Type::TEXT),
            (&event.kind, Type::TEXT),
            (&self.payload, Type::JSONB),
            (&event.ordering_key, Type::TEXT),
            (&self.aggregate_kind, Type::TEXT),
            (&self.aggregate_id, Type::TEXT),
            (&self.aggregate_version, Type::INT8),
            (&self.headers, Type::JSONB),
            (scope, Type::TEXT),
            (key, Type::TEXT),
            (&event.ordinal, Type::INT4),
            (&event.message_id, Type::UUID),
            (tenant, Type::TEXT),
        ]
    }

    /// For the direct statement, which takes the id in place of what it is derived from.
    pub(crate) fn direct<'b>(
        &'b self,
        event: &'b Event,
        name: &'b IntentName,
        id: &'b Uuid,
    ) -> [(&'b (dyn ToSql + Sync), Type); 12] {
        [
            (&event.topic, Type::TEXT),
            (&event.kind, Type::TEXT),
            (&self.payload, Type::JSONB),
            (&event.ordering_key, Type::TEXT),
            (&self.aggregate_kind, Type::TEXT),
            (&self.aggregate_id, Type::TEXT),
            (&self.aggregate_version, Type::INT8),
            (&self.headers, Type::JSONB),
            (&name.scope, Type::TEXT),
            (&name.key, Type::TEXT),
            (id, Type::UUID),
            (&name.tenant, Type::TEXT),
        ]
    }
}

/// Adds many messages in the caller's own transaction, by one statement; see [`emit`]. Their ids, in the order given.
///
/// # Errors
/// As [`emit`], for all of them: none was added. P4020 for more than 10,000.
pub async fn emit_batch(
    transaction: &impl GenericClient,
    tenant: &str,
    intent: Option<(&str, &str)>,
    events: &[Event],
) -> Result<Vec<Uuid>, Error> {
    let (scope, key) = intent.unzip();
    let wire = BatchWire::new(events)?;
    let parameters = wire.parameters(&tenant, &scope, &key);
    let rows = transaction.query_typed(sql::text(Call::EmitBatch, true), &parameters).await?;
    rows.iter().map(|row| Ok(row.try_get(0)?)).collect()
}

/// The parts of many events as arrays.
pub(crate) struct BatchWire<'a> {
    topics: Vec<&'a str>,
    kinds: Vec<&'a str>,
    payloads: Vec<&'a serde_json::Value>,
    ordering_keys: Vec<Option<&'a str>>,
    aggregate_kinds: Vec<Option<&'a str>>,
    aggregate_ids: Vec<Option<&'a str>>,
    aggregate_versions: Vec<Option<i64>>,
    headers: Vec<Option<serde_json::Value>>,
    /// None: the database numbers the messages of each type.
    ordinals: Option<Vec<i32>>,
    message_ids: Vec<Option<Uuid>>,
}

impl<'a> BatchWire<'a> {
    pub(crate) fn new(events: &'a [Event]) -> Result<Self, Error> {
        let wires = events.iter().map(Wire::new).collect::<Result<Vec<_>, _>>()?;
        let numbered = events.iter().any(|event| event.ordinal != 0);
        Ok(Self {
            topics: events.iter().map(|event| event.topic.as_str()).collect(),
            kinds: events.iter().map(|event| event.kind.as_str()).collect(),
            payloads: wires.iter().map(|wire| wire.payload).collect(),
            ordering_keys: events.iter().map(|event| event.ordering_key.as_deref()).collect(),
            aggregate_kinds: wires.iter().map(|wire| wire.aggregate_kind).collect(),
            aggregate_ids: wires.iter().map(|wire| wire.aggregate_id).collect(),
            aggregate_versions: wires.iter().map(|wire| wire.aggregate_version).collect(),
            headers: wires.into_iter().map(|wire| wire.headers).collect(),
            ordinals: numbered.then(|| events.iter().map(|event| event.ordinal).collect()),
            message_ids: events.iter().map(|event| event.message_id).collect(),
        })
    }

    pub(crate) fn parameters<'b>(
        &'b self,
        tenant: &'b (impl ToSql + Sync),
        scope: &'b (impl ToSql + Sync),
        key: &'b (impl ToSql + Sync),
    ) -> [(&'b (dyn ToSql + Sync), Type); 13] {
        [
            (&self.topics, Type::TEXT_ARRAY),
            (&self.kinds, Type::TEXT_ARRAY),
            (&self.payloads, Type::JSONB_ARRAY),
            (&self.ordering_keys, Type::TEXT_ARRAY),
            (&self.aggregate_kinds, Type::TEXT_ARRAY),
            (&self.aggregate_ids, Type::TEXT_ARRAY),
            (&self.aggregate_versions, Type::INT8_ARRAY),
            (&self.headers, Type::JSONB_ARRAY),
            (scope, Type::TEXT),
            (key, Type::TEXT),
            (&self.ordinals, Type::INT4_ARRAY),
            (&self.message_ids, Type::UUID_ARRAY),
            (tenant, Type::TEXT),
        ]
    }
}

/// Whether the straight path may take it: what is within the limits that `once.check_emit` knows. Anything else is
/// the function's, to take or to refuse with its reason.
pub(crate) fn is_plain(event: &Event) -> bool {
    let named = |text: &str| (1..=255).contains(&text.len());
    named(&event.topic)
        && named(&event.kind)
        && event.ordering_key.as_deref().is_none_or(named)
        && event.aggregate.is_none()
        && event.headers.is_empty()
}

/// Whether it may be posted: far below the limit of payloads, and of what may lie in buffers meanwhile.
pub(crate) fn is_small(event: &Event) -> bool {
    const BYTES_MAX: usize = 64 * 1024;
    let headers: usize =
        event.headers.iter().map(|(name, value)| name.len() + value.as_str().map_or(16, str::len)).sum();
    headers <= BYTES_MAX && event.payload().is_ok_and(|payload| take_weight(payload, BYTES_MAX).is_some())
}

/// What is left of a limit after roughly what a value weighs; None: it weighs more.
fn take_weight(value: &serde_json::Value, left: usize) -> Option<usize> {
    use serde_json::Value;
    let left = left.checked_sub(16)?;
    match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => Some(left),
        Value::String(text) => left.checked_sub(text.len()),
        Value::Array(all) => all.iter().try_fold(left, |left, one| take_weight(one, left)),
        Value::Object(all) => {
            all.iter().try_fold(left, |left, (name, one)| take_weight(one, left.checked_sub(name.len())?))
        }
    }
}

/// Whether a posted message was refused because its id is in the log: `once.emit` then says whether it is the same one.
pub(crate) fn is_repeated(error: &tokio_postgres::Error) -> bool {
    error.as_db_error().is_some_and(|error| {
        error.code().code() == "23505"
            && error.schema() == Some("once")
            && error.table().is_some_and(|table| table.starts_with("outbox"))
    })
}

/// `once.message_id`, which it equals: the contract suite compares.
pub(crate) fn message_id(name: &IntentName, event: &Event) -> Uuid {
    derived_id(&[&name.tenant, &name.scope, &name.key], event)
}

/// The id of what is emitted because of something that has these names: the same every time.
pub(crate) fn derived_id(of: &[&str], event: &Event) -> Uuid {
    if let Some(id) = event.message_id {
        return id;
    }
    let mut hash = Sha256::new();
    for part in of.iter().copied().chain([event.kind.as_str()]) {
        hash.update(format!("{}:{part}", part.len()));
    }
    hash.update(event.ordinal.to_string());
    let digest: [u8; 32] = hash.finalize().into();
    let mut id = [0; 16];
    id.copy_from_slice(&digest[..16]);
    id[6] = (id[6] & 0x0f) | 0x80;
    id[8] = (id[8] & 0x0f) | 0x90;
    Uuid::from_bytes(id)
}

/// Wakes relays, from a connection of its own and at most so often: a NOTIFY in the effect's transaction would take
/// a lock that all commits share (trap 15). Relays poll, too: a signal that is lost costs milliseconds.
#[derive(Debug, Default)]
pub(crate) struct Waker {
    emitted: tokio::sync::Notify,
    started: AtomicBool,
}

impl Waker {
    const EVERY: Duration = Duration::from_millis(20);

    /// Something was committed that a relay waits for.
    pub(crate) fn wake(shared: &Arc<crate::once::Shared>) {
        let waker = &shared.waker;
        if !waker.started.swap(true, Ordering::Relaxed) {
            let weak = Arc::downgrade(shared);
            tokio::spawn(async move {
                loop {
                    let Some(shared) = weak.upgrade() else { return };
                    // Dropped and made anew every second, so that the last clone of `Once` ends this task.
                    let woken = tokio::time::timeout(Duration::from_secs(1), shared.waker.emitted.notified()).await;
                    if woken.is_err() {
                        continue;
                    }
                    if let Ok(connection) = shared.pool.get().await {
                        let _ = connection.client.batch_execute("NOTIFY once_outbox").await;
                    }
                    drop(shared);
                    tokio::time::sleep(Self::EVERY).await;
                }
            });
        }
        waker.emitted.notify_one();
    }
}

/// Signals that something was emitted, on a connection of its own; several that come together are one. For relays.
/// Behind a pooler in transaction mode nothing ever comes.
#[derive(Debug)]
pub struct Signals {
    _client: tokio_postgres::Client,
    receiver: tokio::sync::mpsc::Receiver<()>,
}

impl Signals {
    /// Listens.
    ///
    /// # Errors
    /// Where the database cannot be reached.
    pub async fn listen(url: &str) -> Result<Self, Error> {
        let (config, tls, _) = crate::Settings::from_url(url).resolve()?;
        let (client, mut connection) = config.connect(tls).await?;
        let (sender, receiver) = tokio::sync::mpsc::channel(1);
        tokio::spawn(async move {
            while let Some(Ok(message)) = std::future::poll_fn(|context| connection.poll_message(context)).await {
                if let tokio_postgres::AsyncMessage::Notification(_) = message {
                    let _ = sender.try_send(());
                }
            }
        });
        client.batch_execute("LISTEN once_outbox").await?;
        Ok(Self { _client: client, receiver })
    }

    /// Waits for the next one. False: the connection is gone.
    pub async fn next(&mut self) -> bool {
        self.receiver.recv().await.is_some()
    }
}
