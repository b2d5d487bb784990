//! How fast a broker's own client publishes, with acknowledgements: what the relay is measured against. And our sinks
//! over the same broker.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use async_nats::jetstream::context::{ContextBuilder, PublishAckFuture};
use async_nats::jetstream::message::PublishMessage;
use async_nats::jetstream::stream;
use pgonce_relay::{Message, Verdict, sink};
use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord};
use uuid::Uuid;

use crate::Arguments;
use crate::measure::{Series, report};

/// Messages that wait for their acknowledgements, and messages in one call of a sink.
const IN_FLIGHT: usize = 2_000;
const MESSAGES: usize = 50_000;

/// For each broker that was named: its client, then our sink.
pub async fn sinks(arguments: &Arguments) -> Result<()> {
    for url in &arguments.brokers {
        let mut series =
            ["the client alone", "the sink"].map(|name| Series { name: name.to_owned(), rates: Vec::new() });
        for _ in 0..arguments.rounds {
            let raw = match url.split_once(':') {
                Some(("nats", _)) => raw_nats(url, MESSAGES, Sends::Payloads).await?,
                Some(("kafka", _)) => raw_kafka(url, MESSAGES, Sends::Payloads).await?,
                _ => bail!("--broker takes nats:// and kafka://"),
            };
            let ours = through_sink(url, MESSAGES).await?;
            for (one, took) in series.iter_mut().zip([raw, ours]) {
                one.rates.push(MESSAGES as f64 / took.as_secs_f64());
            }
        }
        report(&format!("sinks: {url}, acknowledged messages"), &series);
    }
    Ok(())
}

fn payload() -> String {
    crate::work::body().to_string()
}

/// What a broker's client sends by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sends {
    /// Bare payloads.
    Payloads,
    /// The same bytes as the relay: payloads with the headers of a CloudEvent.
    Events,
}

/// The headers that the relay sends by default with a message of the bench, its id apart.
fn event(topic: &str, prefix: &str, number: usize) -> [(String, String); 6] {
    [
        ("specversion", "1.0".to_owned()),
        ("source", format!("/pgonce/{topic}")),
        ("type", "order.created".to_owned()),
        ("time", "2026-01-02T03:04:05.678901Z".to_owned()),
        ("partitionkey", format!("order-{number}")),
        ("id", Uuid::new_v4().to_string()),
    ]
    .map(|(name, value)| (format!("{prefix}{name}"), value))
}

/// A stream of its own, `messages` acknowledged publishes with ids, a bounded number in flight.
pub async fn raw_nats(url: &str, messages: usize, sends: Sends) -> Result<Duration> {
    let client = async_nats::connect(url).await?;
    let context = ContextBuilder::new().max_ack_inflight(IN_FLIGHT).backpressure_on_inflight(true).build(client);
    let subject = nats_stream(&context).await?;
    let payload = bytes::Bytes::from(payload());
    let began = Instant::now();
    let (sender, mut sent) = tokio::sync::mpsc::channel::<PublishAckFuture>(IN_FLIGHT);
    let acknowledged = tokio::spawn(async move {
        while let Some(future) = sent.recv().await {
            future.await?;
        }
        anyhow::Ok(())
    });
    for number in 0..messages {
        let mut publish = PublishMessage::build().payload(payload.clone()).message_id(Uuid::new_v4().to_string());
        if sends == Sends::Events {
            publish = publish.header("content-type", "application/json");
            for (name, value) in event(&subject, "ce-", number) {
                publish = publish.header(name.as_str(), value.as_str());
            }
        }
        sender.send(context.send_publish(subject.clone(), publish).await?).await?;
    }
    drop(sender);
    acknowledged.await??;
    let took = began.elapsed();
    context.delete_stream(&subject).await?;
    Ok(took)
}

/// A stream on the broker's disk, and the one subject that it takes, which is also its name.
pub async fn nats_stream(context: &async_nats::jetstream::Context) -> Result<String> {
    let name = format!("bench-{}", Uuid::new_v4().simple());
    let config = stream::Config { name: name.clone(), subjects: vec![name.clone()], ..stream::Config::default() };
    context.create_stream(config).await?;
    Ok(name)
}

/// A topic of its own, `messages` acknowledged by all replicas, by the idempotent producer.
pub async fn raw_kafka(url: &str, messages: usize, sends: Sends) -> Result<Duration> {
    let config = kafka_config(url);
    let topic = kafka_topic(&config).await?;
    let producer: FutureProducer = config.create()?;
    let payload = payload();
    let began = Instant::now();
    let mut queued = Vec::with_capacity(messages);
    for number in 0..messages {
        let key = format!("order-{number}");
        loop {
            let mut record = FutureRecord::to(&topic).payload(&payload).key(&key);
            if sends == Sends::Events {
                let mut headers =
                    OwnedHeaders::new().insert(Header { key: "content-type", value: Some("application/json") });
                for (name, value) in &event(&topic, "ce_", number) {
                    headers = headers.insert(Header { key: name, value: Some(value) });
                }
                record = record.headers(headers);
            }
            match producer.send_result(record) {
                Ok(future) => break queued.push(future),
                Err((KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull), _)) => {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                Err((error, _)) => return Err(error.into()),
            }
        }
    }
    for future in queued {
        future.await?.map_err(|(error, _)| error)?;
    }
    Ok(began.elapsed())
}

pub fn kafka_config(url: &str) -> ClientConfig {
    let mut config = ClientConfig::new();
    config
        .set("bootstrap.servers", url.trim_start_matches("kafka://").trim_end_matches('/'))
        .set("enable.idempotence", "true")
        .set("acks", "all")
        .set("linger.ms", "2");
    config
}

pub async fn kafka_topic(config: &ClientConfig) -> Result<String> {
    let admin: AdminClient<DefaultClientContext> = config.create()?;
    let topic = format!("bench-{}", Uuid::new_v4().simple());
    let new = [NewTopic::new(&topic, 1, TopicReplication::Fixed(1))];
    let made = admin.create_topics(&new, &AdminOptions::new()).await?;
    if let Some(Err((_, error))) = made.into_iter().next() {
        bail!("no topic: {error}");
    }
    Ok(topic)
}

/// The same number of messages through our sink, a batch after the other.
async fn through_sink(url: &str, messages: usize) -> Result<Duration> {
    let topic = if url.starts_with("nats") {
        nats_stream(&async_nats::jetstream::new(async_nats::connect(url).await?)).await?
    } else {
        kafka_topic(&kafka_config(url)).await?
    };
    let (_, sink) = sink::open(url).context("no sink")?;
    // Made before the clock starts: the outbox has its messages already.
    let made: Vec<Message> = (0..messages).map(|number| message(&topic, number)).collect();
    // Connected before the clock starts, as the other one is.
    if sink.send(&[message(&topic, messages)]).await != [Verdict::Delivered] {
        bail!("the first message was not delivered");
    }
    let began = Instant::now();
    for batch in made.chunks(IN_FLIGHT) {
        if let Some(other) = sink.send(batch).await.into_iter().find(|verdict| *verdict != Verdict::Delivered) {
            bail!("not delivered: {other:?}");
        }
    }
    let took = began.elapsed();
    sink.close().await;
    Ok(took)
}

fn message(topic: &str, number: usize) -> Message {
    Message {
        id: Uuid::new_v4().to_string(),
        topic: topic.to_owned(),
        kind: "order.created".into(),
        ordering_key: Some(format!("order-{number}")),
        payload: payload().into(),
        time: "2026-01-02T03:04:05Z".into(),
        ..Message::default()
    }
}
