//! A new configuration under running requests.

use std::io::Write;
use std::sync::{Arc, Mutex};

use pgonce_testkit::eventually;

use crate::rig::{Rig, Service, send};

#[tokio::test(flavor = "multi_thread")]
async fn a_new_policy_takes_effect_and_what_runs_goes_on() {
    let rig = Rig::new("").await;
    let address = rig.gateway.address;
    let key = [("idempotency-key", "\"k\"")];
    let held = tokio::spawn(async move { send(address, "POST", "/hold", &key, b"a").await });
    rig.service.state.arrived.notified().await;
    assert_eq!(rig.send("POST", "/else", &[], "a").await.status, 200);
    rig.gateway.reload(rig.service.address, "key = \"required\"\nstatuses = { conflict = 418 }").await;
    eventually("a key is required", async || rig.send("POST", "/else", &[], "a").await.status == 400).await;
    assert_eq!(rig.post("/hold", "k", "a").await.status, 409, "it is still running");
    assert_eq!(rig.post("/hold", "k", "b").await.status, 418, "and told as the new configuration says");
    rig.service.state.gate.notify_one();
    let first = held.await.unwrap();
    assert_eq!(first.status, 201);
    assert_eq!(rig.post("/hold", "k", "a").await.body, first.body);
    assert_eq!(rig.effects("k").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn another_upstream_gets_what_comes_and_the_old_one_ends_what_it_has() {
    let rig = Rig::new("").await;
    let address = rig.gateway.address;
    let key = [("idempotency-key", "\"k\"")];
    let held = tokio::spawn(async move { send(address, "POST", "/hold", &key, b"a").await });
    rig.service.state.arrived.notified().await;
    let other = Service::start(rig.db.direct_url()).await;
    rig.gateway.reload(other.address, "").await;
    let mut before = rig.service.requests();
    eventually("the other one is asked", async || {
        assert_eq!(rig.send("GET", "/else", &[], "").await.status, 200);
        let now = rig.service.requests();
        std::mem::replace(&mut before, now) == now
    })
    .await;
    assert!(other.requests() > 0);
    assert_eq!(rig.post("/orders", "k-2", "a").await.status, 201);
    assert_eq!(rig.service.requests(), before, "nothing new comes to the old one");
    rig.service.state.gate.notify_one();
    let first = held.await.unwrap();
    assert_eq!(first.status, 201);
    assert!(rig.post("/hold", "k", "a").await.is_replay(), "its outcome was stored");
    assert_eq!(rig.effects("k").await, 1);
}

/// What is logged, by everybody in this process.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Log {
    fn says(&self, text: &str) -> bool {
        String::from_utf8_lossy(&self.0.lock().unwrap()).contains(text)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_with_a_mistake_changes_nothing_and_is_told() {
    let log = Log::default();
    let writer = log.clone();
    tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).init();
    let rig = Rig::new("stale = \"hold\"\nkey = \"required\"").await;
    let policy = async || {
        let sql = "SELECT row_to_json(rules)::text FROM once.scope AS rules WHERE scope = 'http'";
        rig.db.client().await.query_one(sql, &[]).await.unwrap().get::<_, String>(0)
    };
    let before = policy().await;
    // The second is right in every line; only the certificate is not there. Nothing of it may count.
    let limits = "[gateway.limits]\ninflight_max = 1\ntenant_inflight_max = 1\n";
    let no_file = format!("stale = \"rerun\"\n[gateway.tls]\ncert = \"/none.pem\"\nkey = \"/none.key\"\n{limits}");
    for (config, told) in [("key = \"sometimes\"", "line "), (no_file.as_str(), "/none.pem")] {
        rig.gateway.reload(rig.service.address, config).await;
        eventually("it is told", async || log.says(told)).await;
        assert!(log.says("the running configuration stays"));
        assert!(!log.says("sometimes"), "without the text of the file");
        assert_eq!(rig.send("POST", "/else", &[], "a").await.status, 400, "a key is required, as before");
        assert_eq!(policy().await, before, "the scope's rules are the old ones");
    }
    let address = rig.gateway.address;
    let held = tokio::spawn(async move { send(address, "POST", "/hold", &[("idempotency-key", "\"k\"")], b"a").await });
    rig.service.state.arrived.notified().await;
    assert_eq!(rig.post("/orders", "k-2", "a").await.status, 201, "and so are the limits");
    rig.service.state.gate.notify_one();
    assert_eq!(held.await.unwrap().status, 201);
    assert!(rig.metric("pgonce_gateway_reloads_total{result=\"refused\"}").await >= 2.0);
}

/// Two gateways that give one scope different rules would do so in turns: it is noticed.
#[tokio::test(flavor = "multi_thread")]
async fn rules_that_somebody_else_replaced_are_noticed() {
    let rig = Rig::new("lease = \"20s\"").await;
    assert_eq!(rig.metric("pgonce_gateway_scopes_replaced").await, 0.0);
    let rules = async || -> serde_json::Value {
        let sql = "SELECT once.scope_rules('http')";
        rig.db.client().await.query_one(sql, &[]).await.unwrap().get(0)
    };
    assert_eq!(rules().await["lease"], "00:00:20");
    let sql = "SELECT once.define_scope('http', '{\"mode\": \"leased\", \"lease\": \"5s\"}')";
    rig.db.client().await.execute(sql, &[]).await.unwrap();
    eventually("it is noticed", async || rig.metric("pgonce_gateway_scopes_replaced").await == 1.0).await;
    assert_eq!(rules().await["lease"], "00:00:05", "nothing is put back");
    // Its own again, by a reload: the file counts for whoever reads it last.
    rig.gateway.reload(rig.service.address, "lease = \"20s\"").await;
    eventually("it is settled", async || rig.metric("pgonce_gateway_scopes_replaced").await == 0.0).await;
    assert_eq!(rules().await["lease"], "00:00:20");
}
