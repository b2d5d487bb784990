//! What a request is told that gets no response of its own: problem details (RFC 9457) that say what happened,
//! whether the effect is there, and what to do. The table of them is in docs/reference/errors.md.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use pgonce::sqlstate::{self, Verdict};
use serde_json::{Map, Value};

use crate::KeyError;

/// What a problem's `type` starts with; its slug follows. A name: programs compare it, and nothing can be fetched
/// there. Where a page about it is, whoever answers says in `Link` (the gateway: `/_pgonce/problems/<slug>`).
pub const BASE: &str = "urn:pgonce:problem:";

/// What this request did about the effect that it asks for. What an earlier request with the same key did stands:
/// to a client that was told "unknown" before, a later "not done" (no database, say) is no news of that one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// The effect is there, once.
    Done,
    /// This request did not bring it about, and never will.
    NotDone,
    /// It is there once or not at all.
    Unknown,
}

impl Effect {
    /// As the member `effect` says it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::NotDone => "not_done",
            Self::Unknown => "unknown",
        }
    }
}

/// Why a request gets no response of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Problem {
    /// A key is required.
    KeyMissing,
    /// The key cannot be read.
    KeyMalformed(KeyError),
    /// The request's body is larger than what is fingerprinted.
    BodyTooLarge {
        /// The limit, in bytes.
        limit: usize,
    },
    /// The request's body ended early.
    BodyIncomplete,
    /// The request's body did not arrive in time.
    BodyTimeout,
    /// The key was used before for another request.
    Conflict,
    /// The first request with this key is still running.
    InProgress {
        /// When to come again.
        retry_after: Duration,
    },
    /// The intent failed before, finally.
    FailedBefore {
        /// The failure code that was recorded.
        code: String,
    },
    /// The effect was rolled back; it may work later.
    TryAgain,
    /// Held until somebody settles it.
    Uncertain,
    /// Whether the commit arrived could not be found out in time.
    InDoubt,
    /// Done, and past its retention.
    ResultExpired,
    /// Done, and its response was not kept or cannot be read.
    ResponseNotStored {
        /// The status of that response, where it is known.
        code: Option<u16>,
    },
    /// The request does not say whose it is.
    TenantMissing,
    /// What it says cannot be believed.
    TenantRefused,
    /// Too many requests for this instance or its database.
    Overloaded {
        /// When to come again.
        retry_after: Duration,
    },
    /// Too many requests of this tenant.
    QuotaExceeded {
        /// When to come again.
        retry_after: Duration,
    },
    /// The database could not be asked.
    DatabaseAway,
    /// The key's home region could not be reached.
    HomeAway,
    /// No connection to the upstream: nothing was sent to it.
    UpstreamAway,
    /// The upstream did not answer in time.
    UpstreamTimeout,
    /// The upstream got the request, and did not say what became of it; the intent is held.
    UpstreamUncertain {
        /// What it answered, where it did.
        upstream_status: Option<u16>,
    },
    /// The upstream failed, nothing is held, and a retry runs it again: by the scope's policy, or because the upstream
    /// said "not now".
    UpstreamFailed {
        /// What it answered, where it did.
        upstream_status: Option<u16>,
    },
    /// Another attempt took over while this one was working.
    LeaseLost,
    /// The handler panicked, or its response broke off; its writes are rolled back.
    HandlerFailed,
    /// The handler kept its transaction; it is rolled back.
    TransactionKept,
    /// A handler asks for what only a guarded request has.
    NotGuarded,
    /// The request itself is malformed. The text says how, and holds nothing of what was sent.
    Malformed(String),
    /// A fault of ours.
    Internal,
}

/// What is the same for every problem of a kind.
struct Kind {
    slug: &'static str,
    title: &'static str,
    status: StatusCode,
    effect: Effect,
    retryable: bool,
}

const fn kind(slug: &'static str, status: StatusCode, effect: Effect, retryable: bool, title: &'static str) -> Kind {
    Kind { slug, title, status, effect, retryable }
}

/// Every slug, in the order of [`Problem`].
pub const SLUGS: [&str; 29] = [
    "key-missing",
    "key-malformed",
    "body-too-large",
    "body-incomplete",
    "body-timeout",
    "conflict",
    "in-progress",
    "failed-before",
    "try-again",
    "uncertain",
    "in-doubt",
    "result-expired",
    "response-not-stored",
    "tenant-missing",
    "tenant-refused",
    "overloaded",
    "quota-exceeded",
    "database-away",
    "home-away",
    "upstream-away",
    "upstream-timeout",
    "upstream-uncertain",
    "upstream-failed",
    "lease-lost",
    "handler-failed",
    "transaction-kept",
    "not-guarded",
    "malformed",
    "internal",
];

impl Problem {
    /// The one table of what each problem means.
    #[rustfmt::skip]
    fn kind(&self) -> Kind {
        use Effect::{Done, NotDone, Unknown};
        use StatusCode as S;
        match self {
            Self::KeyMissing => kind("key-missing", S::BAD_REQUEST, NotDone, false, "An idempotency key is required"),
            Self::KeyMalformed(_) => kind("key-malformed", S::BAD_REQUEST, NotDone, false, "The idempotency key cannot be read"),
            Self::BodyTooLarge { .. } => kind("body-too-large", S::PAYLOAD_TOO_LARGE, NotDone, false, "The request body is too large"),
            Self::BodyIncomplete => kind("body-incomplete", S::BAD_REQUEST, NotDone, true, "The request body ended early"),
            Self::BodyTimeout => kind("body-timeout", S::REQUEST_TIMEOUT, NotDone, true, "The request body did not arrive in time"),
            Self::Conflict => kind("conflict", S::UNPROCESSABLE_ENTITY, NotDone, false, "The idempotency key was used for another request"),
            Self::InProgress { .. } => kind("in-progress", S::CONFLICT, Unknown, true, "The request is being processed"),
            Self::FailedBefore { .. } => kind("failed-before", S::CONFLICT, NotDone, false, "The request failed before, finally"),
            Self::TryAgain => kind("try-again", S::SERVICE_UNAVAILABLE, NotDone, true, "The request could not be carried out now"),
            Self::Uncertain => kind("uncertain", S::CONFLICT, Unknown, true, "Whether the request was carried out is not known"),
            Self::InDoubt => kind("in-doubt", S::SERVICE_UNAVAILABLE, Unknown, true, "The outcome could not be found out in time"),
            Self::ResultExpired => kind("result-expired", S::GONE, Done, false, "Done; the response has expired"),
            Self::ResponseNotStored { .. } => kind("response-not-stored", S::GONE, Done, false, "Done; the response was not stored"),
            Self::TenantMissing => kind("tenant-missing", S::UNAUTHORIZED, NotDone, false, "The request does not say whose it is"),
            Self::TenantRefused => kind("tenant-refused", S::UNAUTHORIZED, NotDone, false, "The request's credentials were refused"),
            Self::Overloaded { .. } => kind("overloaded", S::SERVICE_UNAVAILABLE, NotDone, true, "Too many requests at once"),
            Self::QuotaExceeded { .. } => kind("quota-exceeded", S::TOO_MANY_REQUESTS, NotDone, true, "The quota is used up"),
            Self::DatabaseAway => kind("database-away", S::SERVICE_UNAVAILABLE, NotDone, true, "The database cannot be reached"),
            Self::HomeAway => kind("home-away", S::SERVICE_UNAVAILABLE, Unknown, true, "The key's home region cannot be reached"),
            Self::UpstreamAway => kind("upstream-away", S::BAD_GATEWAY, NotDone, true, "The service cannot be reached"),
            Self::UpstreamTimeout => kind("upstream-timeout", S::GATEWAY_TIMEOUT, Unknown, true, "The service did not answer in time"),
            Self::UpstreamUncertain { .. } => kind("upstream-uncertain", S::BAD_GATEWAY, Unknown, true, "The service did not say what became of the request"),
            Self::UpstreamFailed { .. } => kind("upstream-failed", S::BAD_GATEWAY, Unknown, true, "The service failed"),
            Self::LeaseLost => kind("lease-lost", S::SERVICE_UNAVAILABLE, Unknown, true, "Another attempt took over"),
            Self::HandlerFailed => kind("handler-failed", S::INTERNAL_SERVER_ERROR, NotDone, true, "The service failed; nothing was done"),
            Self::TransactionKept => kind("transaction-kept", S::INTERNAL_SERVER_ERROR, NotDone, false, "The service kept its transaction"),
            Self::NotGuarded => kind("not-guarded", S::INTERNAL_SERVER_ERROR, NotDone, false, "The route is not guarded"),
            Self::Malformed(_) => kind("malformed", S::BAD_REQUEST, NotDone, false, "The request is malformed"),
            Self::Internal => kind("internal", S::INTERNAL_SERVER_ERROR, Unknown, true, "Internal error"),
        }
    }

    /// Its name: what its `type` ends with, and what a [`StatusMap`] knows it by.
    #[must_use]
    pub fn slug(&self) -> &'static str {
        self.kind().slug
    }

    /// What happened, the same for every problem of this kind.
    #[must_use]
    pub fn title(&self) -> &'static str {
        self.kind().title
    }

    /// What became of the effect.
    #[must_use]
    pub fn effect(&self) -> Effect {
        if self.is_abandoned() { Effect::Unknown } else { self.kind().effect }
    }

    /// Given up after its last attempt had ended in doubt, or without a word.
    fn is_abandoned(&self) -> bool {
        matches!(self, Self::FailedBefore { code } if code == "abandoned")
    }

    /// Whether the same request with the same key may be sent again as it is, and can then come out differently.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        self.kind().retryable
    }

    /// The status where no map says otherwise.
    #[must_use]
    pub fn default_status(&self) -> StatusCode {
        self.kind().status
    }

    /// When to come again, where that is known.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::InProgress { retry_after }
            | Self::Overloaded { retry_after }
            | Self::QuotaExceeded { retry_after } => Some(*retry_after),
            _ => None,
        }
    }

    /// What happened, what it means for the effect, and what to do.
    #[must_use]
    pub fn detail(&self) -> String {
        let text = match self {
            Self::KeyMissing => "Nothing was run. Send the request with a key of its own, in double quotes.",
            Self::KeyMalformed(error) => return format!("Nothing was run: {error}."),
            Self::BodyTooLarge { limit } => {
                return format!("Nothing was run: bodies of guarded requests may have {limit} bytes.");
            }
            Self::BodyIncomplete => "Nothing was run. Send the whole request again, with the same key.",
            Self::BodyTimeout => "Nothing was run. Send the request again, with the same key.",
            Self::Conflict => {
                "This request was not run; the earlier one with this key stands. A new request needs a new key; a \
                 retry must repeat the request as it was."
            }
            Self::InProgress { .. } => {
                "An earlier request with this key is running. Send this one again with the same key after the time \
                 in Retry-After: it gets the same outcome."
            }
            Self::FailedBefore { .. } if self.is_abandoned() => {
                "Its attempts are used up, and the last one's outcome is not known: it may have been carried out, and \
                 will not be run under this key. Find out before you send it with a new one: it could happen twice."
            }
            Self::FailedBefore { .. } => {
                "It was not carried out, and will not be under this key. A new attempt needs a new key."
            }
            Self::TryAgain => "What was begun was rolled back. Send the request again with the same key.",
            Self::Uncertain => {
                "An earlier attempt ended without a word: it was carried out once or not at all, and is held until \
                 that is settled. Ask again later with the same key. With a new key it could happen twice."
            }
            Self::InDoubt => {
                "It was carried out once or not at all. Send the request again with the same key to learn which."
            }
            Self::ResultExpired => "It was carried out, once; its response is no longer kept. Treat it as done.",
            Self::ResponseNotStored { .. } => {
                "It was carried out, once; its response was not kept, or cannot be read. Treat it as done."
            }
            Self::TenantMissing => "Nothing was run. Send the request with the credentials that this route asks for.",
            Self::TenantRefused => "Nothing was run. Send the request with valid credentials.",
            Self::Overloaded { .. } => {
                "This request was not run. Send it again with the same key after the time in Retry-After."
            }
            Self::QuotaExceeded { .. } => {
                "This request was not run. Send it again with the same key after the time in Retry-After, and fewer \
                 at once."
            }
            Self::DatabaseAway => {
                "This request was not run: without the database it could run twice. Send it again with the same key."
            }
            Self::HomeAway => {
                "This request was not run here, and whether it arrived at the key's home is not known. Send it again \
                 with the same key."
            }
            Self::UpstreamAway => "Nothing was sent to the service. Send the request again with the same key.",
            Self::UpstreamTimeout => {
                "The service has the request, and may have carried it out. Send it again with the same key: it gets \
                 the outcome, is run again or is held, by the policy of this route. With a new key it could happen \
                 twice."
            }
            Self::UpstreamUncertain { .. } => {
                "The service had the request: it was carried out once or not at all. Ask again later with the same \
                 key. With a new key it could happen twice."
            }
            Self::UpstreamFailed { .. } => {
                "The service had the request, and gave no outcome. Nothing is held: send it again with the same key, and \
                 it is run again, by the policy of this route. With a new key it could happen twice."
            }
            Self::LeaseLost => {
                "It took so long that another attempt took over; that one decides. Send the request again with the \
                 same key to learn the outcome."
            }
            Self::HandlerFailed => {
                "It failed without an answer, and what it had begun was rolled back. Send the request again with the \
                 same key: it is run again."
            }
            Self::TransactionKept => {
                "A fault of the service: its handler kept the intent's transaction beyond its own end. Nothing was \
                 committed."
            }
            Self::NotGuarded => {
                "A fault of the service: its handler asks for what only a request behind the idempotency layer has, \
                 and only in the layer's mode. Nothing was run."
            }
            Self::Malformed(reason) => return format!("Nothing was run: {reason}."),
            Self::Internal => {
                "What became of the request is not known. Send it again with the same key to learn the outcome."
            }
        };
        text.to_owned()
    }

    /// The problem behind an error of the library, as the layer and the gateway both tell it.
    #[must_use]
    pub fn of_error(error: &pgonce::Error) -> Self {
        use pgonce::Error;
        match error {
            Error::Conflict => Self::Conflict,
            Error::InProgress { retry_after } => Self::InProgress { retry_after: *retry_after },
            Error::FailedBefore { code, .. } | Error::Failed { code, .. } => Self::FailedBefore { code: code.clone() },
            Error::FailedRetryable { .. } => Self::TryAgain,
            Error::Uncertain => Self::Uncertain,
            Error::ResultExpired => Self::ResultExpired,
            Error::AnswerUnreadable { .. } => Self::ResponseNotStored { code: None },
            Error::LeaseLost => Self::LeaseLost,
            Error::InDoubt { .. } => Self::InDoubt,
            Error::Away { .. } => Self::DatabaseAway,
            Error::Kept => Self::TransactionKept,
            Error::Overloaded { retry_after } => Self::Overloaded { retry_after: *retry_after },
            // Of one call, or of one intent of a batch.
            Error::Database(_) | Error::Refused { .. } => match error.sqlstate() {
                Some("P4001") => Self::KeyMalformed(KeyError::Refused),
                Some("P4004") => Self::TenantRefused,
                Some(code) => match sqlstate::verdict(code) {
                    Verdict::Again => Self::TryAgain,
                    Verdict::Later => Self::DatabaseAway,
                    Verdict::InDoubt => Self::InDoubt,
                    _ => Self::Internal,
                },
                None if error.is_retryable() => Self::DatabaseAway,
                None => Self::Internal,
            },
            _ => Self::Internal,
        }
    }

    /// As the response that is sent. `instance` is a URI for this occurrence, where there is one.
    #[must_use]
    pub fn response(&self, statuses: &StatusMap, instance: Option<&str>) -> Response<Bytes> {
        let status = statuses.status(self);
        let uri = format!("{BASE}{}", self.slug());
        let wait_s = self.retry_after().map(whole_seconds);
        let mut members = Map::new();
        let mut put = |name: &str, value: Value| members.insert(name.to_owned(), value);
        put("type", uri.as_str().into());
        put("title", self.title().into());
        put("status", status.as_u16().into());
        put("detail", self.detail().into());
        put("effect", self.effect().as_str().into());
        put("retryable", self.is_retryable().into());
        if let Some(wait_s) = wait_s {
            put("retry_after", wait_s.into());
        }
        if let Some(instance) = instance {
            put("instance", instance.into());
        }
        match self {
            Self::BodyTooLarge { limit } => drop(put("limit_bytes", (*limit).into())),
            Self::FailedBefore { code } => drop(put("failure_code", code.as_str().into())),
            Self::ResponseNotStored { code: Some(code) } => drop(put("original_status", (*code).into())),
            Self::UpstreamUncertain { upstream_status: Some(code) }
            | Self::UpstreamFailed { upstream_status: Some(code) } => drop(put("upstream_status", (*code).into())),
            _ => {}
        }
        let mut response = Response::new(Bytes::from(Value::Object(members).to_string()));
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        // A cache that kept a 410 or a 503 would answer retries that could learn more.
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if let Some(wait_s) = wait_s {
            headers.insert(header::RETRY_AFTER, wait_s.into());
        }
        response
    }
}

/// Rounded up, so that nobody comes too early; at least one, so that nobody spins.
fn whole_seconds(wait: Duration) -> u64 {
    wait.as_secs().saturating_add(u64::from(wait.subsec_nanos() > 0)).max(1)
}

/// Which status says what: the documented defaults, and what was set otherwise.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StatusMap {
    overrides: BTreeMap<&'static str, StatusCode>,
}

/// Why a status cannot be set.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StatusMapError {
    /// No problem is called so.
    #[error("no problem is called {0:?}; their names are in docs/reference/errors.md")]
    UnknownSlug(String),
    /// A problem must not look like a success, or like nothing that HTTP knows.
    #[error("status {0} is not one of an error (400 to 599)")]
    NotAnError(u16),
}

impl StatusMap {
    /// Answers the problem of this name with this status.
    ///
    /// # Errors
    /// Where there is no such problem, or the status is not from 400 to 599.
    pub fn set(&mut self, slug: &str, status: u16) -> Result<(), StatusMapError> {
        let slug = SLUGS
            .into_iter()
            .find(|known| *known == slug)
            .ok_or_else(|| StatusMapError::UnknownSlug(slug.to_owned()))?;
        let code = StatusCode::from_u16(status)
            .ok()
            .filter(|code| code.is_client_error() || code.is_server_error())
            .ok_or(StatusMapError::NotAnError(status))?;
        self.overrides.insert(slug, code);
        Ok(())
    }

    /// The status that a problem is answered with.
    #[must_use]
    pub fn status(&self, problem: &Problem) -> StatusCode {
        self.overrides.get(problem.slug()).copied().unwrap_or_else(|| problem.default_status())
    }
}

mod help;

#[cfg(test)]
mod tests;
