//! NATS JetStream: a message is delivered when its stream has acknowledged it. The stream drops a second one with
//! the same id within its duplicate window.

use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream::context::{ContextBuilder, PublishAckFuture, PublishError, PublishErrorKind};
use async_nats::jetstream::{self, ErrorCode, message::PublishMessage};
use async_nats::{Client, HeaderMap, HeaderName, HeaderValue};
use futures_util::FutureExt as _;
use futures_util::future::{self, BoxFuture};
use tokio::sync::{OnceCell, Semaphore};
use tokio::time::Instant;

use super::template::Template;
use super::{CLOSED, Sink, Verdict};
use crate::attribute;
use crate::nats::{Connector, Link};
use crate::{Envelope, Message, Target, TargetError};

/// What a URL may say beside the common settings.
pub const SETTINGS: &[&str] = &["subject", "creds", "tls", "in_flight"];

/// The setting `in_flight`.
const IN_FLIGHT: u32 = 2_000;
const IN_FLIGHT_MAX: u32 = 20_000;

/// Opens a sink; it connects when it first sends.
///
/// # Errors
/// What the URL has wrong.
pub fn open(target: &Target) -> Result<NatsSink, TargetError> {
    if !target.path().is_empty() {
        return Err(TargetError("a NATS sink has no path: the subject says which stream".into()));
    }
    let in_flight = target.number("in_flight", 1..=u64::from(IN_FLIGHT_MAX))?;
    let in_flight = in_flight.and_then(|number| u32::try_from(number).ok()).unwrap_or(IN_FLIGHT);
    Ok(NatsSink {
        connector: Connector::of(target)?,
        subject: Template::of(target, "subject")?,
        envelope: target.envelope()?,
        timeout: target.timeout()?,
        in_flight,
        permits: Semaphore::new(in_flight as usize),
        opened: OnceCell::new(),
    })
}

/// See [`open`].
#[derive(Debug)]
pub struct NatsSink {
    connector: Connector,
    subject: Template,
    envelope: Envelope,
    timeout: Duration,
    in_flight: u32,
    /// One a message that waits for its acknowledgement, over all calls.
    permits: Semaphore,
    opened: OnceCell<(Link, Arc<jetstream::Context>)>,
}

impl Sink for NatsSink {
    fn send<'a>(&'a self, messages: &'a [Message]) -> BoxFuture<'a, Vec<Verdict>> {
        Box::pin(async move {
            let mut verdicts = Vec::with_capacity(messages.len());
            for window in messages.chunks(self.in_flight as usize) {
                verdicts.extend(self.send_window(window).await);
            }
            verdicts
        })
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            self.permits.close();
            if let Some((link, _)) = self.opened.get() {
                let _ = tokio::time::timeout(self.timeout, link.client.drain()).await;
            }
        })
    }
}

impl NatsSink {
    async fn send_window(&self, messages: &[Message]) -> Vec<Verdict> {
        let all = |verdict: Verdict| vec![verdict; messages.len()];
        let Ok(_permits) = self.permits.acquire_many(u32::try_from(messages.len()).unwrap_or(IN_FLIGHT_MAX)).await
        else {
            return all(Verdict::away(CLOSED));
        };
        let (link, context) = match self.opened.get_or_try_init(|| self.connect()).await {
            Ok(opened) => opened,
            Err(error) => return all(Verdict::away(error)),
        };
        // What is published to a connection that is down would wait in the client, and time out one by one.
        if let Err(error) = link.connected(self.timeout).await {
            return all(Verdict::away(error));
        }
        let deadline = Instant::now() + self.timeout;
        let lost = link.lost();
        let mut sent = Vec::with_capacity(messages.len());
        for message in messages {
            // The client's queue is full where the server takes nothing any more.
            let publish = tokio::time::timeout_at(deadline, self.publish(context, message));
            sent.push(publish.await.unwrap_or_else(|_| Err(Verdict::away(LATE))));
        }
        let acknowledged = async |sent: Result<(String, PublishAckFuture), Verdict>| match sent {
            Ok((subject, future)) => {
                future.await.map_or_else(|error| verdict(&error, &subject), |_| Verdict::Delivered)
            }
            Err(verdict) => verdict,
        };
        // One limit for all of them: the client's own begins with each that is waited for.
        let end = async {
            tokio::select! {
                () = lost => LOST,
                () = tokio::time::sleep_until(deadline) => LATE,
            }
        };
        collect(sent.into_iter().map(acknowledged), end).await
    }

    async fn connect(&self) -> Result<(Link, Arc<jetstream::Context>), String> {
        let link = self.connector.connect().await?;
        let context = context(link.client.clone(), self.timeout, self.in_flight as usize);
        Ok((link, Arc::new(context)))
    }

    async fn publish(
        &self,
        context: &jetstream::Context,
        message: &Message,
    ) -> Result<(String, PublishAckFuture), Verdict> {
        let subject = self.subject.fill(message).into_owned();
        if !valid_subject(&subject) {
            return Err(Verdict::refused(format!("{subject:?} is no subject")));
        }
        let encoded = self.envelope.encode(message, "ce-");
        let mut headers = HeaderMap::new();
        let own = [("Nats-Msg-Id", message.id.as_str()), ("content-type", encoded.content_type)];
        for (name, value) in own.into_iter().chain(encoded.headers.iter().map(|(name, value)| (&**name, &**value))) {
            let value = attribute::write(name, value);
            let (Ok(name), Ok(value)) = (name.parse::<HeaderName>(), value.parse::<HeaderValue>()) else {
                return Err(Verdict::refused(format!("NATS cannot carry the header {name:?}")));
            };
            headers.insert(name, value);
        }
        let publish = PublishMessage::build().headers(headers).payload(encoded.body);
        match context.send_publish(subject.clone(), publish).await {
            Ok(future) => Ok((subject, future)),
            Err(error) => Err(verdict(&error, &subject)),
        }
    }
}

/// Waits for all answers; those that are not there at the end, which says why, will not be waited for any more.
async fn collect(
    answers: impl Iterator<Item = impl Future<Output = Verdict>>,
    end: impl Future<Output = &'static str>,
) -> Vec<Verdict> {
    let mut verdicts = Vec::with_capacity(answers.size_hint().0);
    let mut end = std::pin::pin!(end);
    let mut ended = None;
    for answer in answers {
        let mut answer = std::pin::pin!(answer);
        if ended.is_none() {
            match future::select(answer.as_mut(), end.as_mut()).await {
                future::Either::Left((verdict, _)) => {
                    verdicts.push(verdict);
                    continue;
                }
                future::Either::Right((why, _)) => ended = Some(why),
            }
        }
        // It may have come before the end: looked at once.
        verdicts.push(answer.now_or_never().unwrap_or_else(|| Verdict::away(ended.unwrap_or(LATE))));
    }
    verdicts
}

const LOST: &str = "the connection was lost before the acknowledgement came";
const LATE: &str = "no acknowledgement in time";

fn context(client: Client, timeout: Duration, in_flight: usize) -> jetstream::Context {
    ContextBuilder::new()
        .timeout(timeout)
        .ack_timeout(timeout)
        // Twice: a permit of the client is free a moment after its answer was read.
        .max_ack_inflight(in_flight * 2)
        .backpressure_on_inflight(true)
        .build(client)
}

fn valid_subject(subject: &str) -> bool {
    !subject.is_empty()
        && subject.split('.').all(|token| !token.is_empty() && token != "*" && token != ">")
        && !subject.contains(|c: char| c.is_whitespace() || c.is_control())
}

fn verdict(error: &PublishError, subject: &str) -> Verdict {
    match error.kind() {
        PublishErrorKind::MaxPayloadExceeded => Verdict::refused(error),
        PublishErrorKind::StreamNotFound => Verdict::away(format!("no stream takes the subject {subject:?}")),
        PublishErrorKind::TimedOut => Verdict::away(LATE),
        PublishErrorKind::WrongLastMessageId | PublishErrorKind::WrongLastSequence => Verdict::refused(error),
        _ => match std::error::Error::source(error).and_then(|source| source.downcast_ref::<jetstream::Error>()) {
            Some(said) => match said.error_code() {
                ErrorCode::STREAM_MESSAGE_EXCEEDS_MAXIMUM | ErrorCode::STREAM_HEADER_EXCEEDS_MAXIMUM => {
                    Verdict::refused(said)
                }
                ErrorCode::STREAM_SEALED => Verdict::away(said),
                // A stream that is full and discards what is new says no more than that it could not store.
                _ => Verdict::retry(said),
            },
            None => Verdict::away(error),
        },
    }
}
