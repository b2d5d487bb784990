//! The service behind: how requests get there, and what it means when they do not.

use std::net::SocketAddr;
use std::sync::Weak;
use std::time::Duration;

use futures_util::future::Either;
use http::header::{self, HeaderMap, HeaderValue};
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{Request, Response, StatusCode, Uri, Version};
use hyper::body::Incoming;
use hyper_util::client::legacy::{self as client, Client};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::error::Elapsed;

use super::body::{Arriving, Body, CutOff};
use super::breaker::{Attempt, Breaker};
use super::config::{ResponseTimes, UpstreamConfig};
use super::headers::{forwarded, join_cookies, strip_hop_by_hop, strip_ours, takes_trailers, wants_upgrade};
use super::tls;
use crate::problem::Problem;

/// Who is at the other end of a client's connection.
#[derive(Debug, Clone)]
pub(crate) struct Peer {
    pub(crate) address: SocketAddr,
    pub(crate) tls: bool,
    /// Another of our gateways, which has said whose request it is.
    pub(crate) trusted: bool,
    pub(crate) identity: crate::tenant::PeerIdentity,
    /// Its place among the connections that are taken, as long as it is open; an upgraded one keeps it.
    pub(crate) place: Weak<OwnedSemaphorePermit>,
}

/// Why there is no response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lost {
    /// No byte of the request left: the effect is not there.
    NotSent,
    /// No response in time: the effect may be there.
    TimedOut,
    /// The connection broke: the effect may be there.
    Broken,
}

/// One service, reached over a pool of kept connections.
#[derive(Debug)]
pub(crate) struct Upstream {
    client: Client<tls::Connector, Body>,
    scheme: Scheme,
    authority: Authority,
    base: String,
    /// By prior knowledge.
    http2: bool,
    timeout: Duration,
    trust_forwarded: bool,
    pub(crate) breaker: Breaker,
}

impl Upstream {
    pub(crate) fn new(config: &UpstreamConfig, trust_forwarded: bool) -> Result<Self, tls::TlsError> {
        let connector = tls::connector(&config.tls, config.connect_timeout, config.http2)?;
        let parts = config.url.clone().into_parts();
        let scheme = parts.scheme.unwrap_or(Scheme::HTTP);
        // Over TLS both sides choose; without it there is nobody to ask.
        let http2 = config.http2 && scheme == Scheme::HTTP;
        let client = Client::builder(TokioExecutor::new())
            .timer(TokioTimer::new())
            .pool_timer(TokioTimer::new())
            // Shorter than what services keep a silent connection open for: a request must not meet its end.
            .pool_idle_timeout(config.idle_timeout)
            .pool_max_idle_per_host(config.idle_max)
            .http2_only(http2)
            .set_host(false)
            .build(connector);
        Ok(Self {
            client,
            scheme,
            authority: parts.authority.unwrap_or_else(|| Authority::from_static("localhost")),
            base: parts.path_and_query.map(|path| path.path().trim_end_matches('/').to_owned()).unwrap_or_default(),
            http2,
            timeout: config.timeout,
            trust_forwarded,
            breaker: Breaker::new(config.breaker),
        })
    }

    /// The same request, addressed to the upstream, with what belongs to this hop only replaced.
    pub(crate) fn address<B>(&self, request: &mut Request<B>, peer: &Peer) -> Result<(), Problem> {
        let from_http2 = request.version() == Version::HTTP_2;
        let host =
            request.headers().get(header::HOST).cloned().or_else(|| {
                request.uri().authority().and_then(|authority| HeaderValue::from_str(authority.as_str()).ok())
            });
        let path = match request.uri().path_and_query() {
            Some(path) if self.base.is_empty() => path.clone(),
            path => format!("{}{}", self.base, path.map_or("/", PathAndQuery::as_str))
                .parse()
                .map_err(|_| Problem::Malformed("the request's target cannot be forwarded".into()))?,
        };
        let mut parts = http::uri::Parts::default();
        parts.scheme = Some(self.scheme.clone());
        parts.authority = Some(self.authority.clone());
        parts.path_and_query = Some(path);
        *request.uri_mut() = Uri::from_parts(parts)
            .map_err(|_| Problem::Malformed("the request's target cannot be forwarded".into()))?;
        *request.version_mut() = if self.http2 { Version::HTTP_2 } else { Version::HTTP_11 };
        let headers = request.headers_mut();
        strip_hop_by_hop(headers);
        headers.remove(header::EXPECT); // answered here, by reading the body
        strip_ours(headers);
        if from_http2 {
            join_cookies(headers);
        }
        forwarded(headers, peer.address, peer.tls, host.as_ref(), self.trust_forwarded || peer.trusted);
        headers.append(header::VIA, HeaderValue::from_static(if from_http2 { "2 pgonce" } else { "1.1 pgonce" }));
        // A service on the same network is told the name that the client used; one behind TLS answers to its own.
        let own = || HeaderValue::from_str(self.authority.as_str()).ok();
        let told = if self.scheme == Scheme::HTTPS { own() } else { host.or_else(own) };
        match told {
            Some(host) if !self.http2 => headers.insert(header::HOST, host),
            _ => headers.remove(header::HOST),
        };
        Ok(())
    }

    /// Sends a request and waits for the head of its response. The request is not in the future, which is moved about.
    pub(crate) fn send(
        &self,
        request: Request<Body>,
    ) -> impl Future<Output = Result<Response<Arriving>, Lost>> + use<> {
        let attempt = self.breaker.admit().map_err(|_| Lost::NotSent);
        let answered = attempt.map(|attempt| (attempt, self.client.request(request)));
        let timeout = self.timeout;
        async move {
            let (attempt, answered) = answered?;
            Self::answer(attempt, tokio::time::timeout(timeout, answered).await)
        }
    }

    fn answer(
        attempt: Attempt,
        answered: Result<Result<Response<Incoming>, client::Error>, Elapsed>,
    ) -> Result<Response<Arriving>, Lost> {
        match answered {
            Ok(Ok(response)) => {
                attempt.answered();
                Ok(Arriving::of(response))
            }
            Ok(Err(error)) => {
                attempt.failed();
                let lost = if error.is_connect() { Lost::NotSent } else { Lost::Broken };
                tracing::debug!(error = %chain(&error), ?lost, "no response from the upstream");
                Err(lost)
            }
            Err(_) => {
                attempt.failed();
                Err(Lost::TimedOut)
            }
        }
    }

    /// Asks a URL by GET, in the gateway's own name: nothing of a client's goes with it.
    pub(crate) async fn fetch(&self, url: Uri) -> Result<Response<Arriving>, Lost> {
        let host = url.authority().and_then(|authority| HeaderValue::from_str(authority.as_str()).ok());
        let mut request = Request::new(Body::empty());
        *request.uri_mut() = url;
        if let Some(host) = host {
            request.headers_mut().insert(header::HOST, host);
        }
        self.send(request).await
    }

    /// Passes a request that is not guarded, streaming both ways.
    pub(crate) fn pass<'a>(
        &'a self,
        request: Request<Incoming>,
        peer: &'a Peer,
        times: ResponseTimes,
    ) -> impl Future<Output = Result<Response<Body>, Problem>> + use<'a> {
        let mut request = streaming(request);
        let sent = match wants_upgrade(&request) {
            Some(protocol) => Either::Left(Box::pin(self.upgrade(request, protocol, peer))),
            None => {
                let trailers = takes_trailers(request.headers());
                let addressed = self.address(&mut request, peer);
                if trailers {
                    // Ours now: whatever trailers come are passed on. (HTTP/2 has no Connection; hyper takes it out.)
                    request.headers_mut().insert(header::TE, HeaderValue::from_static("trailers"));
                    request.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("te"));
                }
                Either::Right(addressed.map(|()| self.send(request)))
            }
        };
        async move {
            let sent = match sent {
                Either::Left(upgraded) => return upgraded.await,
                Either::Right(sent) => sent?,
            };
            let mut response = sent.await.map_err(Lost::problem)?;
            if response.status() == StatusCode::SWITCHING_PROTOCOLS {
                // Nobody asked for it: what comes next on that connection is no answer to anything.
                return Err(Problem::UpstreamUncertain { upstream_status: Some(101) });
            }
            strip_hop_by_hop(response.headers_mut());
            Ok(response.map(|body| Body::Streaming(body.within(times))))
        }
    }

    /// WebSocket and other upgrades: once both sides have switched, bytes go through as they are.
    async fn upgrade(
        &self,
        mut request: Request<Body>,
        protocol: HeaderValue,
        peer: &Peer,
    ) -> Result<Response<Body>, Problem> {
        let theirs = hyper::upgrade::on(&mut request);
        self.address(&mut request, peer)?;
        ask_upgrade(request.headers_mut(), protocol);
        let mut response = self.send(request).await.map_err(Lost::problem)?;
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            strip_hop_by_hop(response.headers_mut());
            return Ok(response.map(Body::Streaming));
        }
        let agreed = response.headers().get(header::UPGRADE).cloned();
        let ours = hyper::upgrade::on(&mut response);
        let place = peer.place.upgrade();
        tokio::spawn(async move {
            let _place = place;
            match tokio::try_join!(theirs, ours) {
                Ok((client, upstream)) => {
                    let (mut client, mut upstream) = (TokioIo::new(client), TokioIo::new(upstream));
                    // Either side may end it at any time: nothing to say about that.
                    let _ = tokio::io::copy_bidirectional(&mut client, &mut upstream).await;
                }
                Err(error) => tracing::debug!(%error, "the upgrade did not come about"),
            }
        });
        strip_hop_by_hop(response.headers_mut());
        if let Some(agreed) = agreed {
            ask_upgrade(response.headers_mut(), agreed);
        }
        Ok(response.map(|_| Body::empty()))
    }
}

impl From<CutOff> for Lost {
    /// Of a response whose head is there.
    fn from(error: CutOff) -> Self {
        match error {
            CutOff::TimedOut => Self::TimedOut,
            CutOff::Broken(_) | CutOff::Reset => Self::Broken,
        }
    }
}

impl Lost {
    /// What it means for a request that nobody guards.
    pub(crate) fn problem(self) -> Problem {
        match self {
            Self::NotSent => Problem::UpstreamAway,
            Self::TimedOut => Problem::UpstreamTimeout,
            Self::Broken => Problem::UpstreamUncertain { upstream_status: None },
        }
    }

    /// How the row calls it.
    pub(crate) fn code(self) -> &'static str {
        match self {
            Self::NotSent => "upstream_away",
            Self::TimedOut => "upstream_timeout",
            Self::Broken => "upstream_broken",
        }
    }
}

/// A request as it comes, to be sent on.
pub(crate) fn streaming(request: Request<Incoming>) -> Request<Body> {
    let version = request.version();
    request.map(|incoming| Body::Streaming(Arriving::new(incoming, version)))
}

fn ask_upgrade(headers: &mut HeaderMap, protocol: HeaderValue) {
    headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(header::UPGRADE, protocol);
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(": ");
        text.push_str(&error.to_string());
        source = error.source();
    }
    text
}
