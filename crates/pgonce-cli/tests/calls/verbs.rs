//! The verbs: what people and programs see.

use crate::common::pgonce;
use crate::rig::Rig;

const DUMB: &str =
    r#"{"timeout": "500ms", "grace": "1s", "reconcile_after": "0s", "escalate_after": "0s", "backoff": "10ms"}"#;

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_call_is_listed_shown_and_settled() {
    let rig = Rig::new(false, DUMB).await;
    rig.charge(&["none", "error_before"]).await;
    let ran = rig.reconcile().args(&["--until-settled", "--wait-max", "100s"]).ran().await.done();
    assert!(ran.stderr.contains("ready sending and reconciling calls of every provider"), "{ran:?}");
    let url = rig.db.direct_url();
    let listed = pgonce(url, &["calls", "list", "--unknown", "--json"]).done().json();
    assert_eq!(listed.as_array().unwrap().len(), 1, "{listed}");
    assert_eq!((listed[0]["state"].as_str(), listed[0]["last_verdict"].as_str()), (Some("escalated"), Some("unclear")));
    let id = listed[0]["id"].as_str().unwrap();
    let shown = pgonce(url, &["calls", "show", id]).done();
    assert!(
        shown.stdout.contains("escalated") && shown.stdout.contains("500") && shown.stdout.contains("answer"),
        "{shown:?}"
    );
    let shown = pgonce(url, &["calls", "show", id, "--json"]).done().json();
    assert_eq!(shown["evidence"][0]["code"], 500);
    let settle = ["calls", "settle", id, "--verdict", "failed", "--reason", "their desk said so"];
    assert_eq!(pgonce(url, &settle[..5]).code, 2, "a reason is needed");
    pgonce(url, &settle).done();
    pgonce(url, &settle).failed();
    pgonce(url, &["calls", "show", "7f000001-0000-4000-8000-000000000000"]).failed();
    assert_eq!(pgonce(url, &["calls", "list", "--unknown", "--json"]).done().json(), serde_json::json!([]));
    assert_eq!(pgonce(url, &["calls", "list", "--json"]).done().json().as_array().unwrap().len(), 2);
    rig.judge(2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_private_address_is_not_called_unless_that_is_allowed() {
    let rig = Rig::new(false, DUMB).await;
    rig.charge(&["none"]).await;
    let ran =
        crate::rig::Run::new(rig.db.direct_url(), &["reconcile", "--until-settled", "--wait-max", "1s", "--json"]);
    let ran = ran.ran().await.failed();
    assert!(ran.stderr.contains("not settled"), "{ran:?}");
    assert!(rig.charged().is_empty());
    let note: String = rig.client.query_one("SELECT last_note FROM once.calls", &[]).await.unwrap().get(0);
    assert!(note.contains("private"), "{note}");
}

/// A secret comes from the environment, and no other variable does.
#[tokio::test(flavor = "multi_thread")]
async fn a_missing_secret_holds_the_call_back() {
    let rig =
        Rig::new(false, &DUMB.replacen('{', r#"{"header_env": {"Authorization": "PGONCE_CALL_BANK"}, "#, 1)).await;
    rig.charge(&["none"]).await;
    rig.reconcile().args(&["--until-settled", "--wait-max", "1s"]).ran().await.failed();
    assert!(rig.charged().is_empty());
    let note: String = rig.client.query_one("SELECT last_note FROM once.calls", &[]).await.unwrap().get(0);
    assert_eq!(note, "PGONCE_CALL_BANK is not set");
    let ran = rig.reconcile().args(&["--until-settled"]).env("PGONCE_CALL_BANK", "Bearer x").ran().await;
    ran.done();
    rig.judge(1).await;
}
