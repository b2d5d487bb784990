//! What is refused, with its code, and without a word of what was given.

use crate::desk::{ASKED, Desk};

const MARK: &str = "s3cret";

#[tokio::test]
async fn requests_that_are_refused() {
    let desk = Desk::new(ASKED).await;
    let path = |path: &str| format!("once.call('bank', 'op', '{path}')::text");
    let cases = [
        (format!("once.call('{MARK}', 'op', '/x')::text"), "P4063"),
        ("once.call(NULL, 'op', '/x')::text".into(), "P4000"),
        ("once.call('bank', NULL, '/x')::text".into(), "P4063"),
        (path(&format!("//{MARK}.example/x")), "P4063"),
        (path(&format!("https://{MARK}.example/x")), "P4063"),
        (path(MARK), "P4063"),
        (path("/../x"), "P4063"),
        (path("/a/../../x"), "P4063"),
        (path("/a/%2e%2e/x"), "P4063"),
        (path("/a/%2E./x"), "P4063"),
        (path("/a%2f..%2fx"), "P4063"),
        (path("/a/..;/x"), "P4063"),
        (path("/.."), "P4063"),
        (path("/."), "P4063"),
        (path(r"/\\evil.example"), "P4063"),
        (path("/x y"), "P4063"),
        (path("/x#y"), "P4063"),
        (path("/x\ty"), "P4063"),
        (path("@evil.example"), "P4063"),
        (path(&format!("/{}", "x".repeat(5000))), "P4063"),
        ("once.call('bank', 'op', NULL)::text".into(), "P4063"),
        ("once.call('bank', 'op', '/x', p_method => 'TRACE')::text".into(), "P4063"),
        ("once.call('bank', 'op', '/x', p_scope => 's')::text".into(), "P4063"),
        ("once.call('bank', 'op', '/x', p_key => 'k')::text".into(), "P4063"),
        ("once.call('bank', 'op', '/x', p_ordinal => -1)::text".into(), "P4063"),
        ("once.call('bank', 'op', '/x', p_tenant => NULL)::text".into(), "P4063"),
        ("once.call('bank', 'op', '/x', p_delay => '-1 second')::text".into(), "P4063"),
        (format!("once.call('bank', 'op', '/x', p_headers => '{{\"Authorization\": \"{MARK}\"}}')::text"), "P4063"),
        (format!("once.call('bank', 'op', '/x', p_headers => '{{\"idempotency-KEY\": \"{MARK}\"}}')::text"), "P4063"),
        (format!("once.call('bank', 'op', '/x', p_headers => '{{\"X\": \"a\\r\\nHost: {MARK}\"}}')::text"), "P4063"),
        ("once.call('bank', 'op', '/x', p_headers => '[]')::text".into(), "P4063"),
        ("once.call('bank', 'op', '/x', p_body_bytes => decode(repeat('00', 1048577), 'hex'))::text".into(), "P4063"),
        (format!("once.call_notice('bank', 'n', 'maybe', '{MARK}')"), "P4063"),
        ("once.call_notice('bank', 'n', 'confirmed')".into(), "P4063"),
        (format!("once.call_notice('{MARK}', 'n', 'confirmed', 'k')"), "P4063"),
        ("once.call_notice('bank', '', 'confirmed', 'k')".into(), "P4001"),
        ("once.call_heard(gen_random_uuid(), gen_random_uuid(), 'lost')".into(), "P4061"),
        ("once.call_heard(NULL, NULL, 'lost')".into(), "P4061"),
        ("once.call_asked(gen_random_uuid(), gen_random_uuid(), 'lost')".into(), "P4061"),
        ("once.call_settle(gen_random_uuid(), 'maybe', 'me', 'why')".into(), "P4013"),
        ("(SELECT count(*)::text FROM once.call_take('w', 0))".into(), "P4020"),
        ("(SELECT count(*)::text FROM once.call_doubts('w', 1001))".into(), "P4020"),
    ];
    for (call, code) in cases {
        let error = desk.client.query_one(&format!("SELECT {call}"), &[]).await.expect_err(&call);
        let error = error.as_db_error().unwrap();
        assert_eq!(error.code().code(), code, "{call}: {error:?}");
        let told = format!("{} {:?} {:?}", error.message(), error.detail(), error.hint());
        assert!(!told.contains(MARK), "{told}");
    }
    assert_eq!(desk.number("SELECT count(*) FROM once.calls").await, 0);
    for fine in ["/", "/charges?expand=a/../b", "/.well-known/x", "/a...b", "/a/%20b"] {
        desk.said(&format!("SELECT {}", path(fine)), &[]).await.unwrap_or_else(|code| panic!("{fine}: {code}"));
    }
}

#[tokio::test]
async fn policies_that_are_refused() {
    let desk = Desk::new(ASKED).await;
    for policy in [
        r#"[]"#,
        r#"{"bogus": 1}"#,
        r#"{"base_url": "ftp://x"}"#,
        r#"{"base_url": "https://user:password@x"}"#,
        r#"{"base_url": "https://x/?token=1"}"#,
        r#"{"base_url": "https://x/a/../b"}"#,
        r#"{"base_url": 1}"#,
        r#"{"key_header": "a b"}"#,
        r#"{"header_env": {"Authorization": "DATABASE_URL"}}"#,
        r#"{"header_env": ["PGONCE_CALL_X"]}"#,
        r#"{"timeout": "0s"}"#,
        r#"{"timeout": 10}"#,
        r#"{"resend": "yes"}"#,
        r#"{"accepted": "maybe"}"#,
        r#"{"server_error": "fine"}"#,
        r#"{"absent": "resend", "absent_after": "1h", "reconcile": "worker"}"#,
        r#"{"absent": "failed", "reconcile": "worker"}"#,
        r#"{"absent": "failed", "absent_after": "1s", "reconcile": "worker"}"#,
        r#"{"absent": "failed", "absent_after": "1h"}"#,
        r#"{"verify_failed": true}"#,
        r#"{"reconcile": "http"}"#,
        r#"{"reconcile": {"how": "http", "path": "/x/{key}"}}"#,
        r#"{"base_url": "https://x", "reconcile": {"how": "http", "path": "/x"}}"#,
        r#"{"base_url": "https://x", "reconcile": {"how": "http", "path": "//evil/{key}"}}"#,
        r#"{"base_url": "https://x", "reconcile": {"how": "http", "path": "/{key}", "field": "status"}}"#,
        r#"{"base_url": "https://x", "reconcile": {"how": "http", "path": "/{key}", "failed": ["no"]}}"#,
        r#"{"base_url": "https://x", "reconcile": {"how": "http", "path": "/{key}", "bogus": 1}}"#,
        r#"{"reconcile": {"how": "sql", "function": "app.nobody"}}"#,
        r#"{"reconcile": {"how": "sql", "function": "app.on_settled"}}"#,
        r#"{"on_settled": "app.nobody"}"#,
        r#"{"on_settled": "pg_catalog.now"}"#,
        r#"{"breaker": {"failures": 0}}"#,
        r#"{"breaker": {"bogus": 1}}"#,
        r#"{"rate_per_second": 0}"#,
        r#"{"retention": "never"}"#,
    ] {
        let policy: serde_json::Value = serde_json::from_str(policy).unwrap();
        let error = desk
            .client
            .query_one("SELECT once.define_provider('other', $1)", &[&policy])
            .await
            .expect_err(&policy.to_string());
        assert_eq!(error.code().unwrap().code(), "P4020", "{policy}: {error:?}");
    }
    assert_eq!(desk.number("SELECT count(*) FROM once.providers").await, 1);
    let before = "SELECT count(*) FROM once.audit_trail WHERE action = 'define_provider'";
    assert_eq!(desk.number(before).await, 1);
    desk.define(ASKED).await;
    assert_eq!(desk.number(before).await, 1, "the same rules again write nothing");
}

/// Applications ask for calls and pass notices on; only workers read them, only operators settle.
#[tokio::test]
async fn who_may_do_what() {
    let desk = Desk::new(ASKED).await;
    for (role, allowed, refused) in [
        (
            "once_app",
            vec!["once.call('bank', 'op', '/x')", "once.call_notice('bank', 'n', 'confirmed', 'k')"],
            vec![
                "once.call_take()",
                "once.call_settle(NULL, 'failed', 'a', 'r')",
                "once.call_sweep()",
                "once.purge_calls()",
            ],
        ),
        (
            "once_relay",
            vec![
                "once.call_take()",
                "once.call_doubts()",
                "once.call_recover()",
                "once.call_sweep()",
                "once.call_open()",
            ],
            vec!["once.call('bank', 'op', '/x')", "once.purge_calls()"],
        ),
        ("once_ops", vec!["once.purge_calls()"], vec!["once.call_take()", "once.call('bank', 'op', '/x')"]),
    ] {
        desk.client.batch_execute(&format!("SET ROLE {role}")).await.unwrap();
        for call in allowed {
            desk.client
                .query(&format!("SELECT {call}"), &[])
                .await
                .unwrap_or_else(|error| panic!("{role} {call}: {error:?}"));
        }
        for call in refused {
            let error = desk.client.query(&format!("SELECT {call}"), &[]).await.expect_err(call);
            assert_eq!(error.code().unwrap().code(), "42501", "{role} {call}");
        }
        assert!(desk.client.query("SELECT * FROM once.call", &[]).await.is_err(), "tables are nobody's");
        desk.client.batch_execute("RESET ROLE").await.unwrap();
    }
}
