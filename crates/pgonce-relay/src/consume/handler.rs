//! Handlers in other languages: a SQL function, whose effect commits with the message's end, or an HTTP service.

#[cfg(feature = "webhook")]
use std::time::Duration;

use base64::Engine as _;
use pgonce::{Failure, Handled, MessageTx, StoredMessage};
use serde_json::{Value, json};
#[cfg(feature = "webhook")]
use sha2::{Digest as _, Sha256};
use tokio_postgres::types::Type;

use crate::TargetError;

/// Who is given a stored message.
#[derive(Debug, Clone)]
pub enum Handler {
    /// `schema.function(message jsonb)`, called in the message's transaction. What it writes commits with the message's end, once.
    /// It returns anything; the texts `ignored` and `gap` mean that. What it raises fails the message: for good, or to be
    /// tried again, as the SQLSTATE says.
    Sql(String),
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
            return Ok(Self::Sql(statement(name)?));
        }
        #[cfg(feature = "webhook")]
        if text.starts_with("http://") || text.starts_with("https://") {
            return HttpHandler::new(text, consumer).map(Self::Http);
        }
        let _ = consumer;
        Err(TargetError("a handler is sql:schema.function or http://host/path".into()))
    }

    /// Handles one message.
    ///
    /// # Errors
    /// Why it was not handled.
    pub async fn call(&self, tx: &MessageTx, message: &StoredMessage) -> Result<Handled, Failure> {
        match self {
            Self::Sql(statement) => {
                let row = tx.query_typed_one(statement, &[(&described(message), Type::JSONB)]).await?;
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

/// The call of a function by its name: identifiers are quoted, so that nothing else gets in.
pub(crate) fn statement(name: &str) -> Result<String, TargetError> {
    let parts: Vec<&str> = name.split('.').collect();
    let fits = |part: &&str| !part.is_empty() && part.len() <= 63 && !part.contains(['"', '\0']);
    if parts.len() != 2 || !parts.iter().all(fits) {
        return Err(TargetError("a SQL handler is sql:schema.function".into()));
    }
    Ok(format!("SELECT \"{}\".\"{}\"($1::jsonb)::text", parts[0], parts[1]))
}

/// A message as a SQL function gets it: `payload` where the body is JSON, `body_base64` where it is not.
fn described(message: &StoredMessage) -> Value {
    let mut all = json!({
        "id": message.id, "source": message.source, "tenant": message.tenant, "topic": message.topic, "type": message.kind,
        "ordering_key": message.ordering_key, "entity": message.entity, "version": message.version,
        "headers": message.headers, "attempt": message.attempt,
    });
    match serde_json::from_slice::<Value>(&message.body) {
        // jsonb cannot hold it: the bytes can.
        Ok(payload) if !message.body.windows(6).any(|part| part == b"\\u0000") => all["payload"] = payload,
        _ => all["body_base64"] = base64::engine::general_purpose::STANDARD.encode(&message.body).into(),
    }
    all
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
            // A value that no header can hold is left out: the key names the message all the same.
            if let Some(value) = value.and_then(|value| reqwest::header::HeaderValue::from_str(value).ok()) {
                request = request.header(name, value);
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
        assert_eq!(statement("app.on_order").unwrap(), "SELECT \"app\".\"on_order\"($1::jsonb)::text");
        for wrong in ["on_order", "a.b.c", "a.", ".b", "a.b\"; DROP TABLE x; --", ""] {
            assert!(statement(wrong).is_err(), "{wrong}");
        }
        assert!(Handler::parse("ftp://x", "c").is_err());
    }
}
