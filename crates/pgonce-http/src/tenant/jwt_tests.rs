#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop, loudly")]

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::HeaderValue;
use jsonwebtoken::{EncodingKey, Header, get_current_timestamp};
use serde_json::json;

use super::*;
use crate::tenant::{PeerIdentity, TenantSource};

const SECRET: &[u8] = b"a secret of sixty-four bytes, which is enough for HS512 as well.";

/// Signed with keys that are thrown away: only what verifies them is kept.
const SIGNED: [(JwtAlgorithm, &str, &str); 4] = [
    (JwtAlgorithm::RS256, include_str!("testdata/rsa.pem"), include_str!("testdata/RS256.jwt")),
    (JwtAlgorithm::PS256, include_str!("testdata/rsa.pem"), include_str!("testdata/PS256.jwt")),
    (JwtAlgorithm::ES256, include_str!("testdata/ec.pem"), include_str!("testdata/ES256.jwt")),
    (JwtAlgorithm::EdDSA, include_str!("testdata/ed.pem"), include_str!("testdata/EdDSA.jwt")),
];

fn hs256() -> JwtSettings {
    JwtSettings::new("org.id", JwtAlgorithm::HS256, SECRET)
}

fn sign(algorithm: Algorithm, secret: &[u8], claims: &Value) -> String {
    jsonwebtoken::encode(&Header::new(algorithm), claims, &EncodingKey::from_secret(secret)).unwrap()
}

/// Good claims, in which some are replaced; null takes one away.
fn claims(changes: Value) -> Value {
    let mut claims = json!({"exp": get_current_timestamp() + 600, "org": {"id": "acme"}});
    for (name, value) in changes.as_object().unwrap() {
        match value {
            Value::Null => drop(claims.as_object_mut().unwrap().remove(name)),
            value => claims[name] = value.clone(),
        }
    }
    claims
}

async fn sent(settings: &JwtSettings, header: HeaderName, value: &str) -> Result<String, TenantError> {
    let source = TenantSource::Jwt(Arc::new(Jwt::new(settings.clone()).unwrap()));
    let headers = HeaderMap::from_iter([(header, HeaderValue::from_str(value).unwrap())]);
    source.tenant(&headers, &PeerIdentity::default()).await
}

async fn of(settings: &JwtSettings, token: &str) -> Result<String, TenantError> {
    sent(settings, AUTHORIZATION, &format!("Bearer {}", token.trim())).await
}

/// What a token with these claims, rightly signed, gets.
async fn with(settings: &JwtSettings, changes: Value) -> Result<String, TenantError> {
    of(settings, &sign(Algorithm::HS256, SECRET, &claims(changes))).await
}

#[tokio::test]
async fn every_algorithm_verifies_its_own_tokens_and_no_others() {
    let secrets = [Algorithm::HS256, Algorithm::HS384, Algorithm::HS512];
    let settings = [JwtAlgorithm::HS256, JwtAlgorithm::HS384, JwtAlgorithm::HS512];
    let mut all: Vec<(JwtSettings, String)> = secrets
        .into_iter()
        .zip(settings)
        .map(|(known, ours)| (JwtSettings::new("org.id", ours, SECRET), sign(known, SECRET, &claims(json!({})))))
        .collect();
    all.extend(SIGNED.map(|(ours, key, token)| (JwtSettings::new("org.id", ours, key), token.to_owned())));
    for (at, (settings, _)) in all.iter().enumerate() {
        for (from, (_, token)) in all.iter().enumerate() {
            let expected = if at == from { Ok("acme".to_owned()) } else { Err(TenantError::Refused) };
            assert_eq!(of(settings, token).await, expected, "{:?}, token {from}", settings.keys);
        }
    }
}

#[tokio::test]
async fn a_public_key_is_never_a_secret() {
    for (ours, key, _) in SIGNED {
        let settings = JwtSettings::new("org.id", ours, key);
        // What an attacker has: the public key, as bytes, and every algorithm that takes a secret.
        for known in [Algorithm::HS256, Algorithm::HS384, Algorithm::HS512] {
            for secret in [key.as_bytes(), key.trim().as_bytes()] {
                let forged = sign(known, secret, &claims(json!({})));
                assert_eq!(of(&settings, &forged).await, Err(TenantError::Refused), "{ours:?} {known:?}");
            }
        }
        assert!(Jwt::new(JwtSettings::new("org.id", JwtAlgorithm::HS256, key)).is_err(), "nor by configuration");
    }
    // With both kinds configured, each key is still for its own algorithm.
    let mut both = hs256();
    both.keys.push(JwtKey { algorithm: JwtAlgorithm::RS256, key: SIGNED[0].1.into(), id: None });
    assert_eq!(of(&both, SIGNED[0].2).await.unwrap(), "acme");
    assert_eq!(with(&both, json!({})).await.unwrap(), "acme");
    let forged = sign(Algorithm::HS256, SIGNED[0].1.as_bytes(), &claims(json!({})));
    assert_eq!(of(&both, &forged).await, Err(TenantError::Refused));
}

#[tokio::test]
async fn no_signature_is_no_signature() {
    let payload = URL_SAFE_NO_PAD.encode(claims(json!({})).to_string());
    for alg in ["none", "None", "NONE", "nOnE", ""] {
        let header = URL_SAFE_NO_PAD.encode(json!({"alg": alg, "typ": "JWT"}).to_string());
        for token in [format!("{header}.{payload}."), format!("{header}.{payload}"), format!("{header}.{payload}.AAAA")]
        {
            assert_eq!(of(&hs256(), &token).await, Err(TenantError::Refused), "{alg:?}");
        }
    }
    let token = sign(Algorithm::HS256, SECRET, &claims(json!({})));
    let unsigned = &token[..=token.rfind('.').unwrap()];
    assert_eq!(of(&hs256(), unsigned).await, Err(TenantError::Refused));
}

#[tokio::test]
async fn any_changed_character_is_refused() {
    let mut tokens = vec![(hs256(), sign(Algorithm::HS256, SECRET, &claims(json!({}))))];
    tokens.extend(SIGNED.map(|(ours, key, token)| (JwtSettings::new("org.id", ours, key), token.trim().to_owned())));
    for (settings, token) in tokens {
        let jwt = Jwt::new(settings).unwrap();
        // Every character would take minutes with the slow algorithms, unoptimised.
        for at in (0..token.len()).step_by(token.len() / 40) {
            let mut tampered = token.clone().into_bytes();
            tampered[at] = if tampered[at] == b'A' { b'B' } else { b'A' };
            assert!(jwt.verified(std::str::from_utf8(&tampered).unwrap()).is_err(), "character {at}");
        }
        let (start, signature) = token.rsplit_once('.').unwrap();
        let (header, _) = start.split_once('.').unwrap();
        let rival = URL_SAFE_NO_PAD.encode(claims(json!({"org": {"id": "rival"}})).to_string());
        assert!(jwt.verified(&format!("{header}.{rival}.{signature}")).is_err());
        assert_eq!(jwt.verified(&token).unwrap(), "acme");
    }
    let another = sign(Algorithm::HS256, &[7; 64], &claims(json!({})));
    assert_eq!(of(&hs256(), &another).await, Err(TenantError::Refused));
}

#[tokio::test]
async fn times_are_required_and_checked() {
    let now = get_current_timestamp();
    assert_eq!(with(&hs256(), json!({"exp": now - 30})).await.unwrap(), "acme", "within the leeway");
    assert_eq!(with(&hs256(), json!({"nbf": now + 30})).await.unwrap(), "acme", "within the leeway");
    for wrong in [
        json!({"exp": now - 90}),
        json!({"exp": 0}),
        json!({"exp": null}),
        json!({"exp": "4102444800"}),
        json!({"exp": -1}),
        json!({"exp": []}),
        json!({"nbf": now + 90}),
        json!({"nbf": "soon"}),
    ] {
        assert_eq!(with(&hs256(), wrong.clone()).await, Err(TenantError::Refused), "{wrong}");
    }
}

#[tokio::test]
async fn issuer_and_audience_are_required_where_configured() {
    let settings = JwtSettings { issuer: Some("https://id.example".into()), audience: Some("shop".into()), ..hs256() };
    let good = json!({"iss": "https://id.example", "aud": ["other", "shop"]});
    assert_eq!(with(&settings, good.clone()).await.unwrap(), "acme");
    for (name, value) in [
        ("iss", json!("https://evil.example")),
        ("iss", Value::Null),
        ("iss", json!(7)),
        ("aud", json!("bank")),
        ("aud", json!(["bank"])),
        ("aud", json!([])),
        ("aud", Value::Null),
    ] {
        let mut wrong = good.clone();
        wrong[name] = value;
        assert_eq!(with(&settings, wrong.clone()).await, Err(TenantError::Refused), "{wrong}");
    }
    assert_eq!(with(&hs256(), json!({"aud": "bank"})).await, Err(TenantError::Refused), "made for somebody else");
}

#[tokio::test]
async fn the_claim_is_a_string_or_an_integer() {
    let get = async |claim: &str, changes: Value| with(&JwtSettings { claim: claim.into(), ..hs256() }, changes).await;
    assert_eq!(get("sub", json!({"sub": "acme"})).await.unwrap(), "acme");
    assert_eq!(get("sub", json!({"sub": 42})).await.unwrap(), "42");
    assert_eq!(get("sub", json!({"sub": u64::MAX})).await.unwrap(), u64::MAX.to_string());
    assert_eq!(get("a.b.c", json!({"a": {"b": {"c": "deep"}}})).await.unwrap(), "deep");
    assert_eq!(get("https://shop.example/org", json!({"https://shop.example/org": "acme"})).await.unwrap(), "acme");
    assert_eq!(get("a.b", json!({"a.b": "whole", "a": {"b": "nested"}})).await.unwrap(), "whole");
    for wrong in [
        json!(null),
        json!(4.5),
        json!(true),
        json!(["acme"]),
        json!({"id": "acme"}),
        json!("a\nb"),
        json!("x".repeat(256)),
    ] {
        assert_eq!(get("t", json!({"t": wrong})).await, Err(TenantError::Refused), "{wrong}");
    }
    assert_eq!(get("a.b", json!({"a": "text"})).await, Err(TenantError::Refused));
    assert_eq!(get("sub", json!({"sub": ""})).await, Err(TenantError::Missing));
}

#[tokio::test]
async fn where_the_token_is() {
    let good = sign(Algorithm::HS256, SECRET, &claims(json!({})));
    assert_eq!(sent(&hs256(), AUTHORIZATION, &format!("bearer  {good}")).await.unwrap(), "acme");
    assert_eq!(sent(&hs256(), AUTHORIZATION, &good).await, Err(TenantError::Missing), "no scheme");
    assert_eq!(sent(&hs256(), AUTHORIZATION, "Basic YTpi").await, Err(TenantError::Missing));
    assert_eq!(sent(&hs256(), AUTHORIZATION, "Bearer ").await, Err(TenantError::Missing));
    assert_eq!(sent(&hs256(), AUTHORIZATION, "Bearer x").await, Err(TenantError::Refused));
    assert_eq!(
        sent(&hs256(), AUTHORIZATION, &format!("Bearer {good}, Bearer {good}")).await,
        Err(TenantError::Refused)
    );
    assert_eq!(of(&hs256(), &format!("{good}{}", "A".repeat(TOKEN_BYTES_MAX))).await, Err(TenantError::Refused));
    let name = HeaderName::from_static("x-assertion");
    let elsewhere = JwtSettings { header: name.clone(), ..hs256() };
    assert_eq!(sent(&elsewhere, name.clone(), &good).await.unwrap(), "acme");
    assert_eq!(sent(&elsewhere, name, &format!("Bearer {good}")).await.unwrap(), "acme");
    assert_eq!(sent(&elsewhere, AUTHORIZATION, &format!("Bearer {good}")).await, Err(TenantError::Missing));
}

#[tokio::test]
async fn keys_rotate_by_name_and_by_trying() {
    let token = |secret: &[u8], kid: Option<&str>| {
        let header = Header { kid: kid.map(str::to_owned), ..Header::new(Algorithm::HS256) };
        jsonwebtoken::encode(&header, &claims(json!({})), &EncodingKey::from_secret(secret)).unwrap()
    };
    let key =
        |secret: [u8; 32], id: &str| JwtKey { algorithm: JwtAlgorithm::HS256, key: secret.into(), id: Some(id.into()) };
    let settings = JwtSettings { keys: vec![key([1; 32], "old"), key([2; 32], "new")], ..hs256() };
    assert_eq!(of(&settings, &token(&[1; 32], None)).await.unwrap(), "acme");
    assert_eq!(of(&settings, &token(&[2; 32], None)).await.unwrap(), "acme");
    assert_eq!(of(&settings, &token(&[2; 32], Some("new"))).await.unwrap(), "acme");
    assert_eq!(of(&settings, &token(&[2; 32], Some("old"))).await, Err(TenantError::Refused), "another's name");
    assert_eq!(of(&settings, &token(&[3; 32], None)).await, Err(TenantError::Refused));
    let critical = Header { crit: Some(vec!["b64".into()]), ..Header::new(Algorithm::HS256) };
    let critical = jsonwebtoken::encode(&critical, &claims(json!({})), &EncodingKey::from_secret(&[1; 32])).unwrap();
    assert_eq!(of(&settings, &critical).await, Err(TenantError::Refused), "what is critical and unknown is refused");
}

#[test]
fn weak_or_wrong_keys_are_told_at_the_start() {
    let error = |ours, key: &[u8]| Jwt::new(JwtSettings::new("sub", ours, key)).unwrap_err().to_string();
    assert!(error(JwtAlgorithm::HS256, &[1; 31]).contains("32 bytes"));
    assert!(error(JwtAlgorithm::HS384, &[1; 47]).contains("48 bytes"));
    assert!(error(JwtAlgorithm::HS512, &[1; 63]).contains("64 bytes"));
    assert!(error(JwtAlgorithm::RS256, SIGNED[2].1.as_bytes()).contains("RS256"), "an elliptic key");
    assert!(error(JwtAlgorithm::EdDSA, SIGNED[0].1.as_bytes()).contains("EdDSA"), "an RSA key");
    assert!(error(JwtAlgorithm::ES256, b"a secret").contains("ES256"));
    assert!(error(JwtAlgorithm::ES256, b"-----BEGIN PRIVATE KEY-----").contains("private"));
    assert!(Jwt::new(JwtSettings { keys: vec![], ..hs256() }).is_err());
    assert!(Jwt::new(JwtSettings { claim: String::new(), ..hs256() }).is_err());
    let shown = format!("{:?}", (hs256(), Jwt::new(hs256()).unwrap()));
    assert!(!shown.contains("sixty-four") && !shown.contains("97, 32, 115"), "{shown}");
}
