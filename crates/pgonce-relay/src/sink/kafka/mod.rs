//! Kafka, by librdkafka's idempotent producer: a message is delivered when all replicas that are in sync have it.
//! The producer's own retries make no second one; a message that the relay sends again does, with the same id.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::{self, BoxFuture, Either};
use rdkafka::config::ClientConfig;
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::future_producer::DeliveryFuture;
use rdkafka::producer::{FutureProducer, FutureRecord, Producer as _};

use super::template::Template;
use super::{CLOSED, Sink, Verdict};
use crate::kafka::{Quiet, config};
use crate::{Envelope, Message, Target, TargetError};

/// What a URL may say beside the common settings.
pub const SETTINGS: &[&str] = &["kafka_topic", "bytes_max", "compression", "linger"];

/// The setting `bytes_max`: librdkafka's default, which is Kafka's.
const BYTES_MAX: u64 = 1_000_000;
/// Messages that wait for their answers in one call.
const WINDOW: usize = 10_000;

/// Opens a sink; it connects when it first sends.
///
/// # Errors
/// What the URL has wrong.
pub fn open(target: &Target) -> Result<KafkaSink, TargetError> {
    if !target.path().is_empty() {
        return Err(TargetError("a Kafka sink has no path: messages name their topics".into()));
    }
    let timeout = target.timeout()?;
    let linger = target.duration("linger", Duration::ZERO..=Duration::from_secs(1))?;
    let compression = match target.setting("compression") {
        None => "none",
        Some(known @ ("none" | "gzip" | "snappy" | "lz4")) => known,
        Some(_) => return Err(TargetError("compression is none, gzip, snappy or lz4".into())),
    };
    let bytes_max = target.number("bytes_max", 1_000..=BYTES_MAX * 1_000)?.unwrap_or(BYTES_MAX);
    let mut config = config(target)?;
    config
        .set("enable.idempotence", "true")
        .set("acks", "all")
        .set("message.timeout.ms", timeout.as_millis().to_string())
        // A topic that is not there is said to be unknown while there is still time for it: else it times out.
        .set("topic.metadata.propagation.max.ms", (timeout / 2).as_millis().to_string())
        .set("message.max.bytes", bytes_max.to_string())
        .set("compression.type", compression)
        .set("linger.ms", linger.unwrap_or(Duration::from_millis(2)).as_millis().to_string())
        // Keys find the same partitions as those of the Java clients.
        .set("partitioner", "murmur2_random");
    Ok(KafkaSink {
        config,
        topic: Template::of(target, "kafka_topic")?,
        envelope: target.envelope()?,
        timeout,
        producer: Mutex::new(None),
        closed: AtomicBool::new(false),
    })
}

/// See [`open`].
pub struct KafkaSink {
    config: ClientConfig,
    topic: Template,
    envelope: Envelope,
    timeout: Duration,
    producer: Mutex<Option<FutureProducer<Quiet>>>,
    closed: AtomicBool,
}

impl std::fmt::Debug for KafkaSink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The config may hold a password.
        f.debug_struct("KafkaSink").field("topic", &self.topic).finish_non_exhaustive()
    }
}

impl Sink for KafkaSink {
    fn send<'a>(&'a self, messages: &'a [Message]) -> BoxFuture<'a, Vec<Verdict>> {
        Box::pin(async move {
            let mut verdicts = Vec::with_capacity(messages.len());
            for window in messages.chunks(WINDOW) {
                verdicts.extend(self.send_window(window).await);
            }
            verdicts
        })
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            self.closed.store(true, Ordering::Release);
            let producer = self.current().take();
            // It waits for its threads.
            let _ = tokio::task::spawn_blocking(move || drop(producer)).await;
        })
    }
}

impl KafkaSink {
    fn current(&self) -> std::sync::MutexGuard<'_, Option<FutureProducer<Quiet>>> {
        self.producer.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// The producer: a new one where the last has seen an error that it cannot survive.
    fn producer(&self) -> Result<FutureProducer<Quiet>, Verdict> {
        let mut current = self.current();
        if self.closed.load(Ordering::Acquire) {
            return Err(Verdict::away(CLOSED));
        }
        if let Some(producer) = &*current
            && producer.client().fatal_error().is_none()
        {
            return Ok(producer.clone());
        }
        let producer = self.config.create_with_context(Quiet).map_err(Verdict::away)?;
        if let Some(broken) = current.replace(producer) {
            std::thread::spawn(move || drop(broken)); // as in close
        }
        current.clone().ok_or_else(|| Verdict::away(CLOSED))
    }

    async fn send_window(&self, messages: &[Message]) -> Vec<Verdict> {
        let producer = match self.producer() {
            Ok(producer) => producer,
            Err(away) => return vec![away; messages.len()],
        };
        let queued: Vec<_> = messages.iter().map(|message| self.queue(&producer, message)).collect();
        // librdkafka answers for every message by its own time-out; ours is behind it, should it ever not.
        // One timer for all of them.
        let mut late = std::pin::pin!(tokio::time::sleep(self.timeout + Duration::from_secs(5)));
        let mut verdicts = Vec::with_capacity(messages.len());
        for queued in queued {
            verdicts.push(match queued {
                Err(verdict) => verdict,
                Ok(answer) => match future::select(answer, late.as_mut()).await {
                    Either::Left((Ok(Ok(_)), _)) => Verdict::Delivered,
                    Either::Left((Ok(Err((error, _))), _)) => verdict(&error),
                    Either::Left((Err(_), _)) => Verdict::away("the producer has ended"),
                    Either::Right(_) => Verdict::away("no acknowledgement in time"),
                },
            });
        }
        verdicts
    }

    fn queue(&self, producer: &FutureProducer<Quiet>, message: &Message) -> Result<DeliveryFuture, Verdict> {
        let encoded = self.envelope.encode(message, "ce_");
        let topic = self.topic.fill(message);
        if !valid_topic(&topic) {
            return Err(Verdict::refused(format!("{topic:?} is no topic")));
        }
        let mut headers = OwnedHeaders::new_with_capacity(encoded.headers.len() + 1)
            .insert(Header { key: "content-type", value: Some(encoded.content_type) });
        for (name, value) in &encoded.headers {
            // librdkafka takes names as C strings.
            if name.contains('\0') {
                return Err(Verdict::refused("a header's name holds a zero byte"));
            }
            headers = headers.insert(Header { key: name, value: Some(value) });
        }
        let mut record = FutureRecord::to(&topic).payload(&encoded.body[..]).headers(headers);
        if let Some(key) = &message.ordering_key {
            record = record.key(key.as_bytes());
        }
        producer.send_result(record).map_err(|(error, _)| verdict(&error))
    }
}

/// Kafka's own rule. A name that breaks it would only be found out by a time-out.
fn valid_topic(topic: &str) -> bool {
    (1..=249).contains(&topic.len())
        && topic != "."
        && topic != ".."
        && topic.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-'))
}

fn verdict(error: &KafkaError) -> Verdict {
    match error.rdkafka_error_code() {
        Some(
            Code::MessageSizeTooLarge
            | Code::MessageBatchTooLarge
            | Code::InvalidMessage
            | Code::InvalidRecord
            | Code::InvalidTopic
            | Code::UnknownTopic
            | Code::UnknownTopicOrPartition
            | Code::UnknownPartition
            | Code::TopicAuthorizationFailed
            | Code::PolicyViolation,
        ) => Verdict::refused(error),
        Some(
            Code::MessageTimedOut
            | Code::AllBrokersDown
            | Code::BrokerTransportFailure
            | Code::NotEnoughReplicas
            | Code::NotEnoughReplicasAfterAppend
            | Code::LeaderNotAvailable
            | Code::ClusterAuthorizationFailed
            | Code::SaslAuthenticationFailed
            | Code::Authentication
            | Code::QueueFull
            | Code::Fatal
            | Code::Fenced
            | Code::PurgeQueue
            | Code::PurgeInflight,
        ) => Verdict::away(error),
        _ => Verdict::retry(error),
    }
}
