//! One contract, every source, each against the broker itself.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on should stop, loudly")]

#[path = "../common/brokers.rs"]
mod brokers;
mod contract;
#[path = "../common/undone.rs"]
mod undone;
mod world;

/// The same test for each broker.
macro_rules! every_source {
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

every_source! {
    what_a_sink_sends_is_received_and_acknowledged: false;
    what_was_not_acknowledged_comes_again: false;
    a_retry_comes_again_after_its_delay: false;
    what_is_refused_does_not_come_again: false;
    no_more_than_prefetch_are_out: false;
    a_call_that_is_dropped_loses_nothing: false;
    a_message_of_a_stranger_has_an_id: false;
    a_killed_broker_goes_on_where_it_was: true;
}
