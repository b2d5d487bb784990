//! How a message is written: CloudEvents 1.0, structured or binary, or plain.
//!
//! Binary and plain leave the payload as it is and put the rest into headers; each protocol's binding spells the
//! attributes' names in its own way (`ce-` over HTTP and NATS, `ce_` in Kafka, `cloudEvents:` in AMQP), which is why
//! the prefix is the sink's to say.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;
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

/// Beginnings of headers that are not the emitter's to set; `once.is_reserved_header` has the same list.
const RESERVED_PREFIXES: [&str; 7] = ["ce-", "ce_", "cloudevents", "pgonce-", "nats-", "webhook-", "proxy-"];
/// And whole names.
const RESERVED_NAMES: [&str; 19] = [
    "authorization",
    "bcc",
    "cc",
    "connection",
    "content-encoding",
    "content-length",
    "content-type",
    "cookie",
    "expect",
    "host",
    "idempotency-key",
    "keep-alive",
    "payload",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "x-death",
    "x-delay",
];

/// Whether a header belongs to the event (a tenant, an id), the broker or the request, and so not to whoever emits.
/// `once.emit` refuses it; what is in a log from before that is not sent.
#[must_use]
pub fn is_reserved(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    RESERVED_PREFIXES.iter().any(|prefix| name.starts_with(prefix)) || RESERVED_NAMES.contains(&name.as_str())
}

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
        let own = message.headers.iter().filter(|(name, _)| !is_reserved(name));
        let mut headers: Vec<(String, String)> = own.map(|(name, value)| (name.clone(), value.clone())).collect();
        match self {
            Self::Structured => Encoded { content_type: STRUCTURED, headers, body: structured(message).into() },
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

/// The one document. The payload goes into it byte by byte: read and written again, a number might not be the same.
fn structured(message: &Message) -> String {
    let document: Map<String, Value> =
        attributes(message).into_iter().map(|(name, value)| (name.to_owned(), value.into())).collect();
    let mut text = Value::Object(document).to_string();
    text.pop(); // the brace that ends it
    match std::str::from_utf8(&message.payload) {
        Ok(json) if serde_json::from_str::<IgnoredAny>(json).is_ok() => {
            text.push_str(r#","datacontenttype":"application/json","data":"#);
            text.push_str(json);
        }
        _ => {
            text.push_str(r#","data_base64":""#);
            BASE64.encode_string(&message.payload, &mut text);
            text.push('"');
        }
    }
    text.push('}');
    text
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
        && let Ok(mut document) = serde_json::from_slice::<BTreeMap<String, Box<RawValue>>>(&message.payload)
    {
        let encoded = document.remove("data_base64").and_then(|data| serde_json::from_str::<String>(data.get()).ok());
        let decoded = encoded.and_then(|data| BASE64.decode(data).ok());
        let data = document.remove("data").map(|data| data.get().to_owned().into_bytes());
        for (name, value) in document {
            let text = serde_json::from_str::<String>(value.get()).unwrap_or_else(|_| value.get().to_owned());
            set(&mut message, &name, text);
        }
        message.payload = data.or(decoded).unwrap_or_default().into();
    }
    if aggregate != Aggregate::default() {
        message.aggregate = Some(aggregate);
    }
    message
}

#[cfg(test)]
#[allow(clippy::expect_used, reason = "a test that cannot go on should stop, loudly")]
mod tests {
    use super::*;

    fn message() -> Message {
        Message {
            id: "0b7c".into(),
            tenant: "acme".into(),
            topic: "orders/eu".into(),
            kind: "order.created".into(),
            ordering_key: Some("order \"7\"".into()),
            aggregate: Some(Aggregate { kind: "order".into(), id: "7 ☃".into(), version: Some(-3) }),
            headers: [("traceparent".to_owned(), "00-ab-cd-01".to_owned())].into(),
            // Whoever reads this number into a float, or sorts the keys, has changed it.
            payload: r#"{"b": 12345678901234567890123.10, "a":"\u0000ä"}"#.into(),
            time: "2026-01-02T03:04:05Z".into(),
        }
    }

    #[test]
    fn what_is_written_is_read_back_in_every_form() {
        let plain = Message { id: "1".into(), payload: "null".into(), ..Message::default() };
        for message in [message(), plain] {
            for envelope in [Envelope::Binary, Envelope::Structured, Envelope::Plain] {
                for prefix in ["ce-", "ce_", "cloudEvents:"] {
                    let encoded = envelope.encode(&message, prefix);
                    let read = decode(Some(encoded.content_type), encoded.headers, encoded.body);
                    // The topic is the broker's to say.
                    let wanted = Message { topic: String::new(), ..message.clone() };
                    assert_eq!(read, wanted, "{envelope:?} {prefix}");
                }
            }
        }
    }

    #[test]
    fn a_structured_event_is_what_the_specification_wants() {
        let encoded = Envelope::Structured.encode(&message(), "ce-");
        assert_eq!(encoded.content_type, "application/cloudevents+json");
        let event: Map<String, Value> = serde_json::from_slice(&encoded.body).expect("one JSON document");
        for required in ["id", "source", "specversion", "type"] {
            assert!(event[required].as_str().is_some_and(|value| !value.is_empty()), "{required}");
        }
        assert_eq!(event["specversion"], "1.0");
        assert_eq!(event["source"], "/pgonce/orders%2Feu");
        assert_eq!(event["subject"], "7 ☃");
        let named = |name: &str| name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
        assert!(event.keys().all(|name| named(name) && name.len() <= 20), "names of attributes: {event:?}");
        assert!(std::str::from_utf8(&encoded.body).is_ok_and(|text| text.contains("12345678901234567890123.10")));
    }

    #[test]
    fn headers_that_pass_for_something_else_do_not_travel() {
        for name in
            ["ce-tenant", "ce_id", "cloudevents:tenant", "pgonce-tenant", "nats-msg-id", "content-length", "BCC"]
        {
            let mut message = message();
            message.headers.insert(name.to_owned(), "mallory".to_owned());
            for envelope in [Envelope::Binary, Envelope::Structured, Envelope::Plain] {
                let encoded = envelope.encode(&message, "ce-");
                assert!(encoded.headers.iter().all(|(_, value)| value != "mallory"), "{name} {envelope:?}");
                let read = decode(Some(encoded.content_type), encoded.headers, encoded.body);
                assert_eq!(read.tenant, "acme", "{name} {envelope:?}");
            }
        }
    }

    /// One list here, one in SQL.
    #[test]
    fn emit_refuses_what_is_not_sent() {
        const FILE: &str = include_str!("../../../sql/functions/outbox/is_reserved_header.sql");
        let (_, rest) = FILE.split_once("~ '^(").expect("the prefixes");
        let (prefixes, rest) = rest.split_once(")'").expect("their end");
        assert_eq!(prefixes.split('|').collect::<Vec<_>>(), RESERVED_PREFIXES);
        let (_, names) = rest.split_once("ARRAY[").expect("the names");
        let names: Vec<&str> = names.split('\'').skip(1).step_by(2).collect();
        assert_eq!(names, RESERVED_NAMES);
        assert!(
            is_reserved("Ce-Tenant") && is_reserved("X-Death") && !is_reserved("traceparent") && !is_reserved("cert")
        );
    }

    #[test]
    fn a_payload_that_is_no_json_travels_too() {
        for payload in [&b"not json"[..], b"", b"\xff\x00", b"1 2"] {
            let message = Message { id: "1".into(), payload: payload.to_vec().into(), ..Message::default() };
            let encoded = Envelope::Structured.encode(&message, "ce-");
            let read = decode(Some(encoded.content_type), encoded.headers, encoded.body);
            assert_eq!(read.payload, payload);
        }
    }

    #[test]
    fn headers_of_others_are_read_whatever_their_case() {
        let headers = [("CE-Id", "9"), ("ce-Type", "t"), ("X-Other", "y"), ("ce-aggregateversion", "x")];
        let headers = headers.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
        let read = decode(None, headers, Bytes::from_static(b"body"));
        assert_eq!((read.id.as_str(), read.kind.as_str()), ("9", "t"));
        assert_eq!(read.headers, [("x-other".to_owned(), "y".to_owned())].into());
        assert_eq!(read.aggregate, None);
        assert_eq!(read.payload, "body");
        // Says that it is a structured event, and is none.
        let read = decode(Some("application/cloudevents+json; charset=utf-8"), Vec::new(), "[1]".into());
        assert_eq!(read.payload, "[1]");
    }
}
