//! Whose request it is. The tenant is part of an intent's name, so this decides which intents a caller can
//! meet: it comes before the key is looked at.
//!
//! A client learns that no tenant was named or that the one named was refused, and nothing of why: the reason
//! goes to the log, at level debug.

mod basic;
mod jwt;

use std::sync::Arc;
use std::time::Duration;

use http::header::{AUTHORIZATION, HeaderMap, HeaderName, HeaderValue};
use x509_parser::prelude::{FromDer as _, X509Certificate};

pub use basic::BasicUsers;
pub use jwt::{Jwt, JwtAlgorithm, JwtKey, JwtSettings};

use crate::problem::Problem;

/// The longest tenant, in bytes, as the schema limits it.
const TENANT_BYTES_MAX: usize = 255;

/// Where a request's tenant is read.
#[derive(Debug, Clone)]
pub enum TenantSource {
    /// Always this one; empty where there is only one tenant. See [`TenantSource::fixed`].
    Fixed(String),
    /// What this header says. Whoever can reach the gateway can say it: for a gateway behind something that
    /// authenticates, and sets or removes the header.
    Header(HeaderName),
    /// A claim of a signed token.
    Jwt(Arc<Jwt>),
    /// The common name of the client certificate that the TLS handshake verified.
    Mtls,
    /// The user of HTTP basic authentication.
    Basic(Arc<BasicUsers>),
}

/// What the connection says about the peer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PeerIdentity {
    /// The common name in the subject of the verified client certificate.
    pub certificate_subject: Option<String>,
}

impl PeerIdentity {
    /// The identity in a client certificate (DER) **that the handshake has verified**. A subject without a
    /// common name, or with several, names nobody.
    #[must_use]
    pub fn of_certificate(der: &[u8]) -> Self {
        let Ok((_, certificate)) = X509Certificate::from_der(der) else { return Self::default() };
        let mut names = certificate.subject().iter_common_name();
        let (Some(name), None) = (names.next(), names.next()) else { return Self::default() };
        Self { certificate_subject: name.as_str().ok().map(str::to_owned) }
    }
}

/// Why a request has no tenant. Nothing was claimed and nothing was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TenantError {
    /// The request carries nothing that could name one.
    #[error("the request names no tenant; nothing was done: send the credentials that this service asks for")]
    Missing,
    /// What it carries is not accepted.
    #[error("the request's tenant was refused; nothing was done: send other credentials")]
    Refused,
    /// Too many passwords are being verified.
    #[error("too many passwords are being verified; nothing was done: send it again a little later")]
    Busy,
}

impl From<TenantError> for Problem {
    fn from(error: TenantError) -> Self {
        match error {
            TenantError::Missing => Self::TenantMissing,
            TenantError::Refused => Self::TenantRefused,
            TenantError::Busy => Self::Overloaded { retry_after: Duration::from_secs(1) },
        }
    }
}

/// What is wrong with a tenant source's settings.
#[derive(Debug, thiserror::Error)]
#[error("tenant source: {0}")]
pub struct TenantConfigError(pub(crate) String);

impl TenantSource {
    /// Always this tenant; empty where there is only one.
    ///
    /// # Errors
    /// Where the text is beyond the limits of a tenant: 255 bytes, no control characters.
    pub fn fixed(tenant: impl Into<String>) -> Result<Self, TenantConfigError> {
        let tenant = tenant.into();
        match tenant.is_empty() || is_tenant(&tenant) {
            true => Ok(Self::Fixed(tenant)),
            false => {
                Err(TenantConfigError("the fixed tenant is longer than 255 bytes or has control characters".into()))
            }
        }
    }

    /// The request's tenant: 1 to 255 bytes without control characters; a fixed one may be empty.
    ///
    /// Only verifying a password for the first time takes more than a moment; that happens on a thread that
    /// may block.
    ///
    /// # Errors
    /// See [`TenantError`].
    pub async fn tenant(&self, headers: &HeaderMap, peer: &PeerIdentity) -> Result<String, TenantError> {
        let tenant = match self {
            Self::Fixed(tenant) => return Ok(tenant.clone()),
            Self::Header(name) => header_text(headers, name)?.ok_or(TenantError::Missing)?.to_owned(),
            Self::Jwt(jwt) => jwt.tenant(headers)?,
            Self::Mtls => peer.certificate_subject.clone().ok_or(TenantError::Missing)?,
            Self::Basic(users) => users.tenant(headers).await?,
        };
        match is_tenant(&tenant) {
            true => Ok(tenant),
            false if tenant.is_empty() => Err(TenantError::Missing),
            false => Err(refused("the tenant is longer than 255 bytes or has control characters")),
        }
    }

    /// What a 401 says in `WWW-Authenticate`, where there is a scheme for it.
    #[must_use]
    pub fn challenge(&self) -> Option<HeaderValue> {
        match self {
            Self::Basic(_) => Some(HeaderValue::from_static(r#"Basic realm="pgonce", charset="UTF-8""#)),
            Self::Jwt(jwt) if jwt.header() == AUTHORIZATION => Some(HeaderValue::from_static("Bearer")),
            _ => None,
        }
    }
}

/// Within the limits that the schema sets, and fit to be told to an upstream in a header. The two separators are control characters to some collations.
fn is_tenant(text: &str) -> bool {
    (1..=TENANT_BYTES_MAX).contains(&text.len())
        && text.trim_matches(' ').len() == text.len()
        && !text.chars().any(|c| c.is_control() || matches!(c, '\u{2028}' | '\u{2029}'))
}

/// The header's one value. With two lines of it, the one that is believed here need not be the one that
/// something before or behind the gateway believed.
fn header_text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<Option<&'a str>, TenantError> {
    let mut lines = headers.get_all(name).iter();
    match (lines.next(), lines.next()) {
        (None, _) => Ok(None),
        (Some(line), None) => match std::str::from_utf8(line.as_bytes()) {
            Ok(text) => Ok(Some(text.trim_matches([' ', '\t']))),
            Err(_) => Err(refused("the header is not UTF-8")),
        },
        (Some(_), Some(_)) => Err(refused("the header is there more than once")),
    }
}

/// What follows the scheme, where the text has that scheme.
fn after_scheme<'a>(text: &'a str, scheme: &str) -> Option<&'a str> {
    let (given, rest) = text.split_once(' ')?;
    given.eq_ignore_ascii_case(scheme).then(|| rest.trim_start_matches(' '))
}

/// The refusal; its reason is for the log only.
fn refused(reason: &str) -> TenantError {
    tracing::debug!(reason, "tenant refused");
    TenantError::Refused
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on should stop, loudly")]
mod tests {
    use super::*;

    const TENANT: HeaderName = HeaderName::from_static("x-tenant");

    async fn of(source: &TenantSource, values: &[&[u8]]) -> Result<String, TenantError> {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(TENANT, HeaderValue::from_bytes(value).unwrap());
        }
        source.tenant(&headers, &PeerIdentity::default()).await
    }

    #[tokio::test]
    async fn a_header_names_the_tenant_once_and_within_limits() {
        let source = TenantSource::Header(TENANT);
        assert_eq!(of(&source, &[b"acme"]).await.unwrap(), "acme");
        assert_eq!(of(&source, &["Zoë & Søn".as_bytes()]).await.unwrap(), "Zoë & Søn");
        assert_eq!(of(&source, &[&[b'a'; 255]]).await.unwrap().len(), 255);
        assert_eq!(of(&source, &[]).await, Err(TenantError::Missing));
        assert_eq!(of(&source, &[b""]).await, Err(TenantError::Missing));
        assert_eq!(of(&source, &[b" "]).await, Err(TenantError::Missing));
        assert_eq!(of(&source, &[&[b'a'; 256]]).await, Err(TenantError::Refused));
        assert_eq!(of(&source, &[b"a\tb"]).await, Err(TenantError::Refused));
        assert_eq!(of(&source, &["a\u{85}b".as_bytes()]).await, Err(TenantError::Refused));
        assert_eq!(of(&source, &["a\u{2028}b".as_bytes()]).await, Err(TenantError::Refused));
        assert_eq!(of(&source, &[b"\xff"]).await, Err(TenantError::Refused));
        assert_eq!(of(&source, &[b"acme", b"acme"]).await, Err(TenantError::Refused));
        assert_eq!(of(&source, &[b"acme", b"rival"]).await, Err(TenantError::Refused));
    }

    #[tokio::test]
    async fn a_fixed_tenant_may_be_empty_and_ignores_the_request() {
        assert_eq!(of(&TenantSource::fixed("").unwrap(), &[b"rival"]).await.unwrap(), "");
        assert_eq!(of(&TenantSource::fixed("acme").unwrap(), &[b"rival"]).await.unwrap(), "acme");
        assert!(TenantSource::fixed("a\nb").is_err());
        assert!(TenantSource::fixed("a".repeat(256)).is_err());
    }

    #[tokio::test]
    async fn a_certificate_names_the_tenant_by_its_one_common_name() {
        let pem = |text: &str| x509_parser::pem::parse_x509_pem(text.as_bytes()).unwrap().1.contents;
        let one = PeerIdentity::of_certificate(&pem(include_str!("testdata/one-name.pem")));
        assert_eq!(one.certificate_subject.as_deref(), Some("acme"));
        let headers = HeaderMap::new();
        assert_eq!(TenantSource::Mtls.tenant(&headers, &one).await.unwrap(), "acme");
        let two = PeerIdentity::of_certificate(&pem(include_str!("testdata/two-names.pem")));
        assert_eq!(two, PeerIdentity::default(), "two names are no name");
        assert_eq!(PeerIdentity::of_certificate(b"no certificate"), PeerIdentity::default());
        assert_eq!(TenantSource::Mtls.tenant(&headers, &two).await, Err(TenantError::Missing));
    }
}
