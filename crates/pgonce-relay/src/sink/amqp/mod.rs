//! RabbitMQ, with publisher confirms: a message is delivered when the broker has confirmed it and has not returned
//! it, that is, when at least one queue has it. Messages are persistent; whether the queue is, is the queue's matter.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::BoxFuture;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::protocol::{AMQPError, AMQPErrorKind, AMQPSoftError};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{BasicProperties, Channel, Confirmation, Connection, ErrorKind, PublisherConfirm};
use tokio::sync::Mutex;
use tokio::time::Instant;

use super::template::Template;
use super::{CLOSED, Sink, Verdict};
use crate::amqp::Connector;
use crate::{Envelope, Message, Target, TargetError};

/// What a URL may say beside the common settings.
pub const SETTINGS: &[&str] = &["exchange", "routing_key"];

/// Messages that wait for their confirms on one channel.
const WINDOW: usize = 1_000;
const PERSISTENT: u8 = 2;

/// Opens a sink; it connects when it first sends.
///
/// # Errors
/// What the URL has wrong.
pub fn open(target: &Target) -> Result<AmqpSink, TargetError> {
    let exchange = target.setting("exchange").unwrap_or_default();
    Ok(AmqpSink {
        connector: Connector::of(target)?,
        exchange: ShortString::try_new(exchange).map_err(|error| TargetError(format!("exchange: {error}")))?,
        routing_key: Template::of(target, "routing_key")?,
        envelope: target.envelope()?,
        timeout: target.timeout()?,
        link: Mutex::new(Link::default()),
        closed: AtomicBool::new(false),
    })
}

/// See [`open`].
#[derive(Debug)]
pub struct AmqpSink {
    connector: Connector,
    exchange: ShortString,
    routing_key: Template,
    envelope: Envelope,
    timeout: Duration,
    link: Mutex<Link>,
    closed: AtomicBool,
}

/// The connection, and its channels that nobody uses now. A call has a channel for itself: returned messages come
/// with whichever confirm is next on their channel, and must not come with another call's.
#[derive(Default)]
struct Link {
    connection: Option<Connection>,
    idle: Vec<Channel>,
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link").field("idle", &self.idle.len()).finish_non_exhaustive()
    }
}

/// A message that is ready to be published.
struct Ready<'a> {
    at: usize,
    id: &'a str,
    routing_key: ShortString,
    properties: BasicProperties,
    body: bytes::Bytes,
}

impl Sink for AmqpSink {
    fn send<'a>(&'a self, messages: &'a [Message]) -> BoxFuture<'a, Vec<Verdict>> {
        Box::pin(async move {
            let mut verdicts = vec![Verdict::Delivered; messages.len()];
            let mut ready = Vec::with_capacity(messages.len());
            for (at, message) in messages.iter().enumerate() {
                match self.prepare(at, message) {
                    Ok(message) => ready.push(message),
                    Err(error) => verdicts[at] = Verdict::refused(error),
                }
            }
            // The part of a batch that closes its channel is halved until the one to blame is alone.
            let mut parts: Vec<Vec<&Ready<'_>>> =
                ready.chunks(WINDOW).rev().map(|part| part.iter().collect()).collect();
            while let Some(part) = parts.pop() {
                let mut suspects = Vec::new();
                for (message, answer) in part.iter().zip(self.publish(&part).await) {
                    match answer {
                        Answer::Judged(verdict) => verdicts[message.at] = verdict,
                        Answer::ChannelClosed(reason) => suspects.push((*message, reason)),
                    }
                }
                if let [(message, reason)] = &suspects[..] {
                    verdicts[message.at] = Verdict::refused(reason);
                } else if !suspects.is_empty() {
                    let suspects: Vec<_> = suspects.into_iter().map(|(message, _)| message).collect();
                    let (one, two) = suspects.split_at(suspects.len() / 2);
                    parts.extend([two.to_vec(), one.to_vec()]);
                }
            }
            verdicts
        })
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            self.closed.store(true, Ordering::Release);
            let link = std::mem::take(&mut *self.link.lock().await);
            if let Some(connection) = link.connection {
                let _ = tokio::time::timeout(self.timeout, connection.close(200, "bye".into())).await;
            }
        })
    }
}

/// What came back for one message.
enum Answer {
    Judged(Verdict),
    /// The broker has closed the channel: this message, or one before it, is to blame.
    ChannelClosed(String),
}

impl AmqpSink {
    fn prepare<'a>(&self, at: usize, message: &'a Message) -> Result<Ready<'a>, String> {
        let short = |text: &str| ShortString::try_new(text).map_err(|error| error.to_string());
        let encoded = self.envelope.encode(message, "cloudEvents:");
        let mut headers = FieldTable::default();
        for (name, value) in encoded.headers {
            headers.insert(short(&name)?, AMQPValue::LongString(value.into()));
        }
        let properties = BasicProperties::default()
            .with_message_id(short(&message.id)?)
            .with_content_type(short(encoded.content_type)?)
            .with_type(short(&message.kind)?)
            .with_delivery_mode(PERSISTENT)
            .with_headers(headers);
        let routing_key = short(&self.routing_key.fill(message))?;
        Ok(Ready { at, id: &message.id, routing_key, properties, body: encoded.body })
    }

    async fn publish(&self, messages: &[&Ready<'_>]) -> Vec<Answer> {
        let deadline = Instant::now() + self.timeout;
        let away = |reason: String| messages.iter().map(|_| Answer::Judged(Verdict::away(&reason))).collect();
        let channel = match tokio::time::timeout_at(deadline, self.channel()).await {
            Ok(Ok(channel)) => channel,
            Ok(Err(reason)) => return away(reason),
            Err(_) => return away("no channel in time".into()),
        };
        let mut sent = Vec::with_capacity(messages.len());
        for message in messages {
            sent.push(self.publish_one(&channel, message, deadline).await);
        }
        let (outcomes, mut returned) = confirmed(sent, deadline).await;
        let closed_by = outcomes.iter().find_map(|outcome| outcome.as_ref().err().and_then(channel_error));
        let whole = outcomes.iter().all(Result::is_ok);
        let answers = messages.iter().zip(outcomes).map(|(message, outcome)| match outcome {
            Ok(_) if returned.contains_key(message.id) => {
                let reason = returned.remove(message.id).unwrap_or_default();
                Answer::Judged(Verdict::refused(reason))
            }
            Ok(true) => Answer::Judged(Verdict::Delivered),
            Ok(false) => Answer::Judged(Verdict::retry("the broker could not store it")),
            Err(lost) => self.blame(&lost, closed_by.as_ref()),
        });
        let answers = answers.collect();
        if whole {
            self.link.lock().await.idle.push(channel);
        }
        answers
    }

    async fn publish_one(
        &self,
        channel: &Channel,
        message: &Ready<'_>,
        deadline: Instant,
    ) -> Result<PublisherConfirm, Lost> {
        // Mandatory: what no queue takes comes back.
        let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
        let (exchange, key) = (self.exchange.clone(), message.routing_key.clone());
        let publish = channel.basic_publish(exchange, key, options, &message.body, message.properties.clone());
        // A broker that is out of memory or disk takes no more bytes.
        tokio::time::timeout_at(deadline, publish).await.map_err(|_| Lost::InTime)?.map_err(Lost::Error)
    }

    /// Of a message without an answer: which of the two, the broker or a message of this batch, is to blame.
    fn blame(&self, lost: &Lost, closed_by: Option<&AMQPError>) -> Answer {
        match closed_by {
            // All messages go to the one exchange: none of them is to blame that it is not there.
            Some(error) if *error.kind() == AMQPErrorKind::Soft(AMQPSoftError::NOTFOUND) => {
                Answer::Judged(Verdict::away(error.get_message()))
            }
            Some(error) => Answer::ChannelClosed(error.get_message().to_string()),
            None => Answer::Judged(Verdict::away(lost)),
        }
    }

    /// A channel that nobody else uses, with confirms on.
    async fn channel(&self) -> Result<Channel, String> {
        let mut link = self.link.lock().await;
        if self.closed.load(Ordering::Acquire) {
            return Err(CLOSED.into());
        }
        if !link.connection.as_ref().is_some_and(|connection| connection.status().connected()) {
            *link = Link { connection: Some(self.connector.connect().await?), idle: Vec::new() };
        }
        while let Some(channel) = link.idle.pop() {
            if channel.status().connected() {
                return Ok(channel);
            }
        }
        let connection = link.connection.as_ref().ok_or("no connection")?;
        let channel = connection.create_channel().await.map_err(|error| error.to_string())?;
        drop(link);
        channel.confirm_select(ConfirmSelectOptions::default()).await.map_err(|error| error.to_string())?;
        Ok(channel)
    }
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
enum Lost {
    #[error("no confirm in time")]
    InTime,
    #[error("{0}")]
    Error(lapin::Error),
}

/// Waits for the confirms: for each message whether it was stored, and the ids of those that came back. A returned
/// message is told by its own id: the client hangs it on the confirm that comes next, which may be another's.
async fn confirmed(
    sent: Vec<Result<PublisherConfirm, Lost>>,
    deadline: Instant,
) -> (Vec<Result<bool, Lost>>, HashMap<String, String>) {
    let mut outcomes = Vec::with_capacity(sent.len());
    let mut returned = HashMap::new();
    for sent in sent {
        let confirm = match sent {
            Ok(confirm) => tokio::time::timeout_at(deadline, confirm).await,
            Err(lost) => {
                outcomes.push(Err(lost));
                continue;
            }
        };
        let (stored, back) = match confirm {
            Ok(Ok(Confirmation::Ack(back))) => (Ok(true), back),
            Ok(Ok(Confirmation::Nack(back))) => (Ok(false), back),
            Ok(Ok(Confirmation::NotRequested)) => (Ok(false), None),
            Ok(Err(error)) => (Err(Lost::Error(error)), None),
            Err(_) => (Err(Lost::InTime), None),
        };
        outcomes.push(stored);
        if let Some(back) = back
            && let Some(id) = back.delivery.properties.message_id()
        {
            let reason = format!("{} {}", back.reply_code, back.reply_text);
            returned.insert(id.to_string(), reason);
        }
    }
    (outcomes, returned)
}

/// What the broker said when it closed a channel, and not the connection.
fn channel_error(lost: &Lost) -> Option<AMQPError> {
    match lost {
        Lost::Error(error) => match error.kind() {
            ErrorKind::ProtocolError(error) if matches!(error.kind(), AMQPErrorKind::Soft(_)) => Some(error.clone()),
            _ => None,
        },
        Lost::InTime => None,
    }
}
