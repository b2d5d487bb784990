//! Calls of other people's systems: recorded with the effect, sent once that has committed, and settled by what the
//! provider says, never by a guess. The rules are in `sql/functions/call/`.

mod provider;
mod worker;

use std::time::Duration;

use serde::Serialize;
use sha2::{Digest as _, Sha256};
use tokio_postgres::GenericClient;
use tokio_postgres::types::{ToSql, Type};
use uuid::Uuid;

pub use self::provider::{CallVerdict, DoubtfulCall, Heard, OutgoingCall, Provider, Route};
pub use self::worker::CallWorker;

use crate::Error;
use crate::claim::interval;
use crate::sql;

/// A call that a provider is to get: what, where under its base, and with which body.
///
/// ```
/// # use pgonce::Call;
/// let call = Call::post("bank", "charge", "/charges").json(&serde_json::json!({"amount": 2499, "currency": "eur"}));
/// ```
#[derive(Debug, Clone)]
pub struct Call {
    provider: String,
    operation: String,
    path: String,
    method: &'static str,
    body: Result<Option<Body>, String>,
    headers: serde_json::Map<String, serde_json::Value>,
    ordinal: i32,
    delay: Option<Duration>,
}

#[derive(Debug, Clone)]
enum Body {
    Json(serde_json::Value),
    Bytes(Vec<u8>, String),
}

impl Call {
    /// To a provider that `once.define_provider` declared: the name of the operation, and the path under its base.
    pub fn post(provider: impl Into<String>, operation: impl Into<String>, path: impl Into<String>) -> Self {
        Self {
            provider: provider.into(),
            operation: operation.into(),
            path: path.into(),
            method: "POST",
            body: Ok(None),
            headers: serde_json::Map::new(),
            ordinal: 0,
            delay: None,
        }
    }

    /// By PUT.
    #[must_use]
    pub fn put(mut self) -> Self {
        self.method = "PUT";
        self
    }

    /// By PATCH.
    #[must_use]
    pub fn patch(mut self) -> Self {
        self.method = "PATCH";
        self
    }

    /// By DELETE.
    #[must_use]
    pub fn delete(mut self) -> Self {
        self.method = "DELETE";
        self
    }

    /// A JSON body.
    #[must_use]
    pub fn json(mut self, body: &impl Serialize) -> Self {
        self.body = serde_json::to_value(body).map(|body| Some(Body::Json(body))).map_err(|error| error.to_string());
        self
    }

    /// A body of another kind.
    #[must_use]
    pub fn bytes(mut self, body: impl Into<Vec<u8>>, content_type: impl Into<String>) -> Self {
        self.body = Ok(Some(Body::Bytes(body.into(), content_type.into())));
        self
    }

    /// A header that is no secret: what is stored can be read. Secrets are the provider's `header_env`.
    #[must_use]
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.headers.insert(name.into(), serde_json::Value::String(value.into()));
        self
    }

    /// The second and further calls of one operation by one intent: each has its own number.
    #[must_use]
    pub fn ordinal(mut self, ordinal: i32) -> Self {
        self.ordinal = ordinal;
        self
    }

    /// Not before so much time has passed.
    #[must_use]
    pub fn after(mut self, delay: Duration) -> Self {
        self.delay = Some(delay);
        self
    }
}

/// Asks for a call in the caller's own transaction; see `once.call`. With an intent's scope and key its id is derived from
/// them; without, it is random, and asking twice is two calls.
///
/// # Errors
/// P4063 where the call cannot be made; `Error::OtherRequest` where the intent made another one of the operation.
pub async fn call(
    transaction: &impl GenericClient,
    tenant: &str,
    intent: Option<(&str, &str)>,
    call: &Call,
) -> Result<Uuid, Error> {
    let (scope, key) = intent.unzip();
    let wire = Wire::new(call)?;
    let parameters = wire.parameters(call, &tenant, &scope, &key);
    let row = transaction.query_typed_one(sql::text(sql::Call::ProviderRequest, true), &parameters).await?;
    Ok(row.try_get(0)?)
}

/// The parts of a call as parameters.
pub(crate) struct Wire<'a> {
    json: Option<&'a serde_json::Value>,
    bytes: Option<&'a [u8]>,
    content_type: Option<&'a str>,
    headers: Option<serde_json::Value>,
    delay: Option<String>,
}

impl<'a> Wire<'a> {
    pub(crate) fn new(call: &'a Call) -> Result<Self, Error> {
        let body = call.body.as_ref();
        let body =
            body.map_err(|reason| Error::Invalid(format!("the call's body cannot be written as JSON: {reason}")))?;
        let (json, bytes, content_type) = match body {
            None => (None, None, None),
            Some(Body::Json(json)) => (Some(json), None, None),
            Some(Body::Bytes(bytes, kind)) => (None, Some(bytes.as_slice()), Some(kind.as_str())),
        };
        let headers = (!call.headers.is_empty()).then(|| serde_json::Value::Object(call.headers.clone()));
        Ok(Self { json, bytes, content_type, headers, delay: call.delay.map(interval) })
    }

    pub(crate) fn parameters<'b>(
        &'b self,
        call: &'b Call,
        tenant: &'b (impl ToSql + Sync),
        scope: &'b (impl ToSql + Sync),
        key: &'b (impl ToSql + Sync),
    ) -> [(&'b (dyn ToSql + Sync), Type); 13] {
        [
            (&call.provider, Type::TEXT),
            (&call.operation, Type::TEXT),
            (&call.path, Type::TEXT),
            (&self.json, Type::JSONB),
            (&call.method, Type::TEXT),
            (&self.headers, Type::JSONB),
            (scope, Type::TEXT),
            (key, Type::TEXT),
            (&call.ordinal, Type::INT4),
            (tenant, Type::TEXT),
            (&self.bytes, Type::BYTEA),
            (&self.content_type, Type::TEXT),
            (&self.delay, Type::TEXT),
        ]
    }
}

/// A key for what is called because of something that has these names: the same every time.
pub(crate) fn derived_key(of: &[&str]) -> String {
    let mut hash = Sha256::new();
    for part in of {
        hash.update(format!("{}:{part}", part.len()));
    }
    let digest: [u8; 32] = hash.finalize().into();
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}
