//! Opening sources on a topic, receiving with a limit, and what the broker says is still to be done.

use std::time::Duration;

use pgonce_relay::{Delivery, Message, Source, Verdict, sink, source};

use crate::brokers::{Broker, Kind};

pub const CONSUMER: &str = "billing";

/// Whatever happens, it happens in this time.
const LIMIT: Duration = Duration::from_secs(60);

impl Broker {
    /// The consumer's source on what [`Broker::prepare`] made.
    pub fn source(&self, topic: &str, more: &str) -> Box<dyn Source> {
        let url = match self.kind() {
            Kind::Nats => format!("{}/{topic}?timeout=30s", self.url()),
            Kind::Amqp => format!("{}?queue={topic}", self.url()),
            Kind::Kafka => format!("{}?topic={topic}", self.url()),
            Kind::Redis => format!("{}?stream={topic}", self.url()),
        };
        // Groups of Kafka are one for the whole broker: the topic makes it this test's own.
        source::open(&format!("{url}{more}"), &self.consumer(topic)).unwrap().1
    }

    /// Settings under which a delivery that was not ended comes again soon, where the broker waits for that.
    pub fn soon_again(&self) -> &'static str {
        if matches!(self.kind(), Kind::Nats | Kind::Redis) { "&ack_wait=1s" } else { "" }
    }

    fn consumer(&self, topic: &str) -> String {
        if self.kind() == Kind::Kafka { format!("{CONSUMER}-{topic}") } else { CONSUMER.into() }
    }

    pub async fn publish(&self, messages: &[Message]) {
        let sink = sink::open(&format!("{}?timeout=30s", self.url())).unwrap().1;
        assert_eq!(sink.send(messages).await, vec![Verdict::Delivered; messages.len()]);
        sink.close().await;
    }

    /// How many messages the broker still has for the consumer, given out or not.
    pub async fn undone(&self, topic: &str) -> u64 {
        self.undone_by(topic, &self.consumer(topic)).await
    }
}

/// The next deliveries, as a consumer asks for them: after an error, again.
pub async fn next(source: &mut Box<dyn Source>, max: usize) -> Vec<Delivery> {
    let asked = async {
        loop {
            match source.next(max).await {
                Ok(deliveries) => {
                    assert!((1..=max).contains(&deliveries.len()));
                    return deliveries;
                }
                Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    };
    tokio::time::timeout(LIMIT, asked).await.expect("a delivery in time")
}

/// So many deliveries.
pub async fn receive(source: &mut Box<dyn Source>, count: usize) -> Vec<Delivery> {
    let mut all = Vec::new();
    while all.len() < count {
        all.extend(next(source, count - all.len()).await);
    }
    all
}

pub fn ids(deliveries: &[Delivery]) -> Vec<String> {
    deliveries.iter().map(|delivery| delivery.message.id.clone()).collect()
}

pub async fn ack_all(deliveries: Vec<Delivery>) {
    for delivery in deliveries {
        delivery.receipt.ack().await.unwrap();
    }
}
