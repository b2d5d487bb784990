//! The real brokers, in one shape: what a contract needs of each beside the sink and the source under test.

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::StreamExt as _;
use lapin::options::{BasicGetOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use pgonce_relay::{Message, decode};
use pgonce_testkit::{KafkaServer, NatsServer, RabbitServer, RedisServer, brokers_skipped, eventually};
use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::message::{Headers as _, Message as _};
use rdkafka::{Offset, TopicPartitionList};

/// Which.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Nats,
    Amqp,
    Kafka,
    Redis,
}

/// One that runs.
#[derive(Debug)]
pub enum Broker {
    Nats(NatsServer),
    /// `None` is the one that the tests of this process share.
    Amqp(Option<RabbitServer>),
    Kafka(Option<KafkaServer>),
    Redis(RedisServer),
}

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
    /// A broker, of the test's own where it is to be killed; none where `SKIP_BROKERS` leaves it out.
    pub async fn start(kind: Kind, to_be_killed: bool) -> Option<Self> {
        if kind != Kind::Redis && brokers_skipped(&format!("{kind:?}")) {
            return None;
        }
        let start = move || match (kind, to_be_killed) {
            (Kind::Nats, _) => Self::Nats(NatsServer::start()),
            (Kind::Redis, _) => Self::Redis(RedisServer::start_durable()),
            (Kind::Amqp, true) => Self::Amqp(Some(RabbitServer::start())),
            (Kind::Kafka, true) => Self::Kafka(Some(KafkaServer::start())),
            (Kind::Amqp, false) => {
                let _ = RabbitServer::shared();
                Self::Amqp(None)
            }
            (Kind::Kafka, false) => {
                let _ = KafkaServer::shared_url();
                Self::Kafka(None)
            }
        };
        let broker = tokio::task::spawn_blocking(start).await.unwrap();
        eprintln!("against {}", broker.version());
        Some(broker)
    }

    pub fn kind(&self) -> Kind {
        match self {
            Self::Nats(_) => Kind::Nats,
            Self::Amqp(_) => Kind::Amqp,
            Self::Kafka(_) => Kind::Kafka,
            Self::Redis(_) => Kind::Redis,
        }
    }

    fn version(&self) -> String {
        match self {
            Self::Nats(server) => format!("NATS {}", server.version()),
            Self::Amqp(server) => {
                format!("RabbitMQ {}", server.as_ref().unwrap_or_else(|| RabbitServer::shared()).version())
            }
            Self::Kafka(_) => format!("Kafka {}", KafkaServer::shared_version()),
            Self::Redis(server) => format!("Redis {}", server.version()),
        }
    }

    pub fn url(&self) -> String {
        match self {
            Self::Nats(server) => server.url(),
            Self::Amqp(server) => server.as_ref().unwrap_or_else(|| RabbitServer::shared()).url(),
            Self::Kafka(server) => server.as_ref().map_or_else(KafkaServer::shared_url, KafkaServer::url),
            Self::Redis(server) => server.url(),
        }
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        match self {
            Self::Nats(server) => server.kill(),
            Self::Amqp(server) => server.as_mut().unwrap().kill(),
            Self::Kafka(server) => server.as_mut().unwrap().kill(),
            Self::Redis(server) => server.kill(),
        }
    }

    /// Again, with what it had stored.
    pub fn restart(&mut self) {
        match self {
            Self::Nats(server) => server.restart(),
            Self::Amqp(server) => server.as_mut().unwrap().restart(),
            Self::Kafka(server) => server.as_mut().unwrap().restart(),
            Self::Redis(server) => server.start_again(),
        }
    }

    /// Makes what takes the messages of a topic: a stream, a durable queue, a topic of one partition.
    pub async fn prepare(&self, topic: &str) {
        match self {
            Self::Nats(_) => {
                let config = async_nats::jetstream::stream::Config {
                    name: topic.to_owned(),
                    subjects: vec![topic.to_owned()],
                    ..Default::default()
                };
                self.jetstream().await.create_stream(config).await.unwrap();
            }
            Self::Amqp(_) => {
                let (_connection, channel) = self.channel().await;
                let options = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
                channel.queue_declare(topic.into(), options, FieldTable::default()).await.unwrap();
            }
            Self::Kafka(_) => {
                let admin: AdminClient<DefaultClientContext> = self.kafka().create().unwrap();
                let topics = [NewTopic::new(topic, 1, TopicReplication::Fixed(1))];
                let created = admin.create_topics(&topics, &AdminOptions::new()).await.unwrap();
                assert_eq!(created, [Ok(topic.to_owned())]);
            }
            Self::Redis(_) => {}
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
        let client = redis::Client::open(self.url()).unwrap();
        let mut connection = client.get_multiplexed_async_connection().await.unwrap();
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

    pub async fn jetstream(&self) -> async_nats::jetstream::Context {
        async_nats::jetstream::new(async_nats::connect(self.url()).await.unwrap())
    }

    pub async fn channel(&self) -> (lapin::Connection, lapin::Channel) {
        let connection = lapin::Connection::connect(&self.url(), lapin::ConnectionProperties::default()).await.unwrap();
        let channel = connection.create_channel().await.unwrap();
        (connection, channel)
    }

    pub fn kafka(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", self.url().trim_start_matches("kafka://")).set("group.id", "looking");
        config
    }
}

fn stored_in_kafka(config: &ClientConfig, topic: &str) -> Vec<Stored> {
    let consumer: BaseConsumer = config.create().unwrap();
    let wait = Duration::from_secs(30);
    let (low, high) = consumer.fetch_watermarks(topic, 0, wait).unwrap();
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

/// A name that no other test has.
pub fn fresh(what: &str) -> String {
    format!("{what}-{}", uuid::Uuid::new_v4().simple())
}

/// A message of an order, as the outbox has it.
pub fn message(topic: &str, number: usize) -> Message {
    Message {
        id: uuid::Uuid::new_v4().to_string(),
        tenant: "acme".into(),
        topic: topic.to_owned(),
        kind: "order.created".into(),
        ordering_key: Some(format!("order-{number}")),
        aggregate: Some(pgonce_relay::Aggregate {
            kind: "order".into(),
            id: format!("Größe {number} 100%"),
            version: Some(3),
        }),
        headers: BTreeMap::from([(
            "traceparent".into(),
            "00-0af7651916cd43dd8448eb211c80319c-00f067aa0ba902b7-01".into(),
        )]),
        payload: format!(r#"{{"number":{number},"text":"ä \" ☃"}}"#).into(),
        time: "2026-01-02T03:04:05.678901Z".into(),
    }
}

/// Polls longer than [`eventually`]: a broker that was killed takes its time.
pub async fn in_the_end(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    for _ in 0..6 {
        let limit = tokio::time::timeout(Duration::from_secs(9), eventually(what, &mut condition)).await;
        if limit.is_ok() {
            return;
        }
    }
    panic!("did not happen in time: {what}");
}
