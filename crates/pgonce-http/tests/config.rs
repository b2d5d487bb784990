//! What the configuration says of a scope is what the database takes.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop, loudly")]

use pgonce_http::gateway::config::{ConfigSource, Overrides, Stale, upstream_url};
use pgonce_testkit::TestDb;
use serde_json::Value;

#[tokio::test]
async fn the_database_takes_every_scope() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let probe =
        "CREATE SCHEMA shop; CREATE FUNCTION shop.was_paid(key text) RETURNS boolean LANGUAGE sql AS 'SELECT true';
        GRANT USAGE ON SCHEMA shop TO PUBLIC";
    client.batch_execute(probe).await.unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pgonce.toml");
    let text = r#"
[[gateway.route]]
path = "/paid"
scope = "paid"
stale = "probe"
probe = "shop.was_paid"
retention = "permanent"
tombstone = "none"
lease = "10ms"
attempts_max = 1000000
key_pattern = "^[a-z]{1,9}$"
response = "reference"
[[gateway.route]]
path = "/asked"
scope = "asked"
stale = "probe"
probe = "/by-key/{key}"
retention = "none"
tombstone = "permanent"
lease = "1d"
response = "status"
[[gateway.route]]
path = "/again"
scope = "again"
stale = "rerun"
retention = "36000d"
tombstone = "1ms"
response = "error"
"#;
    std::fs::write(&path, text).unwrap();
    let listen = "127.0.0.1:1".parse().ok();
    let overrides = Overrides { listen, upstream: upstream_url("http://h").ok(), ..Overrides::default() };
    let mut source = ConfigSource { path: Some(path), overrides };
    for stale in [None, Some(Stale::Hold), Some(Stale::Rerun)] {
        source.overrides.stale = stale;
        let policies = source.load().unwrap().scope_policies();
        assert_eq!(
            policies.iter().map(|(scope, _)| scope.as_str()).collect::<Vec<_>>(),
            ["paid", "asked", "again", "http"]
        );
        for (scope, policy) in policies {
            let defined = client.execute("SELECT once.define_scope($1, $2)", &[&scope, &policy]).await;
            defined.unwrap_or_else(|error| panic!("{scope}: {error:?}"));
        }
        let sql = "SELECT jsonb_object_agg(scope, stale) FROM once.scope WHERE scope <> ''";
        let stored: Value = client.query_one(sql, &[]).await.unwrap().get(0);
        let expected = match stale {
            None => serde_json::json!({"paid": "probe", "asked": "hold", "again": "rerun", "http": "hold"}),
            Some(all) => ["paid", "asked", "again", "http"].into_iter().map(|scope| (scope, all.as_str())).collect(),
        };
        assert_eq!(stored, expected);
    }
}
