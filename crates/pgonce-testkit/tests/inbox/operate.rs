//! What operators do: replay, discard, purge, and rules.

use std::time::Duration;

use pgonce_testkit::{TestDb, checksum};
use tokio_postgres::Client;

use crate::desk::{admit, define, ids, number, receive, state, take, text, texts};

/// Ends everything that can be taken: upserts the last message of each key into a projection.
async fn project(client: &Client) {
    loop {
        let sql = "SELECT id, claim_id, ordering_key, message_id FROM once.inbox_take('c', 'w', 10)";
        let rows = client.query(sql, &[]).await.unwrap();
        if rows.is_empty() {
            return;
        }
        for row in rows {
            let (key, id): (Option<String>, String) = (row.get(2), row.get(3));
            client.batch_execute("BEGIN").await.unwrap();
            let upsert = "INSERT INTO projection (key, last) VALUES ($1, $2) ON CONFLICT (key) DO UPDATE SET last = excluded.last";
            client.execute(upsert, &[&key, &id]).await.unwrap();
            let finish = "SELECT once.inbox_finish($1, $2)";
            client.execute(finish, &[&row.get::<_, i64>(0), &row.get::<_, uuid::Uuid>(1)]).await.unwrap();
            client.batch_execute("COMMIT").await.unwrap();
        }
    }
}

#[tokio::test]
async fn a_replayed_projection_converges_to_the_same_state() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client.batch_execute("CREATE TABLE projection (key text PRIMARY KEY, last text)").await.unwrap();
    for n in 0..30 {
        receive(&client, &format!("m{n}"), Some(&format!("k{}", n % 7)), None).await;
    }
    project(&client).await;
    let all = "SELECT key || '=' || last FROM projection ORDER BY key";
    let built = texts(&client, all, &[]).await;
    assert_eq!(built.len(), 7);
    client.batch_execute("TRUNCATE projection").await.unwrap();
    let replay = "SELECT message_id FROM once.inbox_replay('c', 'me', 'rebuild', p_states => '{processed}')";
    assert_eq!(texts(&client, replay, &[]).await.len(), 30);
    project(&client).await;
    assert_eq!(texts(&client, all, &[]).await, built);
    // And without emptying it first, half of it again: nothing moves that should not.
    let half = "SELECT message_id FROM once.inbox_replay('c', 'me', 'again', p_ids => (SELECT array_agg(id) FROM once.inbox WHERE id > 15))";
    texts(&client, half, &[]).await;
    project(&client).await;
    assert_eq!(texts(&client, all, &[]).await, built);
}

#[tokio::test]
async fn replay_is_tried_first_limited_and_audited() {
    let db = TestDb::new().await;
    let client = db.client().await;
    for n in 1..=4 {
        receive(&client, &format!("m{n}"), None, None).await;
    }
    let held = take(&client, 4).await;
    held[0].fail(&client, false, "no such customer").await.unwrap();
    held[1].fail(&client, false, "no such customer").await.unwrap();
    held[2].finish(&client).await.unwrap();
    let before = checksum(&client).await;
    let dry = "SELECT message_id FROM once.inbox_replay('c', 'me', 'fixed', p_dry_run => true)";
    assert_eq!(texts(&client, dry, &[]).await, ["m1", "m2"], "failed ones, if no states are named");
    assert_eq!(checksum(&client).await, before, "a dry run changes nothing");
    let one = "SELECT message_id FROM once.inbox_replay('c', 'me', 'fixed', p_limit => 1)";
    assert_eq!(texts(&client, one, &[]).await, ["m1"]);
    let again = take(&client, 10).await;
    assert_eq!((ids(&again), again[0].attempts), (vec!["m1"], 1), "counted from the beginning");
    // By ids, finished ones too; what is being processed is left alone.
    let by_id =
        "SELECT message_id FROM once.inbox_replay('c', 'me', 'why', p_ids => (SELECT array_agg(id) FROM once.inbox))";
    assert_eq!(texts(&client, by_id, &[]).await, ["m2", "m3"]);
    let none =
        "SELECT message_id FROM once.inbox_replay('c', 'me', 'why', p_states => '{processed}', p_to => '2020-01-01')";
    assert_eq!(texts(&client, none, &[]).await, Vec::<String>::new());
    let audit = "SELECT concat_ws(' ', actor, action, scope, key, from_status, to_status, reason) FROM once.audit_trail WHERE action = 'inbox_replay' ORDER BY id";
    assert_eq!(
        texts(&client, audit, &[]).await,
        [
            "me inbox_replay c m1 failed_final received fixed",
            "me inbox_replay c m2 failed_final received why",
            "me inbox_replay c m3 processed received why"
        ]
    );
    for bad in ["'', 'why'", "'me', ' '", "'me', NULL"] {
        let sql = format!("SELECT message_id FROM once.inbox_replay('c', {bad})");
        assert_eq!(text(&client, &sql, &[]).await.unwrap_err(), "P4013");
    }
}

#[tokio::test]
async fn a_discarded_message_frees_its_key() {
    let db = TestDb::new().await;
    let client = db.client().await;
    receive(&client, "bad", Some("k"), None).await;
    receive(&client, "good", Some("k"), None).await;
    take(&client, 1).await[0].fail(&client, false, "never").await.unwrap();
    assert_eq!(take(&client, 10).await, []);
    let sql = "SELECT once.inbox_discard('c', (SELECT array_agg(id) FROM once.inbox), 'me', 'nobody needs it')::bigint";
    assert_eq!(number(&client, sql).await, 1, "only what is parked");
    assert_eq!(ids(&take(&client, 10).await), ["good"]);
    assert_eq!(
        text(&client, "SELECT state || ' ' || result FROM once.inbox_messages WHERE message_id = 'bad'", &[])
            .await
            .unwrap(),
        "processed failed_final"
    );
    assert_eq!(number(&client, "SELECT count(*) FROM once.audit_trail WHERE action = 'inbox_discard'").await, 1);
}

/// Purge takes what its consumer's retention is over for, and nothing that is not finished (I13).
#[tokio::test]
async fn purge_keeps_what_is_unfinished_or_unexpired() {
    let db = TestDb::new().await;
    let client = db.client().await;
    define(&db, r#"{"retention": "2d", "gap_max": "100d"}"#).await;
    let (purge, day) = ("SELECT once.purge_inbox()", Duration::from_secs(86_400));
    client
        .batch_execute(
            "SELECT once.define_consumer('for ever', '{\"retention\": \"permanent\"}');
             SELECT once.admit('for ever', 's', 'old', '\\x01'); SELECT once.admit('default', 's', 'old', '\\x01');
             SELECT once.receive('for ever', 's', 'old', 'x')",
        )
        .await
        .unwrap();
    admit(&client, "old", b"h").await.unwrap();
    for (id, version) in
        [("done", None), ("final", None), ("retry", None), ("gap", Some(9)), ("held", None), ("new", None)]
    {
        receive(&client, id, None, version).await;
    }
    let held = take(&client, 5).await;
    held[0].finish(&client).await.unwrap();
    held[1].fail(&client, false, "no").await.unwrap();
    held[2].fail(&client, true, "no").await.unwrap();
    held[3].wait(&client).await.unwrap();
    db.travel(day).await;
    admit(&client, "young", b"h").await.unwrap();
    assert_eq!(number(&client, purge).await, 0);
    db.travel(day * 2 + Duration::from_secs(60)).await;
    assert_eq!(number(&client, purge).await, 2, "one dedup row, one processed message");
    assert_eq!(number(&client, purge).await, 0);
    for (id, is) in [
        ("final", "failed_final"),
        ("retry", "failed_retryable"),
        ("gap", "waiting"),
        ("held", "processing"),
        ("new", "received"),
    ] {
        assert_eq!(state(&client, id).await, is);
    }
    let left = "SELECT consumer || ' ' || message_id FROM once.admitted_messages ORDER BY 1";
    assert_eq!(texts(&client, left, &[]).await, ["c young", "default old", "for ever old"]);
    db.travel(day * 8).await;
    assert_eq!(number(&client, purge).await, 2, "young, and the default consumer's");
    assert_eq!(texts(&client, left, &[]).await, ["for ever old"]);
    assert_eq!(admit(&client, "old", b"another body, after the window").await.unwrap(), "new");
}

/// Purge remembers when each stretch of the table has something to remove; a shorter retention is not what it reckoned with.
#[tokio::test]
async fn purge_looks_again_when_retention_is_shorter() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (purge, hour) = ("SELECT once.purge_inbox()", Duration::from_secs(3600));
    define(&db, r#"{"retention": "30d"}"#).await;
    admit(&client, "first", b"h").await.unwrap();
    db.travel(hour * 12).await;
    assert_eq!(number(&client, purge).await, 0);
    define(&db, r#"{"retention": "13h"}"#).await;
    admit(&client, "second", b"h").await.unwrap();
    db.travel(hour * 14).await;
    assert_eq!(number(&client, purge).await, 1);
    assert_eq!(number(&client, purge).await, 0, "the second is two hours old");
    // A consumer that had no message when purge looked keeps its own for less.
    client.batch_execute("SELECT once.define_consumer('brief', '{\"retention\": \"1h\"}')").await.unwrap();
    assert_eq!(number(&client, purge).await, 0);
    number(&client, "SELECT count(*) FROM once.admit('brief', 's', 'third', '\\x01')").await;
    db.travel(hour * 16).await;
    assert_eq!(number(&client, purge).await, 1);
    assert_eq!(number(&client, "SELECT count(*) FROM once.admitted WHERE message_id = 'second'").await, 1);
}

#[tokio::test]
async fn purge_goes_in_batches_and_waits_for_nobody() {
    let db = TestDb::new().await;
    let (client, holder) = (db.client().await, db.client().await);
    let many =
        "SELECT count(*) FROM once.admit_batch('c', 's', (SELECT array_agg(n::text) FROM generate_series(1, 1000) n),
        (SELECT array_agg('\\x01'::bytea) FROM generate_series(1, 1000)))";
    number(&client, many).await;
    db.travel(Duration::from_secs(8 * 86_400)).await;
    holder.batch_execute("BEGIN; SELECT once.note_result('c', 's', '500', 'ignored')").await.unwrap();
    let purge = "SELECT once.purge_inbox(400)";
    let went = [number(&client, purge).await, number(&client, purge).await, number(&client, purge).await];
    assert_eq!(went, [400, 400, 199], "a row that somebody holds is skipped");
    holder.batch_execute("COMMIT").await.unwrap();
    assert_eq!(number(&client, purge).await, 1);
}

#[tokio::test]
async fn consumers_have_rules_and_tenants_their_own() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let sql = "SELECT once.define_consumer('c', '{\"attempts_max\": 2, \"lease\": \"1h\"}');
        SELECT once.define_consumer('c', '{\"lease\": \"2h\"}', p_tenant => 't')";
    client.batch_execute(sql).await.unwrap();
    let before = checksum(&client).await;
    client.batch_execute(sql).await.unwrap();
    assert_eq!(checksum(&client).await, before, "the same rules again write nothing");
    for tenant in ["", "t"] {
        text(&client, "SELECT once.receive('c', 's', 'm', 'x', p_tenant => $1)", &[&tenant]).await.unwrap();
    }
    let leases = "SELECT tenant || round(extract(epoch FROM leased_until - once.clock()) / 3600) FROM once.inbox_take('c', 'w', 10) ORDER BY 1";
    assert_eq!(texts(&client, leases, &[]).await, ["1", "t2"]);
    for bad in [r#"{"leas": "1h"}"#, r#"{"on_poison": "drop"}"#, r#"{"attempts_max": 0}"#, r#"{"lease": "2d"}"#, "[]"] {
        let refused = client.execute("SELECT once.define_consumer('c', $1::text::jsonb)", &[&bad]).await.unwrap_err();
        assert_eq!(crate::desk::code(&refused), "P4020", "{bad}");
    }
}
