//! How the requests of one route are guarded: the rules that the layer and the gateway share.

use std::time::Duration;

use http::{HeaderName, Method, StatusCode};
use serde::Deserialize;

use crate::problem::StatusMap;

/// Whether a request must carry a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Requirement {
    /// A request without a key is refused.
    Required,
    /// A request without a key passes unguarded.
    #[default]
    Optional,
    /// Keys are not looked at.
    Off,
}

/// How the header is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KeySyntax {
    /// A structured-field string (RFC 8941), as the draft says: `"…"` in quotes.
    Strict,
    /// That, or the same characters without quotes: both spell the same key.
    #[default]
    Lenient,
}

/// What a duplicate of a running request gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum InProgress {
    /// 409 with Retry-After, at once.
    #[default]
    Refuse,
    /// The winner's response, if it comes in time.
    Wait,
    /// 202 with a status URL.
    Status,
}

/// Which part of the body pins the request.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum BodyPart {
    /// Every byte as it came.
    #[default]
    Raw,
    /// The JSON document, canonical (RFC 8785): spelling and member order do not matter. A body that is not
    /// JSON counts as raw.
    Json,
    /// Of the JSON document these fields only (JSON pointers, RFC 6901).
    Fields(Vec<String>),
    /// Nothing of it.
    None,
}

/// What goes into a request's fingerprint. The method always does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FingerprintParts {
    /// The body.
    pub body: BodyPart,
    /// These request headers.
    pub headers: Vec<HeaderName>,
    /// The path.
    pub path: bool,
    /// The query string.
    pub query: bool,
}

impl Default for FingerprintParts {
    fn default() -> Self {
        Self { body: BodyPart::Raw, headers: Vec::new(), path: true, query: true }
    }
}

/// The rules of one route.
#[derive(Debug, Clone)]
pub struct Policy {
    /// The scope that its intents are in.
    pub scope: String,
    /// Which methods are guarded; others pass.
    pub methods: Vec<Method>,
    /// Whether a key is required.
    pub requirement: Requirement,
    /// The header that carries it.
    pub header: HeaderName,
    /// How the header is read.
    pub syntax: KeySyntax,
    /// What pins the request.
    pub fingerprint: FingerprintParts,
    /// What a duplicate of a running request gets.
    pub in_progress: InProgress,
    /// How long a duplicate waits for the winner, where it waits.
    pub wait_max: Duration,
    /// How many duplicates of one request may wait.
    pub waiters_max: usize,
    /// The largest request body that is read and fingerprinted.
    pub body_bytes_max: usize,
    /// How long a request body may take to arrive.
    pub body_timeout: Duration,
    /// The largest response body that is stored; a larger one is done, and not stored.
    pub response_bytes_max: usize,
    /// Response headers that are stored, beside those that always are; see [`crate::stored`].
    pub keep_headers: Vec<HeaderName>,
    /// Whether a 4xx of the handler is an outcome that is stored. 408, 425 and 429 never are.
    pub store_client_errors: bool,
    /// Which status says what.
    pub statuses: StatusMap,
}

impl Policy {
    /// The defaults, for a scope.
    #[must_use]
    pub fn new(scope: impl Into<String>) -> Self {
        Self {
            scope: scope.into(),
            methods: vec![Method::POST, Method::PATCH],
            requirement: Requirement::default(),
            header: HeaderName::from_static("idempotency-key"),
            syntax: KeySyntax::default(),
            fingerprint: FingerprintParts::default(),
            in_progress: InProgress::default(),
            wait_max: Duration::from_secs(5),
            waiters_max: 10_000,
            body_bytes_max: 1024 * 1024,
            body_timeout: Duration::from_secs(30),
            response_bytes_max: 1024 * 1024,
            keep_headers: Vec::new(),
            store_client_errors: true,
            statuses: StatusMap::default(),
        }
    }

    /// Whether requests with this method are guarded.
    #[must_use]
    pub fn guards(&self, method: &Method) -> bool {
        self.requirement != Requirement::Off && self.methods.contains(method)
    }

    /// Whether a response with this status is an outcome, to be stored and replayed: 2xx to 4xx are, except
    /// those that say "not now" (408, 425, 429).
    #[must_use]
    pub fn is_outcome(&self, status: StatusCode) -> bool {
        !matches!(status.as_u16(), 408 | 425 | 429)
            && (status.is_success()
                || status.is_redirection()
                || (status.is_client_error() && self.store_client_errors))
    }
}
