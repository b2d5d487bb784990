//! One guarded request whose body has arrived: among its duplicates, through the intent, to its response.

use std::marker::PhantomData;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use http::request::Parts;
use http::{Method, Request, Response, StatusCode};
use http_body::Body;
use pgonce::{Answer, Answered, Decision, Failure, Fingerprint, Lease, Tx};
use tokio::time::Instant;
use tower_service::Service;
use tracing::Instrument as _;

use super::Rules;
use super::body::{LayerBody, is_short};
use super::flights::{Boarding, Landed, Lead, Name, Seen};
use crate::stored::kept_headers;
use crate::{InProgress, Policy, Problem, StoredResponse};

/// What the database keeps at most.
const STORED_BYTES_MAX: usize = 16 * 1024 * 1024;
/// The longest wait that the database takes.
const WAIT_MAX: Duration = Duration::from_secs(300);
/// When a duplicate of a running request should come again: how long that one takes is not known.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// What one run of the handler came to: its response, read as far as it is to be stored.
type Ran<R, E> = Result<Response<LayerBody<R>>, Broken<E>>;

/// Why there is no response.
enum Broken<E> {
    /// The service itself failed.
    Service(E),
    /// The handler panicked, failed, or the body of its response broke off.
    Handler,
}

/// A request, to be run as often as it takes.
pub(super) struct Guarded<S, B> {
    /// Shared by runs that follow each other.
    inner: Mutex<S>,
    rules: Arc<Rules>,
    parts: Parts,
    body: Bytes,
    name: Name,
    fingerprint: Fingerprint,
    request_body: PhantomData<fn() -> B>,
}

impl<S, B, R> Guarded<S, B>
where
    S: Service<Request<LayerBody<B>>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    B: Send + 'static,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Send,
{
    pub(super) fn new(
        inner: S,
        rules: Arc<Rules>,
        parts: Parts,
        body: Bytes,
        name: Name,
        fingerprint: Fingerprint,
    ) -> Arc<Self> {
        let inner = Mutex::new(inner);
        Arc::new(Self { inner, rules, parts, body, name, fingerprint, request_body: PhantomData })
    }

    /// The response, however it comes about.
    pub(super) async fn answer(self: Arc<Self>) -> Result<Response<LayerBody<R>>, S::Error> {
        let policy = &self.rules.policy;
        let waits = policy.in_progress == InProgress::Wait;
        let until = Instant::now() + policy.wait_max;
        loop {
            let flight = match self.rules.flights.board(&self.name, self.fingerprint) {
                Boarding::Lead(lead) => {
                    let wait_until = if waits { until } else { Instant::now() };
                    return self.fly(Some(lead), wait_until).await;
                }
                Boarding::Follow(flight) => flight,
            };
            // While it is only asking, it is about to know more: asking beside it would tell the same.
            let other = flight.is_other(self.fingerprint);
            match flight.follow(until, policy.waiters_max, waits && !other).await {
                Seen::Running if other => return Ok(self.rules.refuse(&Problem::Conflict)),
                Seen::Running | Seen::Busy => {
                    return Ok(self.rules.refuse(&Problem::InProgress { retry_after: RETRY_AFTER }));
                }
                // Not one after the other, as new firsts: the answer is there to be read.
                Seen::Landed(Landed::Settled) => {
                    let rules = Arc::clone(&self.rules);
                    let _reader = rules.flights.reader().await;
                    return self.fly(None, Instant::now()).await;
                }
                Seen::Landed(Landed::Fault(problem)) => return Ok(self.rules.refuse(&problem)),
                Seen::Landed(Landed::Free) => {}
            }
        }
    }

    /// Runs the intent, in a task of its own: a client that goes away does not stop what has begun, so that its
    /// retry finds an outcome and not another beginning.
    async fn fly(self: Arc<Self>, lead: Option<Lead>, until: Instant) -> Result<Response<LayerBody<R>>, S::Error> {
        let rules = Arc::clone(&self.rules);
        let flown = async move {
            let wait = until.saturating_duration_since(Instant::now()).min(WAIT_MAX);
            let answered = self.run(lead.as_ref(), wait).await;
            let (landed, response) = self.respond(answered);
            if let Some(lead) = lead {
                lead.land(landed);
            }
            response
        };
        match tokio::spawn(flown.in_current_span()).await {
            Ok(response) => response,
            Err(error) => {
                tracing::error!(%error, "a guarded request ended without a result");
                Ok(rules.refuse(&Problem::Internal))
            }
        }
    }

    async fn run(&self, lead: Option<&Lead>, wait: Duration) -> Result<Answered<Ran<R, S::Error>>, pgonce::Error> {
        let (tenant, key) = &self.name;
        let intent = self.rules.once.intent(&self.rules.policy.scope, key);
        let intent = intent.tenant(tenant).fingerprint(self.fingerprint).wait(wait);
        let runs = || lead.into_iter().for_each(Lead::runs);
        if self.rules.leased {
            let work = |lease: Lease| {
                runs();
                self.attempt(lease)
            };
            return intent.run_leased_answer(work).await;
        }
        let intent = match self.rules.isolation {
            Some(level) => intent.isolation(level),
            None => intent,
        };
        let effect = |tx: Tx| {
            runs();
            self.attempt(tx)
        };
        intent.run_answer(effect).await
    }

    /// One run of the handler, with what is its own among the request's extensions.
    async fn attempt<X>(&self, own: X) -> Result<Decision<Ran<R, S::Error>>, Failure>
    where
        X: Clone + Send + Sync + 'static,
    {
        let mut parts = self.parts.clone();
        parts.extensions.insert(own);
        let request = Request::from_parts(parts, LayerBody::whole(self.body.clone()));
        let mut inner = self.inner.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
        let bytes_max = self.rules.policy.response_bytes_max.min(STORED_BYTES_MAX);
        let method = self.parts.method.clone();
        let called = async move {
            std::future::poll_fn(|context| inner.poll_ready(context)).await.map_err(Broken::Service)?;
            let (mut head, body) = inner.call(request).await.map_err(Broken::Service)?.into_parts();
            // Some middleware copies extensions from request to response: that is not keeping it.
            head.extensions.remove::<X>();
            match LayerBody::read_up_to(body, bytes_max).await {
                // Passed on from another service, it may have broken off without an error: over HTTP/2 a reset can
                // look like an end.
                Ok(body) if is_cut(&method, &head, body.as_whole()) => {
                    tracing::error!("the response of a guarded handler has not the length that it says");
                    Err(Broken::Handler)
                }
                Ok(body) => Ok(Response::from_parts(head, body)),
                Err(_) => {
                    tracing::error!("the response of a guarded handler broke off");
                    Err(Broken::Handler)
                }
            }
        };
        let ran = match AssertUnwindSafe(called).catch_unwind().await {
            Ok(ran) => ran,
            Err(_) => {
                tracing::error!("a guarded handler panicked");
                Err(Broken::Handler)
            }
        };
        decide(&self.rules.policy, self.rules.leased, ran)
    }

    /// What the client gets, and what duplicates should know.
    fn respond(
        &self,
        answered: Result<Answered<Ran<R, S::Error>>, pgonce::Error>,
    ) -> (Landed, Result<Response<LayerBody<R>>, S::Error>) {
        let refuse = |problem: Problem| Ok(self.rules.refuse(&problem));
        match answered {
            Ok(Answered::Executed(Ok(response))) => (Landed::Settled, Ok(response)),
            Ok(Answered::NotStored(Ok(response))) => (Landed::Free, Ok(response)),
            Ok(Answered::Executed(Err(Broken::Service(error))) | Answered::NotStored(Err(Broken::Service(error)))) => {
                (Landed::Free, Err(error))
            }
            Ok(Answered::Executed(Err(Broken::Handler)) | Answered::NotStored(Err(Broken::Handler))) => {
                // What a leased handler did outside is not undone by its panic.
                let problem = if self.rules.leased { Problem::Internal } else { Problem::HandlerFailed };
                (Landed::Free, refuse(problem))
            }
            Ok(Answered::Replayed(answer)) => (Landed::Settled, replayed(&answer).or_else(refuse)),
            Err(error) => {
                let problem = Problem::of_error(&error);
                match &problem {
                    Problem::Internal | Problem::TransactionKept => tracing::error!(%error, "guarded request failed"),
                    _ => tracing::debug!(%error, "guarded request not answered"),
                }
                (landed(&problem), refuse(problem))
            }
        }
    }
}

/// Whether a response that was read to its end lacks something of what its head says.
fn is_cut(method: &Method, head: &http::response::Parts, body: Option<&Bytes>) -> bool {
    let has_body = *method != Method::HEAD && head.status != StatusCode::NOT_MODIFIED;
    body.is_some_and(|body| has_body && is_short(&head.headers, body.len()))
}

/// What a handler's response means for its intent.
fn decide<R, E>(policy: &Policy, leased: bool, ran: Ran<R, E>) -> Result<Decision<Ran<R, E>>, Failure> {
    let Ok(response) = ran else { return Ok(Decision::Unknown(ran)) };
    match response.extensions().get::<Failure>() {
        // What a leased handler did before it failed is not rolled back: nothing says that it may run again.
        Some(failure) if failure.is_retryable() && !leased => return Err(failure.clone()),
        Some(_) => return Ok(Decision::Unknown(Err(Broken::Handler))),
        None => {}
    }
    let status = response.status();
    if !policy.is_outcome(status) {
        let known = status.is_client_error();
        return Ok(if known { Decision::NotDone(Ok(response)) } else { Decision::Unknown(Ok(response)) });
    }
    let body = response.body().as_whole();
    let stored = StoredResponse {
        status,
        headers: kept_headers(response.headers(), &policy.keep_headers),
        body: body.cloned().unwrap_or_default(),
        not_stored: body.is_none(),
    };
    let decision = if status.is_client_error() { Decision::Refused } else { Decision::Done };
    Ok(decision(stored.to_answer(None), Ok(response)))
}

fn replayed<R>(answer: &Answer) -> Result<Response<LayerBody<R>>, Problem> {
    let code = answer.code.and_then(|code| u16::try_from(code).ok());
    match StoredResponse::from_answer(answer) {
        Ok(stored) if !stored.not_stored => Ok(stored.into_http(true).map(LayerBody::whole)),
        Ok(_) => Err(Problem::ResponseNotStored { code }),
        Err(error) => {
            tracing::warn!(%error, "a stored response cannot be replayed");
            Err(Problem::ResponseNotStored { code })
        }
    }
}

/// What a problem of the first request means for those that wait for it.
fn landed(problem: &Problem) -> Landed {
    match problem {
        Problem::Conflict
        | Problem::FailedBefore { .. }
        | Problem::Uncertain
        | Problem::ResultExpired
        | Problem::ResponseNotStored { .. } => Landed::Settled,
        // Without a database, one duplicate after the other would wait for it in vain.
        Problem::Overloaded { .. } | Problem::DatabaseAway | Problem::InDoubt | Problem::Internal => {
            Landed::Fault(problem.clone())
        }
        _ => Landed::Free,
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::Full;

    use super::*;

    fn decided(policy: &Policy, leased: bool, status: u16, failure: Option<Failure>) -> &'static str {
        let mut response = Response::new(LayerBody::<Full<Bytes>>::whole(Bytes::new()));
        *response.status_mut() = StatusCode::from_u16(status).unwrap_or_default();
        if let Some(failure) = failure {
            response.extensions_mut().insert(failure);
        }
        match decide::<_, ()>(policy, leased, Ok(response)) {
            Ok(Decision::Done(..)) => "done",
            Ok(Decision::Refused(..)) => "refused",
            Ok(Decision::NotDone(_)) => "not done",
            Ok(Decision::Unknown(_)) => "unknown",
            Err(_) => "again",
        }
    }

    #[test]
    fn a_status_decides() {
        let policy = Policy::new("s");
        let kept = [(200, "done"), (204, "done"), (303, "done"), (400, "refused"), (404, "refused"), (422, "refused")];
        let not_kept = [(408, "not done"), (425, "not done"), (429, "not done"), (500, "unknown"), (503, "unknown")];
        for (status, decision) in kept.into_iter().chain(not_kept) {
            assert_eq!(decided(&policy, false, status, None), decision, "{status}");
        }
        let lenient = Policy { store_client_errors: false, ..policy };
        assert_eq!(decided(&lenient, false, 404, None), "not done");
        assert_eq!(decided(&lenient, false, 201, None), "done");
    }

    #[test]
    fn those_that_wait_ask_run_or_are_told_the_fault() {
        assert_eq!(landed(&Problem::Conflict), Landed::Settled);
        assert_eq!(landed(&Problem::Uncertain), Landed::Settled);
        assert_eq!(landed(&Problem::TryAgain), Landed::Free);
        assert_eq!(landed(&Problem::InProgress { retry_after: RETRY_AFTER }), Landed::Free);
        for fault in [Problem::DatabaseAway, Problem::InDoubt, Problem::Overloaded { retry_after: RETRY_AFTER }] {
            assert_eq!(landed(&fault), Landed::Fault(fault.clone()));
        }
    }

    /// A response that comes with a failure is not the handler's answer, whatever its status.
    #[test]
    fn a_failure_decides_before_the_status() {
        let policy = Policy::new("s");
        for status in [200, 404, 500] {
            assert_eq!(decided(&policy, false, status, Some(Failure::retry("c", "m"))), "again");
            assert_eq!(decided(&policy, false, status, Some(Failure::refuse("c", "m"))), "unknown");
            assert_eq!(decided(&policy, true, status, Some(Failure::retry("c", "m"))), "unknown");
        }
    }
}
