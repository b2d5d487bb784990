//! Asking for a call: with the effect or not at all, once an intent, from SQL and from Rust.

use pgonce::{Call, Error, Failure, Incoming, Outcome, Processed};
use serde_json::json;
use uuid::Uuid;

use crate::desk::{ASKED, Desk};

#[tokio::test]
async fn a_call_commits_with_its_effect_and_is_the_same_in_every_attempt() {
    let desk = Desk::new(ASKED).await;
    let once = desk.db.once().await;
    let charge = |amount: i32| Call::post("bank", "charge", "/charges").json(&json!({"amount": amount}));
    let failed = once
        .intent("pay", "k")
        .payload(&1)
        .run(async |tx| {
            tx.call(charge(7)).await?;
            Err::<(), _>(Failure::retry("later", "not now"))
        })
        .await;
    assert!(failed.is_err());
    assert_eq!(desk.number("SELECT count(*) FROM once.calls").await, 0, "rolled back with the effect");
    let outcome = once
        .intent("pay", "k")
        .payload(&1)
        .run(async |tx| {
            let first = tx.call(charge(7)).await?;
            assert_eq!(tx.call(charge(7)).await?, first, "no second call");
            assert!(matches!(tx.call(charge(7).ordinal(1)).await, Ok(second) if second != first));
            Ok(first)
        })
        .await
        .unwrap();
    let Outcome::Executed(id) = outcome else { panic!("{outcome:?}") };
    let derived: Uuid =
        desk.client.query_one("SELECT once.call_key('', 'bank', 'pay', 'k', 'charge', 0)", &[]).await.unwrap().get(0);
    assert_eq!(id, derived);
    // In SQL it is the same call, and another request is an error.
    assert_eq!(desk.call("k").await, id);
    let other =
        "SELECT once.call('bank', 'charge', '/charges', '{\"amount\": 8}', p_scope => 'pay', p_key => 'k')::text";
    assert_eq!(desk.said(other, &[]).await.unwrap_err(), "P4062");
    let refused = pgonce::call(&desk.client, "", Some(("pay", "k")), &charge(8)).await.unwrap_err();
    assert!(matches!(&refused, Error::OtherRequest) && refused.sqlstate() == Some("P4062"), "{refused:?}");
    assert_eq!(pgonce::call(&desk.client, "", Some(("pay", "k")), &charge(7)).await.unwrap(), id);
    // Another tenant's is another.
    assert_ne!(pgonce::call(&desk.client, "b", Some(("pay", "k")), &charge(7)).await.unwrap(), id);
    // Without an intent each is one of its own.
    let alone = Call::post("bank", "ping", "/ping").put().bytes("x", "text/plain").header("X-Trace", "1");
    assert_ne!(
        pgonce::call(&desk.client, "", None, &alone).await.unwrap(),
        pgonce::call(&desk.client, "", None, &alone).await.unwrap()
    );
    assert_eq!(desk.number("SELECT count(*) FROM once.calls WHERE method = 'PUT' AND body_bytes = 1").await, 2);
}

#[tokio::test]
async fn a_message_makes_the_same_call_in_every_delivery() {
    let desk = Desk::new(ASKED).await;
    let once = desk.db.once().await;
    let mut ids = Vec::new();
    for consumer in ["books", "books", "others"] {
        let message = Incoming::new("s", "m", b"body");
        let inbox = once.consumer(consumer).source("s");
        let handled = inbox.process(&message, async |tx| Ok(tx.call(Call::post("bank", "refund", "/refunds")).await?));
        match handled.await.unwrap() {
            Processed::Applied(id) => ids.push(id),
            Processed::Duplicate => {}
        }
    }
    assert_eq!(ids.len(), 2);
    assert_ne!(ids[0], ids[1], "another consumer's is another call");
}

/// Two attempts of one intent at once: one call, and the second waits for the first.
#[tokio::test]
async fn the_same_call_at_once() {
    let desk = Desk::new(ASKED).await;
    let first = desk.db.client().await;
    first.batch_execute("BEGIN").await.unwrap();
    let sql = "SELECT once.call('bank', 'charge', '/charges', p_scope => 'pay', p_key => 'k')";
    let id: Uuid = first.query_one(sql, &[]).await.unwrap().get(0);
    let second = desk.db.client().await;
    let waiting = tokio::spawn(async move { second.query_one(sql, &[]).await.unwrap().get::<_, Uuid>(0) });
    pgonce_testkit::lock_waiters(&desk.client, 1).await;
    first.batch_execute("COMMIT").await.unwrap();
    assert_eq!(waiting.await.unwrap(), id);
    assert_eq!(desk.number("SELECT count(*) FROM once.calls").await, 1);
}
