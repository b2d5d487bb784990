//! What a broker has stored, read by its own client and not by ours.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use lapin::options::BasicGetOptions;
use lapin::types::AMQPValue;
use pgonce_relay::{Message, decode};
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::message::{Headers as _, Message as _};
use rdkafka::{ClientConfig, Offset, TopicPartitionList};

use crate::brokers::Broker;

/// A message as the broker has it.
#[derive(Debug)]
pub struct Stored {
    pub content_type: String,
    pub headers: BTreeMap<String, String>,
    pub key: Option<String>,
    pub body: Vec<u8>,
    /// As a consumer would read it.
    pub message: Message,
}

impl Stored {
    fn new(content_type: Option<&str>, headers: Vec<(String, String)>, key: Option<String>, body: Vec<u8>) -> Self {
        Self {
            content_type: content_type.unwrap_or_default().to_owned(),
            headers: headers.iter().cloned().collect(),
            key,
            message: decode(content_type, headers, body.clone().into()),
            body,
        }
    }
}

impl Broker {
    /// SIGSTOP, and with `false` SIGCONT: it is there, and answers nothing.
    pub fn stop_answering(&self, stopped: bool) {
        macro_rules! signal {
            ($server:expr) => {
                if stopped { $server.stop_answering() } else { $server.resume() }
            };
        }
        match self {
            Self::Nats(server) => signal!(server),
            Self::Amqp(server) => signal!(server.as_ref().unwrap()),
            Self::Kafka(server) => signal!(server.as_ref().unwrap()),
            Self::Redis(server) => signal!(server),
        }
    }

    /// All that the broker has of a topic.
    pub async fn stored(&self, topic: &str) -> Vec<Stored> {
        match self {
            Self::Nats(_) => self.stored_in_nats(topic).await,
            Self::Amqp(_) => self.stored_in_rabbit(topic).await,
            Self::Kafka(_) => {
                let (config, topic) = (self.kafka(), topic.to_owned());
                tokio::task::spawn_blocking(move || stored_in_kafka(&config, &topic)).await.unwrap()
            }
            Self::Redis(_) => self.stored_in_redis(topic).await,
        }
    }

    async fn stored_in_nats(&self, topic: &str) -> Vec<Stored> {
        let mut stream = self.jetstream().await.get_stream(topic).await.unwrap();
        let count = stream.info().await.unwrap().state.messages;
        if count == 0 {
            return Vec::new();
        }
        let config = async_nats::jetstream::consumer::pull::Config { ..Default::default() };
        let consumer = stream.create_consumer(config).await.unwrap();
        let messages = consumer.messages().await.unwrap().take(usize::try_from(count).unwrap());
        let read = |message: async_nats::jetstream::Message| {
            let headers = message.headers.clone().unwrap_or_default();
            let text = |name: &str| headers.get(name).map(|value| value.as_str().to_owned());
            let content_type = text("content-type");
            let all = headers.iter().map(|(name, values)| {
                (name.to_string(), values.iter().map(|value| value.as_str()).collect::<String>())
            });
            Stored::new(content_type.as_deref(), all.collect(), None, message.payload.to_vec())
        };
        messages.map(|message| read(message.unwrap())).collect().await
    }

    async fn stored_in_rabbit(&self, topic: &str) -> Vec<Stored> {
        let (connection, channel) = self.channel().await;
        let mut all = Vec::new();
        while let Some(got) = channel.basic_get(topic.into(), BasicGetOptions::default()).await.unwrap() {
            let properties = &got.delivery.properties;
            let content_type = properties.content_type().as_ref().map(ToString::to_string);
            let table = properties.headers().clone().unwrap_or_default();
            let headers = table.inner().iter().map(|(name, value)| match value {
                AMQPValue::LongString(value) => (name.to_string(), value.to_string()),
                other => panic!("{other:?}"),
            });
            let mut stored = Stored::new(content_type.as_deref(), headers.collect(), None, got.delivery.data.clone());
            assert_eq!(*properties.delivery_mode(), Some(2), "persistent");
            stored.headers.extend(properties.message_id().iter().map(|id| ("message-id".into(), id.to_string())));
            all.push(stored);
        }
        // Nothing was acknowledged: all of it goes back.
        connection.close(200, "".into()).await.unwrap();
        all
    }

    async fn stored_in_redis(&self, topic: &str) -> Vec<Stored> {
        let mut connection = self.redis().await;
        let entries: Vec<(String, Vec<(String, String)>)> =
            redis::cmd("XRANGE").arg(topic).arg("-").arg("+").query_async(&mut connection).await.unwrap();
        let read = |fields: Vec<(String, String)>| {
            let text = |name: &str| fields.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone());
            let (body, content_type) = (text("payload").unwrap_or_default(), text("content-type"));
            let headers = fields.into_iter().filter(|(name, _)| name != "payload").collect();
            Stored::new(content_type.as_deref(), headers, None, body.into_bytes())
        };
        entries.into_iter().map(|(_, fields)| read(fields)).collect()
    }
}

fn stored_in_kafka(config: &ClientConfig, topic: &str) -> Vec<Stored> {
    let wait = Duration::from_secs(30);
    // A broker that was stopped for long has lost its partitions for a moment; a client remembers that.
    let deadline = Instant::now() + wait * 2;
    let (consumer, low, high) = loop {
        let consumer: BaseConsumer = config.create().unwrap();
        match consumer.fetch_watermarks(topic, 0, Duration::from_secs(5)) {
            Ok((low, high)) => break (consumer, low, high),
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
    };
    let mut from = TopicPartitionList::new();
    from.add_partition_offset(topic, 0, Offset::Beginning).unwrap();
    consumer.assign(&from).unwrap();
    let mut all = Vec::new();
    while i64::try_from(all.len()).unwrap() < high - low {
        let message = consumer.poll(wait).expect("a message in time").unwrap();
        let headers: Vec<(String, String)> = message
            .headers()
            .into_iter()
            .flat_map(|headers| headers.iter())
            .map(|header| {
                (header.key.to_owned(), String::from_utf8(header.value.unwrap_or_default().to_vec()).unwrap())
            })
            .collect();
        let content_type = headers.iter().find(|(name, _)| name == "content-type").map(|(_, value)| value.clone());
        let key = message.key().map(|key| String::from_utf8(key.to_vec()).unwrap());
        let body = message.payload().unwrap_or_default().to_vec();
        all.push(Stored::new(content_type.as_deref(), headers, key, body));
    }
    all
}
