//! What is no job, no queue and no policy is refused, with its code, and leaves nothing.

use pgonce_testkit::TestDb;

use crate::desk::{number, text};

#[tokio::test]
async fn refused_with_their_codes() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let long = "x".repeat(256);
    let cases: &[(&str, String)] = &[
        ("P4000", "once.enqueue('', '{}')".into()),
        ("P4000", "once.enqueue(NULL, '{}')".into()),
        ("P4000", format!("once.enqueue('{long}', '{{}}')")),
        ("P4000", "once.enqueue(E'a\\nb', '{}')".into()),
        ("P4000", "once.define_queue('')".into()),
        ("P4000", "once.enqueue_batch('', ARRAY['1']::jsonb[])".into()),
        ("P4004", "once.enqueue('q', '{}', p_tenant => NULL)".into()),
        ("P4001", "once.enqueue('q', '{}', p_key => '')".into()),
        ("P4001", format!("once.enqueue('q', '{{}}', p_key => '{long}')")),
        ("P4001", format!("once.enqueue('q', '{{}}', p_unique_key => '{long}')")),
        ("P4001", "once.enqueue_batch('q', ARRAY['1']::jsonb[], p_keys => ARRAY[''])".into()),
        ("P4001", "once.enqueue_batch('q', ARRAY['1']::jsonb[], p_unique_keys => ARRAY[E'\\t'])".into()),
        ("P4020", "once.enqueue('q', NULL)".into()),
        ("P4020", "once.enqueue('q', '{}', NULL)".into()),
        ("P4020", "once.enqueue('q', '{}', p_attempts_max => 0)".into()),
        ("P4020", "once.enqueue('q', '{}', p_available_at => 'infinity')".into()),
        ("P4020", "once.enqueue('q', '{}', p_unique_key => 'u', p_unique_scope => 'ever')".into()),
        ("P4020", "once.enqueue('q', '{}', p_unique_key => 'u', p_unique_window => '0')".into()),
        ("P4020", "once.enqueue_batch('q', ARRAY['1', NULL]::jsonb[])".into()),
        ("P4020", "once.enqueue_batch('q', ARRAY['1']::jsonb[], p_keys => ARRAY['a', 'b'])".into()),
        ("P4020", "once.enqueue_batch('q', NULL)".into()),
        ("P4020", "once.enqueue_batch('q', ARRAY['1']::jsonb[], p_attempts_max => -1)".into()),
        ("P4005", "once.enqueue('q', to_jsonb(repeat('x', 2000000)))".into()),
        ("P4005", "once.enqueue_batch('q', ARRAY[to_jsonb(repeat('x', 2000000))])".into()),
        ("P4020", "once.take('q', 'w', 0)".into()),
        ("P4020", "once.take('q', 'w', 10001)".into()),
        ("P4020", "once.take('q', 'w', 1, '1 ms')".into()),
        ("P4000", "once.take('')".into()),
        ("P4020", "once.finish_batch(ARRAY[1], NULL)".into()),
        ("P4020", "once.finish_batch(ARRAY[NULL::bigint], ARRAY[gen_random_uuid()])".into()),
        ("P4020", "once.heartbeat_batch(ARRAY[1], ARRAY[gen_random_uuid()], '2 days')".into()),
        ("P4060", "once.finish(1, gen_random_uuid())".into()),
        ("P4060", "once.retry(1, gen_random_uuid())".into()),
        ("P4020", "once.define_queue('q', '{\"often\": 1}')".into()),
        ("P4020", "once.define_queue('q', '[]')".into()),
        ("P4020", "once.define_queue('q', '{\"attempts_max\": 0}')".into()),
        ("P4020", "once.define_queue('q', '{\"unique\": \"ever\"}')".into()),
        ("P4020", "once.define_queue('q', '{\"lease\": \"1 week\"}')".into()),
        ("P4020", "once.define_queue('q', '{\"keep\": \"permanent\"}')".into()),
        ("P4013", "once.retry_buried('q', '', 'why')".into()),
    ];
    for (code, call) in cases {
        assert_eq!(text(&client, &format!("SELECT {call}::text"), &[]).await, Err((*code).into()), "{call}");
    }
    assert_eq!(number(&client, "SELECT count(*) FROM once.jobs").await, 0);
    assert_eq!(number(&client, "SELECT count(*) FROM once.job_unique").await, 0);
}

/// Errors name neither keys nor payloads.
#[tokio::test]
async fn errors_tell_no_secrets() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let secret = format!("secret{}", "x".repeat(260));
    let sql = "SELECT once.enqueue('q', '{}', p_key => $1, p_unique_key => $1)";
    let error = client.query(sql, &[&secret]).await.unwrap_err();
    let error = error.as_db_error().unwrap();
    assert!(!format!("{}{:?}{:?}", error.message(), error.detail(), error.hint()).contains("secret"));
}

#[tokio::test]
async fn a_policy_is_replaced_and_said_twice_it_writes_nothing() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let define = async |policy: &str| {
        client.execute("SELECT once.define_queue('q', $1::text::jsonb)", &[&policy]).await.unwrap();
        let sql = "SELECT concat_ws(' ', attempts_max, backoff, backoff_max, lease, running_max, key_running_max, unique_scope, unique_window, keep)
                   FROM once.queues WHERE queue = 'q'";
        text(&client, sql, &[]).await.unwrap()
    };
    let defaults = "10 00:00:01 00:05:00 00:00:30 1 alive 01:00:00 none";
    assert_eq!(define("{}").await, defaults);
    let all = r#"{"attempts_max": 3, "backoff": "2s", "backoff_max": "1m", "lease": "5s", "running_max": 9, "key_running_max": 2,
                  "unique": "window", "unique_window": "1d", "keep": "2h"}"#;
    assert_eq!(define(all).await, "3 00:00:02 00:01:00 00:00:05 9 2 window 1 day 02:00:00");
    let audited = number(&client, "SELECT count(*) FROM once.audit_trail WHERE action = 'define_queue'").await;
    define(all).await;
    assert_eq!(number(&client, "SELECT count(*) FROM once.audit_trail WHERE action = 'define_queue'").await, audited);
    assert_eq!(define(r#"{"running_max": "none"}"#).await, defaults);
}
