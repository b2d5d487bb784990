//! RabbitMQ: a consumer of one queue, with a bounded number of deliveries that are not yet acknowledged.

use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::{FutureExt as _, StreamExt as _};
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicNackOptions, BasicQosOptions, BasicRejectOptions};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{Acker, Connection, Consumer};
use sha2::{Digest as _, Sha256};

use super::{Delivery, Receipt, Source, SourceError, prefetch};
use crate::amqp::Connector;
use crate::{Target, TargetError, decode};

/// What a URL may say beside the common settings.
pub const SETTINGS: &[&str] = &["queue", "prefetch", "id"];

/// How long a delivery is held back before it goes to its queue again; a broker gives up on one that is held for
/// long.
const HELD_MAX: Duration = Duration::from_secs(300);

/// Opens a source; it connects when it is first asked.
///
/// # Errors
/// What the URL has wrong.
pub fn open(target: &Target, consumer: &str) -> Result<AmqpSource, TargetError> {
    let queue = target.setting("queue").unwrap_or_default();
    if queue.is_empty() {
        return Err(TargetError("an AMQP source names its queue: amqp://host/vhost?queue=orders".into()));
    }
    let digest = match target.setting("id") {
        None | Some("message") => false,
        Some("digest") => true,
        Some(_) => return Err(TargetError("id is message or digest".into())),
    };
    Ok(AmqpSource {
        connector: Connector::of(target)?,
        queue: ShortString::try_new(queue).map_err(|error| TargetError(format!("queue: {error}")))?,
        name: format!("amqp:{queue}"),
        // The broker wants tags that differ on a channel only; people want to see whose they are.
        tag: ShortString::try_new(consumer).map_err(|error| TargetError(format!("consumer: {error}")))?,
        prefetch: prefetch(target)?,
        digest,
        timeout: target.timeout()?,
        consuming: None,
    })
}

/// See [`open`].
pub struct AmqpSource {
    connector: Connector,
    queue: ShortString,
    name: String,
    tag: ShortString,
    prefetch: u16,
    digest: bool,
    timeout: Duration,
    /// Kept between calls: what has arrived already is not lost with a call that is dropped.
    consuming: Option<(Connection, Consumer)>,
}

impl std::fmt::Debug for AmqpSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AmqpSource").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Source for AmqpSource {
    fn next(&mut self, max: usize) -> BoxFuture<'_, Result<Vec<Delivery>, SourceError>> {
        Box::pin(async move {
            let outcome = self.receive(max.max(1)).await;
            if outcome.is_err() {
                self.consuming = None;
            }
            outcome
        })
    }

    fn reach(&mut self) -> BoxFuture<'_, Result<(), SourceError>> {
        Box::pin(async move {
            if self.consuming.is_none() {
                let consume = tokio::time::timeout(self.timeout, self.consume());
                self.consuming = Some(consume.await.map_err(|_| SourceError::new("no consumer in time"))??);
            }
            Ok(())
        })
    }

    fn close(&mut self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            if let Some((connection, _)) = self.consuming.take() {
                let _ = tokio::time::timeout(self.timeout, connection.close(200, "bye".into())).await;
            }
        })
    }
}

impl AmqpSource {
    async fn receive(&mut self, max: usize) -> Result<Vec<Delivery>, SourceError> {
        self.reach().await?;
        let (name, digest) = (self.name.clone(), self.digest);
        let (_, consumer) = self.consuming.as_mut().ok_or_else(|| SourceError::new("no consumer"))?;
        let mut deliveries = Vec::new();
        // The first is waited for; of the others, those that are here.
        let mut next = Some(consumer.next().await);
        while let Some(message) = next {
            match message {
                Some(Ok(message)) => deliveries.push(delivery(&name, digest, message)),
                // What was taken is given out first; the error comes again.
                Some(Err(_)) | None if !deliveries.is_empty() => break,
                Some(Err(error)) => return Err(SourceError::new(error)),
                None => return Err(SourceError::new("the broker has ended the consumer")),
            }
            next = if deliveries.len() < max { consumer.next().now_or_never() } else { None };
        }
        Ok(deliveries)
    }

    async fn consume(&self) -> Result<(Connection, Consumer), SourceError> {
        let connection = self.connector.connect().await.map_err(SourceError::new)?;
        let channel = connection.create_channel().await.map_err(SourceError::new)?;
        channel.basic_qos(self.prefetch, BasicQosOptions::default()).await.map_err(SourceError::new)?;
        let options = BasicConsumeOptions::default();
        let consumer = channel.basic_consume(self.queue.clone(), self.tag.clone(), options, FieldTable::default());
        Ok((connection, consumer.await.map_err(SourceError::new)?))
    }
}

fn delivery(name: &str, digest: bool, delivery: lapin::message::Delivery) -> Delivery {
    let properties = &delivery.properties;
    let headers = properties.headers().iter().flat_map(|table| table.inner()).filter_map(|(name, value)| {
        let value = match value {
            AMQPValue::LongString(text) => text.to_string(),
            AMQPValue::ShortString(text) => text.to_string(),
            AMQPValue::Boolean(value) => value.to_string(),
            AMQPValue::LongInt(value) => value.to_string(),
            AMQPValue::LongLongInt(value) => value.to_string(),
            _ => return None,
        };
        Some((name.to_string(), value))
    });
    let content_type = properties.content_type().as_ref().map(ToString::to_string);
    let mut message = decode(content_type.as_deref(), headers.collect(), delivery.data.into());
    if message.kind.is_empty() {
        message.kind = properties.kind().as_ref().map(ToString::to_string).unwrap_or_default();
    }
    message.topic = delivery.routing_key.to_string();
    if message.id.is_empty() {
        message.id = match properties.message_id() {
            Some(id) => id.to_string(),
            // RabbitMQ has no position to fall back to. Equal bytes are one message only where somebody said so:
            // else the second of them would be lost.
            None if digest => {
                let digest = Sha256::new_with_prefix(message.topic.as_bytes()).chain_update([0]);
                let digest = digest.chain_update(&message.payload).finalize();
                digest.iter().map(|byte| format!("{byte:02x}")).collect()
            }
            None => uuid::Uuid::new_v4().to_string(),
        };
    }
    let receipt = Box::new(AmqpReceipt(delivery.acker));
    // A queue has no positions: the exchange and the routing key are what its producer is known by.
    let place = format!("{name} from {:?} by {:?}", delivery.exchange.as_str(), delivery.routing_key.as_str());
    Delivery { message, source: name.to_owned(), place, redelivered: delivery.redelivered, receipt }
}

#[derive(Debug)]
struct AmqpReceipt(Acker);

/// Says so where the channel is gone: the broker has put the delivery back by itself.
fn heard(outcome: lapin::Result<bool>) -> Result<(), SourceError> {
    match outcome {
        Ok(true) => Ok(()),
        Ok(false) => Err(SourceError::new("the channel is closed: the delivery comes again")),
        Err(error) => Err(SourceError::new(error)),
    }
}

impl Receipt for AmqpReceipt {
    fn ack(self: Box<Self>) -> BoxFuture<'static, Result<(), SourceError>> {
        Box::pin(async move { heard(self.0.ack(BasicAckOptions::default()).await) })
    }

    /// To the queue's dead-letter exchange; gone, where it has none.
    fn refuse(self: Box<Self>) -> BoxFuture<'static, Result<(), SourceError>> {
        Box::pin(async move { heard(self.0.reject(BasicRejectOptions { requeue: false }).await) })
    }

    fn retry(self: Box<Self>, delay: Duration) -> BoxFuture<'static, Result<(), SourceError>> {
        let back = async move {
            let options = BasicNackOptions { requeue: true, ..BasicNackOptions::default() };
            heard(self.0.nack(options).await)
        };
        Box::pin(async move {
            if delay.is_zero() {
                return back.await;
            }
            // RabbitMQ counts no delay: the delivery is held here, and goes back at once if this process ends.
            tokio::spawn(async move {
                tokio::time::sleep(delay.min(HELD_MAX)).await;
                let _ = back.await;
            });
            Ok(())
        })
    }
}
