//! A tenant in a signed token.
//!
//! Each key is for one algorithm, which the configuration names: what the token's own header says only chooses
//! among the keys. So a public key never serves as a secret, and "none" is no algorithm.

use http::HeaderMap;
use http::header::{AUTHORIZATION, HeaderName};
use jsonwebtoken::errors::ErrorKind;
use jsonwebtoken::{Algorithm, DecodingKey, Validation};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::{TenantConfigError, TenantError, after_scheme, header_text, refused};

/// How far a token's times may be off.
const LEEWAY_SECONDS: u64 = 60;
/// The longest token that is looked at.
const TOKEN_BYTES_MAX: usize = 16 * 1024;

/// A signature algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the names of RFC 7518 and RFC 8037 say it")]
pub enum JwtAlgorithm {
    HS256,
    HS384,
    HS512,
    RS256,
    PS256,
    ES256,
    EdDSA,
}

impl JwtAlgorithm {
    fn known(self) -> Algorithm {
        match self {
            Self::HS256 => Algorithm::HS256,
            Self::HS384 => Algorithm::HS384,
            Self::HS512 => Algorithm::HS512,
            Self::RS256 => Algorithm::RS256,
            Self::PS256 => Algorithm::PS256,
            Self::ES256 => Algorithm::ES256,
            Self::EdDSA => Algorithm::EdDSA,
        }
    }

    /// How long a secret has to be at least: as its hash (RFC 7518, 3.2). None: the key is a public one.
    fn secret_bytes_min(self) -> Option<usize> {
        match self {
            Self::HS256 => Some(32),
            Self::HS384 => Some(48),
            Self::HS512 => Some(64),
            Self::RS256 | Self::PS256 | Self::ES256 | Self::EdDSA => None,
        }
    }
}

/// A key, and the one algorithm that it is for.
#[derive(Clone)]
pub struct JwtKey {
    /// The algorithm.
    pub algorithm: JwtAlgorithm,
    /// The secret (HS256, HS384, HS512) or the public key as PEM (all others).
    pub key: Vec<u8>,
    /// Its name. A token that names another one (`kid`) is not tried with this key.
    pub id: Option<String>,
}

impl std::fmt::Debug for JwtKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("JwtKey").field("algorithm", &self.algorithm).field("id", &self.id).finish_non_exhaustive()
    }
}

/// How tokens are verified.
#[derive(Debug, Clone)]
pub struct JwtSettings {
    /// The claim that names the tenant: a string or an integer. `org.id` is the member `id` of the claim `org`,
    /// unless there is a claim that is called `org.id`.
    pub claim: String,
    /// The header that carries the token; in `Authorization` behind `Bearer`.
    pub header: HeaderName,
    /// The keys; several while one replaces the other.
    pub keys: Vec<JwtKey>,
    /// The issuer that a token must name, where given.
    pub issuer: Option<String>,
    /// The audience that a token must name. Where none is given, a token that names one is refused: it was
    /// made for somebody else (RFC 7519, 4.1.3).
    pub audience: Option<String>,
}

impl JwtSettings {
    /// A claim of tokens in `Authorization`, verified with one key.
    #[must_use]
    pub fn new(claim: impl Into<String>, algorithm: JwtAlgorithm, key: impl Into<Vec<u8>>) -> Self {
        let keys = vec![JwtKey { algorithm, key: key.into(), id: None }];
        Self { claim: claim.into(), header: AUTHORIZATION, keys, issuer: None, audience: None }
    }
}

/// Verifies tokens and reads the tenant in them.
#[derive(Debug)]
pub struct Jwt {
    claim: String,
    header: HeaderName,
    keys: Vec<Verifier>,
}

#[derive(Debug)]
struct Verifier {
    id: Option<String>,
    key: DecodingKey,
    validation: Validation,
}

impl Jwt {
    /// Checks the settings.
    ///
    /// # Errors
    /// Where there is no key, a secret is too short or is a PEM file, or a key is not a public key for its
    /// algorithm.
    pub fn new(settings: JwtSettings) -> Result<Self, TenantConfigError> {
        let JwtSettings { claim, header, keys, issuer, audience } = settings;
        let wrong = |what: &str| Err(TenantConfigError(format!("jwt: {what}")));
        if claim.is_empty() {
            return wrong("name the claim that holds the tenant");
        }
        if keys.is_empty() {
            return wrong("give a secret or a public key");
        }
        let mut validation = Validation { leeway: LEEWAY_SECONDS, validate_nbf: true, ..Validation::default() };
        // A configured issuer or audience that the token leaves out would otherwise pass.
        let mut required = vec!["exp"];
        if let Some(issuer) = &issuer {
            validation.set_issuer(&[issuer]);
            required.push("iss");
        }
        if let Some(audience) = &audience {
            validation.set_audience(&[audience]);
            required.push("aud");
        }
        validation.set_required_spec_claims(&required);
        let keys = keys.iter().map(|key| Verifier::new(key, &validation)).collect::<Result<_, _>>()?;
        Ok(Self { claim, header, keys })
    }

    pub(super) fn header(&self) -> &HeaderName {
        &self.header
    }

    pub(super) fn tenant(&self, headers: &HeaderMap) -> Result<String, TenantError> {
        let text = header_text(headers, &self.header)?.ok_or(TenantError::Missing)?;
        let token = match after_scheme(text, "Bearer") {
            Some(token) => token,
            // Credentials of another kind are none of this kind.
            None if self.header == AUTHORIZATION => return Err(TenantError::Missing),
            None => text,
        };
        match token.is_empty() {
            true => Err(TenantError::Missing),
            false => self.verified(token).map_err(refused),
        }
    }

    /// The claim of a token whose signature and times hold; otherwise why not, for the log.
    fn verified(&self, token: &str) -> Result<String, &'static str> {
        if token.len() > TOKEN_BYTES_MAX {
            return Err("the token is too long");
        }
        let header = jsonwebtoken::decode_header(token).map_err(|error| reason(error.kind()))?;
        if header.crit.is_some() {
            return Err("the token has critical extensions");
        }
        let mut why = "no key for the token's algorithm and key id";
        for key in &self.keys {
            let other_id = matches!((&key.id, &header.kid), (Some(ours), Some(theirs)) if ours != theirs);
            if other_id || !key.validation.algorithms.contains(&header.alg) {
                continue;
            }
            match jsonwebtoken::decode::<Map<String, Value>>(token, &key.key, &key.validation) {
                Ok(token) => return self.claim_of(&token.claims).ok_or("the claim is missing, or is no name"),
                Err(error) if matches!(error.kind(), ErrorKind::InvalidSignature) => why = "the signature is wrong",
                Err(error) => return Err(reason(error.kind())),
            }
        }
        Err(why)
    }

    fn claim_of(&self, claims: &Map<String, Value>) -> Option<String> {
        let nested = || {
            let mut path = self.claim.split('.');
            let first = claims.get(path.next()?)?;
            path.try_fold(first, |at, name| at.as_object()?.get(name))
        };
        match claims.get(&self.claim).or_else(nested)? {
            Value::String(text) => Some(text.clone()),
            Value::Number(number) if !number.is_f64() => Some(number.to_string()),
            _ => None,
        }
    }
}

impl Verifier {
    fn new(JwtKey { algorithm, key, id }: &JwtKey, validation: &Validation) -> Result<Self, TenantConfigError> {
        let wrong = |what: String| TenantConfigError(format!("jwt: {algorithm:?}: {what}"));
        let pem = key.trim_ascii_start().starts_with(b"-----BEGIN");
        let decoding = match algorithm.secret_bytes_min() {
            // A public key as a secret: whoever has read it could sign.
            Some(_) if pem => return Err(wrong("the secret is a PEM file, which is no secret".into())),
            Some(min) if key.len() < min => return Err(wrong(format!("a secret needs {min} bytes or more"))),
            Some(_) => DecodingKey::from_secret(key),
            None if String::from_utf8_lossy(key).contains("PRIVATE KEY-----") => {
                return Err(wrong("the key is a private one: only the public key belongs here".into()));
            }
            None => match algorithm {
                JwtAlgorithm::ES256 => DecodingKey::from_ec_pem(key),
                JwtAlgorithm::EdDSA => DecodingKey::from_ed_pem(key),
                _ => DecodingKey::from_rsa_pem(key),
            }
            .map_err(|_| wrong("the key is not a public key for it, as PEM".into()))?,
        };
        let mut validation = validation.clone();
        validation.algorithms = vec![algorithm.known()];
        Ok(Self { id: id.clone(), key: decoding, validation })
    }
}

/// Without what the token says: a library's message may quote it.
fn reason(kind: &ErrorKind) -> &'static str {
    match kind {
        ErrorKind::InvalidSignature => "the signature is wrong",
        ErrorKind::MissingRequiredClaim(_) => "exp, or a configured iss or aud, is missing",
        ErrorKind::ExpiredSignature => "the token has expired",
        ErrorKind::ImmatureSignature => "the token is not valid yet",
        ErrorKind::InvalidIssuer => "another issuer",
        ErrorKind::InvalidAudience => "another audience",
        ErrorKind::InvalidAlgorithm | ErrorKind::InvalidAlgorithmName => "another algorithm",
        _ => "not a token",
    }
}

#[cfg(test)]
#[path = "jwt_tests.rs"]
mod tests;
