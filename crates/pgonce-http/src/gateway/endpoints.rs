//! The gateway's own endpoints, under `/_pgonce/`.

use std::sync::Arc;

use bytes::Bytes;
use http::header::{self, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use hyper::body::Incoming;
use pgonce::{Claim, Fingerprint, IntentName, Observed};

use super::body::Body;
use super::guard::of_database;
use super::probe::encoded;
use super::upstream::Peer;
use super::{Gateway, Live, Named};
use crate::problem::{Problem, SLUGS};

/// Everything under it is the gateway's own; nothing of it reaches the upstream.
pub(crate) const PREFIX: &str = "/_pgonce/";
const PROBLEMS: &str = "problems";

impl Gateway {
    /// Answers one of them.
    pub(crate) async fn own_endpoint(
        &self,
        live: &Arc<Live>,
        request: Request<Incoming>,
        peer: &Peer,
    ) -> Result<Response<Body>, Problem> {
        let path = request.uri().path().strip_prefix(PREFIX).unwrap_or_default();
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            let mut refused = text(StatusCode::METHOD_NOT_ALLOWED, "only GET\n");
            refused.headers_mut().insert(header::ALLOW, HeaderValue::from_static("GET, HEAD"));
            return Ok(refused);
        }
        match path {
            "health" => Ok(text(StatusCode::OK, "alive\n")),
            "ready" => Ok(if self.batcher.is_ready().await {
                text(StatusCode::OK, "ready\n")
            } else {
                text(StatusCode::SERVICE_UNAVAILABLE, "the database does not answer: guarded requests are refused\n")
            }),
            "metrics" => Ok(self.metrics_page(live)),
            _ => match path.split_once('/') {
                Some(("status", rest)) => {
                    let rest = rest.to_owned();
                    self.status(live, &rest, request, peer).await
                }
                Some((PROBLEMS, slug)) => Ok(problem_page(slug)),
                _ => Ok(text(StatusCode::NOT_FOUND, "no such endpoint\n")),
            },
        }
    }

    fn metrics_page(&self, live: &Live) -> Response<Body> {
        let (counts, tenants) = self.admission.usage();
        metrics::gauge!("pgonce_gateway_flights").set(self.flights.count() as f64);
        metrics::gauge!("pgonce_gateway_inflight").set(counts.running as f64);
        metrics::gauge!("pgonce_gateway_waiters").set(counts.waiting as f64);
        metrics::gauge!("pgonce_gateway_tenants").set(tenants as f64);
        metrics::gauge!("pgonce_gateway_upstream_away").set(if live.upstream.breaker.is_open() { 1.0 } else { 0.0 });
        metrics::gauge!("pgonce_gateway_scopes_replaced").set(self.rules.replaced() as f64);
        let mut page = text(StatusCode::OK, "");
        let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
        page.headers_mut().insert(header::CONTENT_TYPE, kind);
        *page.body_mut() = Body::from(Bytes::from(self.metrics.render()));
        page
    }

    /// How an intent is doing: told to whoever has its key, its tenant's credentials and its fingerprint.
    async fn status(
        &self,
        live: &Arc<Live>,
        rest: &str,
        mut request: Request<Incoming>,
        peer: &Peer,
    ) -> Result<Response<Body>, Problem> {
        let unknown = || Ok(text(StatusCode::NOT_FOUND, "no such status\n"));
        let Some((route, fingerprint)) = rest.split_once('/') else { return unknown() };
        let (Some(route), Some(fingerprint)) =
            (live.config.routes.iter().find(|known| encoded(&known.policy.scope) == route), unhex(fingerprint))
        else {
            return unknown();
        };
        let named = live.names(&mut request, &route.policy, peer).await?;
        if let Some(regions) = &live.regions
            && let Some(home) = regions.away(&named, &route.policy.scope)?
        {
            return home.forward(request, peer, route.times).await;
        }
        let Named { tenant, key, .. } = named;
        let name = IntentName { tenant, scope: route.policy.scope.clone(), key, fingerprint };
        let observed = self.batcher.peek(&name).await.map_err(of_database)?;
        let (status, code) = match observed {
            Some(Observed { claim: Claim::InProgress { .. }, .. }) => ("processing", None),
            Some(Observed { claim: Claim::Replay(answer), .. }) => ("succeeded", answer.code),
            Some(Observed { claim: Claim::FailedBefore { answer, .. }, .. }) => ("failed_final", answer.code),
            Some(Observed { claim: Claim::Uncertain, .. }) => ("uncertain", None),
            Some(Observed { claim: Claim::ResultExpired, .. }) => ("result_expired", None),
            // Nobody is at it, and it has no outcome: repeating the request runs it.
            _ => ("claimable", None),
        };
        let mut response = json(&serde_json::json!({ "status": status, "response_status": code }));
        let headers = response.headers_mut();
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if status == "processing" {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        Ok(response)
    }
}

/// Where an intent's status is told. The key is not in it: logs keep URLs.
pub(crate) fn status_path(name: &IntentName) -> String {
    let fingerprint: String = name.fingerprint.0.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{PREFIX}status/{}/{fingerprint}", encoded(&name.scope))
}

/// What a problem carries in `Link`.
pub(crate) fn help_link(problem: &Problem) -> String {
    format!("<{PREFIX}{PROBLEMS}/{}>; rel=\"help\"", problem.slug())
}

/// What there is to say about a kind of problem; without a slug, which kinds there are.
fn problem_page(slug: &str) -> Response<Body> {
    match (slug, Problem::help(slug)) {
        ("", _) => json(&serde_json::json!({ "problems": SLUGS })),
        (_, Some(help)) => json(&help),
        _ => text(StatusCode::NOT_FOUND, "no such problem\n"),
    }
}

fn unhex(text: &str) -> Option<Fingerprint> {
    if text.len() != 64 || !text.is_ascii() {
        return None;
    }
    let mut bytes = [0; 32];
    for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    }
    Some(Fingerprint(bytes))
}

fn json(value: &serde_json::Value) -> Response<Body> {
    let mut response = text(StatusCode::OK, "");
    *response.body_mut() = Body::from(Bytes::from(format!("{value:#}\n")));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

fn text(status: StatusCode, text: &'static str) -> Response<Body> {
    let mut response = Response::new(Body::from(Bytes::from_static(text.as_bytes())));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    response
}
