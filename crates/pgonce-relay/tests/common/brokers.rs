//! The real brokers, in one shape: what a contract needs of each beside the sink and the source under test.

use std::collections::BTreeMap;
use std::time::Duration;

use lapin::options::QueueDeclareOptions;
use lapin::types::{AMQPValue, FieldTable};
use pgonce_relay::Message;
use pgonce_testkit::{KafkaServer, NatsServer, RabbitServer, RedisServer, brokers_skipped, eventually};
use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;

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

    /// Makes what takes the messages of a topic: a stream, a durable queue with another one for dead letters, a topic of
    /// one partition.
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
                channel.queue_declare(dead(topic).into(), options, FieldTable::default()).await.unwrap();
                let mut arguments = FieldTable::default();
                for (name, value) in [("x-dead-letter-exchange", ""), ("x-dead-letter-routing-key", &dead(topic))] {
                    arguments.insert(name.into(), AMQPValue::LongString(value.into()));
                }
                channel.queue_declare(topic.into(), options, arguments).await.unwrap();
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

    pub async fn jetstream(&self) -> async_nats::jetstream::Context {
        async_nats::jetstream::new(async_nats::connect(self.url()).await.unwrap())
    }

    pub async fn channel(&self) -> (lapin::Connection, lapin::Channel) {
        let connection = lapin::Connection::connect(&self.url(), lapin::ConnectionProperties::default()).await.unwrap();
        let channel = connection.create_channel().await.unwrap();
        (connection, channel)
    }

    /// A connection that is patient: the client's own limit is half a second, which a busy machine needs for itself.
    pub async fn redis(&self) -> redis::aio::MultiplexedConnection {
        let patience = Some(Duration::from_secs(60));
        let config =
            redis::AsyncConnectionConfig::new().set_connection_timeout(patience).set_response_timeout(patience);
        let client = redis::Client::open(self.url()).unwrap();
        client.get_multiplexed_async_connection_with_config(&config).await.unwrap()
    }

    pub fn kafka(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", self.url().trim_start_matches("kafka://")).set("group.id", "looking");
        config
    }
}

/// The queue of RabbitMQ that takes what a consumer of a topic refused.
pub fn dead(topic: &str) -> String {
    format!("{topic}.dead")
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
