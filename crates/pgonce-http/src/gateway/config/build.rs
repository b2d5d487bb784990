//! From what the file says to what the gateway does: defaults, the command line, and what must fit together.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use http::header;
use toml::Spanned;

use super::path::PathPattern;
use super::values::{Count, SecretRef, Size, Text};
use super::{
    BreakerConfig, ClientTls, ConfigError, GatewayConfig, Limits, Overrides, Probe, RegionConfig, RegionsConfig,
    ResponseTimes, Route, ScopePolicy, Secret, ServerTls, Stale, UpstreamConfig, UrlTemplate, file, line_of,
};
use crate::cache::{CacheSettings, RedisSettings};
use crate::policy::{FingerprintParts, KeySyntax, Policy, Requirement};
use crate::seal::{Keyring, SealKey};
use crate::tenant::{BasicUsers, Jwt, JwtKey, JwtSettings, TenantSource};

pub(super) const SCOPE_NAMES: &str = "a scope has 1 to 128 bytes and no control characters";

pub(super) fn is_scope(text: &str) -> bool {
    is_name(text, 128)
}

/// The scope of routes that name none.
const SCOPE: &str = "http";
/// What the database takes is 16 MiB; sealing a body makes it a little larger.
const RESPONSE_BYTES_MAX: usize = 16 * 1024 * 1024 - 1024;
/// A body is held in memory until it is whole.
pub(super) const BODY_BYTES_MAX: usize = 1024 * 1024 * 1024;
/// Shorter ones can be guessed.
const SECRET_BYTES_MIN: usize = 32;

/// What is wrong, and where in the file, if it is there.
struct Fault(Option<Range<usize>>, String);

impl Fault {
    fn at<T>(place: &Spanned<T>, reason: impl Into<String>) -> Self {
        Self(Some(place.span()), reason.into())
    }

    fn anywhere(reason: impl Into<String>) -> Self {
        Self(None, reason.into())
    }
}

/// Reads, checks and completes.
pub(super) fn from_text(text: &str, overrides: &Overrides) -> Result<GatewayConfig, ConfigError> {
    let whole: file::Whole = toml::from_str(text).map_err(|error| ConfigError::from_toml(text, &error))?;
    gateway(whole.gateway, overrides).map_err(|Fault(place, reason)| ConfigError {
        line: place.map(|place| line_of(text, place.start)),
        ..ConfigError::new(reason)
    })
}

fn gateway(file: file::Gateway, overrides: &Overrides) -> Result<GatewayConfig, Fault> {
    let listen = overrides.listen.or(file.listen.map(|listen| listen.0));
    let listen =
        listen.ok_or_else(|| Fault::anywhere("nowhere to listen: give --listen ADDR:PORT, or listen in [gateway]"))?;
    let upstream = upstream(file.upstream, overrides)?;
    let routes = routes(file.route, overrides, &upstream)?;
    let tls = file.tls.map(|tls| ServerTls { cert: tls.cert, key: tls.key, client_ca: tls.client_ca });
    let tenant = match &overrides.tenant_header {
        Some(header) => TenantSource::Header(header.clone()),
        None => tenant(file.tenant, tls.as_ref())?,
    };
    Ok(GatewayConfig {
        listen,
        upstream,
        routes: routes.into_iter().map(Arc::new).collect(),
        limits: limits(file.limits, &tenant)?,
        tenant,
        trust_forwarded: file.trust_forwarded,
        tls,
        cache: cache(file.cache, overrides)?,
        regions: file.regions.map(regions).transpose()?,
        seal: file.seal.map(seal).transpose()?,
        drain_timeout: duration_or(file.drain_timeout, 30),
    })
}

fn duration_or(given: Option<Text<Duration>>, default_s: u64) -> Duration {
    given.map_or(Duration::from_secs(default_s), |given| given.0)
}

fn count_or(given: Option<Count>, default: usize) -> usize {
    given.map_or(default, |given| given.0)
}

fn size_within(given: Option<&Spanned<Size>>, default: usize, range: Range<usize>) -> Result<usize, Fault> {
    let Some(given) = given else { return Ok(default) };
    match given.get_ref().0 {
        bytes if range.contains(&bytes) => Ok(bytes),
        _ => Err(Fault::at(given, format!("expected {} to {} bytes", range.start, range.end - 1))),
    }
}

fn upstream(file: file::Upstream, overrides: &Overrides) -> Result<UpstreamConfig, Fault> {
    let url = overrides.upstream.clone().or(file.url.map(|url| url.0.0));
    let url = url.ok_or_else(|| Fault::anywhere("no upstream: give --upstream URL, or url in [gateway.upstream]"))?;
    Ok(UpstreamConfig {
        url,
        connect_timeout: duration_or(file.connect_timeout, 5),
        timeout: duration_or(file.timeout, 60),
        idle_max: file.idle_max.unwrap_or(256),
        idle_timeout: duration_or(file.idle_timeout, 60),
        http2: file.http2,
        tls: client_tls(file.ca_file, file.cert, file.key)?,
        breaker: BreakerConfig {
            failures_max: u32::try_from(count_or(file.breaker_failures_max, 10)).unwrap_or(u32::MAX),
            open_for: duration_or(file.breaker_open_for, 2),
        },
    })
}

fn client_tls(
    ca_file: Option<PathBuf>,
    cert: Option<Spanned<PathBuf>>,
    key: Option<Spanned<PathBuf>>,
) -> Result<ClientTls, Fault> {
    let identity = match (cert, key) {
        (Some(cert), Some(key)) => Some((cert.into_inner(), key.into_inner())),
        (None, None) => None,
        (Some(place), None) | (None, Some(place)) => return Err(Fault::at(&place, "cert and key belong together")),
    };
    Ok(ClientTls { ca_file, identity })
}

/// In the file's order, and one for everything else at the end.
fn routes(
    list: Vec<Spanned<file::Route>>,
    overrides: &Overrides,
    upstream: &UpstreamConfig,
) -> Result<Vec<Route>, Fault> {
    let mut routes: Vec<Route> = Vec::new();
    // The rules of each scope, from the routes that state some.
    let mut scopes: BTreeMap<String, ScopePolicy> = BTreeMap::new();
    for file in list {
        let place = file.span();
        let (route, states_rules) = route(file, overrides, upstream)?;
        if let Some(before) = routes.iter().find(|before| before.path == route.path || before.path.is_everything()) {
            let reason = format!("never reached: the route {} before it takes every such path", before.path.as_str());
            return Err(Fault(Some(place), reason));
        }
        let scope = &route.policy.scope;
        if states_rules
            && *scopes.entry(scope.clone()).or_insert_with(|| route.scope_policy.clone()) != route.scope_policy
        {
            let reason = "a route before this one has the same scope and other rules for it (lease, retention, stale, …); \
                          state them once, or give this route a scope of its own";
            return Err(Fault(Some(place), reason.into()));
        }
        routes.push(route);
    }
    if !routes.iter().any(|route| route.path.is_everything()) {
        let mut policy = Policy::new(overrides.scope.as_deref().unwrap_or(SCOPE));
        override_policy(&mut policy, overrides);
        let path = PathPattern::parse("*").map_err(Fault::anywhere)?;
        let scope_policy =
            ScopePolicy { lease: overrides.lease.unwrap_or(ScopePolicy::default().lease), ..ScopePolicy::default() };
        routes.push(Route { path, policy, scope_policy, times: ResponseTimes::default() });
    }
    for route in &mut routes {
        if let Some(rules) = scopes.get(&route.policy.scope) {
            route.scope_policy = rules.clone();
        }
    }
    if let Some(stale) = overrides.stale {
        for route in routes.iter_mut().filter(|route| route.policy.requirement != Requirement::Off) {
            route.scope_policy.stale = stale;
            if stale == Stale::Probe && route.scope_policy.probe.is_none() {
                let reason = format!("--stale probe: the route {} has no probe in the file", route.path.as_str());
                return Err(Fault::anywhere(reason));
            }
        }
    }
    Ok(routes)
}

/// A route, and whether it states rules for its scope.
fn route(file: Spanned<file::Route>, overrides: &Overrides, upstream: &UpstreamConfig) -> Result<(Route, bool), Fault> {
    let file = file.into_inner();
    let path = PathPattern::parse(file.path.get_ref()).map_err(|reason| Fault::at(&file.path, reason))?;
    let scope = match &file.scope {
        Some(scope) if is_scope(scope.get_ref()) => scope.get_ref().as_str(),
        Some(scope) => return Err(Fault::at(scope, SCOPE_NAMES)),
        None => overrides.scope.as_deref().unwrap_or(SCOPE),
    };
    let states_rules = states_rules(&file);
    let scope_policy = scope_policy(&file, overrides, upstream)?;
    let mut policy = Policy::new(scope);
    policy.body_bytes_max = size_within(file.body_bytes_max.as_ref(), policy.body_bytes_max, 1..BODY_BYTES_MAX + 1)?;
    policy.response_bytes_max =
        size_within(file.response_bytes_max.as_ref(), policy.response_bytes_max, 0..RESPONSE_BYTES_MAX + 1)?;
    for (slug, status) in &file.statuses {
        policy.statuses.set(slug.get_ref(), *status.get_ref()).map_err(|error| Fault::at(slug, error.to_string()))?;
    }
    for name in file.keep_headers.into_iter().flatten() {
        policy.keep_headers.push(name.get_ref().0.clone());
        if crate::stored::is_never_kept(&name.get_ref().0) {
            return Err(Fault::at(&name, "this header is never stored: it belongs to one connection or one client"));
        }
    }
    let defaults = FingerprintParts::default();
    policy.fingerprint = FingerprintParts {
        body: file.fingerprint.body.map_or(defaults.body, |body| body.0),
        headers: file.fingerprint.headers.into_iter().map(|name| name.0).collect(),
        path: file.fingerprint.path.unwrap_or(defaults.path),
        query: file.fingerprint.query.unwrap_or(defaults.query),
    };
    if let Some(methods) = file.methods {
        if methods.get_ref().is_empty() {
            return Err(Fault::at(&methods, "no method is guarded: write key = \"off\" if that is meant"));
        }
        policy.methods = methods.into_inner().into_iter().map(|method| method.0).collect();
    }
    policy.requirement = file.key.unwrap_or(policy.requirement);
    policy.header = file.header.map_or(policy.header, |header| header.0);
    policy.syntax = file.syntax.unwrap_or(policy.syntax);
    policy.in_progress = file.in_progress.unwrap_or(policy.in_progress);
    policy.wait_max = file.wait_max.map_or(policy.wait_max, |wait| wait.0);
    policy.waiters_max = file.waiters_max.unwrap_or(policy.waiters_max);
    policy.body_timeout = file.body_timeout.map_or(policy.body_timeout, |timeout| timeout.0);
    policy.store_client_errors = file.store_client_errors.unwrap_or(policy.store_client_errors);
    override_policy(&mut policy, overrides);
    let times = ResponseTimes {
        idle_max: file.response_idle_timeout.map_or(ResponseTimes::default().idle_max, |timeout| timeout.0),
        total_max: file.response_timeout.map(|timeout| timeout.0),
    };
    Ok((Route { path, policy, scope_policy, times }, states_rules))
}

fn override_policy(policy: &mut Policy, overrides: &Overrides) {
    if overrides.require_key {
        policy.requirement = Requirement::Required;
    }
    if overrides.strict_keys {
        policy.syntax = KeySyntax::Strict;
    }
    policy.in_progress = overrides.in_progress.unwrap_or(policy.in_progress);
    policy.body_bytes_max = overrides.body_bytes_max.unwrap_or(policy.body_bytes_max);
}

fn states_rules(file: &file::Route) -> bool {
    let file::Route { lease, retention, tombstone, stale, probe, attempts_max, key_pattern, response, .. } = file;
    let times = lease.is_some() || retention.is_some() || tombstone.is_some();
    times || stale.is_some() || probe.is_some() || attempts_max.is_some() || key_pattern.is_some() || response.is_some()
}

fn scope_policy(file: &file::Route, overrides: &Overrides, upstream: &UpstreamConfig) -> Result<ScopePolicy, Fault> {
    let defaults = ScopePolicy::default();
    let lease = file.lease.as_ref().map_or(defaults.lease, |lease| lease.get_ref().0);
    if let Some(place) = file.lease.as_ref().filter(|_| !is_lease(lease)) {
        return Err(Fault::at(place, LEASE));
    }
    let stale = file.stale.as_ref().map_or(defaults.stale, |stale| *stale.get_ref());
    let probe = match &file.probe {
        Some(text) => Some(probe(text.get_ref(), upstream).map_err(|reason| Fault::at(text, reason))?),
        None => None,
    };
    match (&file.stale, &file.probe) {
        (Some(place), None) if stale == Stale::Probe => {
            return Err(Fault::at(place, "stale = \"probe\" needs a probe: a function's name or a URL"));
        }
        (_, Some(place)) if stale != Stale::Probe => {
            return Err(Fault::at(place, "a probe is only asked with stale = \"probe\""));
        }
        _ => {}
    }
    let attempts_max = file.attempts_max.as_ref().map(|attempts| (attempts, attempts.get_ref().0));
    if let Some((place, _)) = attempts_max.filter(|(_, attempts)| *attempts > 1_000_000) {
        return Err(Fault::at(place, "expected a whole number from 1 to 1000000"));
    }
    if let Some(place) = file.key_pattern.as_ref().filter(|pattern| !is_name(pattern.get_ref(), 500)) {
        return Err(Fault::at(place, "a key_pattern has 1 to 500 bytes and no control characters"));
    }
    Ok(ScopePolicy {
        lease: overrides.lease.unwrap_or(lease),
        retention: file.retention.as_ref().map_or(defaults.retention, |keep| keep.0),
        tombstone: file.tombstone.as_ref().map_or(defaults.tombstone, |keep| keep.0),
        stale,
        probe,
        attempts_max: attempts_max.and_then(|(_, attempts)| u32::try_from(attempts).ok()),
        key_pattern: file.key_pattern.as_ref().map(|pattern| pattern.get_ref().clone()),
        response: file.response.unwrap_or(defaults.response),
    })
}

pub(super) const LEASE: &str = "a lease takes from 10ms to 1d";

/// What `once.define_scope` takes.
pub(super) fn is_lease(lease: Duration) -> bool {
    (Duration::from_millis(10)..=Duration::from_secs(86_400)).contains(&lease)
}

fn probe(text: &str, upstream: &UpstreamConfig) -> Result<Probe, String> {
    if text.contains(['/', '{']) {
        return UrlTemplate::parse(text, &upstream.url).map(Probe::Http);
    }
    // Whether there is such a function only the database knows.
    match is_name(text, 500) {
        true => Ok(Probe::Sql(text.to_owned())),
        false => Err("expected a function's name, or a URL as http://orders.internal/by-key/{key}".into()),
    }
}

fn is_name(text: &str, bytes_max: usize) -> bool {
    (1..=bytes_max).contains(&text.len()) && !text.chars().any(char::is_control)
}

fn tenant(file: Option<Spanned<file::Tenant>>, tls: Option<&ServerTls>) -> Result<TenantSource, Fault> {
    let Some(file) = file else { return Ok(TenantSource::Fixed(String::new())) };
    let place = file.span();
    let missing = |key: &str| Fault(Some(place.clone()), format!("this source of tenants needs {key}"));
    let file = file.into_inner();
    if let Some(key) = stray_key(&file) {
        return Err(Fault(Some(place), format!("this source of tenants does not use {key}")));
    }
    match file.source {
        file::TenantSource::Fixed => {
            let name = file.name.ok_or_else(|| missing("name"))?;
            TenantSource::fixed(name.get_ref().as_str()).map_err(|error| Fault::at(&name, error.0))
        }
        file::TenantSource::Header => {
            let header = file.header.ok_or_else(|| missing("header"))?;
            Ok(TenantSource::Header(header.0))
        }
        file::TenantSource::Jwt => jwt(file, missing).map(|jwt| TenantSource::Jwt(Arc::new(jwt))),
        file::TenantSource::Mtls => match tls.and_then(|tls| tls.client_ca.as_ref()) {
            Some(_) => Ok(TenantSource::Mtls),
            None => Err(missing("[gateway.tls] with client_ca: without it nobody shows a certificate")),
        },
        file::TenantSource::Basic => {
            let path = file.users_file.ok_or_else(|| missing("users_file"))?;
            let text = std::fs::read_to_string(path.get_ref())
                .map_err(|error| Fault::at(&path, format!("{} cannot be read: {error}", path.get_ref().display())))?;
            let users = BasicUsers::parse(&text).map_err(|error| Fault::at(&path, error.0))?;
            Ok(TenantSource::Basic(Arc::new(users)))
        }
    }
}

/// A key of another source, which would silently protect nothing.
fn stray_key(file: &file::Tenant) -> Option<&'static str> {
    use file::TenantSource::{Basic, Fixed, Header, Jwt};
    let stray = [
        ("name", file.name.is_some(), file.source == Fixed),
        ("header", file.header.is_some(), matches!(file.source, Header | Jwt)),
        ("claim", file.claim.is_some(), file.source == Jwt),
        ("keys", !file.keys.is_empty(), file.source == Jwt),
        ("issuer", file.issuer.is_some(), file.source == Jwt),
        ("audience", file.audience.is_some(), file.source == Jwt),
        ("users_file", file.users_file.is_some(), file.source == Basic),
    ];
    stray.into_iter().find(|(_, is_there, is_used)| *is_there && !is_used).map(|(key, ..)| key)
}

fn jwt(file: file::Tenant, missing: impl Fn(&str) -> Fault) -> Result<Jwt, Fault> {
    let claim = file.claim.ok_or_else(|| missing("claim"))?;
    let mut keys: Vec<JwtKey> = Vec::new();
    for place in &file.keys {
        let file::JwtKey { id, algorithm, env, file } = place.get_ref().clone();
        let secret = SecretRef { env, file }.read().map_err(|reason| Fault::at(place, reason))?;
        // Alone, so that what is wrong with it is told with its line.
        Jwt::new(JwtSettings::new("claim", algorithm, secret.expose())).map_err(|error| Fault::at(place, error.0))?;
        if keys.iter().any(|before| before.id == id && id.is_some()) {
            return Err(Fault::at(place, "another key has this id"));
        }
        keys.push(JwtKey { id, algorithm, key: secret.expose().to_vec() });
    }
    if keys.is_empty() {
        return Err(missing("keys: who may sign tokens"));
    }
    let header = file.header.map_or(header::AUTHORIZATION, |header| header.0);
    let settings =
        JwtSettings { claim: claim.get_ref().clone(), header, keys, issuer: file.issuer, audience: file.audience };
    Jwt::new(settings).map_err(|error| Fault::at(&claim, error.0))
}

fn secret(place: &Spanned<SecretRef>) -> Result<Secret, Fault> {
    let secret = place.get_ref().read().map_err(|reason| Fault::at(place, reason))?;
    match secret.expose().len() < SECRET_BYTES_MIN {
        true => Err(Fault::at(place, "this secret is too short: 32 bytes at least")),
        false => Ok(secret),
    }
}

fn cache(file: file::Cache, overrides: &Overrides) -> Result<CacheSettings, Fault> {
    let defaults = CacheSettings::default();
    let secret = file.secret.as_ref().map(secret).transpose()?;
    let url = overrides.cache.clone().or(file.redis.map(|url| url.0));
    let redis = url.map(|url| {
        let mut redis = RedisSettings::new(url.expose());
        redis.secret = secret.map(|secret| secret.expose().to_vec());
        redis.timeout = file.redis_timeout.map_or(redis.timeout, |timeout| timeout.0);
        redis
    });
    Ok(CacheSettings {
        memory_bytes: file.memory_bytes.map_or(defaults.memory_bytes, |size| size.0 as u64),
        lifetime_max: file.ttl_max.map_or(defaults.lifetime_max, |ttl| ttl.0),
        redis,
    })
}

fn limits(file: file::Limits, tenant: &TenantSource) -> Result<Limits, Fault> {
    let inflight_max = count_or(file.inflight_max, 8_192);
    let waiters_max = file.waiters_max.unwrap_or(20_000);
    // One of many may take a part only; the only one may take all.
    let parts = |parts: usize| if matches!(tenant, TenantSource::Fixed(_)) { 1 } else { parts };
    Ok(Limits {
        header_bytes_max: size_within(file.header_bytes_max.as_ref(), 64 * 1024, 8 * 1024..16 * 1024 * 1024 + 1)?,
        header_timeout: duration_or(file.header_timeout, 10),
        connections_max: count_or(file.connections_max, 20_000),
        inflight_max,
        tenant_inflight_max: count_or(file.tenant_inflight_max, inflight_max.div_ceil(parts(4))),
        waiters_max,
        tenant_waiters_max: file.tenant_waiters_max.unwrap_or(waiters_max.div_ceil(parts(2))),
        shed_wait: duration_or(file.shed_wait, 1),
    })
}

fn regions(file: file::Regions) -> Result<RegionsConfig, Fault> {
    let tls = client_tls(file.ca_file, file.cert, file.key)?;
    let mut list: Vec<RegionConfig> = Vec::new();
    for region in file.region {
        // The name travels in a signed header, between separators.
        let name = &region.get_ref().name;
        if !is_name(name, 64) || !name.bytes().all(|c| c.is_ascii_alphanumeric() || b"-_.".contains(&c)) {
            return Err(Fault::at(&region, "a region's name has 1 to 64 letters, digits, -, _ and ."));
        }
        if list.iter().any(|before| before.name == *name) {
            return Err(Fault::at(&region, "another region has this name"));
        }
        let file::Region { name, url } = region.into_inner();
        list.push(RegionConfig { name, url: url.0.0 });
    }
    if !list.iter().any(|region| region.name == *file.own.get_ref()) {
        return Err(Fault::at(&file.own, "own names none of the regions in the list"));
    }
    Ok(RegionsConfig { own: file.own.into_inner(), list, secret: secret(&file.secret)?, tls })
}

fn seal(file: file::Seal) -> Result<Keyring, Fault> {
    let mut keys = Vec::new();
    for place in file.keys {
        let file::SealKey { id, env, file } = place.get_ref().clone();
        let text = SecretRef { env, file }.read().map_err(|reason| Fault::at(&place, reason))?;
        let key = SealKey::parse(&String::from_utf8_lossy(text.expose()));
        keys.push((id, key.map_err(|error| Fault::at(&place, error.to_string()))?));
    }
    Keyring::new(file.current.get_ref().as_str(), keys).map_err(|error| Fault::at(&file.current, error.to_string()))
}
