//! Stored bodies that only the gateway can read.

use std::path::{Path, PathBuf};

use pgonce_testkit::{RedisServer, eventually};
use redis::AsyncCommands as _;

use crate::rig::{Gateway, Rig, send};

/// Key files, and the section that names them; nothing is cached, so that PostgreSQL is asked.
struct Keys(tempfile::TempDir);

const NO_CACHE: &str = "[gateway.cache]\nmemory_bytes = 0\n";

impl Keys {
    fn new() -> Self {
        let keys = Self(tempfile::tempdir().unwrap());
        for (id, byte) in [("a", "ab"), ("b", "cd")] {
            std::fs::write(keys.file(id), byte.repeat(32)).unwrap();
        }
        keys
    }

    fn file(&self, id: &str) -> PathBuf {
        self.0.path().join(id)
    }

    fn section(&self, current: &str, ids: &[&str]) -> String {
        let key = |id: &&str| format!("{{ id = \"{id}\", file = \"{}\" }}", Path::display(&self.file(id)));
        let keys: Vec<String> = ids.iter().map(key).collect();
        format!("[gateway.seal]\ncurrent = \"{current}\"\nkeys = [{}]\n", keys.join(", "))
    }
}

/// The body as the row has it, and the key that sealed it.
async fn stored(rig: &Rig, key: &str) -> (Vec<u8>, String) {
    let sql = "SELECT response_body, response_headers FROM once.intent WHERE key = $1";
    let row = rig.db.client().await.query_one(sql, &[&key]).await.unwrap();
    let headers: serde_json::Value = row.get(1);
    let sealed = headers.as_array().unwrap().iter().find(|pair| pair[0] == ":sealed");
    (row.get(0), sealed.map(|pair| pair[1].as_str().unwrap().to_owned()).unwrap_or_default())
}

fn shows(bytes: &[u8], text: &str) -> bool {
    bytes.windows(text.len()).any(|window| window == text.as_bytes())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_database_cannot_read_what_it_keeps() {
    let keys = Keys::new();
    let rig = Rig::new(&format!("{NO_CACHE}{}", keys.section("a", &["a"]))).await;
    rig.service.state.pieces.add_permits(5);
    for path in ["/orders", "/large/0", "/large/100000", "/stream", "/status/422"] {
        let first = rig.post(path, path, "a").await;
        let (body, sealed_with) = stored(&rig, path).await;
        assert_eq!(sealed_with, "a", "{path}");
        for text in ["order", "xxxxxxxx", "piece", "status"] {
            assert!(!shows(&body, text), "{path}: {text} can be read");
        }
        let again = rig.post(path, path, "a").await;
        assert_eq!((again.status, again.is_replay(), &again.body), (first.status, true, &first.body), "{path}");
        assert_eq!(again.header("content-type"), first.header("content-type"));
        assert!(!again.headers.iter().any(|(name, _)| name.contains("sealed")));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_rotate_by_a_reload_and_old_rows_still_open() {
    let keys = Keys::new();
    let config = |current: &str, ids: &[&str]| format!("{NO_CACHE}{}", keys.section(current, ids));
    let rig = Rig::new(&config("a", &["a"])).await;
    let old = rig.post("/orders", "old", "a").await;
    rig.gateway.reload(rig.service.address, &config("b", &["a", "b"])).await;
    let mut tries = 0;
    eventually("the new key seals", async || {
        tries += 1;
        let key = format!("new-{tries}");
        assert_eq!(rig.post("/orders", &key, "a").await.status, 201);
        stored(&rig, &key).await.1 == "b"
    })
    .await;
    assert_eq!(stored(&rig, "old").await.1, "a");
    assert_eq!(rig.post("/orders", "old", "a").await.body, old.body);
    assert!(rig.post("/orders", &format!("new-{tries}"), "a").await.is_replay());
    // The old key is taken away too early: done is done, and said so.
    rig.gateway.reload(rig.service.address, &config("b", &["b"])).await;
    eventually("the old key is gone", async || rig.post("/orders", "old", "a").await.status != 201).await;
    let unreadable = rig.post("/orders", "old", "a").await;
    assert_eq!((unreadable.status, unreadable.problem().as_str()), (410, "response-not-stored"));
    assert_eq!((unreadable.json()["effect"].as_str(), rig.effects("old").await), (Some("done"), 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn another_intents_body_is_not_served() {
    let keys = Keys::new();
    let rig = Rig::new(&format!("{NO_CACHE}{}", keys.section("a", &["a"]))).await;
    for key in ["mine", "theirs"] {
        assert_eq!(rig.post("/orders", key, "a").await.status, 201);
    }
    let swap = "UPDATE once.intent SET response_body = (SELECT response_body FROM once.intent WHERE key = 'theirs')
                WHERE key = 'mine'";
    assert_eq!(rig.db.client().await.execute(swap, &[]).await.unwrap(), 1);
    let refused = rig.post("/orders", "mine", "a").await;
    assert_eq!((refused.status, refused.problem().as_str()), (410, "response-not-stored"));
    assert_eq!((&refused.json()["effect"], &refused.json()["original_status"]), (&"done".into(), &201.into()));
    assert!(rig.post("/orders", "theirs", "a").await.is_replay());
    assert_eq!((rig.effects("mine").await, rig.service.requests()), (1, 2), "and nothing runs again");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_shared_cache_holds_nothing_readable_either() {
    let (keys, server) = (Keys::new(), RedisServer::start());
    let cache = format!("[gateway.cache]\nmemory_bytes = 0\nredis = \"{}\"\nredis_timeout = \"5s\"\n", server.url());
    let config = format!("{cache}{}", keys.section("a", &["a"]));
    let rig = Rig::new(&config).await;
    let first = rig.post("/orders", "k", "a").await;
    let client = redis::Client::open(server.url()).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();
    let mut names: Vec<String> = Vec::new();
    eventually("Redis has it", async || {
        names = connection.keys("*").await.unwrap();
        names.len() == 1
    })
    .await;
    let value: Vec<u8> = connection.get(&names[0]).await.unwrap();
    assert!(!shows(&value, "order\":") && !shows(&value, std::str::from_utf8(&first.body).unwrap()));
    // A gateway that has never seen it, and whose database does not answer: it comes from Redis, and is opened.
    let second = Gateway::start(rig.db.url(), rig.service.address, &config).await;
    let mut locker = rig.db.client().await;
    let lock = locker.transaction().await.unwrap();
    lock.batch_execute("LOCK TABLE once.intent IN ACCESS EXCLUSIVE MODE").await.unwrap();
    let again = send(second.address, "POST", "/orders", &[("idempotency-key", "\"k\"")], b"a").await;
    assert_eq!((again.status, again.is_replay(), &again.body), (201, true, &first.body));
}
