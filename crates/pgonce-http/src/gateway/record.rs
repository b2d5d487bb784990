//! What came back from the upstream: recorded under the claim's fence, and only then told as done.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use http::{Response, response};
use http_body::Body as _;
use http_body_util::BodyExt as _;
use pgonce::{Answer, Claim, Error, Kept, Recorded};
use tokio::sync::mpsc;
use uuid::Uuid;

use super::Gateway;
use super::body::{Arriving, Body, BodyError};
use super::config::KeptResponse;
use super::flights::{Leader, Stage};
use super::guard::{Guarded, Reply, of_database, publish_expiry};
use super::headers::strip_hop_by_hop;
use super::upstream::Lost;
use crate::problem::{Effect, Problem};

/// A response is gathered whole up to this size, and for this long; from then on it is passed on while it is
/// recorded, except for its last piece.
const WHOLE_BYTES_MAX: usize = 64 * 1024;
const WHOLE_PATIENCE: Duration = Duration::from_millis(50);
/// Pieces on their way to a client.
const PIECES_MAX: usize = 4;
/// How long a client may leave a response alone that is too large to be recorded, while its claim is held.
const CLIENT_PATIENCE: Duration = Duration::from_secs(30);

/// A request that was forwarded under a claim.
pub(crate) struct Flight {
    pub(crate) guarded: Guarded,
    pub(crate) leader: Leader,
    pub(crate) claim_id: Uuid,
    /// The lease, renewed while this lives.
    pub(crate) kept: Kept,
}

/// A body, so far.
enum Gathered {
    Whole(Bytes),
    Part(Bytes),
    Lost(Lost),
}

impl Gateway {
    /// The upstream answered: an outcome is recorded, "not now" gives the claim back, and everything else is doubt: a
    /// server error, and what is no answer to this request (101, which it did not ask for, or a status over 599).
    pub(crate) async fn take(&self, flight: Flight, reply: Reply, response: Response<Arriving>) {
        let status = response.status();
        let (mut head, mut body) = response.into_parts();
        strip_hop_by_hop(&mut head.headers);
        head.headers.remove(http::header::TRAILER); // a response that is stored has none
        if flight.guarded.policy().is_outcome(status) {
            return self.record(flight, reply, head, body).await;
        }
        let code = format!("http_{}", status.as_u16());
        // Read before the claim ends: a body that breaks off says no less than the status did.
        let limit = flight.guarded.policy().response_bytes_max;
        let whole = tokio::time::timeout(Duration::from_secs(30), gather(&mut body, limit, None)).await;
        let is_response = status.is_client_error() || status.is_server_error();
        let passed = match whole {
            Ok(Gathered::Whole(bytes)) if is_response => Some(Response::from_parts(head, Body::from(bytes))),
            _ => None,
        };
        if !status.is_client_error() {
            let problem = Problem::UpstreamUncertain { upstream_status: Some(status.as_u16()) };
            return self.doubt(flight, reply, &code, problem, passed).await;
        }
        let Flight { guarded, leader, claim_id, kept } = flight;
        drop(kept);
        let failed = self.batcher.fail(&guarded.name, claim_id, true, &code, "the upstream said: not now").await;
        let problem = Problem::UpstreamFailed { upstream_status: Some(status.as_u16()) };
        leader.end(guarded.name.fingerprint, problem.clone());
        reply.send(match (failed, passed) {
            (Ok(()), Some(response)) => Ok(response),
            (Ok(()), None) => Err(problem),
            (Err(error), _) => Err(though_sent(of_database(error))),
        });
    }

    /// Stores the outcome, then tells it. A long response is passed on meanwhile, except for its last piece:
    /// nobody has the whole of an answer that is not stored.
    async fn record(&self, flight: Flight, reply: Reply, head: response::Parts, mut body: Arriving) {
        let gathered = tokio::select! {
            biased;
            () = flight.kept.lost() => return self.lost(flight, reply).await,
            gathered = gather(&mut body, WHOLE_BYTES_MAX, Some(WHOLE_PATIENCE)) => gathered,
        };
        match gathered {
            Gathered::Lost(lost) => {
                let problem = match lost {
                    Lost::TimedOut => Problem::UpstreamTimeout,
                    _ => Problem::UpstreamUncertain { upstream_status: Some(head.status.as_u16()) },
                };
                self.doubt(flight, reply, lost.code(), problem, None).await;
            }
            Gathered::Whole(bytes) => {
                let fits = bytes.len() <= flight.guarded.policy().response_bytes_max;
                let stored = self.store(flight, &head, fits.then(|| bytes.clone())).await;
                fail::fail_point!("gateway::before_answer");
                reply.send(match stored {
                    Ok(Stored::Now(fresh_for)) => {
                        let mut response = Response::from_parts(head, Body::from(bytes));
                        publish_expiry(&mut response, fresh_for);
                        Ok(response)
                    }
                    Ok(Stored::Before(response)) => Ok(response),
                    Err(problem) => Err(problem),
                });
            }
            Gathered::Part(begun) => {
                let (sender, pieces) = mpsc::channel(PIECES_MAX);
                let left = body.size_hint().exact().map(|left| left + begun.len() as u64);
                let passed = Response::from_parts(head.clone(), Body::Recorded { pieces, left });
                reply.send(Ok(passed));
                if let Err(error) = self.pass_and_record(flight, head, body, begun, &sender).await {
                    tracing::warn!(error, "a response was cut off before its end");
                    let _ = sender.send(Err(error.into())).await;
                }
            }
        }
    }

    /// Passes a body on while recording it, and lets go of the last piece when it is stored.
    async fn pass_and_record(
        &self,
        flight: Flight,
        head: response::Parts,
        mut body: Arriving,
        begun: Bytes,
        client: &mpsc::Sender<Result<Bytes, BodyError>>,
    ) -> Result<(), &'static str> {
        let limit = flight.guarded.policy().response_bytes_max;
        let mut recorded = Some(BytesMut::from(&begun[..])).filter(|_| begun.len() <= limit);
        let mut last = begun;
        // What the client has not taken. As long as it is recorded anyway, the service is read on: a client that
        // stops reading must not keep an outcome from being stored.
        let mut queue = VecDeque::new();
        let mut moved_at = tokio::time::Instant::now();
        let mut is_cut = false;
        loop {
            let frame = tokio::select! {
                biased;
                () = flight.kept.lost() => {
                    flight.leader.at(Stage::Dissolved);
                    return Err("the lease was lost");
                }
                room = client.reserve(), if !queue.is_empty() => {
                    match (room, queue.pop_front()) {
                        (Ok(room), Some(piece)) => room.send(Ok(piece)),
                        // Gone, which changes nothing: the outcome is recorded to the end.
                        _ => queue.clear(),
                    }
                    moved_at = tokio::time::Instant::now();
                    continue;
                }
                () = tokio::time::sleep_until(moved_at + CLIENT_PATIENCE), if !queue.is_empty() && recorded.is_none() => {
                    queue.clear();
                    is_cut = true;
                    continue;
                }
                frame = body.frame(), if queue.is_empty() || recorded.is_some() => frame,
            };
            match frame {
                Some(Ok(frame)) => {
                    let Ok(data) = frame.into_data() else { continue };
                    if data.is_empty() {
                        continue;
                    }
                    if let Some(bytes) = recorded.as_mut().filter(|bytes| bytes.len() + data.len() <= limit) {
                        bytes.extend_from_slice(&data);
                    } else {
                        recorded = None;
                    }
                    let piece = std::mem::replace(&mut last, data);
                    if !is_cut && !client.is_closed() {
                        if queue.is_empty() {
                            moved_at = tokio::time::Instant::now();
                        }
                        queue.push_back(piece);
                    }
                }
                Some(Err(error)) => {
                    let lost = Lost::from(error);
                    self.give_up(flight, lost.code()).await;
                    return Err(if lost == Lost::TimedOut {
                        "the upstream stood still"
                    } else {
                        "the upstream broke off"
                    });
                }
                None => break,
            }
        }
        match self.store(flight, &head, recorded.map(BytesMut::freeze)).await {
            Ok(_) if is_cut => Err("the client did not read"),
            Ok(_) => {
                for piece in queue.into_iter().chain([last]) {
                    let _ = client.send(Ok(piece)).await;
                }
                Ok(())
            }
            Err(_) => Err("the outcome could not be recorded"),
        }
    }

    /// Records the outcome under the claim's fence. None: larger than what is kept; done all the same.
    async fn store(&self, flight: Flight, head: &response::Parts, body: Option<Bytes>) -> Result<Stored, Problem> {
        let Flight { guarded, leader, claim_id, kept } = flight;
        let answer = guarded.to_store(head, body)?;
        drop(kept); // a renewal would only queue behind this (trap 8)
        fail::fail_point!("gateway::before_store");
        let asked_at = Instant::now();
        let recorded = self.batcher.succeed(&guarded.name, claim_id, answer.clone()).await;
        fail::fail_point!("gateway::after_store");
        match recorded {
            Ok(Recorded::Now { expires_in }) => {
                let answer = as_stored(answer, guarded.route.scope_policy.response);
                self.share(&guarded, &leader, answer, expires_in, asked_at);
                Ok(Stored::Now(expires_in))
            }
            // The upstream committed the outcome with its effect: that is the answer.
            Ok(Recorded::Before { answer, expires_in }) => {
                let replay = self.share(&guarded, &leader, answer, expires_in, asked_at);
                guarded.open(&replay, false).map(Stored::Before)
            }
            Err(Error::LeaseLost) => self.observe(&guarded, &leader).await.map(Stored::Before),
            Err(error) => {
                tracing::warn!(%error, "the upstream answered, and the outcome could not be recorded");
                let problem = Problem::InDoubt;
                leader.end(guarded.name.fingerprint, problem.clone());
                Err(problem)
            }
        }
    }

    /// Nobody knows whether the effect is there: the scope's policy decides what that means, at once. An
    /// upstream that had committed the outcome by itself has made the claim its own end: then that is told.
    pub(crate) async fn doubt(
        &self,
        flight: Flight,
        reply: Reply,
        code: &str,
        problem: Problem,
        passed: Option<Response<Body>>,
    ) {
        let Flight { guarded, leader, claim_id, kept } = flight;
        drop(kept);
        let status = self.batcher.doubt(&guarded.name, claim_id, code, "the upstream's answer is not known").await;
        let problem = match status.as_deref() {
            Ok("failed_retryable") => runs_again(problem),
            _ => problem,
        };
        let answer = match status.as_deref() {
            Ok("succeeded") | Err(Error::LeaseLost) => self.observe(&guarded, &leader).await,
            Ok("uncertain") if guarded.route.scope_policy.http_probe().is_some() && self.probe(&guarded).await => {
                match self.observe(&guarded, &leader).await {
                    // The provider does not know it: it may run again, and this attempt's answer stands.
                    Err(Problem::LeaseLost) => passed.ok_or(runs_again(problem.clone())),
                    answer => answer,
                }
            }
            Ok("failed_retryable" | "failed_final") => passed.ok_or(problem.clone()),
            Ok(_) => Err(problem.clone()),
            Err(error) => {
                tracing::warn!(%error, "the doubt could not be recorded; the lease will end");
                Err(problem.clone())
            }
        };
        leader.end(guarded.name.fingerprint, problem);
        reply.send(answer);
    }

    /// The same where the client has got the head already.
    async fn give_up(&self, flight: Flight, code: &str) {
        let problem = Problem::UpstreamUncertain { upstream_status: None };
        self.doubt(flight, Reply::nobody(), code, problem, None).await;
    }

    /// No byte left this process: the claim is given back as if it had never been made.
    pub(crate) async fn give_back(&self, flight: Flight, reply: Reply, problem: Problem) {
        let Flight { guarded, leader, claim_id, kept } = flight;
        drop(kept);
        if let Err(error) = self.batcher.release(&guarded.name, claim_id).await {
            tracing::warn!(%error, "a claim could not be given back; its lease will end");
        }
        leader.end(guarded.name.fingerprint, problem.clone());
        reply.send(Err(problem));
    }

    /// The lease is over: whoever has the intent now decides.
    pub(crate) async fn lost(&self, flight: Flight, reply: Reply) {
        let answer = self.observe(&flight.guarded, &flight.leader).await;
        reply.send(answer);
    }

    /// What the row says to somebody who does not own it.
    async fn observe(&self, guarded: &Guarded, leader: &Leader) -> Result<Response<Body>, Problem> {
        match self.batcher.peek(&guarded.name).await {
            Ok(Some(observed)) if matches!(observed.claim, Claim::InProgress { .. }) => {
                leader.at(Stage::Dissolved);
                Err(Problem::LeaseLost)
            }
            Ok(Some(observed)) => self.settled(guarded, leader, observed).map_err(though_sent),
            Ok(None) => Err(Problem::LeaseLost),
            Err(error) => Err(though_sent(of_database(error))),
        }
    }
}

/// The upstream may have got the request: whatever else is wrong, nobody can say that nothing was done.
fn though_sent(problem: Problem) -> Problem {
    match problem.effect() {
        Effect::NotDone => Problem::InDoubt,
        Effect::Done | Effect::Unknown => problem,
    }
}

/// Nothing is held: the same request with the same key is run again.
fn runs_again(problem: Problem) -> Problem {
    match problem {
        Problem::UpstreamUncertain { upstream_status } => Problem::UpstreamFailed { upstream_status },
        problem => problem,
    }
}

/// What the database keeps of an answer: nobody is told more by a cache.
fn as_stored(answer: Answer, response: KeptResponse) -> Answer {
    match response {
        KeptResponse::Full => answer,
        KeptResponse::Reference | KeptResponse::Status => Answer { code: answer.code, ..Answer::default() },
        KeptResponse::Error => Answer::default(),
    }
}

/// How the outcome came into the row.
enum Stored {
    /// By us, just now: the client gets the response that came.
    Now(Option<Duration>),
    /// By somebody else, before: the client gets what is stored.
    Before(Response<Body>),
}

/// Reads a body up to a size, and for some time.
async fn gather(body: &mut Arriving, bytes_max: usize, patience: Option<Duration>) -> Gathered {
    let mut gathered = Bytes::new();
    let deadline = patience.map(|patience| tokio::time::Instant::now() + patience);
    loop {
        let frame = match deadline {
            // Something is there: no need to hold it back any longer.
            Some(deadline) if !gathered.is_empty() => match tokio::time::timeout_at(deadline, body.frame()).await {
                Ok(frame) => frame,
                Err(_) => return Gathered::Part(gathered),
            },
            _ => body.frame().await,
        };
        match frame {
            None => return Gathered::Whole(gathered),
            Some(Err(error)) => return Gathered::Lost(error.into()),
            Some(Ok(frame)) => {
                let Ok(data) = frame.into_data() else { continue };
                if gathered.is_empty() {
                    gathered = data;
                } else {
                    let mut joined = BytesMut::with_capacity(gathered.len() + data.len());
                    joined.extend_from_slice(&gathered);
                    joined.extend_from_slice(&data);
                    gathered = joined.freeze();
                }
                if gathered.len() > bytes_max {
                    return Gathered::Part(gathered);
                }
            }
        }
    }
}
