//! Handlers in other languages: a SQL function, whose effect commits with the message's end, or an HTTP service.

#[cfg(feature = "webhook")]
use std::time::Duration;

use base64::Engine as _;
use pgonce::{Failure, Handled, MessageTx, StoredMessage};
use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;
#[cfg(feature = "webhook")]
use sha2::{Digest as _, Sha256};
use tokio_postgres::Client;
use tokio_postgres::types::{Json, Type};

use crate::TargetError;

/// Who is given a stored message.
#[derive(Debug, Clone)]
pub enum Handler {
    /// `schema.function(message jsonb)`, called in the message's transaction. What it writes commits with the message's end, once.
    /// It returns anything; the texts `ignored` and `gap` mean that. What it raises fails the message: for good, or to be
    /// tried again, as the SQLSTATE says.
    Sql(SqlHandler),
    /// A service that gets the body by POST. Its effect is its own: it has to know the message by its `Idempotency-Key`, or
    /// to call `once.inbox_finish` with `Pgonce-Inbox` and `Pgonce-Claim` in its own transaction.
    #[cfg(feature = "webhook")]
    Http(HttpHandler),
}

impl Handler {
    /// Reads `sql:schema.function` or `http://…`.
    ///
    /// # Errors
    /// What it should be.
    pub fn parse(text: &str, consumer: &str) -> Result<Self, TargetError> {
        if let Some(name) = text.strip_prefix("sql:") {
            return SqlHandler::new(name).map(Self::Sql);
        }
        #[cfg(feature = "webhook")]
        if text.starts_with("http://") || text.starts_with("https://") {
            return HttpHandler::new(text, consumer).map(Self::Http);
        }
        let _ = consumer;
        Err(TargetError("a handler is sql:schema.function or http://host/path".into()))
    }

    /// Whether it can be called at all: a mistake in its name or its rights is told before the first message, and not by each of
    /// them. A service is not called.
    ///
    /// # Errors
    /// Why a function cannot be called.
    pub async fn rehearse(&self, client: &Client) -> Result<(), Unfit> {
        match self {
            Self::Sql(handler) => handler.rehearse(client).await,
            #[cfg(feature = "webhook")]
            Self::Http(_) => Ok(()),
        }
    }

    /// Handles one message.
    ///
    /// # Errors
    /// Why it was not handled.
    pub async fn call(&self, tx: &MessageTx, message: &StoredMessage) -> Result<Handled, Failure> {
        match self {
            Self::Sql(handler) => {
                let message = Json(Described::of(message));
                let row = tx.query_typed_one(&handler.call, &[(&message, Type::JSONB)]).await?;
                Ok(match row.try_get::<_, Option<&str>>(0)? {
                    Some("ignored") => Handled::Ignored,
                    Some("gap") => Handled::Gap,
                    _ => Handled::Applied,
                })
            }
            #[cfg(feature = "webhook")]
            Self::Http(handler) => handler.call(message).await,
        }
    }
}

/// A function, by the statements that call it.
#[derive(Debug, Clone)]
pub struct SqlHandler {
    name: String,
    pub(crate) call: String,
    /// Planned and set up, which checks name, argument and rights, but not run.
    rehearsal: String,
}

/// Why a handler cannot be called.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Unfit {
    /// The database says no, or is away.
    #[error(
        "the handler {name} cannot be called: {error}. It is a function of one jsonb, which this login may execute"
    )]
    Refused {
        /// The function.
        name: String,
        /// What the database says.
        #[source]
        error: pgonce::Error,
    },
    /// It returns rows, and not one value.
    #[error("the handler {0} returns a set: a handler returns one value, or void")]
    Set(String),
}

impl SqlHandler {
    /// Identifiers are quoted, so that nothing else gets in.
    pub(crate) fn new(name: &str) -> Result<Self, TargetError> {
        let parts: Vec<&str> = name.split('.').collect();
        let fits = |part: &&str| !part.is_empty() && part.len() <= 63 && !part.contains(['"', '\0']);
        if parts.len() != 2 || !parts.iter().all(fits) {
            return Err(TargetError("a SQL handler is sql:schema.function".into()));
        }
        let function = format!("\"{}\".\"{}\"", parts[0], parts[1]);
        Ok(Self {
            name: name.to_owned(),
            call: format!("SELECT {function}($1::jsonb)::text"),
            // OFFSET 0: the planner must not know the argument, or it would call an immutable function to plan with its answer.
            rehearsal: format!("EXPLAIN SELECT {function}(m.m)::text FROM (SELECT '{{}}'::jsonb AS m OFFSET 0) m"),
        })
    }

    pub(crate) async fn rehearse(&self, client: &Client) -> Result<(), Unfit> {
        let refused = |error: tokio_postgres::Error| Unfit::Refused { name: self.name.clone(), error: error.into() };
        let plan = client.query_typed(&self.rehearsal, &[]).await.map_err(refused)?;
        let is_set =
            plan.iter().filter_map(|line| line.try_get::<_, &str>(0).ok()).any(|line| line.contains("ProjectSet"));
        if is_set { Err(Unfit::Set(self.name.clone())) } else { Ok(()) }
    }
}

/// A message as a SQL function gets it: `payload` where the body is JSON, `body_base64` where it is not.
#[derive(Debug, Serialize)]
struct Described<'a> {
    id: &'a str,
    source: &'a str,
    tenant: &'a str,
    topic: Option<&'a str>,
    #[serde(rename = "type")]
    kind: Option<&'a str>,
    ordering_key: Option<&'a str>,
    entity: Option<&'a str>,
    version: Option<i64>,
    headers: Option<&'a Value>,
    attempt: u32,
    /// As it came: a number that is read and written again may lose digits.
    #[serde(skip_serializing_if = "Option::is_none")]
    payload: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    body_base64: Option<String>,
}

impl<'a> Described<'a> {
    fn of(message: &'a StoredMessage) -> Self {
        let payload = payload(&message.body);
        let body_base64 = payload.is_none().then(|| base64::engine::general_purpose::STANDARD.encode(&message.body));
        Self {
            id: &message.id,
            source: &message.source,
            tenant: &message.tenant,
            topic: message.topic.as_deref(),
            kind: message.kind.as_deref(),
            ordering_key: message.ordering_key.as_deref(),
            entity: message.entity.as_deref(),
            version: message.version,
            headers: message.headers.as_ref(),
            attempt: message.attempt,
            payload,
            body_base64,
        }
    }
}

/// The body, where jsonb can hold it. It is read to know that (numbers beyond all measure, half a surrogate, a thousand levels),
/// and passed on as it is.
fn payload(body: &[u8]) -> Option<&RawValue> {
    let fits = serde_json::from_slice::<Value>(body).is_ok() && !body.windows(6).any(|part| part == b"\\u0000");
    fits.then(|| serde_json::from_slice(body).ok()).flatten()
}

/// An HTTP service as a handler.
#[cfg(feature = "webhook")]
#[derive(Debug, Clone)]
pub struct HttpHandler {
    client: reqwest::Client,
    url: reqwest::Url,
    consumer: String,
}

#[cfg(feature = "webhook")]
impl HttpHandler {
    fn new(url: &str, consumer: &str) -> Result<Self, TargetError> {
        let url = url.parse().map_err(|_| TargetError("the handler's URL cannot be read".into()))?;
        let client = reqwest::Client::builder()
            .timeout(Duration::from_secs(20))
            .redirect(reqwest::redirect::Policy::none())
            .build()
            .map_err(|error| TargetError(format!("the HTTP client cannot be built: {error}")))?;
        Ok(Self { client, url, consumer: consumer.to_owned() })
    }

    async fn call(&self, message: &StoredMessage) -> Result<Handled, Failure> {
        let mut request = self
            .client
            .post(self.url.clone())
            .header("content-type", message.content_type.as_deref().unwrap_or("application/json"))
            .header("idempotency-key", format!("\"{}\"", self.key(message)))
            .header("pgonce-inbox", message.number)
            .header("pgonce-claim", message.claim_id.to_string())
            .header("pgonce-attempt", message.attempt);
        let named =
            [("ce-id", Some(&message.id)), ("ce-source", Some(&message.source)), ("ce-type", message.kind.as_ref())];
        let more = [("pgonce-topic", message.topic.as_ref()), ("pgonce-ordering-key", message.ordering_key.as_ref())];
        for (name, value) in named.into_iter().chain(more) {
            if let Some(value) = value {
                request = request.header(name, &*crate::attribute::encode(value));
            }
        }
        let answer = request.body(message.body.clone()).send().await;
        let status = answer.map_err(|_| Failure::retry("http", "the handler did not answer"))?.status();
        match status.as_u16() {
            200..300 => Ok(Handled::Applied),
            408 | 409 | 425 | 429 | 500.. => Err(Failure::retry("http", format!("the handler answered {status}"))),
            _ => Err(Failure::refuse("http", format!("the handler answered {status}"))),
        }
    }

    /// The same for every delivery of a message to this consumer, and nobody else's.
    fn key(&self, message: &StoredMessage) -> String {
        let mut hash = Sha256::new();
        for part in [&message.tenant, &self.consumer, &message.source, &message.id] {
            hash.update(format!("{}:{part}", part.len()));
        }
        let digest: [u8; 32] = hash.finalize().into();
        digest.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sql_handler_is_a_name_and_nothing_else() {
        assert_eq!(SqlHandler::new("app.on_order").unwrap().call, "SELECT \"app\".\"on_order\"($1::jsonb)::text");
        for wrong in ["on_order", "a.b.c", "a.", ".b", "a.b\"; DROP TABLE x; --", ""] {
            assert!(SqlHandler::new(wrong).is_err(), "{wrong}");
        }
        assert!(Handler::parse("ftp://x", "c").is_err());
    }

    #[test]
    fn a_payload_is_what_came_or_nothing() {
        for body in ["12345678901234567890.123456789", r#" {"b": 1.10, "a": 1e300} "#, "null"] {
            assert_eq!(payload(body.as_bytes()).map(RawValue::get), Some(body.trim()));
        }
        let deep = "[".repeat(1000) + &"]".repeat(1000);
        for body in ["", "{", "1 2", "1e999", r#""\ud800""#, r#""\u0000""#, &deep] {
            assert!(payload(body.as_bytes()).is_none(), "{body}");
        }
        assert!(payload(b"\"\xff\"").is_none());
    }
}
