//! Two tenants with the same key never meet, and whoever is nobody is told how to say who they are.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::json;

use crate::rig::{Reply, Rig};

#[tokio::test(flavor = "multi_thread")]
async fn the_same_key_of_two_tenants_is_two_intents() {
    let rig = Rig::new("[gateway.tenant]\nsource = \"header\"\nheader = \"x-tenant\"").await;
    let of = |tenant: &'static str| [("idempotency-key", "\"k\""), ("x-tenant", tenant)];
    let a = rig.send("POST", "/orders", &of("a"), "1").await;
    let b = rig.send("POST", "/orders", &of("b"), "1").await;
    assert_eq!((a.status, b.status), (201, 201));
    assert!(!b.is_replay());
    assert_ne!(a.body, b.body);
    // The shape of the answer does not tell whether another tenant has used a key, whatever the payload.
    let c = rig.send("POST", "/orders", &of("c"), "another payload").await;
    assert_eq!((c.status, c.is_replay()), (201, false));
    assert_eq!(rig.send("POST", "/orders", &of("a"), "1").await.body, a.body);
    assert_eq!(rig.send("POST", "/orders", &of("b"), "1").await.body, b.body);
    assert_eq!(rig.effects("k").await, 3);
    let names = |reply: &Reply| {
        let mut names: Vec<String> = reply.headers.iter().map(|(name, _)| name.clone()).collect();
        names.sort();
        names
    };
    assert_eq!(names(&a), names(&b));
    assert_eq!(names(&a), names(&c));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_without_its_tenant_is_refused() {
    let rig = Rig::new("[gateway.tenant]\nsource = \"header\"\nheader = \"x-tenant\"").await;
    let refused = rig.post("/orders", "k", "a").await;
    assert_eq!((refused.status, refused.problem().as_str()), (401, "tenant-missing"));
    assert_eq!(rig.service.requests(), 0);
    assert_eq!(rig.states("k").await, Vec::<String>::new());
}

/// One tenant's running request does not make another wait.
#[tokio::test(flavor = "multi_thread")]
async fn another_tenants_running_request_is_not_seen() {
    let rig = Rig::new("[gateway.tenant]\nsource = \"header\"\nheader = \"x-tenant\"").await;
    let address = rig.gateway.address;
    let first = tokio::spawn(async move {
        crate::rig::send(address, "POST", "/hold", &[("idempotency-key", "\"k\""), ("x-tenant", "a")], b"1").await
    });
    rig.service.state.arrived.notified().await;
    let b = rig.send("POST", "/orders", &[("idempotency-key", "\"k\""), ("x-tenant", "b")], "1").await;
    assert_eq!(b.status, 201);
    rig.service.state.gate.notify_one();
    assert_eq!(first.await.unwrap().status, 201);
}

/// All of a refusal but the time.
fn shape(reply: &Reply) -> (u16, Vec<(String, Vec<u8>)>, bytes::Bytes) {
    let headers = reply.headers.iter().filter(|(name, _)| name != "date").cloned().collect();
    (reply.status, headers, reply.body.clone())
}

/// What cargo tells every test: a secret that is in the environment already.
const SECRET: &str = "CARGO_PKG_DESCRIPTION";

fn token(claims: &serde_json::Value, secret: &[u8]) -> String {
    let key = jsonwebtoken::EncodingKey::from_secret(secret);
    format!("Bearer {}", jsonwebtoken::encode(&jsonwebtoken::Header::default(), claims, &key).unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_names_the_tenant_or_is_refused() {
    let secret = std::env::var(SECRET).unwrap().into_bytes();
    let config = format!(
        "[gateway.tenant]\nsource = \"jwt\"\nclaim = \"org.id\"\nkeys = [{{ algorithm = \"HS256\", env = \"{SECRET}\" }}]"
    );
    let rig = Rig::new(&config).await;
    let send = async |authorization: &str| {
        let headers = [("idempotency-key", "\"k\""), ("authorization", authorization)];
        rig.send("POST", "/orders", if authorization.is_empty() { &headers[..1] } else { &headers }, "a").await
    };
    let ends = |seconds: i64| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs() as i64;
        now + seconds
    };
    let claims = |org: &str, seconds: i64| json!({ "org": { "id": org }, "exp": ends(seconds) });
    let first = send(&token(&claims("acme", 60), &secret)).await;
    assert_eq!(first.status, 201, "{first:?}");
    assert_eq!(rig.service.header("pgonce-tenant").unwrap(), "acme");
    assert!(send(&token(&claims("acme", 90), &secret)).await.is_replay(), "another token, the same tenant");
    assert!(!send(&token(&claims("rival", 60), &secret)).await.is_replay());
    let mut refusals = Vec::new();
    for bad in [
        token(&claims("acme", 60), b"another secret of more than 32 bytes"),
        token(&claims("acme", -3600), &secret),
        token(&json!({ "sub": "acme", "exp": ends(60) }), &secret),
        token(&json!({ "org": { "id": "acme" } }), &secret),
        "Bearer garbage".to_owned(),
    ] {
        let refused = send(&bad).await;
        assert_eq!((refused.status, refused.problem().as_str()), (401, "tenant-refused"), "{refused:?}");
        assert_eq!(refused.header("www-authenticate"), Some("Bearer"));
        refusals.push(shape(&refused));
    }
    refusals.dedup();
    assert_eq!(refusals.len(), 1, "nobody learns what was wrong with a token");
    let missing = send("").await;
    assert_eq!((missing.status, missing.problem().as_str()), (401, "tenant-missing"));
    assert_eq!(missing.header("www-authenticate"), Some("Bearer"));
    assert_eq!((rig.service.requests(), rig.effects("k").await), (2, 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_is_a_tenant_and_nobody_learns_who_is_one() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("users");
    let line = |user: &str, password: &str| format!("{user}:{}\n", bcrypt::hash(password, 4).unwrap());
    std::fs::write(&file, format!("# shops\n{}{}", line("acme", "open sesame"), line("rival", "swordfish"))).unwrap();
    let config = format!("[gateway.tenant]\nsource = \"basic\"\nusers_file = \"{}\"", file.display());
    let rig = Rig::new(&config).await;
    let send = async |pair: &str| {
        let basic = format!("Basic {}", STANDARD.encode(pair));
        rig.send("POST", "/orders", &[("idempotency-key", "\"k\""), ("authorization", &basic)], "a").await
    };
    assert_eq!(send("acme:open sesame").await.status, 201);
    assert_eq!(rig.service.header("pgonce-tenant").unwrap(), "acme");
    assert!(send("acme:open sesame").await.is_replay());
    assert!(!send("rival:swordfish").await.is_replay());
    let wrong = send("acme:swordfish").await;
    assert_eq!((wrong.status, wrong.problem().as_str()), (401, "tenant-refused"));
    assert_eq!(wrong.header("www-authenticate"), Some("Basic realm=\"pgonce\", charset=\"UTF-8\""));
    for other in ["nobody:swordfish", "acme:", ":swordfish", "nobody:", "acme", "# shops:x"] {
        assert_eq!(shape(&send(other).await), shape(&wrong), "{other}: byte for byte the same");
    }
    let missing = rig.post("/orders", "k", "a").await;
    assert_eq!((missing.status, missing.problem().as_str()), (401, "tenant-missing"));
    assert!(missing.header("www-authenticate").unwrap().starts_with("Basic "));
    assert_eq!(rig.service.requests(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fixed_tenant_is_everybodys() {
    let rig = Rig::new("[gateway.tenant]\nsource = \"fixed\"\nname = \"acme\"").await;
    let first = rig.send("POST", "/orders", &[("idempotency-key", "\"k\""), ("pgonce-tenant", "rival")], "a").await;
    assert_eq!(first.status, 201);
    assert_eq!(rig.service.header("pgonce-tenant").unwrap(), "acme", "whatever a client says");
    let rows = rig.db.client().await.query("SELECT tenant FROM once.intents WHERE key = 'k'", &[]).await.unwrap();
    assert_eq!(rows.iter().map(|row| row.get::<_, String>(0)).collect::<Vec<_>>(), ["acme"]);
}
