//! One guarded request, from its key to its answer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use http::header::{self, HeaderValue};
use http::{Request, Response, StatusCode};
use http_body::Body as _;
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use pgonce::{Claim, Error, IntentName, Observed, Owned};
use tokio::sync::oneshot;
use tracing::Instrument as _;
use uuid::Uuid;

use super::admission::{Permit, Waiting};
use super::body::{Arriving, Body, discard};
use super::config::Route;
use super::flights::{Follower, Leader, Seat, Stage};
use super::headers::{CLAIM, KEY, SCOPE, TENANT, strip_hop_by_hop};
use super::homes::Home;
use super::upstream::{Lost, Peer};
use super::{Gateway, Live, Named};
use crate::cache::Replay;
use crate::fingerprint::request_fingerprint;
use crate::policy::{InProgress, Policy, Requirement};
use crate::problem::Problem;
use crate::stored::StoredResponse;

/// What a duplicate of a request that runs in this process is told to wait: its end is not known.
const COME_AGAIN: Duration = Duration::from_secs(1);
/// How often another process's claim is asked about, at first and at most.
const WATCH_EVERY: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(250));

/// A guarded request, whole.
pub(crate) struct Guarded {
    pub(crate) live: Arc<Live>,
    pub(crate) route: Arc<Route>,
    pub(crate) name: IntentName,
    pub(crate) head: http::request::Parts,
    pub(crate) body: Bytes,
    pub(crate) peer: Arc<Peer>,
    /// Its place among the requests that are let in, until it is answered and stored.
    place: Place,
}

/// Counted among those that run, or among those that wait.
pub(crate) enum Place {
    Running(Permit),
    Waiting(Waiting),
    /// Between the two, or refused one.
    Nowhere,
}

impl Place {
    fn wait(&mut self) -> Result<(), Problem> {
        *self = match std::mem::replace(self, Self::Nowhere) {
            Self::Running(permit) => Self::Waiting(permit.wait()?),
            other => other,
        };
        Ok(())
    }

    fn resume(&mut self) -> Result<(), Problem> {
        *self = match std::mem::replace(self, Self::Nowhere) {
            Self::Waiting(waiting) => Self::Running(waiting.resume()?),
            other => other,
        };
        Ok(())
    }
}

/// Where the answer goes. The request's own future may be gone: the work goes on all the same.
pub(crate) struct Reply(Option<oneshot::Sender<Result<Response<Body>, Problem>>>);

impl Reply {
    /// Where nobody is told any more.
    pub(crate) fn nobody() -> Self {
        Self(None)
    }

    pub(crate) fn send(self, answer: Result<Response<Body>, Problem>) {
        if let Some(waiting) = self.0 {
            let _ = waiting.send(answer);
        }
    }
}

impl Gateway {
    /// Answers a request on a guarded route: tenant, key, whole body, fingerprint, and only then a claim.
    pub(crate) async fn guard(
        self: &Arc<Self>,
        live: Arc<Live>,
        route: Arc<Route>,
        mut request: Request<Incoming>,
        peer: Arc<Peer>,
    ) -> Result<Response<Body>, Problem> {
        let policy = &route.policy;
        if !request.headers().contains_key(&policy.header) && policy.requirement == Requirement::Optional {
            return live.upstream.pass(request, &peer, route.times).await;
        }
        let (named, permit, home) = match self.enter(&live, policy, &mut request, &peer).await {
            Ok(entered) => entered,
            Err(problem) => {
                let (head, body) = request.into_parts();
                discard(&head.headers, Arriving::new(body, head.version));
                return Err(problem);
            }
        };
        if let Some(home) = home {
            return home.forward(request, &peer, route.times).await;
        }
        let peer = match named.forwarded {
            // The gateway that forwarded it knows whose it is.
            true => Arc::new(Peer { trusted: true, ..(*peer).clone() }),
            false => peer,
        };
        let Named { tenant, key, .. } = named;
        let (head, body) = request.into_parts();
        let mut body = Arriving::new(body, head.version);
        let body = match whole_body(&mut body, policy).await {
            Ok(whole) => whole,
            Err(problem) => {
                if matches!(problem, Problem::BodyTooLarge { .. }) {
                    discard(&head.headers, body);
                }
                return Err(problem);
            }
        };
        let fingerprint = request_fingerprint(&policy.fingerprint, &head.method, &head.uri, &head.headers, &body);
        let name = IntentName { tenant, scope: policy.scope.clone(), key, fingerprint };
        let guarded =
            Guarded { live, route: Arc::clone(&route), name, head, body, peer, place: Place::Running(permit) };
        let span = tracing::info_span!(
            "pgonce.gateway",
            scope = %guarded.name.scope,
            tenant = %guarded.name.tenant,
            key_hash = %pgonce::key_hash(&guarded.name.key),
            deduplication_decision = tracing::field::Empty,
        );
        self.answer(guarded).instrument(span).await
    }

    /// Whose request it is, its place among those that run, and its home, if that is elsewhere.
    async fn enter<'a>(
        &self,
        live: &'a Live,
        policy: &Policy,
        request: &mut Request<Incoming>,
        peer: &Peer,
    ) -> Result<(Named, Permit, Option<Home<'a>>), Problem> {
        let named = live.names(request, policy, peer).await?;
        let permit = self.admission.admit(&named.tenant)?;
        let home = match &live.regions {
            Some(regions) => regions.away(&named, &policy.scope)?,
            None => None,
        };
        Ok((named, permit, home))
    }

    /// From the cache, from the flight that the request joins, or by leading one.
    async fn answer(self: &Arc<Self>, mut guarded: Guarded) -> Result<Response<Body>, Problem> {
        let deadline = Instant::now() + guarded.policy().wait_max;
        loop {
            let IntentName { tenant, scope, key, .. } = &guarded.name;
            if let Some(replay) = guarded.live.caches.get(tenant, scope, key).await {
                guarded.decided("cache_hit");
                return guarded.replayed(&replay);
            }
            match self.flights.enter((tenant.clone(), scope.clone(), key.clone())) {
                Seat::Leader(leader) => {
                    guarded.place.resume()?;
                    // Only now: what a cache or a running request answers costs the database nothing.
                    self.admission.shed(tenant, self.batcher.queue_wait())?;
                    let (sender, answered) = oneshot::channel();
                    let gateway = Arc::clone(self);
                    // Of its own: a client that goes away does not take its effect's outcome with it.
                    let leading = async move { gateway.lead(guarded, leader, Reply(Some(sender)), deadline).await };
                    self.tasks.spawn(leading.in_current_span());
                    return answered.await.unwrap_or(Err(Problem::Internal));
                }
                Seat::Follower(follower) => {
                    if let Some(answer) = self.follow(&mut guarded, follower, deadline).await? {
                        return Ok(answer);
                    }
                }
            }
        }
    }

    /// Sees the leader's flight to its end, as far as policy lets it. None: ask for yourself.
    async fn follow(
        &self,
        guarded: &mut Guarded,
        mut follower: Follower,
        deadline: Instant,
    ) -> Result<Option<Response<Body>>, Problem> {
        let mut waiting = None;
        loop {
            let stage = follower.stages.borrow_and_update().clone();
            match stage {
                Stage::Asking => {}
                Stage::Running(theirs) if theirs != guarded.name.fingerprint => return Err(Problem::Conflict),
                Stage::Elsewhere(theirs) if theirs != guarded.name.fingerprint => {
                    // The owner is in another process; only the database knows whose payload is the intent's.
                    return match self.batcher.peek(&guarded.name).await {
                        Err(error) => Err(of_database(error)),
                        Ok(_) => Err(Problem::InProgress { retry_after: COME_AGAIN }),
                    };
                }
                Stage::Running(_) | Stage::Elsewhere(_) => match guarded.policy().in_progress {
                    InProgress::Refuse => return Err(Problem::InProgress { retry_after: COME_AGAIN }),
                    InProgress::Status => return Ok(Some(guarded.status_url())),
                    InProgress::Wait if waiting.is_none() => {
                        let too_many = Problem::InProgress { retry_after: COME_AGAIN };
                        waiting = Some(follower.wait(guarded.policy().waiters_max).ok_or(too_many)?);
                        guarded.place.wait()?;
                    }
                    InProgress::Wait => {}
                },
                Stage::Settled(replay) => {
                    guarded.decided("followed");
                    return guarded.replayed(&replay).map(Some);
                }
                Stage::Ended(theirs, problem) if theirs == guarded.name.fingerprint => return Err(problem),
                Stage::Ended(..) | Stage::Dissolved => return Ok(None),
            }
            match tokio::time::timeout_at(deadline.into(), follower.stages.changed()).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) => return Ok(None),
                Err(_) => return Err(Problem::InProgress { retry_after: COME_AGAIN }),
            }
        }
    }

    /// Claims, and does what the claim says.
    async fn lead(self: Arc<Self>, guarded: Guarded, leader: Leader, reply: Reply, deadline: Instant) {
        match self.claim(&guarded, &leader, deadline).await {
            Ok(Claimed::Owned(owned, asked)) => {
                guarded.decided("new_execution");
                self.run(guarded, leader, reply, owned, asked).await;
            }
            Ok(Claimed::Answer(answer)) => {
                guarded.decided("db_hit");
                reply.send(answer);
            }
            Err(problem) => {
                leader.at(match problem {
                    // The intent is of another payload, which others may have sent.
                    Problem::Conflict => Stage::Dissolved,
                    _ => Stage::Ended(guarded.name.fingerprint, problem.clone()),
                });
                reply.send(Err(problem));
            }
        }
    }

    /// Asks until the intent is ours, settled, or somebody else's for longer than we may wait.
    async fn claim(&self, guarded: &Guarded, leader: &Leader, deadline: Instant) -> Result<Claimed, Problem> {
        let name = &guarded.name;
        let mut probed = false;
        loop {
            let observed = self.batcher.claim(name, Uuid::new_v4()).await.map_err(of_database)?;
            match observed.claim {
                Claim::Owned(owned) => return Ok(Claimed::Owned(owned, observed.asked_at)),
                Claim::InProgress { retry_after } => {
                    leader.at(Stage::Elsewhere(name.fingerprint));
                    match guarded.policy().in_progress {
                        InProgress::Refuse => return Err(Problem::InProgress { retry_after }),
                        InProgress::Status => return Ok(Claimed::Answer(Ok(guarded.status_url()))),
                        InProgress::Wait => {
                            if !self.watch(name, deadline).await? {
                                return Err(Problem::InProgress { retry_after: COME_AGAIN });
                            }
                        }
                    }
                }
                Claim::Uncertain if guarded.route.scope_policy.http_probe().is_some() && !probed => {
                    probed = true;
                    if !self.probe(guarded).await {
                        return Err(Problem::Uncertain);
                    }
                }
                _ => return self.settled(guarded, leader, observed).map(|answer| Claimed::Answer(Ok(answer))),
            }
        }
    }

    /// Whether another process's claim ended before the deadline. One question at a time for all who wait here.
    async fn watch(&self, name: &IntentName, deadline: Instant) -> Result<bool, Problem> {
        let (mut pause, pause_max) = WATCH_EVERY;
        while Instant::now() + pause < deadline {
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(pause_max);
            match self.batcher.peek(name).await.map_err(of_database)? {
                Some(Observed { claim: Claim::InProgress { .. }, .. }) => {}
                _ => return Ok(true),
            }
        }
        Ok(false)
    }

    /// The answer of an intent that is settled, told to all who follow.
    pub(crate) fn settled(
        &self,
        guarded: &Guarded,
        leader: &Leader,
        observed: Observed,
    ) -> Result<Response<Body>, Problem> {
        let answer = match observed.claim {
            Claim::Replay(answer) => answer,
            // A failure that was stored with its response is replayed like any other outcome.
            Claim::FailedBefore { answer, .. } if answer.code.is_some() => answer,
            Claim::FailedBefore { code, .. } => return Err(Problem::FailedBefore { code }),
            Claim::Uncertain => return Err(Problem::Uncertain),
            Claim::ResultExpired => return Err(Problem::ResultExpired),
            Claim::InProgress { retry_after } => return Err(Problem::InProgress { retry_after }),
            _ => return Err(Problem::Internal),
        };
        let replay = self.share(guarded, leader, answer, observed.expires_in, observed.asked_at);
        guarded.replayed(&replay)
    }

    /// Puts an outcome that PostgreSQL has into the caches, and tells the followers.
    pub(crate) fn share(
        &self,
        guarded: &Guarded,
        leader: &Leader,
        answer: pgonce::Answer,
        fresh_for: Option<Duration>,
        asked_at: Instant,
    ) -> Arc<Replay> {
        let IntentName { tenant, scope, key, fingerprint } = &guarded.name;
        let replay = Arc::new(Replay::new(*fingerprint, answer, fresh_for, asked_at));
        guarded.live.caches.put(tenant, scope, key, Arc::clone(&replay));
        leader.at(Stage::Settled(Arc::clone(&replay)));
        replay
    }

    /// The claim is ours: forwards the request, and makes of what comes back what policy says.
    async fn run(&self, guarded: Guarded, leader: Leader, reply: Reply, owned: Owned, asked: Instant) {
        leader.at(Stage::Running(guarded.name.fingerprint));
        let claim_id = owned.claim_id;
        let lease = owned.lease.unwrap_or(guarded.route.scope_policy.lease);
        let kept = self.batcher.keep(&guarded.name, claim_id, lease, asked);
        fail::fail_point!("gateway::after_claim");
        let flight = super::record::Flight { guarded, leader, claim_id, kept };
        let request = match flight.guarded.upstream_request(claim_id) {
            Ok(request) => request,
            Err(problem) => return self.give_back(flight, reply, problem).await,
        };
        let answered = tokio::select! {
            biased;
            () = flight.kept.lost() => return self.lost(flight, reply).await,
            answered = flight.guarded.live.upstream.send(request) => answered,
        };
        fail::fail_point!("gateway::after_forward");
        match answered {
            Ok(response) => {
                let times = flight.guarded.route.times;
                self.take(flight, reply, response.map(|body| body.within(times))).await;
            }
            Err(Lost::NotSent) => self.give_back(flight, reply, Problem::UpstreamAway).await,
            Err(lost) => self.doubt(flight, reply, lost.code(), lost.problem(), None).await,
        }
    }
}

/// What became of asking.
enum Claimed {
    Owned(Owned, Instant),
    Answer(Result<Response<Body>, Problem>),
}

impl Guarded {
    /// Who answered it, for whoever watches.
    fn decided(&self, decision: &'static str) {
        tracing::Span::current().record("deduplication_decision", decision);
        let scope = self.name.scope.clone();
        metrics::counter!("pgonce_gateway_answers_total", "scope" => scope, "decision" => decision).increment(1);
    }

    pub(crate) fn policy(&self) -> &Policy {
        &self.route.policy
    }

    /// A settled intent's answer, for a request that names it: never for another payload.
    pub(crate) fn replayed(&self, replay: &Replay) -> Result<Response<Body>, Problem> {
        if replay.fingerprint != self.name.fingerprint {
            metrics::counter!("pgonce_conflicts_total", "scope" => self.name.scope.clone()).increment(1);
            return Err(Problem::Conflict);
        }
        self.open(replay, true)
    }

    /// A stored answer as the response that it was.
    pub(crate) fn open(&self, replay: &Replay, replayed: bool) -> Result<Response<Body>, Problem> {
        let stored = self.live.open(&self.name, &replay.answer)?;
        if stored.not_stored {
            return Err(Problem::ResponseNotStored { code: Some(stored.status.as_u16()) });
        }
        let mut response = stored.into_http(replayed).map(Body::from);
        publish_expiry(&mut response, replay.fresh_for());
        Ok(response)
    }

    /// What goes to the upstream: the request as it came, and under which claim it runs.
    fn upstream_request(&self, claim_id: Uuid) -> Result<Request<Body>, Problem> {
        let mut request = Request::from_parts(self.head.clone(), Body::from(self.body.clone()));
        self.live.upstream.address(&mut request, &self.peer)?;
        let headers = request.headers_mut();
        let value = |text: &str| {
            HeaderValue::from_bytes(text.as_bytes())
                .map_err(|_| Problem::Malformed("the tenant's name does not fit into a header".into()))
        };
        headers.insert(CLAIM, value(&claim_id.to_string())?);
        headers.insert(KEY, value(&self.name.key)?);
        headers.insert(SCOPE, value(&self.name.scope)?);
        headers.insert(TENANT, value(&self.name.tenant)?);
        // What was chunked is whole now, and what came behind it is not part of the request that is guarded.
        headers.remove(header::TRAILER);
        headers.insert(header::CONTENT_LENGTH, HeaderValue::from(self.body.len()));
        Ok(request)
    }

    /// 202: where to ask how it goes. Whoever asks needs the same key and the same tenant.
    fn status_url(&self) -> Response<Body> {
        let location = super::endpoints::status_path(&self.name);
        let body = serde_json::json!({
            "status": "processing",
            "status_url": location,
            "detail": "The same request is being processed. Ask the status URL with the same Idempotency-Key, or repeat the request later.",
        });
        let mut response = Response::new(Body::from(Bytes::from(body.to_string())));
        *response.status_mut() = StatusCode::ACCEPTED;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        if let Ok(location) = HeaderValue::from_str(&location) {
            headers.insert(header::LOCATION, location);
        }
        response
    }

    /// What is kept of a response, as it goes into the row.
    pub(crate) fn to_store(
        &self,
        head: &http::response::Parts,
        body: Option<Bytes>,
    ) -> Result<pgonce::Answer, Problem> {
        let mut headers = head.headers.clone();
        strip_hop_by_hop(&mut headers);
        let stored = StoredResponse {
            status: head.status,
            headers: crate::stored::kept_headers(&headers, &self.policy().keep_headers),
            not_stored: body.is_none(),
            body: body.unwrap_or_default(),
        };
        self.live.seal(&self.name, stored)
    }
}

/// When the outcome is forgotten, by the database's count.
pub(crate) fn publish_expiry(response: &mut Response<Body>, fresh_for: Option<Duration>) {
    if let Some(at) = fresh_for.and_then(|left| std::time::SystemTime::now().checked_add(left))
        && let Ok(value) = HeaderValue::from_str(&httpdate::fmt_http_date(at))
    {
        response.headers_mut().insert("idempotency-expires", value);
    }
}

/// The whole body, or why it is not to be had. Nothing has been claimed so far.
async fn whole_body(body: &mut Arriving, policy: &Policy) -> Result<Bytes, Problem> {
    let limit = policy.body_bytes_max;
    let too_large = || Problem::BodyTooLarge { limit };
    if body.size_hint().lower() > limit as u64 {
        return Err(too_large());
    }
    let collected = tokio::time::timeout(policy.body_timeout, async {
        let mut first = Bytes::new();
        let mut rest = BytesMut::new();
        while let Some(frame) = body.frame().await {
            let Ok(data) = frame.map_err(|_| Problem::BodyIncomplete)?.into_data() else { continue };
            if first.len() + rest.len() + data.len() > limit {
                return Err(too_large());
            }
            if first.is_empty() {
                first = data;
            } else {
                rest.extend_from_slice(&data);
            }
        }
        Ok(if rest.is_empty() {
            first
        } else {
            let mut whole = BytesMut::with_capacity(first.len() + rest.len());
            whole.extend_from_slice(&first);
            whole.extend_from_slice(&rest);
            whole.freeze()
        })
    });
    collected.await.unwrap_or(Err(Problem::BodyTimeout))
}

/// What the database's refusal means to a client that has sent a request.
pub(crate) fn of_database(error: Error) -> Problem {
    let problem = Problem::of_error(&error);
    if matches!(problem, Problem::DatabaseAway | Problem::InDoubt | Problem::Internal) {
        tracing::warn!(%error, problem = problem.slug(), "the database did not do what was asked");
    }
    problem
}
