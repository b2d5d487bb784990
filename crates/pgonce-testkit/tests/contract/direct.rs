//! The straight path's plain statements (`sql/direct/`) leave the same rows and give the same answers as the
//! functions that they stand in for.

use pgonce_testkit::TestDb;
use serde_json::Value;

use crate::world::DAY;

const SCOPES: &[(&str, &str)] = &[
    ("full", r#"{"response": "full"}"#),
    ("reference", r#"{"response": "reference"}"#),
    ("status", r#"{"response": "status"}"#),
    ("error", r#"{"response": "error"}"#),
    ("permanent", r#"{"retention": "permanent", "tombstone": "1d"}"#),
    ("none", r#"{"retention": "none"}"#),
    ("none_tomb", r#"{"retention": "none", "tombstone": "9d"}"#),
    ("tomb", r#"{"retention": "1d", "tombstone": "permanent"}"#),
    ("odd", r#"{"retention": "1 day 2 hours 3.004 seconds", "tombstone": "5ms"}"#),
    ("month", r#"{"retention": "1 month", "tombstone": "1 month"}"#),
    ("digits", r#"{"key_pattern": "^[0-9]+$"}"#),
];

/// What each call told, then every row, without what differs between any two runs.
async fn observed(direct: bool) -> Vec<String> {
    let db = TestDb::new().await.through(direct);
    let client = db.client().await;
    for (scope, policy) in SCOPES {
        client.batch_execute(&format!("SELECT once.define_scope('{scope}', '{policy}')")).await.unwrap();
    }
    client.batch_execute("SELECT once.define_scope('full', '{\"response\": \"status\"}', 'acme')").await.unwrap();
    let once = db.once().await;
    let mut told = Vec::new();
    let mut call = async |scope: &str, tenant: &str, key: &str, payload: &str, size: usize| {
        let answer = "x".repeat(size);
        let outcome = once
            .intent(scope, key)
            .tenant(tenant)
            .payload(payload)
            .run(async |tx| {
                tx.status(201);
                tx.made("order", "4711");
                Ok(answer.clone())
            })
            .await;
        let outcome = match outcome {
            Ok(outcome) => format!("replay {} {}", outcome.is_replay(), outcome.into_inner().len()),
            Err(error) => format!("{:?} {error}", error.sqlstate()),
        };
        told.push(format!("{scope}/{tenant}/{key}/{payload}: {outcome}"));
    };
    for days in [0, 2, 400] {
        db.travel(days * DAY).await;
        for (scope, _) in SCOPES.iter().chain(&[("undefined", "")]) {
            for tenant in ["", "acme"] {
                for key in ["12", "word", "", "a\nb"] {
                    call(scope, tenant, key, "one", 10).await;
                    call(scope, tenant, key, "one", 11).await;
                    call(scope, tenant, key, "another", 12).await;
                }
            }
        }
    }
    call("full", "", "too large", "one", 16 * 1024 * 1024 + 1).await;
    call("full", "", "too large", "one", 10).await;
    // What stands beside the body has its limits, too.
    for (kind, id) in [(256, 1), (5, 1025), (255, 1024)] {
        let made = once.intent("full", format!("made {kind} {id}")).payload("one").run(async |tx| {
            tx.made("t".repeat(kind), "i".repeat(id));
            Ok(())
        });
        told.push(format!("made {kind} {id}: {:?}", made.await.map_err(|error| error.sqlstate().map(str::to_owned))));
    }
    // Direct callers count a calendar month as 30 days: how long rows are kept is compared coarsely.
    let rows = "SELECT to_jsonb(i) - 'claim_id' - 'created_at' - 'updated_at' - 'completed_at' - 'expires_at'
        - 'tombstone_until' - 'claimed_by' || jsonb_build_object(
            'kept', round(ln(1 + extract(epoch FROM expires_at - created_at)::numeric) * 3),
            'buried', round(ln(1 + extract(epoch FROM tombstone_until - expires_at)::numeric) * 3))
        FROM once.intent i ORDER BY tenant, scope, key";
    told.extend(client.query(rows, &[]).await.unwrap().iter().map(|row| row.get::<_, Value>(0).to_string()));
    told
}

#[tokio::test]
async fn direct_statements_do_as_the_functions_do() {
    let (functions, direct) = tokio::join!(observed(false), observed(true));
    for (function, statement) in functions.iter().zip(&direct) {
        assert_eq!(statement, function);
    }
    assert_eq!(functions.len(), direct.len());
}
