//! Which requests are guarded, and what is refused before anything is run.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::request::Parts;
use http::{Request, Response, Uri};
use http_body::Body;
use pgonce::key_hash;
use tower_service::Service;
use tracing::Instrument as _;

use super::Rules;
use super::body::{BoxError, LayerBody, request_body};
use super::flights::Name;
use super::guard::Guarded;
use crate::{Problem, Requirement, parse_key, request_fingerprint};

/// The service that [`super::IdempotencyLayer`] makes.
#[derive(Debug, Clone)]
pub struct IdempotencyService<S> {
    pub(super) inner: S,
    pub(super) rules: Arc<Rules>,
}

impl<S, B, R> Service<Request<B>> for IdempotencyService<S>
where
    S: Service<Request<LayerBody<B>>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Send,
{
    type Response = Response<LayerBody<R>>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        // The one that is ready is this call's.
        let next = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, next);
        let rules = Arc::clone(&self.rules);
        let (mut parts, body) = request.into_parts();
        let name = match rules.name(&parts) {
            Ok(Some(name)) => name,
            Ok(None) => {
                if rules.policy.guards(&parts.method) {
                    parts.extensions.insert(Unkeyed(rules));
                }
                let passed = inner.call(Request::from_parts(parts, LayerBody::passed(body)));
                return Box::pin(async move { Ok(passed.await?.map(LayerBody::passed)) });
            }
            Err(problem) => return Box::pin(std::future::ready(Ok(rules.refuse(&problem)))),
        };
        // A guarded request may need several calls, or none: what was reserved for one is given back.
        let inner = inner.clone();
        let span = tracing::info_span!("pgonce.http", scope = %rules.policy.scope, key_hash = %key_hash(&name.1));
        let answered = async move {
            let body = match request_body(body, &parts.headers, &rules.policy).await {
                Ok(body) => body,
                Err(problem) => return Ok(rules.refuse(&problem)),
            };
            let pinned = &rules.policy.fingerprint;
            let fingerprint = request_fingerprint(pinned, &parts.method, original_uri(&parts), &parts.headers, &body);
            Guarded::<S, B>::new(inner, rules, parts, body, name, fingerprint).answer().await
        };
        Box::pin(answered.instrument(span))
    }
}

/// Marks a request that was let through for want of a key, so that an extractor can say what is missing.
#[derive(Debug, Clone)]
pub(super) struct Unkeyed(#[cfg_attr(not(feature = "axum"), allow(dead_code))] pub(super) Arc<Rules>);

impl Rules {
    /// Whose intent a request is, and its key; none where it passes.
    fn name(&self, parts: &Parts) -> Result<Option<Name>, Problem> {
        let policy = &self.policy;
        if !policy.guards(&parts.method) {
            return Ok(None);
        }
        let key = parse_key(&parts.headers, &policy.header, policy.syntax).map_err(Problem::KeyMalformed)?;
        match (key, policy.requirement) {
            (None, Requirement::Required) => Err(Problem::KeyMissing),
            (None, _) => Ok(None),
            (Some(key), _) => {
                let tenant = self.tenant.as_ref().map_or_else(|| Ok(String::new()), |of| of(parts))?;
                Ok(Some((tenant, key)))
            }
        }
    }

    /// A problem as the response, counted.
    pub(super) fn refuse<B>(&self, problem: &Problem) -> Response<LayerBody<B>> {
        metrics::counter!("pgonce_problems_total", "problem" => problem.slug()).increment(1);
        problem.response(&self.policy.statuses, None).map(LayerBody::whole)
    }
}

/// The URI that the client sent: a router that nests services takes a prefix off, and two prefixes are two requests.
fn original_uri(parts: &Parts) -> &Uri {
    #[cfg(feature = "axum")]
    if let Some(axum::extract::OriginalUri(uri)) = parts.extensions.get() {
        return uri;
    }
    &parts.uri
}
