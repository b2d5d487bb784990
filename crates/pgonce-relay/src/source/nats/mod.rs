//! NATS JetStream: a durable pull consumer with explicit acknowledgements. The stream keeps the consumer's place.

use std::time::Duration;

use async_nats::jetstream::consumer::pull;
use async_nats::jetstream::message::Acker;
use async_nats::jetstream::{self, AckKind};
use futures_util::future::BoxFuture;
use futures_util::{FutureExt as _, StreamExt as _};

use super::{Delivery, Receipt, Source, SourceError, prefetch};
use crate::nats::{Connector, Link};
use crate::{Target, TargetError, attribute, decode};

/// What a URL may say beside the common settings.
pub const SETTINGS: &[&str] = &["subject", "creds", "tls", "prefetch", "ack_wait"];

/// The setting `ack_wait`: after it, a delivery that was not ended comes again.
const ACK_WAIT: Duration = Duration::from_secs(30);
/// A request for messages that nobody answers any more is noticed after two of these.
const HEARTBEAT: Duration = Duration::from_secs(2);

/// Opens a source; it connects when it is first asked.
///
/// # Errors
/// What the URL or the consumer's name has wrong.
pub fn open(target: &Target, consumer: &str) -> Result<NatsSource, TargetError> {
    let stream = target.path();
    if stream.is_empty() || stream.contains('/') {
        return Err(TargetError("a NATS source names its stream: nats://host/STREAM".into()));
    }
    if consumer.contains(|c: char| c.is_whitespace() || c.is_control() || matches!(c, '.' | '*' | '>' | '/' | '\\')) {
        return Err(TargetError("the name of a NATS consumer has no dots, slashes, stars or spaces in it".into()));
    }
    let ack_wait = target.duration("ack_wait", Duration::from_secs(1)..=Duration::from_secs(86_400))?;
    Ok(NatsSource {
        connector: Connector::of(target)?,
        config: pull::Config {
            durable_name: Some(consumer.to_owned()),
            ack_wait: ack_wait.unwrap_or(ACK_WAIT),
            max_ack_pending: i64::from(prefetch(target)?),
            filter_subject: target.setting("subject").unwrap_or_default().to_owned(),
            ..pull::Config::default()
        },
        name: format!("nats:{stream}"),
        stream,
        timeout: target.timeout()?,
        link: None,
        messages: None,
    })
}

/// See [`open`].
pub struct NatsSource {
    connector: Connector,
    config: pull::Config,
    name: String,
    stream: String,
    timeout: Duration,
    link: Option<Link>,
    /// Kept between calls: what it has fetched already is not lost with a call that is dropped.
    messages: Option<pull::Stream>,
}

impl std::fmt::Debug for NatsSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NatsSource").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Source for NatsSource {
    fn next(&mut self, max: usize) -> BoxFuture<'_, Result<Vec<Delivery>, SourceError>> {
        Box::pin(async move {
            let outcome = self.receive(max.max(1)).await;
            if outcome.is_err() {
                self.messages = None;
            }
            outcome
        })
    }

    fn reach(&mut self) -> BoxFuture<'_, Result<(), SourceError>> {
        Box::pin(async move {
            if self.messages.is_none() {
                self.messages = Some(self.consume().await?);
            }
            Ok(())
        })
    }

    fn close(&mut self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            self.messages = None;
            if let Some(link) = self.link.take() {
                let _ = tokio::time::timeout(self.timeout, link.client.drain()).await;
            }
        })
    }
}

impl NatsSource {
    async fn receive(&mut self, max: usize) -> Result<Vec<Delivery>, SourceError> {
        self.reach().await?;
        let name = self.name.clone();
        let messages = self.messages.as_mut().ok_or_else(|| SourceError::new("no consumer"))?;
        let mut deliveries = Vec::new();
        // The first is waited for; of the others, those that are here.
        let mut next = Some(messages.next().await);
        while let Some(message) = next {
            match message {
                Some(Ok(message)) => deliveries.push(delivery(&name, message)?),
                // What was taken is given out first; the error comes again.
                Some(Err(_)) | None if !deliveries.is_empty() => break,
                Some(Err(error)) => return Err(SourceError::new(error)),
                None => return Err(SourceError::new("the consumer has ended")),
            }
            next = if deliveries.len() < max { messages.next().now_or_never() } else { None };
        }
        Ok(deliveries)
    }

    async fn consume(&mut self) -> Result<pull::Stream, SourceError> {
        if self.link.is_none() {
            self.link = Some(self.connector.connect().await.map_err(SourceError::new)?);
        }
        let link = self.link.as_ref().ok_or_else(|| SourceError::new("no connection"))?;
        link.connected(self.timeout).await.map_err(SourceError::new)?;
        let mut context = jetstream::new(link.client.clone());
        context.set_timeout(self.timeout);
        let consumer: jetstream::consumer::Consumer<pull::Config> =
            context.create_consumer_on_stream(self.config.clone(), &*self.stream).await.map_err(SourceError::new)?;
        let batch = usize::try_from(self.config.max_ack_pending).unwrap_or(1);
        consumer
            .stream()
            .max_messages_per_batch(batch)
            .expires(Duration::from_secs(30))
            .heartbeat(HEARTBEAT)
            .messages()
            .await
            .map_err(SourceError::new)
    }
}

fn delivery(name: &str, message: jetstream::Message) -> Result<Delivery, SourceError> {
    let info = message.info().map_err(SourceError::new)?;
    let (redelivered, position) = (info.delivered > 1, info.stream_sequence);
    let (message, acker) = message.split();
    let mut headers = Vec::new();
    let mut content_type = None;
    let mut id = None;
    for (header, values) in message.headers.unwrap_or_default().iter() {
        let Some(value) = values.first() else { continue };
        let header: &str = header.as_ref();
        match header.to_ascii_lowercase().as_str() {
            "content-type" => content_type = Some(value.as_str().to_owned()),
            "nats-msg-id" => id = Some(value.as_str().to_owned()),
            own if own.starts_with("nats-") => {}
            _ => headers.push((header.to_owned(), attribute::read(header, value.as_str()))),
        }
    }
    let mut read = decode(content_type.as_deref(), headers, message.payload);
    if read.id.is_empty() {
        read.id = id.unwrap_or_else(|| position.to_string());
    }
    read.topic = message.subject.to_string();
    let place = format!("{name} {position}");
    Ok(Delivery { message: read, source: name.to_owned(), place, redelivered, receipt: Box::new(NatsReceipt(acker)) })
}

struct NatsReceipt(Acker);

impl std::fmt::Debug for NatsReceipt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("NatsReceipt")
    }
}

impl Receipt for NatsReceipt {
    fn ack(self: Box<Self>) -> BoxFuture<'static, Result<(), SourceError>> {
        // Answered by the server: an acknowledgement that was lost is known to be.
        Box::pin(async move { self.0.double_ack().await.map_err(SourceError::new) })
    }

    fn retry(self: Box<Self>, delay: Duration) -> BoxFuture<'static, Result<(), SourceError>> {
        let delay = (!delay.is_zero()).then_some(delay);
        Box::pin(async move { self.0.double_ack_with(AckKind::Nak(delay)).await.map_err(SourceError::new) })
    }

    /// The stream keeps it, and tells it as terminated (`$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED`).
    fn refuse(self: Box<Self>) -> BoxFuture<'static, Result<(), SourceError>> {
        Box::pin(async move { self.0.double_ack_with(AckKind::Term).await.map_err(SourceError::new) })
    }
}
