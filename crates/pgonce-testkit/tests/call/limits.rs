//! Rates, pauses and the breaker: everybody's, for they are in the database.

use crate::desk::Desk;

async fn calls(desk: &Desk, count: i32) {
    let sql = "SELECT once.call('bank', 'charge', '/charges', p_scope => 'pay', p_key => 'k' || n) FROM generate_series(1, $1::int) n";
    desk.client.query(sql, &[&count]).await.unwrap();
}

#[tokio::test]
async fn no_more_than_a_provider_takes() {
    let desk = Desk::new(r#"{"base_url": "https://b.example", "rate_per_second": 5}"#).await;
    calls(&desk, 40).await;
    desk.travel(3600).await;
    // Four workers at once, and together no more than one second's worth.
    let mut taking = tokio::task::JoinSet::new();
    for _ in 0..4 {
        let client = desk.db.client().await;
        taking.spawn(async move { client.query("SELECT * FROM once.call_take('w', 40)", &[]).await.unwrap().len() });
    }
    let taken: usize = taking.join_all().await.into_iter().sum();
    // The clock runs while they take: a slow machine may see another second begin.
    assert!((5..40).contains(&taken), "{taken}");
    desk.client
        .batch_execute("UPDATE once.provider_state SET tokens = 0, refilled_at = once.clock() + interval '1 hour'")
        .await
        .unwrap();
    assert!(desk.take(40).await.is_empty(), "none left, and a clock that went back gives none");
    desk.travel(7200).await;
    desk.client
        .batch_execute("UPDATE once.provider_state SET tokens = 0, refilled_at = once.clock() - interval '1 hour'")
        .await
        .unwrap();
    assert_eq!(desk.take(40).await.len(), 5, "an hour of rest is one second's worth");
}

#[tokio::test]
async fn a_provider_that_asks_to_be_left_alone_is() {
    let desk = Desk::new(r#"{"base_url": "https://b.example"}"#).await;
    calls(&desk, 2).await;
    desk.client.execute("SELECT once.provider_heard('bank', NULL, '30 seconds')", &[]).await.unwrap();
    assert!(desk.take(2).await.is_empty());
    desk.client.execute("SELECT once.provider_heard('bank', false, '1 second')", &[]).await.unwrap();
    desk.travel(10).await;
    assert!(desk.take(2).await.is_empty(), "a shorter pause does not end a longer one");
    desk.travel(31).await;
    assert_eq!(desk.take(2).await.len(), 2);
}

#[tokio::test]
async fn a_breaker_opens_lets_one_through_and_closes() {
    let desk = Desk::new(r#"{"base_url": "https://b.example", "breaker": {"failures": 3, "open_for": "30s"}}"#).await;
    calls(&desk, 10).await;
    let heard = async |failed: bool| {
        desk.client.execute("SELECT once.provider_heard('bank', $1)", &[&failed]).await.unwrap();
    };
    let breaker =
        async || -> String { desk.client.query_one("SELECT breaker FROM once.providers", &[]).await.unwrap().get(0) };
    heard(true).await;
    heard(true).await;
    heard(false).await;
    heard(true).await;
    heard(true).await;
    assert_eq!(desk.take(1).await.len(), 1, "an answer between them begins the count anew");
    heard(true).await;
    assert_eq!(breaker().await, "open");
    assert!(desk.take(10).await.is_empty());
    desk.travel(31).await;
    assert_eq!(breaker().await, "half-open");
    assert_eq!(desk.take(10).await.len(), 1, "one is let through");
    assert!(desk.take(10).await.is_empty(), "and the others wait another round");
    heard(true).await;
    assert!(desk.take(10).await.is_empty(), "it failed: open again");
    desk.travel(62).await;
    assert_eq!(desk.take(10).await.len(), 1);
    heard(false).await;
    assert_eq!(breaker().await, "closed");
    assert_eq!(desk.take(10).await.len(), 7);
}

/// Nothing was there to try it with: whoever comes next may.
#[tokio::test]
async fn a_trial_that_was_not_used_is_given_back() {
    let desk = Desk::new(
        r#"{"base_url": "https://b.example", "breaker": {"failures": 1, "open_for": "30s"}, "rate_per_second": 2}"#,
    )
    .await;
    calls(&desk, 1).await;
    desk.client.execute("SELECT once.provider_heard('bank', true)", &[]).await.unwrap();
    desk.travel(31).await;
    // Another worker has the only call in its hands.
    let other = desk.db.client().await;
    other.batch_execute("BEGIN; SELECT 1 FROM once.call FOR UPDATE").await.unwrap();
    assert!(desk.take(10).await.is_empty());
    other.batch_execute("ROLLBACK").await.unwrap();
    assert_eq!(desk.take(10).await.len(), 1);
}
