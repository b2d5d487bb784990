//! SIGKILL at each step, SIGSTOP past the lease, the broker killed in between.

use std::time::Duration;

use pgonce_testkit::{brokers_skipped, eventually};

use crate::rig::{Rig, number};

const LIMIT: Duration = Duration::from_secs(30);

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_killed_at_each_step_loses_nothing_and_keeps_order() {
    if brokers_skipped("relay killed") {
        return;
    }
    for point in ["after_read", "before_send", "after_send", "before_record", "after_record"] {
        let rig = Rig::new().await;
        rig.transfer(60).await;
        let relay = rig.relay().args(&["--batch", "25"]).env("PGONCE_KILL_AT", &format!("relay::{point}")).start();
        relay.killed().await;
        rig.transfer(40).await;
        rig.relay().args(&["--until-empty"]).done().await;
        assert_eq!(rig.stream().await, rig.emitted().await, "{point}");
        assert_eq!(number(&rig.sender.client().await, "SELECT lag_messages FROM once.sinks").await, 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_killed_at_each_step_has_one_effect_a_message() {
    if brokers_skipped("consumer killed") {
        return;
    }
    for point in
        ["consume::before_store", "consume::after_store", "pgonce::inbox_before_commit", "pgonce::inbox_after_commit"]
    {
        let rig = Rig::new().await;
        rig.transfer(60).await;
        rig.relay().args(&["--until-empty"]).done().await;
        rig.consume().env("PGONCE_KILL_AT", point).start().killed().await;
        let consumer = rig.consume().start().ready().await;
        rig.until_applied(60, LIMIT).await;
        consumer.stop().await;
        rig.judge(60).await;
        assert_eq!(rig.applied().await, rig.emitted().await, "{point}: in each key's order");
    }
}

/// It slept through its lease with a batch sent and not recorded: another took over; what it records then is refused.
#[tokio::test(flavor = "multi_thread")]
async fn a_relay_that_wakes_up_late_does_no_harm() {
    if brokers_skipped("relay stopped") {
        return;
    }
    let rig = Rig::new().await;
    rig.transfer(40).await;
    let sleeper = rig.relay().args(&["--batch", "10"]).env("PGONCE_STOP_AT", "relay::after_send").start();
    sleeper.stopped().await;
    rig.transfer(20).await;
    rig.relay().args(&["--until-empty"]).done().await;
    let client = rig.sender.client().await;
    let cursor = "SELECT string_agg(delivered::text, ' ' ORDER BY lane) FROM once.lane";
    let before: String = client.query_one(cursor, &[]).await.unwrap().get(0);
    sleeper.signal("-CONT");
    rig.transfer(20).await;
    eventually("the late one works again", async || {
        number(&client, "SELECT lag_messages FROM once.sinks").await == 0
            && client.query_one(cursor, &[]).await.unwrap().get::<_, String>(0) != before
    })
    .await;
    sleeper.stop().await;
    assert_eq!(rig.stream().await, rig.emitted().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_killed_under_way_loses_nothing() {
    if brokers_skipped("broker killed") {
        return;
    }
    let mut rig = Rig::new().await;
    rig.transfer(100).await;
    // Sent and acknowledged, and the broker dies before that is recorded; then the relay goes on.
    let relay = rig.relay().args(&["--batch", "20"]).env("PGONCE_STOP_AT", "relay::after_send").start();
    relay.stopped().await;
    rig.nats.kill();
    relay.signal("-CONT");
    rig.transfer(50).await;
    rig.nats.restart();
    let consumer = rig.consume().start().ready().await;
    rig.until_applied(150, LIMIT).await;
    // And before the acknowledgement of a delivery.
    rig.nats.kill();
    rig.transfer(50).await;
    rig.nats.restart();
    rig.until_applied(200, LIMIT).await;
    relay.stop().await;
    consumer.stop().await;
    rig.judge(200).await;
    assert_eq!(rig.stream().await, rig.emitted().await);
}
