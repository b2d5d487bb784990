//! Rust and SQL fingerprints are the same 32 bytes, on whatever JSON.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests stop loudly")]

use pgonce_testkit::TestDb;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use serde_json::{Map, Number, Value, json};

fn number() -> impl Strategy<Value = Value> {
    prop_oneof![
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_filter_map("JSON has no infinities", |float| Number::from_f64(float).map(Value::Number)),
        (-400_i32..309, 1_u64..1_000_000_000_000_000_000).prop_filter_map("doubles only", |(exponent, digits)| {
            let float: f64 = format!("{digits}e{}", exponent - 17).parse().ok()?;
            Number::from_f64(float).map(Value::Number)
        }),
        Just(json!(-0.0)),
        Just(json!(1e21)),
        Just(json!(1e-7)),
        Just(json!(9_007_199_254_740_993_u64)),
    ]
}

/// Any text but U+0000, which jsonb refuses; with the planes whose UTF-16 order is not their code point order.
fn text() -> impl Strategy<Value = String> {
    let character = prop_oneof![
        any::<char>(),
        proptest::char::range('\u{1}', '\u{7f}'),
        proptest::char::range('\u{e000}', '\u{ffff}'),
        proptest::char::range('\u{10000}', '\u{10ffff}'),
    ];
    proptest::collection::vec(character.prop_filter("jsonb", |character| *character != '\0'), 0..8)
        .prop_map(|characters| characters.into_iter().collect())
}

fn document() -> impl Strategy<Value = Value> {
    let leaf =
        prop_oneof![Just(Value::Null), any::<bool>().prop_map(Value::Bool), number(), text().prop_map(Value::String)];
    leaf.prop_recursive(5, 40, 8, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..6).prop_map(Value::Array),
            proptest::collection::vec((text(), inner), 0..6)
                .prop_map(|members| Value::Object(members.into_iter().collect::<Map<_, _>>())),
        ]
    })
}

#[tokio::test]
async fn rust_and_sql_agree_on_random_json() {
    let client = TestDb::new().await.client().await;
    let sql = client
        .prepare("SELECT once.fingerprint($1::text::jsonb, $2, $3), once.canonical_json($1::text::jsonb)")
        .await
        .unwrap();
    let mut runner = TestRunner::default();
    for _ in 0..3000 {
        let tree = (document(), text(), text()).new_tree(&mut runner).unwrap();
        let (value, operation, version) = tree.current();
        let row = client.query_one(&sql, &[&value.to_string(), &operation, &version]).await.unwrap();
        let canonical = serde_json_canonicalizer::to_string(&value).unwrap();
        assert_eq!(row.get::<_, &str>(1), canonical, "canonical form of {value}");
        let ours = pgonce::fingerprint(&value, &operation, &version).unwrap();
        assert_eq!(row.get::<_, &[u8]>(0), ours.0, "fingerprint of {value}");
    }
}

#[tokio::test]
async fn known_answers() {
    let client = TestDb::new().await.client().await;
    let known = "456bba12217c022981e38685559886db9c2c8b09e2590e8e8e4de48bf1e589fd";
    let row =
        client.query_one("SELECT encode(once.fingerprint('{\"a\": 1.0}', 'op', 'v1'), 'hex')", &[]).await.unwrap();
    assert_eq!(row.get::<_, &str>(0), known);
    let ours = pgonce::fingerprint(&json!({"a": 1}), "op", "v1").unwrap();
    assert_eq!(ours.0.iter().map(|byte| format!("{byte:02x}")).collect::<String>(), known);
    let row = client.query_one("SELECT once.fingerprint_bytes('\\x00ff', 'op', 'v1')", &[]).await.unwrap();
    assert_eq!(row.get::<_, &[u8]>(0), pgonce::fingerprint_bytes(b"\x00\xff", "op", "v1").0);
}

#[tokio::test]
async fn what_has_no_double_has_no_fingerprint() {
    let client = TestDb::new().await.client().await;
    let error = client.query_one("SELECT once.fingerprint('{\"secret\": 1e400}')", &[]).await.unwrap_err();
    assert_eq!(error.code().unwrap().code(), "P4003");
    assert!(!format!("{error:?}").contains("1e400"));
}
