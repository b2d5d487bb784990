//! The whole way, with everything dying all the time.

use std::time::Duration;

use pgonce_testkit::brokers_skipped;
use tokio::task::JoinSet;

use crate::rig::{Rig, number};

/// In every run; `make test-messages` sends a hundred thousand, which takes some minutes.
const MESSAGES: i64 = 20_000;
const WRITERS: i64 = 4;
const A_TRANSACTION: i64 = 50;

fn messages() -> i64 {
    std::env::var("PGONCE_TEST_MESSAGES").ok().and_then(|text| text.parse().ok()).unwrap_or(MESSAGES)
}

/// Writers that also roll back; two relays and two consumers, killed in turn; the broker killed, too. Then both books are equal.
#[tokio::test(flavor = "multi_thread")]
async fn two_services_agree_after_many_messages_under_faults() {
    if brokers_skipped("end to end") {
        return;
    }
    let messages = messages();
    let mut rig = Rig::new().await;
    let mut writers = JoinSet::new();
    for writer in 0..WRITERS {
        let client = rig.sender.client().await;
        writers.spawn(async move {
            for round in 0..messages / WRITERS / A_TRANSACTION {
                // Accounts are locked in one order: writers wait for each other, and never deadlock.
                let one = "SELECT count(transfer(((n * 10 + $1::bigint * 3) % 500)::int, n + $1::bigint))
                    FROM (SELECT n FROM generate_series(1, $2::bigint) n ORDER BY (n * 10 + $1::bigint * 3) % 500, n) o";
                if round % 10 == 3 {
                    client.batch_execute("BEGIN").await.unwrap();
                    client.query_one(one, &[&writer, &A_TRANSACTION]).await.unwrap();
                    client.batch_execute("ROLLBACK").await.unwrap();
                }
                client.query_one(one, &[&writer, &A_TRANSACTION]).await.unwrap();
            }
        });
    }
    let mut relays = vec![rig.relay().start(), rig.relay().start()];
    let mut consumers =
        vec![rig.consume().args(&["--at-once", "16"]).start(), rig.consume().args(&["--at-once", "16"]).start()];
    let client = rig.receiver.client().await;
    for step in 1..=6 {
        // By what has been done, not by time: a fault at every seventh of the way.
        let due = messages * step / 7;
        rig.until_applied(due, Duration::from_secs(120)).await;
        match step % 3 {
            0 => rig.nats.restart(),
            1 => {
                relays.remove(0).kill();
                relays.push(rig.relay().start());
            }
            _ => {
                consumers.remove(0).kill();
                consumers.push(rig.consume().args(&["--at-once", "16"]).start());
            }
        }
    }
    while writers.join_next().await.is_some() {}
    rig.until_applied(messages, Duration::from_secs(120)).await;
    for process in relays.into_iter().chain(consumers) {
        process.stop().await;
    }
    rig.judge(messages).await;
    assert_eq!(number(&client, "SELECT count(*) FROM once.inbox WHERE state <> 'processed'").await, 0);
}
