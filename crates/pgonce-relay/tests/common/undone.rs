//! What a broker says that is still to be done.

use std::time::Duration;

use rdkafka::Offset;
use rdkafka::consumer::{BaseConsumer, Consumer as _};

use crate::brokers::{Broker, dead};

impl Broker {
    /// How many messages the broker still has for a consumer, given out or not.
    pub async fn undone_by(&self, topic: &str, consumer: &str) -> u64 {
        match self {
            Self::Nats(_) => {
                let stream = self.jetstream().await.get_stream(topic).await.unwrap();
                let info = stream.consumer_info(consumer).await.unwrap();
                info.num_pending + u64::try_from(info.num_ack_pending).unwrap()
            }
            // What is given out is counted when its channel is closed: the queue counts what is ready.
            Self::Amqp(_) => self.queued(topic).await,
            Self::Kafka(_) => {
                let (mut config, topic) = (self.kafka(), topic.to_owned());
                config.set("group.id", consumer);
                tokio::task::spawn_blocking(move || undone_in_kafka(&config.create().unwrap(), &topic)).await.unwrap()
            }
            Self::Redis(_) => {
                let mut connection = self.redis().await;
                let answer: Vec<redis::Value> =
                    redis::cmd("XPENDING").arg(topic).arg(consumer).query_async(&mut connection).await.unwrap();
                redis::from_redis_value(answer[0].clone()).unwrap()
            }
        }
    }

    /// How many messages RabbitMQ has put aside, as nobody takes them; the others have no such place.
    pub async fn dead_letters(&self, topic: &str) -> Option<u64> {
        if matches!(self, Self::Amqp(_)) { Some(self.queued(&dead(topic)).await) } else { None }
    }

    async fn queued(&self, queue: &str) -> u64 {
        let (_connection, channel) = self.channel().await;
        let options = lapin::options::QueueDeclareOptions { passive: true, ..Default::default() };
        let queue = channel.queue_declare(queue.into(), options, Default::default()).await.unwrap();
        u64::from(queue.message_count())
    }
}

fn undone_in_kafka(consumer: &BaseConsumer, topic: &str) -> u64 {
    let wait = Duration::from_secs(30);
    let (_, high) = consumer.fetch_watermarks(topic, 0, wait).unwrap();
    let mut place = rdkafka::TopicPartitionList::new();
    place.add_partition(topic, 0);
    let committed = consumer.committed_offsets(place, wait).unwrap();
    let done = match committed.elements()[0].offset() {
        Offset::Offset(offset) => offset,
        _ => 0,
    };
    u64::try_from(high - done).unwrap()
}
