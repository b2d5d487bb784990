//! What a worker hands to whoever talks with a provider, and what comes back.

use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio_postgres::Row;
use uuid::Uuid;

/// Talks with a provider: `pgonce-relay` has one for HTTP; a service brings its own where the provider has an SDK, or
/// speaks something else.
pub trait Provider: std::fmt::Debug + Send + Sync {
    /// Sends a call, with its id as the provider's idempotency key. What cannot be known is [`Heard::lost`], never a guess.
    fn send<'a>(&'a self, call: &'a OutgoingCall) -> BoxFuture<'a, Heard>;

    /// Asks what became of a call, by its id or its reference.
    fn ask<'a>(&'a self, call: &'a DoubtfulCall) -> BoxFuture<'a, Heard>;
}

/// Whose a call is, and how its provider is reached.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Route {
    /// The call, and the provider's idempotency key.
    pub id: Uuid,
    /// The fence of this take.
    pub claim_id: Uuid,
    /// Whom it goes to.
    pub provider: String,
    /// What it is.
    pub operation: String,
    /// Whose it is.
    pub tenant: String,
    /// The provider's own id for it, where it is known.
    pub reference: Option<String>,
    /// The provider's base; none where code of the worker's own serves it.
    pub base_url: Option<String>,
    /// The header that carries the key.
    pub key_header: String,
    /// Headers by the names of the environment variables that hold them.
    pub header_env: Vec<(String, String)>,
    /// How long to wait for an answer.
    pub timeout: Duration,
    /// How long after the take a request may still begin.
    pub grace: Duration,
}

/// A call that is to be sent.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct OutgoingCall {
    /// Whose it is, and where it goes.
    pub route: Route,
    /// POST, PUT, PATCH, DELETE or GET.
    pub method: String,
    /// Under the provider's base.
    pub path: String,
    /// Headers that are no secrets.
    pub headers: Vec<(String, String)>,
    /// The body's media type.
    pub content_type: Option<String>,
    /// The body.
    pub body: Option<Vec<u8>>,
    /// Which send this is, from one.
    pub attempt: i32,
}

/// A call that nobody knows the end of.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct DoubtfulCall {
    /// Whose it is, and where to ask.
    pub route: Route,
    /// How: `http`, `sql` or `worker`.
    pub how: String,
    /// The path to ask at, with `{key}` or `{reference}` in it.
    pub path: Option<String>,
    /// How often it was asked before.
    pub asked: i32,
}

/// What a provider says of a call, for those who do not leave that to the rules in the database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallVerdict {
    /// It is done.
    Confirmed,
    /// It is not done, and never will be.
    Failed,
    /// It is under way.
    Pending,
    /// The provider does not know it (yet).
    Absent,
    /// It was not taken, for now.
    NotDone,
    /// Nobody could tell.
    Unclear,
}

impl CallVerdict {
    fn name(self) -> &'static str {
        match self {
            Self::Confirmed => "confirmed",
            Self::Failed => "failed",
            Self::Pending => "pending",
            Self::Absent => "absent",
            Self::NotDone => "not_done",
            Self::Unclear => "unclear",
        }
    }
}

/// What came back.
#[derive(Debug, Clone, Default)]
pub struct Heard {
    pub(super) outcome: &'static str,
    pub(super) code: Option<i32>,
    pub(super) headers: Option<serde_json::Value>,
    pub(super) body: Option<Vec<u8>>,
    pub(super) note: Option<String>,
    pub(super) retry_after: Option<Duration>,
    pub(super) verdict: Option<&'static str>,
    pub(super) reference: Option<String>,
    /// Whether the provider is to blame, for its breaker; none: it says nothing about that.
    pub(super) provider_failed: Option<bool>,
}

impl Heard {
    /// An answer with its status: what it means is the policy's to say.
    #[must_use]
    pub fn answer(code: u16, headers: serde_json::Value, body: Vec<u8>) -> Self {
        let provider_failed = match code {
            425 | 429 => None,
            _ => Some(code >= 500),
        };
        Self {
            outcome: "answered",
            code: Some(code.into()),
            headers: Some(headers),
            body: Some(body),
            provider_failed,
            ..Self::default()
        }
    }

    /// An answer whose meaning is known already, and the provider's own id for the call, if it told one.
    #[must_use]
    pub fn verdict(verdict: CallVerdict, reference: Option<String>) -> Self {
        Self {
            outcome: "answered",
            verdict: Some(verdict.name()),
            reference,
            provider_failed: Some(false),
            ..Self::default()
        }
    }

    /// No answer, or one that broke off: the request may have arrived.
    pub fn lost(note: impl Into<String>) -> Self {
        Self { outcome: "lost", note: Some(note.into()), provider_failed: Some(true), ..Self::default() }
    }

    /// No byte of the request went out.
    pub fn unsent(note: impl Into<String>) -> Self {
        Self { outcome: "unsent", note: Some(note.into()), provider_failed: Some(true), ..Self::default() }
    }

    /// No byte went out, and that was not the provider's doing.
    pub fn held_back(note: impl Into<String>) -> Self {
        Self { provider_failed: None, ..Self::unsent(note) }
    }

    /// How long the provider asks to be left alone.
    #[must_use]
    pub fn retry_after(mut self, pause: Option<Duration>) -> Self {
        self.retry_after = pause;
        self
    }

    /// The provider's answer in words.
    #[must_use]
    pub fn note(mut self, note: impl Into<String>) -> Self {
        self.note = Some(note.into());
        self
    }
}

impl Route {
    fn read(row: &Row) -> Result<Self, tokio_postgres::Error> {
        let milliseconds = |place: usize| -> Result<Duration, tokio_postgres::Error> {
            Ok(Duration::from_millis(u64::try_from(row.try_get::<_, i32>(place)?).unwrap_or(0)))
        };
        Ok(Self {
            id: row.try_get(0)?,
            claim_id: row.try_get(1)?,
            provider: row.try_get(2)?,
            operation: row.try_get(3)?,
            tenant: row.try_get(4)?,
            reference: row.try_get(5)?,
            base_url: row.try_get(6)?,
            key_header: row.try_get(7)?,
            header_env: texts(row.try_get(8)?),
            timeout: milliseconds(9)?,
            grace: milliseconds(10)?,
        })
    }
}

impl OutgoingCall {
    pub(super) fn read(row: &Row) -> Result<Self, tokio_postgres::Error> {
        Ok(Self {
            route: Route::read(row)?,
            method: row.try_get(11)?,
            path: row.try_get(12)?,
            headers: texts(row.try_get(13)?),
            content_type: row.try_get(14)?,
            body: row.try_get(15)?,
            attempt: row.try_get(16)?,
        })
    }
}

impl DoubtfulCall {
    pub(super) fn read(row: &Row) -> Result<Self, tokio_postgres::Error> {
        Ok(Self { route: Route::read(row)?, how: row.try_get(11)?, path: row.try_get(12)?, asked: row.try_get(13)? })
    }
}

/// The texts of an object, by name.
fn texts(object: Option<serde_json::Value>) -> Vec<(String, String)> {
    let Some(serde_json::Value::Object(object)) = object else { return Vec::new() };
    object.into_iter().filter_map(|(name, value)| Some((name, value.as_str()?.to_owned()))).collect()
}
