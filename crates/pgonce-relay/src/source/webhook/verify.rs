//! Whether a webhook is what its sender sent: a signature over the raw body, a time that is near, and the sender's id.

use std::time::{Duration, SystemTime};

use axum::http::{HeaderMap, StatusCode};
use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;
use standardwebhooks::Webhook;

use crate::{Target, TargetError};

/// How a sender signs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Scheme {
    /// Standard Webhooks: `webhook-id`, `webhook-timestamp`, `webhook-signature`.
    Standard,
    /// `stripe-signature: t=…,v1=…` over time and body; the id is the body's.
    Stripe,
    /// `x-hub-signature-256: sha256=…` over the body; the id is `x-github-delivery`. It has no time: a captured request
    /// can be sent again for ever, and is known by its id for as long as the inbox keeps it.
    Github,
    /// Hexadecimal HMAC-SHA256 of the body in one header, the id in another.
    Plain {
        /// The header with the signature.
        signature: String,
        /// The header with the id.
        id: String,
    },
}

/// Checks webhooks of one sender.
pub struct Verifier {
    scheme: Scheme,
    /// Any of them: the sender may change them one after the other.
    secrets: Vec<Vec<u8>>,
    standard: Vec<Webhook>,
    tolerance: Duration,
}

impl std::fmt::Debug for Verifier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Verifier").field("scheme", &self.scheme).finish_non_exhaustive()
    }
}

/// Why a webhook was refused. Nothing was stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// A header that the scheme needs is missing, or not readable.
    #[error("a header is missing or cannot be read")]
    Headers,
    /// The signature is nobody's that is known here.
    #[error("the signature does not fit")]
    Signature,
    /// Sent too long ago, or in the future.
    #[error("the timestamp is too far from now")]
    Time,
    /// Signed, but without an id to know it by.
    #[error("there is no event id")]
    Id,
}

impl Refusal {
    pub(super) fn status(self) -> StatusCode {
        match self {
            Self::Signature | Self::Time => StatusCode::UNAUTHORIZED,
            Self::Headers | Self::Id => StatusCode::BAD_REQUEST,
        }
    }
}

impl Verifier {
    /// With secrets as the sender shows them (`whsec_…` for Standard Webhooks), any number of them.
    ///
    /// # Errors
    /// Where there is none, or one cannot be read.
    pub fn new(scheme: Scheme, secrets: &[&str], tolerance: Duration) -> Result<Self, TargetError> {
        if secrets.is_empty() {
            return Err(TargetError("a webhook source needs its sender's secret".into()));
        }
        let mut verifier = Self { scheme, secrets: Vec::new(), standard: Vec::new(), tolerance };
        for secret in secrets {
            if verifier.scheme == Scheme::Standard {
                let webhook =
                    Webhook::new(secret).map_err(|_| TargetError("a secret is not whsec_ and base64".into()))?;
                verifier.standard.push(webhook);
            } else {
                verifier.secrets.push(secret.as_bytes().to_vec());
            }
        }
        Ok(verifier)
    }

    pub(super) fn from_target(target: &Target) -> Result<Self, TargetError> {
        let header = |name: &str, default: &str| target.setting(name).unwrap_or(default).to_ascii_lowercase();
        let scheme = match target.setting("scheme").unwrap_or("standard") {
            "standard" => Scheme::Standard,
            "stripe" => Scheme::Stripe,
            "github" => Scheme::Github,
            "hmac" => Scheme::Plain {
                signature: header("signature_header", "x-signature"),
                id: header("id_header", "x-event-id"),
            },
            _ => return Err(TargetError("scheme is standard, stripe, github or hmac".into())),
        };
        let variable = target.setting("secret_env").unwrap_or("PGONCE_WEBHOOK_SECRET");
        let texts = std::env::var(variable).unwrap_or_default();
        let tolerance = target.number("tolerance", 1..=86_400)?.unwrap_or(300);
        let secrets: Vec<&str> = texts.split_whitespace().collect();
        Self::new(scheme, &secrets, Duration::from_secs(tolerance))
            .map_err(|TargetError(reason)| TargetError(format!("{reason} (in {variable})")))
    }

    /// The sender's id of a request that is what it says.
    ///
    /// # Errors
    /// Why it is not.
    pub fn verify(&self, headers: &HeaderMap, body: &[u8]) -> Result<String, Refusal> {
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).ok_or(Refusal::Headers);
        let id = match &self.scheme {
            Scheme::Standard => {
                let (id, time) = (text("webhook-id")?, text("webhook-timestamp")?);
                text("webhook-signature")?;
                self.check_time(time)?;
                // The crate checks the time by its own limit as well, which is five minutes.
                if !self.standard.iter().any(|secret| secret.verify(body, headers).is_ok()) {
                    return Err(Refusal::Signature);
                }
                id.to_owned()
            }
            Scheme::Stripe => self.stripe(text("stripe-signature")?, body)?,
            Scheme::Github => {
                let signature = text("x-hub-signature-256")?.strip_prefix("sha256=").ok_or(Refusal::Headers)?;
                self.check(signature, &[body])?;
                text("x-github-delivery")?.to_owned()
            }
            Scheme::Plain { signature, id } => {
                let signature = text(signature)?;
                self.check(signature.strip_prefix("sha256=").unwrap_or(signature), &[body])?;
                text(id)?.to_owned()
            }
        };
        if (1..=255).contains(&id.len()) { Ok(id) } else { Err(Refusal::Id) }
    }

    fn stripe(&self, header: &str, body: &[u8]) -> Result<String, Refusal> {
        let parts: Vec<(&str, &str)> = header.split(',').filter_map(|part| part.trim().split_once('=')).collect();
        let time = parts.iter().find(|(name, _)| *name == "t").ok_or(Refusal::Headers)?.1;
        self.check_time(time)?;
        let mut signatures = parts.iter().filter(|(name, _)| *name == "v1").map(|(_, value)| *value);
        if !signatures.any(|signature| self.check(signature, &[time.as_bytes(), b".", body]).is_ok()) {
            return Err(Refusal::Signature);
        }
        let body: serde_json::Value = serde_json::from_slice(body).map_err(|_| Refusal::Id)?;
        body["id"].as_str().map(str::to_owned).ok_or(Refusal::Id)
    }

    /// In constant time, whatever it is compared with.
    fn check(&self, signature: &str, parts: &[&[u8]]) -> Result<(), Refusal> {
        let signature = from_hex(signature).ok_or(Refusal::Signature)?;
        let fits = |secret: &Vec<u8>| {
            let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(secret) else { return false };
            parts.iter().for_each(|part| mac.update(part));
            mac.verify_slice(&signature).is_ok()
        };
        if self.secrets.iter().any(fits) { Ok(()) } else { Err(Refusal::Signature) }
    }

    fn check_time(&self, seconds: &str) -> Result<(), Refusal> {
        let sent = seconds.parse::<u64>().map_err(|_| Refusal::Headers)?;
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
        if sent.abs_diff(now) <= self.tolerance.as_secs() { Ok(()) } else { Err(Refusal::Time) }
    }
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digits: Option<Vec<u8>> =
        text.chars().map(|c| c.to_digit(16).and_then(|digit| u8::try_from(digit).ok())).collect();
    let digits = digits.filter(|digits| digits.len() == 64)?;
    Some(digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, String)]) -> HeaderMap {
        pairs
            .iter()
            .map(|(name, value)| (name.parse::<axum::http::HeaderName>().unwrap(), value.parse().unwrap()))
            .collect()
    }

    fn hex(secret: &str, parts: &[&[u8]]) -> String {
        let mut mac = Hmac::<Sha256>::new_from_slice(secret.as_bytes()).unwrap();
        parts.iter().for_each(|part| mac.update(part));
        mac.finalize().into_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn now() -> i64 {
        i64::try_from(SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs()).unwrap()
    }

    const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    const TOLERANCE: Duration = Duration::from_secs(300);

    #[test]
    fn standard_webhooks() {
        let verifier = Verifier::new(Scheme::Standard, &["whsec_AAAA", SECRET], TOLERANCE).unwrap();
        let sign = |time: i64, body: &[u8]| Webhook::new(SECRET).unwrap().sign("msg_1", time, body).unwrap();
        let of = |time: i64, signature: String| {
            headers(&[
                ("webhook-id", "msg_1".into()),
                ("webhook-timestamp", time.to_string()),
                ("webhook-signature", signature),
            ])
        };
        let body = br#"{"a": 1}"#;
        assert_eq!(verifier.verify(&of(now(), sign(now(), body)), body).as_deref(), Ok("msg_1"));
        assert_eq!(verifier.verify(&of(now(), sign(now(), body)), b"{}"), Err(Refusal::Signature));
        assert_eq!(verifier.verify(&of(now(), "v1,AAAA".into()), body), Err(Refusal::Signature));
        for off in [-400, 400] {
            assert_eq!(verifier.verify(&of(now() + off, sign(now() + off, body)), body), Err(Refusal::Time));
        }
        assert_eq!(verifier.verify(&HeaderMap::new(), body), Err(Refusal::Headers));
        // An old signature moved to a new time.
        assert_eq!(verifier.verify(&of(now(), sign(now() - 100, body)), body), Err(Refusal::Signature));
    }

    #[test]
    fn stripe_and_github_and_plain() {
        let body = br#"{"id": "evt_1", "type": "charge"}"#;
        let stripe = Verifier::new(Scheme::Stripe, &["new", "old"], TOLERANCE).unwrap();
        let time = now().to_string();
        let signed = format!("t={time},v0=00,v1={}", hex("old", &[time.as_bytes(), b".", body]));
        assert_eq!(stripe.verify(&headers(&[("stripe-signature", signed.clone())]), body).as_deref(), Ok("evt_1"));
        assert_eq!(stripe.verify(&headers(&[("stripe-signature", signed)]), b"{}"), Err(Refusal::Signature));
        let old = (now() - 1000).to_string();
        let signed = format!("t={old},v1={}", hex("old", &[old.as_bytes(), b".", body]));
        assert_eq!(stripe.verify(&headers(&[("stripe-signature", signed)]), body), Err(Refusal::Time));
        let unnamed = format!("t={time},v1={}", hex("new", &[time.as_bytes(), b".", b"{}"]));
        assert_eq!(stripe.verify(&headers(&[("stripe-signature", unnamed)]), b"{}"), Err(Refusal::Id));

        let github = Verifier::new(Scheme::Github, &["s"], TOLERANCE).unwrap();
        let given =
            |signature: String| headers(&[("x-hub-signature-256", signature), ("x-github-delivery", "d1".into())]);
        assert_eq!(github.verify(&given(format!("sha256={}", hex("s", &[body]))), body).as_deref(), Ok("d1"));
        assert_eq!(github.verify(&given(format!("sha256={}", hex("x", &[body]))), body), Err(Refusal::Signature));
        assert_eq!(github.verify(&given("sha256=zz".into()), body), Err(Refusal::Signature));
        assert_eq!(github.verify(&given(String::new()), body), Err(Refusal::Headers));

        let scheme = Scheme::Plain { signature: "x-signature".into(), id: "x-event-id".into() };
        let plain = Verifier::new(scheme, &["s"], TOLERANCE).unwrap();
        let given = headers(&[("x-signature", hex("s", &[body])), ("x-event-id", "e1".into())]);
        assert_eq!(plain.verify(&given, body).as_deref(), Ok("e1"));
        assert!(Verifier::new(Scheme::Github, &[], TOLERANCE).is_err());
    }
}
