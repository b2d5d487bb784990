//! For axum handlers: the transaction, the lease, and errors that may be run again.

use std::convert::Infallible;
use std::ops::Deref;

use axum::body::Body;
use axum::extract::{FromRequestParts, OptionalFromRequestParts};
use axum::response::{IntoResponse, Response};
use http::request::Parts;
use pgonce::{Failure, Lease, Tx};

use super::service::Unkeyed;
use crate::{Problem, StatusMap};

/// The intent's open transaction: what is written through it commits with the response, or not at all. No clone of
/// it may outlive the handler.
///
/// A handler without a guarded request has none: `Option<Transaction>` for one that can do without.
#[derive(Debug, Clone)]
pub struct Transaction(pub Tx);

impl Deref for Transaction {
    type Target = Tx;

    fn deref(&self) -> &Tx {
        &self.0
    }
}

/// The lease that a handler behind [`super::IdempotencyLayer::leased`] runs under.
#[derive(Debug, Clone)]
pub struct Leased(pub Lease);

impl Deref for Leased {
    type Target = Lease;

    fn deref(&self) -> &Lease {
        &self.0
    }
}

/// Why there is nothing to extract: a key that is missing, or a route that is not behind the layer.
fn missing(parts: &Parts) -> Response {
    match parts.extensions.get::<Unkeyed>() {
        Some(Unkeyed(rules)) => rules.refuse::<Body>(&Problem::KeyMissing).map(Body::new),
        None => {
            tracing::error!("a handler asks for its intent, and its route is not behind IdempotencyLayer in that mode");
            Problem::NotGuarded.into_response()
        }
    }
}

impl<S: Sync> FromRequestParts<S> for Transaction {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Response> {
        parts.extensions.get().cloned().map(Self).ok_or_else(|| missing(parts))
    }
}

impl<S: Sync> OptionalFromRequestParts<S> for Transaction {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, Infallible> {
        Ok(parts.extensions.get().cloned().map(Self))
    }
}

impl<S: Sync> FromRequestParts<S> for Leased {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Response> {
        parts.extensions.get().cloned().map(Self).ok_or_else(|| missing(parts))
    }
}

impl<S: Sync> OptionalFromRequestParts<S> for Leased {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, Infallible> {
        Ok(parts.extensions.get().cloned().map(Self))
    }
}

/// A handler's error that is no answer: any error converts into it with `?`. Behind the layer a serialization
/// failure, a deadlock or a lost connection makes the handler run again; whatever else it is, is rolled back, and the
/// client gets a problem with status 500, which is not stored. A leased handler is not run again: what it did
/// outside is not rolled back. Its code is logged, its message at level debug; the client is not told of it.
#[derive(Debug, Clone)]
pub struct Failed(pub Failure);

impl<E: std::error::Error + Send + Sync + 'static> From<E> for Failed {
    fn from(error: E) -> Self {
        Self(Failure::from(error))
    }
}

impl IntoResponse for Failed {
    fn into_response(self) -> Response {
        if !self.0.is_retryable() {
            // The message may quote what was sent.
            tracing::error!(code = self.0.code(), "a handler failed");
            tracing::debug!(message = self.0.message(), "why it failed");
        }
        // As it looks where no layer is; the layer knows more about the effect.
        let mut response = Problem::Internal.into_response();
        response.extensions_mut().insert(self.0);
        response
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        self.response(&StatusMap::default(), None).map(Body::from)
    }
}
