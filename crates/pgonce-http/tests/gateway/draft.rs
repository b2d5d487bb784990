//! The rules of the Idempotency-Key draft (-07), from outside.

use crate::rig::Rig;

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_gets_the_same_bytes_and_no_second_effect() {
    let rig = Rig::new("").await;
    let first = rig.post("/orders", "k-1", r#"{"sku":1}"#).await;
    assert_eq!((first.status, first.is_replay()), (201, false), "{first:?}");
    for _ in 0..3 {
        let again = rig.post("/orders", "k-1", r#"{"sku":1}"#).await;
        assert_eq!((again.status, again.is_replay()), (201, true));
        assert_eq!(again.body, first.body);
        assert_eq!(again.header("location"), first.header("location"));
        assert_eq!(again.all("link"), first.all("link"), "duplicate headers, in order");
    }
    assert_eq!(rig.effects("k-1").await, 1);
    assert_eq!(rig.service.requests(), 1);
    assert!(first.header("idempotency-expires").is_some(), "expiry is published");
}

#[tokio::test(flavor = "multi_thread")]
async fn another_payload_under_the_same_key_is_422_and_sees_nothing() {
    let rig = Rig::new("").await;
    let first = rig.post("/orders", "k", "a").await;
    for (path, body) in [("/orders", "b"), ("/orders?x=1", "a"), ("/orders/2", "a")] {
        let other = rig.post(path, "k", body).await;
        assert_eq!((other.status, other.problem().as_str()), (422, "conflict"), "{path} {body}");
        assert_eq!(other.json()["effect"], "not_done");
        assert!(!String::from_utf8_lossy(&other.body).contains("order"), "{other:?}");
        assert_eq!(other.header("location"), None);
    }
    let patched = rig.send("PATCH", "/orders", &[("idempotency-key", "\"k\"")], "a").await;
    assert_eq!(patched.status, 422, "the method is part of it");
    assert_eq!(rig.post("/orders", "k", "a").await.body, first.body);
    assert_eq!(rig.effects("k").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_running_request_is_409_with_retry_after_and_422_wins() {
    let rig = Rig::new("").await;
    let address = rig.gateway.address;
    let key = [("idempotency-key", "\"k\"")];
    let first = tokio::spawn(async move { crate::rig::send(address, "POST", "/hold", &key, b"a").await });
    rig.service.state.arrived.notified().await;
    let again = rig.post("/hold", "k", "a").await;
    assert_eq!((again.status, again.problem().as_str()), (409, "in-progress"));
    assert!(again.header("retry-after").unwrap().parse::<u32>().unwrap() >= 1);
    let other = rig.post("/hold", "k", "b").await;
    assert_eq!((other.status, other.problem().as_str()), (422, "conflict"));
    rig.service.state.gate.notify_one();
    let first = first.await.unwrap();
    assert_eq!(first.status, 201);
    assert_eq!(rig.post("/hold", "k", "a").await.body, first.body);
    assert_eq!(rig.effects("k").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_key_is_400_where_it_is_required_and_passes_where_not() {
    let rig =
        Rig::new("[[gateway.route]]\npath = \"/orders/*\"\nkey = \"required\"\n[[gateway.route]]\npath = \"*\"").await;
    let missing = rig.send("POST", "/orders", &[], "a").await;
    assert_eq!((missing.status, missing.problem().as_str()), (400, "key-missing"));
    let link = missing.header("link").unwrap();
    assert_eq!(link, "</_pgonce/problems/key-missing>; rel=\"help\"");
    let help = rig.send("GET", "/_pgonce/problems/key-missing", &[], "").await.json();
    assert_eq!((&help["type"], help["effect"].as_str()), (&missing.json()["type"], Some("not_done")));
    assert!(help["what_to_do"].as_str().unwrap().contains("with a key"), "{help}");
    assert_eq!(rig.send("GET", "/_pgonce/problems/nothing", &[], "").await.status, 404);
    let all = rig.send("GET", "/_pgonce/problems/", &[], "").await.json();
    assert_eq!(all["problems"].as_array().unwrap().len(), pgonce_http::problem::SLUGS.len());
    assert_eq!(rig.service.requests(), 0);
    assert_eq!(rig.send("POST", "/else", &[], "a").await.status, 200);
    assert_eq!(rig.send("GET", "/orders", &[], "").await.status, 201, "other methods pass");
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_keys_are_400_and_leave_nothing() {
    let rig = Rig::new("syntax = \"strict\"\nkey = \"required\"").await;
    let long = format!("\"{}\"", "x".repeat(256));
    for key in ["bare", "\"open", "\"a\" b", "\"\"", "\"a\", \"b\"", "123", "?1", ":YQ==:", "\"a\\n\"", &long] {
        let refused = rig.send("POST", "/orders", &[("idempotency-key", key)], "a").await;
        assert_eq!((refused.status, refused.problem().as_str()), (400, "key-malformed"), "{key}");
        assert!(!String::from_utf8_lossy(&refused.body).contains(key.trim_matches('"').trim()) || key.len() < 4);
    }
    let twice = rig.send("POST", "/orders", &[("idempotency-key", "\"a\""), ("idempotency-key", "\"a\"")], "a").await;
    assert_eq!(twice.status, 400);
    assert_eq!(rig.service.requests(), 0);
    let rows: i64 = rig.db.client().await.query_one("SELECT count(*) FROM once.intents", &[]).await.unwrap().get(0);
    assert_eq!(rows, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn lenient_mode_takes_a_bare_key_for_the_same() {
    let rig = Rig::new("").await;
    let uuid = "8e03978e-40d5-43dd-bc93-6894a57f9324";
    let quoted = rig.post("/orders", uuid, "a").await;
    let bare = rig.send("POST", "/orders", &[("idempotency-key", uuid)], "a").await;
    assert!(bare.is_replay());
    assert_eq!(bare.body, quoted.body);
    let escaped = rig.send("POST", "/orders", &[("idempotency-key", r#""a\"b""#)], "a").await;
    assert_eq!(escaped.status, 201);
    assert_eq!(rig.states(r#"a"b"#).await, ["succeeded"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn client_errors_are_outcomes_and_not_now_is_not() {
    let rig = Rig::new("").await;
    for status in [400, 404, 422, 402] {
        let key = format!("k-{status}");
        let path = format!("/status/{status}");
        let first = rig.post(&path, &key, "a").await;
        assert_eq!(first.status, status);
        let again = rig.post(&path, &key, "a").await;
        assert_eq!((again.status, again.is_replay(), &again.body), (status, true, &first.body));
        assert_eq!(rig.effects(&key).await, 1);
    }
    for status in [408, 425, 429] {
        let key = format!("k-{status}");
        let path = format!("/status/{status}");
        assert_eq!(rig.post(&path, &key, "a").await.status, status);
        let again = rig.post(&path, &key, "a").await;
        assert!(!again.is_replay(), "it runs again");
        assert_eq!(rig.effects(&key).await, 2);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn statuses_can_be_mapped() {
    let rig = Rig::new("statuses = { conflict = 400, in-progress = 425 }").await;
    rig.post("/orders", "k", "a").await;
    let other = rig.post("/orders", "k", "b").await;
    assert_eq!((other.status, other.problem().as_str()), (400, "conflict"));
    assert_eq!(other.json()["status"], 400);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_upstream_learns_the_claim_and_cannot_be_told_one_by_a_client() {
    let rig = Rig::new("").await;
    let forged = [
        ("idempotency-key", "\"k\""),
        ("pgonce-claim", "00000000-0000-0000-0000-000000000000"),
        ("pgonce-tenant", "somebody"),
        ("pgonce-scope", "elsewhere"),
        ("x-forwarded-for", "10.1.2.3"),
        ("connection", "x-secret-hop"),
        ("x-secret-hop", "1"),
    ];
    rig.send("POST", "/orders", &forged, "a").await;
    let claim = rig.service.header("pgonce-claim").unwrap();
    assert_ne!(claim, "00000000-0000-0000-0000-000000000000");
    let sql = "SELECT claim_id::text, scope, tenant FROM once.intents WHERE key = 'k'";
    let row = rig.db.client().await.query_one(sql, &[]).await.unwrap();
    assert_eq!(row.get::<_, String>(0), claim);
    assert_eq!(rig.service.header("pgonce-scope").unwrap(), row.get::<_, String>(1));
    assert_eq!(rig.service.header("pgonce-tenant").unwrap(), "");
    assert_eq!(rig.service.header("pgonce-key").unwrap(), "k");
    assert_eq!(rig.service.header("idempotency-key").unwrap(), "\"k\"");
    assert_eq!(rig.service.header("x-forwarded-for").unwrap(), "127.0.0.1");
    assert_eq!(rig.service.header("x-secret-hop"), None);
    rig.send("GET", "/else", &forged[1..4], "").await;
    assert_eq!(rig.service.header("pgonce-claim"), None, "not on unguarded requests either");
}
