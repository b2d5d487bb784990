//! `pgonce gateway`: a reverse proxy that speaks `Idempotency-Key`, before any service, unchanged.
//!
//! A guarded request is read whole, claimed with a lease, forwarded once, and its response stored under the
//! claim's fence before anybody is told it. The effect is the upstream's own: a gateway that dies in between
//! leaves a lease that runs out, and the scope's policy decides (trap 3). An upstream that takes `Pgonce-Claim`
//! and calls `once.succeed` in its own transaction makes effect and outcome one, and nothing is ever uncertain.

mod admission;
mod body;
mod breaker;
pub mod config;
mod endpoints;
mod flights;
mod guard;
mod headers;
mod homes;
mod probe;
mod record;
mod regions;
mod rules;
mod serve;
mod tls;
mod upstream;

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwap;
use bytes::Bytes;
use http::header::{self, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use hyper::body::Incoming;
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use pgonce::{Answer, BatchSettings, Batcher, IntentName, Settings};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tokio_util::task::TaskTracker;

use self::admission::Admission;
use self::body::Body;
use self::config::{ConfigError, ConfigSource, GatewayConfig};
use self::flights::Flights;
use self::homes::Homes;
use self::rules::Rules;
use self::upstream::{Peer, Upstream};
use crate::cache::Caches;
use crate::key::parse_key;
use crate::policy::Policy;
use crate::problem::{Problem, StatusMap};
use crate::stored::{StoredResponse, sealed_with};

/// Why the gateway does not run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GatewayError {
    /// The configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A secret, a certificate, a key file.
    #[error("{0}")]
    Setup(String),
    /// The database.
    #[error(transparent)]
    Database(#[from] pgonce::Error),
    /// The address to listen on.
    #[error("cannot listen on {address}: {error}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// What the system says.
        error: std::io::Error,
    },
}

/// All that one gateway process is.
#[derive(Debug)]
pub(crate) struct Gateway {
    /// What a reload replaces.
    live: ArcSwap<Live>,
    batcher: Batcher,
    /// What tells its database from others.
    database: String,
    /// The rules that this gateway gave to its scopes, as the database keeps them.
    rules: Rules,
    admission: Admission,
    flights: Flights,
    /// Requests that run under a claim: they go on when their client is gone, and are waited for at the end.
    tasks: TaskTracker,
    metrics: PrometheusHandle,
}

/// A TLS acceptor, which has nothing to show.
#[derive(Clone)]
pub(crate) struct Acceptor(TlsAcceptor);

impl std::fmt::Debug for Acceptor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Acceptor")
    }
}

/// What the configuration made.
#[derive(Debug)]
pub(crate) struct Live {
    config: GatewayConfig,
    caches: Arc<Caches>,
    upstream: Upstream,
    regions: Option<Homes>,
    tls: Option<Acceptor>,
}

/// What a request names.
pub(crate) struct Named {
    tenant: String,
    key: String,
    /// By another of our gateways, which has verified the tenant.
    forwarded: bool,
}

/// Serves until told to stop, and then until what runs has come to its end. `ready` is told the address.
///
/// # Errors
/// Where it cannot start. A reload that fails is logged, and the running configuration stays.
pub async fn run(
    database: Settings,
    source: ConfigSource,
    ready: impl FnOnce(SocketAddr),
    stop: impl Future<Output = ()>,
    mut reload: tokio::sync::mpsc::Receiver<()>,
) -> Result<(), GatewayError> {
    let config = source.load()?;
    let batcher = Batcher::connect(database, BatchSettings::default()).await?;
    let rules = Rules::default();
    rules.define(&batcher, &config).await?;
    let database = batcher.database_id().await?;
    let listener = TcpListener::bind(config.listen)
        .await
        .map_err(|error| GatewayError::Listen { address: config.listen, error })?;
    let address = listener.local_addr().map_err(|error| GatewayError::Listen { address: config.listen, error })?;
    let gateway = Arc::new(Gateway {
        admission: Admission::new(config.limits.clone()),
        live: ArcSwap::from_pointee(Live::build(config, &database, None)?),
        batcher,
        database,
        rules,
        flights: Flights::default(),
        tasks: TaskTracker::new(),
        metrics: recorder(),
    });
    ready(address);
    let reloading = Arc::clone(&gateway);
    let reloads = async move {
        while reload.recv().await.is_some() {
            let result = match reloading.reload(&source).await {
                Ok(()) => {
                    tracing::info!("configuration reloaded");
                    "done"
                }
                Err(error) => {
                    tracing::error!(%error, "not reloaded; the running configuration stays");
                    "refused"
                }
            };
            metrics::counter!("pgonce_gateway_reloads_total", "result" => result).increment(1);
        }
        std::future::pending::<()>().await;
    };
    let watching = Arc::clone(&gateway);
    tokio::select! {
        () = serve::serve(gateway, listener, stop) => Ok(()),
        () = reloads => Ok(()),
        () = watching.rules.watch(&watching.batcher) => Ok(()),
    }
}

/// One recorder a process, whoever starts first.
fn recorder() -> PrometheusHandle {
    static HANDLE: OnceLock<PrometheusHandle> = OnceLock::new();
    HANDLE
        .get_or_init(|| {
            let recorder = PrometheusBuilder::new().build_recorder();
            let handle = recorder.handle();
            if metrics::set_global_recorder(recorder).is_err() {
                tracing::warn!("another metrics recorder is installed: /_pgonce/metrics stays empty");
            }
            handle
        })
        .clone()
}

impl Gateway {
    async fn reload(&self, source: &ConfigSource) -> Result<(), GatewayError> {
        let running = self.live.load_full();
        let live = Live::build(source.load()?, &self.database, Some(&running))?;
        // Everything else that can be wrong has been looked at: from here on it is the new configuration.
        self.rules.define(&self.batcher, &live.config).await?;
        if live.config.listen != running.config.listen {
            tracing::warn!("a new listen address needs a restart");
        }
        self.admission.set_limits(live.config.limits.clone());
        self.live.store(Arc::new(live));
        Ok(())
    }

    /// Answers one request.
    pub(crate) async fn handle(self: Arc<Self>, request: Request<Incoming>, peer: Arc<Peer>) -> Response<Body> {
        let live = self.live.load_full();
        // On the heap: the server moves this future for every request, and what is passed through needs little of it.
        if request.uri().path().starts_with(endpoints::PREFIX) {
            let answered = Box::pin(self.own_endpoint(&live, request, &peer)).await;
            return answered.unwrap_or_else(|problem| live.told(&problem, &StatusMap::default()));
        }
        let route = Arc::clone(live.config.route(request.method(), request.uri().path()));
        let answered = if request.method() == Method::CONNECT {
            Err(Problem::Malformed("CONNECT is for proxies that clients choose".into()))
        } else if route.policy.guards(request.method()) {
            Box::pin(self.guard(Arc::clone(&live), Arc::clone(&route), request, peer)).await
        } else {
            live.upstream.pass(request, &peer, route.times).await
        };
        answered.unwrap_or_else(|problem| live.told(&problem, &route.policy.statuses))
    }
}

impl Live {
    /// A refusal, as it is told and counted.
    fn told(&self, problem: &Problem, statuses: &StatusMap) -> Response<Body> {
        metrics::counter!("pgonce_problems_total", "problem" => problem.slug()).increment(1);
        let mut response = problem.response(statuses, None).map(Body::from);
        if let Ok(link) = HeaderValue::try_from(endpoints::help_link(problem)) {
            response.headers_mut().insert(header::LINK, link);
        }
        // A 401 says what would be accepted (RFC 9110, 15.5.2).
        if let (StatusCode::UNAUTHORIZED, Some(challenge)) = (response.status(), self.config.tenant.challenge()) {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, challenge);
        }
        response
    }

    /// Builds what the configuration describes. Caches stay across a reload that does not change them.
    fn build(config: GatewayConfig, database: &str, running: Option<&Self>) -> Result<Self, GatewayError> {
        let setup = |error: &dyn std::fmt::Display| GatewayError::Setup(error.to_string());
        let caches = match running.filter(|running| running.config.cache == config.cache) {
            Some(running) => Arc::clone(&running.caches),
            None => Arc::new(Caches::new(config.cache.clone(), database).map_err(|error| setup(&error))?),
        };
        let mut upstream = Upstream::new(&config.upstream, config.trust_forwarded).map_err(|error| setup(&error))?;
        if let Some(running) = running.filter(|running| running.config.upstream.url == config.upstream.url) {
            upstream.breaker = running.upstream.breaker.clone(); // it is as far away as it was
            upstream.breaker.set_config(config.upstream.breaker);
        }
        let regions = config.regions.as_ref();
        let regions = regions.map(|regions| Homes::new(regions, &config.upstream, config.trust_forwarded)).transpose();
        let tls = config.tls.as_ref().map(tls::acceptor).transpose().map_err(|error| setup(&error))?;
        Ok(Self { caches, upstream, regions: regions.map_err(|error| setup(&error))?, tls: tls.map(Acceptor), config })
    }

    /// Whose request it is, and its key. The tenant comes first: who is nobody learns nothing about keys.
    pub(crate) async fn names(
        &self,
        request: &mut Request<Incoming>,
        policy: &Policy,
        peer: &Peer,
    ) -> Result<Named, Problem> {
        let headers = request.headers_mut();
        let sent = self.regions.as_ref().and_then(|regions| regions.sent(headers, policy));
        let forwarded = sent.is_some();
        let tenant = match sent {
            Some(tenant) => tenant,
            None => self.config.tenant.tenant(headers, &peer.identity).await?,
        };
        let key = parse_key(headers, &policy.header, policy.syntax).map_err(Problem::KeyMalformed)?;
        Ok(Named { tenant, key: key.ok_or(Problem::KeyMissing)?, forwarded })
    }

    /// A response as it goes into the row: its body sealed, where that is configured.
    pub(crate) fn seal(&self, name: &IntentName, mut stored: StoredResponse) -> Result<Answer, Problem> {
        let Some(keyring) = self.config.seal.as_ref().filter(|_| !stored.not_stored) else {
            return Ok(stored.to_answer(None));
        };
        let sealed = keyring.seal(name, Some(stored.status.as_u16().into()), &stored.body).map_err(|error| {
            tracing::error!(%error, "a response could not be sealed");
            Problem::Internal
        })?;
        stored.body = Bytes::from(sealed.bytes);
        Ok(stored.to_answer(Some(&sealed.key_id)))
    }

    /// A stored answer as the response that it was.
    pub(crate) fn open(&self, name: &IntentName, answer: &Answer) -> Result<StoredResponse, Problem> {
        let code = answer.code.and_then(|code| u16::try_from(code).ok());
        let unreadable = |error: &dyn std::fmt::Display| {
            tracing::error!(%error, scope = %name.scope, key_hash = %pgonce::key_hash(&name.key), "a stored response cannot be read");
            Problem::ResponseNotStored { code }
        };
        match (sealed_with(answer), &self.config.seal) {
            (None, _) => StoredResponse::from_answer(answer).map_err(|error| unreadable(&error)),
            (Some(_), None) => Err(unreadable(&"it is sealed, and no keys are configured")),
            (Some(key_id), Some(keyring)) => {
                let sealed = answer.body.as_deref().unwrap_or_default();
                let body = keyring.open(key_id, name, answer.code, sealed).map_err(|error| unreadable(&error))?;
                StoredResponse::from_opened(answer, Bytes::from(body)).map_err(|error| unreadable(&error))
            }
        }
    }
}
