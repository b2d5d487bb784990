//! The section `[gateway]` of `pgonce.toml`, and the command line over it.
//!
//! [`ConfigSource::load`] reads, checks and answers a [`GatewayConfig`] that is complete: every default is filled
//! in, every secret read. A mistake is told with its line and its reason, and never with the line's text.
//! `docs/reference/config.md` has every key.

mod build;
mod file;
mod path;
mod probe;
mod values;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderName, Method, Uri};
use serde::Deserialize;
use serde_json::{Value, json};

pub use path::{OWN_SEGMENT, PathPattern};
pub use probe::{Probe, UrlTemplate};
pub use values::{Keep, RedisUrl, Secret};

use crate::cache::CacheSettings;
use crate::policy::{InProgress, Policy, Requirement};
use crate::seal::Keyring;
use crate::tenant::TenantSource;

/// Where the configuration comes from; kept, so that SIGHUP reads the same again.
#[derive(Debug, Clone, Default)]
pub struct ConfigSource {
    /// The file, if there is one.
    pub path: Option<PathBuf>,
    /// What the command line says.
    pub overrides: Overrides,
}

impl ConfigSource {
    /// Reads and checks everything. What is wrong changes nothing: a caller that has a configuration keeps it.
    pub fn load(&self) -> Result<GatewayConfig, ConfigError> {
        let Some(path) = &self.path else { return build::from_text("", &self.overrides) };
        let told = |error: ConfigError| ConfigError { path: Some(path.clone()), ..error };
        let unreadable = |error: std::io::Error| told(ConfigError::new(format!("cannot be read: {error}")));
        let text = std::fs::read_to_string(path).map_err(unreadable)?;
        build::from_text(&text, &self.overrides).map_err(told)
    }
}

/// What the command line says; it wins over the file, on every route.
#[derive(Debug, Clone, Default)]
pub struct Overrides {
    /// `--listen`
    pub listen: Option<SocketAddr>,
    /// `--upstream`; see [`upstream_url`].
    pub upstream: Option<Uri>,
    /// `--require-key`
    pub require_key: bool,
    /// `--strict-keys`
    pub strict_keys: bool,
    /// `--tenant-header`
    pub tenant_header: Option<HeaderName>,
    /// `--scope`: of routes that name none.
    pub scope: Option<String>,
    /// `--stale`
    pub stale: Option<Stale>,
    /// `--lease`
    pub lease: Option<Duration>,
    /// `--in-progress`
    pub in_progress: Option<InProgress>,
    /// `--cache`
    pub cache: Option<RedisUrl>,
    /// `--max-body`
    pub body_bytes_max: Option<usize>,
}

/// A duration as people write it: `500ms`, `30s`, `5m`, `24h`, `30d`.
pub fn duration(text: &str) -> Result<Duration, String> {
    values::read(text)
}

/// `--lease`: a duration that the database takes as a lease.
pub fn lease(text: &str) -> Result<Duration, String> {
    duration(text).and_then(|lease| if build::is_lease(lease) { Ok(lease) } else { Err(build::LEASE.into()) })
}

/// `--scope`: the name of a scope.
pub fn scope(text: &str) -> Result<String, String> {
    if build::is_scope(text) { Ok(text.to_owned()) } else { Err(build::SCOPE_NAMES.into()) }
}

/// `--max-body`: a number of bytes, as `1048576` or `1MiB`.
pub fn max_body(text: &str) -> Result<usize, String> {
    let size = values::read::<values::Size>(text)?.0;
    if (1..=build::BODY_BYTES_MAX).contains(&size) { Ok(size) } else { Err("expected 1 byte to 1GiB".into()) }
}

/// `--listen`: `127.0.0.1:8080` or `[::]:8080`.
pub fn listen_address(text: &str) -> Result<SocketAddr, String> {
    values::read(text)
}

/// `--upstream`: `http://host:port` or `https://host`, without a path.
pub fn upstream_url(text: &str) -> Result<Uri, String> {
    values::read::<values::Origin>(text).map(|origin| origin.0)
}

/// `--tenant-header`: the name of a header.
pub fn header_name(text: &str) -> Result<HeaderName, String> {
    values::read(text)
}

/// A mistake in the configuration.
#[derive(Debug, thiserror::Error)]
#[error("{}{}{reason}", .path.as_ref().map_or(String::new(), |path| format!("{}{}", path.display(), if .line.is_some() { ", " } else { ": " })),
    .line.map_or(String::new(), |line| format!("line {line}: ")))]
pub struct ConfigError {
    /// The file.
    pub path: Option<PathBuf>,
    /// The line, where the mistake has one.
    pub line: Option<usize>,
    /// What is wrong; never with the text of the line.
    pub reason: String,
}

impl ConfigError {
    fn new(reason: impl Into<String>) -> Self {
        Self { path: None, line: None, reason: reason.into() }
    }

    /// What the parser says, without the value that it quotes: it may be a password in the wrong place.
    #[must_use]
    pub fn from_toml(text: &str, error: &toml::de::Error) -> Self {
        let line = error.span().map(|span| line_of(text, span.start));
        Self { line, ..Self::new(without_value(error.message().trim())) }
    }
}

fn line_of(text: &str, offset: usize) -> usize {
    text.bytes().take(offset).filter(|byte| *byte == b'\n').count() + 1
}

/// serde writes `invalid type: string "…", expected …` and `unknown variant `…`, expected …`.
fn without_value(message: &str) -> String {
    let quoting =
        ["invalid type: ", "invalid value: ", "unknown variant "].iter().find(|kind| message.starts_with(**kind));
    let told = match (quoting, message.rfind(", expected ")) {
        (Some(kind), Some(expected)) => {
            let found = message[kind.len()..expected].split(['"', '`']).next().unwrap_or_default().trim_end();
            format!(
                "{}{found}{}",
                if found.is_empty() { kind.trim_end_matches([' ', ':']) } else { kind },
                &message[expected..]
            )
        }
        _ => message.to_owned(),
    };
    told.replace('\n', " ")
}

/// Everything the gateway is told, complete and checked.
#[derive(Debug, Clone)]
pub struct GatewayConfig {
    /// Where it listens.
    pub listen: SocketAddr,
    /// The service behind it.
    pub upstream: UpstreamConfig,
    /// In order; the first that matches counts. The last matches everything.
    pub routes: Vec<Arc<Route>>,
    /// Whose request it is.
    pub tenant: TenantSource,
    /// Whether `Forwarded` and `X-Forwarded-*` of a request are kept and extended, because a proxy that is
    /// trusted stands before; else they are replaced.
    pub trust_forwarded: bool,
    /// TLS towards clients; without it plain HTTP.
    pub tls: Option<ServerTls>,
    /// Replay caches.
    pub cache: CacheSettings,
    /// The most of everything.
    pub limits: Limits,
    /// Where keys have their home, if there are several regions.
    pub regions: Option<RegionsConfig>,
    /// Encryption of stored bodies.
    pub seal: Option<Keyring>,
    /// How long running requests may take to end after SIGTERM.
    pub drain_timeout: Duration,
}

impl GatewayConfig {
    /// The route of a request: the first whose path matches. The path is the one of the request line, encoded as
    /// it came. One that can be read in several ways (`..`, `%2F`, `//`, `;`, …) gets the strictest route that
    /// it could mean.
    #[must_use]
    pub fn route(&self, method: &Method, path: &str) -> &Arc<Route> {
        let strictness = |place: usize| {
            let policy = &self.routes[place].policy;
            match policy.requirement {
                Requirement::Required if policy.guards(method) => 2,
                Requirement::Optional if policy.guards(method) => 1,
                _ => 0,
            }
        };
        let place = path::choose(self.routes.iter().map(|route| &route.path), strictness, path);
        // The last one matches everything.
        &self.routes[place.unwrap_or(self.routes.len() - 1)]
    }

    /// What `once.define_scope` is told for each scope, in the order of the routes.
    #[must_use]
    pub fn scope_policies(&self) -> Vec<(String, Value)> {
        let mut policies: Vec<(String, Value)> = Vec::new();
        for route in self.routes.iter().filter(|route| route.policy.requirement != Requirement::Off) {
            if !policies.iter().any(|(scope, _)| *scope == route.policy.scope) {
                policies.push((route.policy.scope.clone(), route.scope_policy.to_json()));
            }
        }
        policies
    }
}

/// The rules for some paths.
#[derive(Debug, Clone)]
pub struct Route {
    /// Which paths.
    pub path: PathPattern,
    /// How their requests are guarded.
    pub policy: Policy,
    /// The rules of their scope, in the database.
    pub scope_policy: ScopePolicy,
    /// How long their responses may take.
    pub times: ResponseTimes,
}

/// How long a response may take from its head on. The head itself has the upstream's `timeout`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResponseTimes {
    /// How long nothing of it may come.
    pub idle_max: Duration,
    /// In all; none: as long as something comes.
    pub total_max: Option<Duration>,
}

impl Default for ResponseTimes {
    fn default() -> Self {
        Self { idle_max: Duration::from_secs(60), total_max: None }
    }
}

/// The rules of a scope, as the database keeps them. The defaults never run anything twice without being told to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScopePolicy {
    /// How long a claim holds without a heartbeat.
    pub lease: Duration,
    /// How long a response is replayed.
    pub retention: Keep,
    /// How long afterwards a key is still known as used.
    pub tombstone: Keep,
    /// What becomes of an intent whose outcome nobody knows.
    pub stale: Stale,
    /// Who knows, for [`Stale::Probe`].
    pub probe: Option<Probe>,
    /// After so many attempts a failure is final.
    pub attempts_max: Option<u32>,
    /// Keys look like this (a regular expression of PostgreSQL).
    pub key_pattern: Option<String>,
    /// How much of a response is kept.
    pub response: KeptResponse,
}

impl Default for ScopePolicy {
    fn default() -> Self {
        Self {
            lease: Duration::from_secs(30),
            retention: Keep::For(Duration::from_secs(24 * 3600)),
            tombstone: Keep::For(Duration::from_secs(7 * 24 * 3600)),
            stale: Stale::Hold,
            probe: None,
            attempts_max: None,
            key_pattern: None,
            response: KeptResponse::Full,
        }
    }
}

impl ScopePolicy {
    /// The probe that the gateway makes itself.
    #[must_use]
    pub fn http_probe(&self) -> Option<&UrlTemplate> {
        match (&self.probe, self.stale) {
            (Some(Probe::Http(template)), Stale::Probe) => Some(template),
            _ => None,
        }
    }

    /// As `once.define_scope` reads it. The database cannot make an HTTP request: for it such a scope holds, and
    /// the gateway asks. A gateway's duplicates do not wait on connections, so the database always refuses them.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let mut policy = json!({
            "mode": "leased",
            "in_progress": "refuse",
            "lease": Keep::For(self.lease).to_sql(),
            "retention": self.retention.to_sql(),
            "tombstone": self.tombstone.to_sql(),
            "stale": self.stale.as_str(),
            "response": self.response.as_str(),
        });
        match &self.probe {
            Some(Probe::Sql(function)) => policy["probe"] = json!(function),
            Some(Probe::Http(_)) if self.stale == Stale::Probe => policy["stale"] = json!(Stale::Hold.as_str()),
            _ => {}
        }
        if let Some(attempts_max) = self.attempts_max {
            policy["attempts_max"] = json!(attempts_max);
        }
        if let Some(key_pattern) = &self.key_pattern {
            policy["key_pattern"] = json!(key_pattern);
        }
        policy
    }
}

/// What becomes of an intent whose outcome nobody knows: its gateway died, or its upstream did not answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stale {
    /// The next request runs it again.
    Rerun,
    /// Somebody is asked who knows.
    Probe,
    /// It is uncertain until an operator settles it.
    Hold,
}

impl Stale {
    /// As the file and the database write it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Rerun => "rerun",
            Self::Probe => "probe",
            Self::Hold => "hold",
        }
    }
}

/// How much of a response is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KeptResponse {
    /// Status, headers and body.
    Full,
    /// Status, and what the upstream named as its result.
    Reference,
    /// The status.
    Status,
    /// Nothing of a success.
    Error,
}

impl KeptResponse {
    fn as_str(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Reference => "reference",
            Self::Status => "status",
            Self::Error => "error",
        }
    }
}

/// The service behind the gateway.
#[derive(Debug, Clone)]
pub struct UpstreamConfig {
    /// Scheme, host and port.
    pub url: Uri,
    /// How long connecting may take; nothing was sent when it is over.
    pub connect_timeout: Duration,
    /// How long it may take until the whole head of the response is there.
    pub timeout: Duration,
    /// Idle connections that are kept.
    pub idle_max: usize,
    /// How long an idle connection is kept.
    pub idle_timeout: Duration,
    /// HTTP/2: over TLS where the upstream offers it, without TLS by prior knowledge.
    pub http2: bool,
    /// TLS towards it, where its URL is https.
    pub tls: ClientTls,
    /// When to stop asking an upstream that is away.
    pub breaker: BreakerConfig,
}

/// TLS towards another server.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClientTls {
    /// Who may sign its certificate, PEM; without it the system's roots.
    pub ca_file: Option<PathBuf>,
    /// The certificate to show it, and its private key, PEM.
    pub identity: Option<(PathBuf, PathBuf)>,
}

/// When to stop asking an upstream that is away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BreakerConfig {
    /// So many connect failures and time-outs in a row open it.
    pub failures_max: u32,
    /// For so long; then one request tries.
    pub open_for: Duration,
}

/// TLS towards clients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerTls {
    /// The certificate and its chain, PEM.
    pub cert: PathBuf,
    /// Its private key, PEM.
    pub key: PathBuf,
    /// Who signs clients' certificates; then every client needs one.
    pub client_ca: Option<PathBuf>,
}

/// The most of everything.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Bytes of a request's head.
    pub header_bytes_max: usize,
    /// How long a request's head may take to arrive.
    pub header_timeout: Duration,
    /// Connections of clients.
    pub connections_max: usize,
    /// Guarded requests that run.
    pub inflight_max: usize,
    /// Of one tenant.
    pub tenant_inflight_max: usize,
    /// Duplicates that wait, over all keys.
    pub waiters_max: usize,
    /// Of one tenant.
    pub tenant_waiters_max: usize,
    /// Load is shed while the p99 of waiting for a database connection is over this.
    pub shed_wait: Duration,
}

/// Several regions, each with its gateways and its database.
#[derive(Debug, Clone)]
pub struct RegionsConfig {
    /// The name of this one.
    pub own: String,
    /// All of them, this one too.
    pub list: Vec<RegionConfig>,
    /// Shared by all gateways: signs what one forwards to another.
    pub secret: Secret,
    /// TLS towards the others.
    pub tls: ClientTls,
}

/// One region.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegionConfig {
    /// Its name, which decides which keys are at home there.
    pub name: String,
    /// Its gateway.
    pub url: Uri,
}

#[cfg(test)]
mod tests;
