//! One contract, every sink, each against the broker itself.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on should stop, loudly")]

#[path = "../common/brokers.rs"]
mod brokers;
mod contract;
mod own;
mod stored;

/// The same test for each broker.
macro_rules! every_sink {
    ($($name:ident: $killed:literal;)*) => {$(
        mod $name {
            use super::{brokers::{Broker, Kind}, contract};

            async fn run(kind: Kind) {
                if let Some(broker) = Broker::start(kind, $killed).await {
                    contract::$name(broker).await;
                }
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn nats() {
                run(Kind::Nats).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn amqp() {
                run(Kind::Amqp).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn kafka() {
                run(Kind::Kafka).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn redis() {
                run(Kind::Redis).await;
            }
        }
    )*};
}

every_sink! {
    every_envelope_arrives_whole: false;
    a_batch_arrives: false;
    the_same_message_twice: false;
    one_that_is_too_large_is_refused_alone: false;
    nowhere_to_go: false;
    a_closed_sink_is_away: false;
    a_killed_broker_is_away_and_comes_back: true;
    a_broker_that_does_not_answer_is_away_in_time: true;
    what_was_delivered_outlives_a_kill: true;
}
