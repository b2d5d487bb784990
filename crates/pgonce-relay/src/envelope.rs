//! How a message is written: CloudEvents 1.0, structured or binary, or plain.
//!
//! Binary and plain leave the payload as it is and put the rest into headers; each protocol's binding spells the
//! attributes' names in its own way (`ce-` over HTTP and NATS, `ce_` in Kafka, `cloudEvents:` in AMQP), which is why
//! the prefix is the sink's to say.

use bytes::Bytes;
use serde_json::{Map, Value};

use crate::{Aggregate, Message};

/// Which form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Envelope {
    /// The payload is the body; CloudEvents attributes are headers.
    #[default]
    Binary,
    /// One JSON document with everything in it.
    Structured,
    /// The payload is the body; headers are pgonce's own.
    Plain,
}

/// A message as it is sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Encoded {
    /// The media type of the body.
    pub content_type: &'static str,
    /// Headers, names in lower case, content-type not among them.
    pub headers: Vec<(String, String)>,
    /// The body.
    pub body: Bytes,
}

const STRUCTURED: &str = "application/cloudevents+json";

/// The attributes of a message beside its payload: CloudEvents' own, then extensions.
fn attributes(message: &Message) -> Vec<(&'static str, String)> {
    let mut all = vec![
        ("specversion", "1.0".to_owned()),
        ("id", message.id.clone()),
        // Who emitted it is not known here; the topic is what a consumer can rely on.
        ("source", format!("/pgonce/{}", encode_path(&message.topic))),
        ("type", message.kind.clone()),
    ];
    if !message.time.is_empty() {
        all.push(("time", message.time.clone()));
    }
    if let Some(aggregate) = &message.aggregate {
        all.push(("subject", aggregate.id.clone()));
        all.push(("aggregatetype", aggregate.kind.clone()));
        all.extend(aggregate.version.map(|version| ("aggregateversion", version.to_string())));
    }
    all.extend(message.ordering_key.iter().map(|key| ("partitionkey", key.clone())));
    if !message.tenant.is_empty() {
        all.push(("tenant", message.tenant.clone()));
    }
    all
}

fn encode_path(text: &str) -> String {
    url::form_urlencoded::byte_serialize(text.as_bytes()).collect()
}

impl Envelope {
    /// The message in this form; `prefix` is the protocol's for CloudEvents attributes.
    #[must_use]
    pub fn encode(self, message: &Message, prefix: &str) -> Encoded {
        let mut headers: Vec<(String, String)> =
            message.headers.iter().map(|(name, value)| (name.clone(), value.clone())).collect();
        match self {
            Self::Structured => {
                let mut document: Map<String, Value> =
                    attributes(message).into_iter().map(|(name, value)| (name.to_owned(), value.into())).collect();
                document.insert("datacontenttype".into(), "application/json".into());
                let payload = serde_json::from_slice(&message.payload);
                document.insert("data".into(), payload.unwrap_or(Value::Null));
                Encoded { content_type: STRUCTURED, headers, body: Value::Object(document).to_string().into() }
            }
            Self::Binary => {
                headers.extend(attributes(message).into_iter().map(|(name, value)| (format!("{prefix}{name}"), value)));
                Encoded { content_type: "application/json", headers, body: message.payload.clone() }
            }
            Self::Plain => {
                headers.extend(
                    attributes(message)
                        .into_iter()
                        .filter(|(name, _)| !matches!(*name, "specversion" | "source"))
                        .map(|(name, value)| (format!("pgonce-{name}"), value)),
                );
                Encoded { content_type: "application/json", headers, body: message.payload.clone() }
            }
        }
    }
}

/// What a consumer reads out of what came: whichever form it was sent in. What is missing stays empty; the caller
/// fills in the broker's own id and topic.
#[must_use]
pub fn decode(content_type: Option<&str>, headers: Vec<(String, String)>, body: Bytes) -> Message {
    let mut message = Message { payload: body, ..Message::default() };
    let mut aggregate = Aggregate::default();
    let mut set = |message: &mut Message, name: &str, value: String| match name {
        "id" => message.id = value,
        "type" => message.kind = value,
        "time" => message.time = value,
        "subject" => aggregate.id = value,
        "aggregatetype" => aggregate.kind = value,
        "aggregateversion" => aggregate.version = value.parse().ok(),
        "partitionkey" => message.ordering_key = Some(value),
        "tenant" => message.tenant = value,
        _ => {}
    };
    for (name, value) in headers {
        let name = name.to_ascii_lowercase();
        let attribute = ["ce-", "ce_", "cloudevents:", "cloudevents_", "pgonce-"]
            .iter()
            .find_map(|prefix| name.strip_prefix(prefix))
            .map(str::to_owned);
        match attribute {
            Some(attribute) => set(&mut message, &attribute, value),
            None => {
                message.headers.insert(name, value);
            }
        }
    }
    if content_type.is_some_and(|kind| kind.starts_with(STRUCTURED))
        && let Ok(Value::Object(mut document)) = serde_json::from_slice(&message.payload)
    {
        let data = document.remove("data");
        for (name, value) in document {
            let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            set(&mut message, &name, value);
        }
        message.payload = data.map_or_else(Bytes::new, |data| data.to_string().into());
    }
    if aggregate != Aggregate::default() {
        message.aggregate = Some(aggregate);
    }
    message
}
