//! What the file may say: every key is optional, unknown ones are errors.
//!
//! Where a value can be wrong only together with another, its place is kept (`Spanned`).

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use http::{HeaderName, Method};
use serde::Deserialize;
use serde::de::{Deserializer, SeqAccess, Visitor};
use toml::Spanned;

use super::values::{Count, Keep, Origin, RedisUrl, SecretRef, Size, Text};
use super::{KeptResponse, Stale};
use crate::policy::{BodyPart, InProgress, KeySyntax, Requirement};
use crate::tenant::JwtAlgorithm;

/// The whole of pgonce.toml; other sections are other verbs' business.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Whole {
    pub gateway: Gateway,
}

/// `[gateway]`
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Gateway {
    pub listen: Option<Text<SocketAddr>>,
    pub trust_forwarded: bool,
    pub drain_timeout: Option<Text<Duration>>,
    pub upstream: Upstream,
    pub route: Vec<Spanned<Route>>,
    pub tenant: Option<Spanned<Tenant>>,
    pub tls: Option<Tls>,
    pub cache: Cache,
    pub limits: Limits,
    pub regions: Option<Regions>,
    pub seal: Option<Seal>,
}

/// `[gateway.upstream]`
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Upstream {
    pub url: Option<Text<Origin>>,
    pub connect_timeout: Option<Text<Duration>>,
    pub timeout: Option<Text<Duration>>,
    pub idle_max: Option<usize>,
    pub idle_timeout: Option<Text<Duration>>,
    pub http2: bool,
    pub ca_file: Option<PathBuf>,
    pub cert: Option<Spanned<PathBuf>>,
    pub key: Option<Spanned<PathBuf>>,
    pub breaker_failures_max: Option<Count>,
    pub breaker_open_for: Option<Text<Duration>>,
}

/// `[[gateway.route]]`
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Route {
    pub path: Spanned<String>,
    pub scope: Option<Spanned<String>>,
    pub methods: Option<Spanned<Vec<Text<Method>>>>,
    pub key: Option<Requirement>,
    pub header: Option<Text<HeaderName>>,
    pub syntax: Option<KeySyntax>,
    #[serde(default)]
    pub fingerprint: Fingerprint,
    pub in_progress: Option<InProgress>,
    pub wait_max: Option<Text<Duration>>,
    pub waiters_max: Option<usize>,
    pub body_bytes_max: Option<Spanned<Size>>,
    pub body_timeout: Option<Text<Duration>>,
    pub response_bytes_max: Option<Spanned<Size>>,
    pub response_idle_timeout: Option<Text<Duration>>,
    pub response_timeout: Option<Text<Duration>>,
    pub keep_headers: Option<Vec<Spanned<Text<HeaderName>>>>,
    pub store_client_errors: Option<bool>,
    #[serde(default)]
    pub statuses: BTreeMap<Spanned<String>, Spanned<u16>>,
    // The scope's.
    pub lease: Option<Spanned<Text<Duration>>>,
    pub retention: Option<Text<Keep>>,
    pub tombstone: Option<Text<Keep>>,
    pub stale: Option<Spanned<Stale>>,
    pub probe: Option<Spanned<String>>,
    pub attempts_max: Option<Spanned<Count>>,
    pub key_pattern: Option<Spanned<String>>,
    pub response: Option<KeptResponse>,
}

/// `fingerprint` of a route.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Fingerprint {
    pub body: Option<Body>,
    pub headers: Vec<Text<HeaderName>>,
    pub path: Option<bool>,
    pub query: Option<bool>,
}

/// `"raw"`, `"json"`, `"none"`, or a list of JSON pointers.
#[derive(Debug)]
pub(super) struct Body(pub BodyPart);

impl<'de> Deserialize<'de> for Body {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        const EXPECTED: &str = "raw, json, none, or a list of JSON pointers, as [\"/order/id\"]";
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = Body;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(EXPECTED)
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Body, E> {
                match text {
                    "raw" => Ok(Body(BodyPart::Raw)),
                    "json" => Ok(Body(BodyPart::Json)),
                    "none" => Ok(Body(BodyPart::None)),
                    _ => Err(E::custom(format!("expected {EXPECTED}"))),
                }
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Body, A::Error> {
                let mut pointers = Vec::new();
                while let Some(pointer) = list.next_element::<String>()? {
                    if !crate::is_pointer(&pointer) {
                        return Err(serde::de::Error::custom(format!("expected {EXPECTED}")));
                    }
                    pointers.push(pointer);
                }
                match pointers.is_empty() {
                    true => {
                        Err(serde::de::Error::custom("an empty list pins nothing: write \"none\" if that is meant"))
                    }
                    false => Ok(Body(BodyPart::Fields(pointers))),
                }
            }
        }
        deserializer.deserialize_any(V)
    }
}

/// `[gateway.tenant]`
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Tenant {
    pub source: TenantSource,
    pub name: Option<Spanned<String>>,
    pub header: Option<Text<HeaderName>>,
    pub claim: Option<Spanned<String>>,
    #[serde(default)]
    pub keys: Vec<Spanned<JwtKey>>,
    pub issuer: Option<String>,
    pub audience: Option<String>,
    pub users_file: Option<Spanned<PathBuf>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum TenantSource {
    Fixed,
    Header,
    Jwt,
    Mtls,
    Basic,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct JwtKey {
    pub id: Option<String>,
    pub algorithm: JwtAlgorithm,
    pub env: Option<String>,
    pub file: Option<PathBuf>,
}

/// `[gateway.tls]`
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Tls {
    pub cert: PathBuf,
    pub key: PathBuf,
    pub client_ca: Option<PathBuf>,
}

/// `[gateway.cache]`
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Cache {
    pub memory_bytes: Option<Size>,
    pub redis: Option<Text<RedisUrl>>,
    pub redis_timeout: Option<Text<Duration>>,
    pub secret: Option<Spanned<SecretRef>>,
    pub ttl_max: Option<Text<Duration>>,
}

/// `[gateway.limits]`
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Limits {
    pub header_bytes_max: Option<Spanned<Size>>,
    pub header_timeout: Option<Text<Duration>>,
    pub connections_max: Option<Count>,
    pub inflight_max: Option<Count>,
    pub tenant_inflight_max: Option<Count>,
    pub waiters_max: Option<usize>,
    pub tenant_waiters_max: Option<usize>,
    pub shed_wait: Option<Text<Duration>>,
}

/// `[gateway.regions]`
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Regions {
    pub own: Spanned<String>,
    pub secret: Spanned<SecretRef>,
    pub ca_file: Option<PathBuf>,
    pub cert: Option<Spanned<PathBuf>>,
    pub key: Option<Spanned<PathBuf>>,
    pub region: Vec<Spanned<Region>>,
}

/// `[[gateway.regions.region]]`
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Region {
    pub name: String,
    pub url: Text<Origin>,
}

/// `[gateway.seal]`
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Seal {
    pub current: Spanned<String>,
    pub keys: Vec<Spanned<SealKey>>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SealKey {
    pub id: String,
    pub env: Option<String>,
    pub file: Option<PathBuf>,
}
