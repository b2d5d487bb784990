//! Kafka: a member of a consumer group, which commits by hand, and never beyond the lowest offset that is still out.

mod tracker;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use rdkafka::config::{ClientConfig, RDKafkaLogLevel};
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer as _, ConsumerContext, Rebalance, StreamConsumer};
use rdkafka::error::KafkaError;
use rdkafka::message::{BorrowedMessage, Headers as _, Message as _};
use rdkafka::{ClientContext, Offset, TopicPartitionList};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use self::tracker::{Place, Ticket, Tracker};
use super::{Delivery, Receipt, Source, SourceError, prefetch};
use crate::kafka::config;
use crate::{Message, Target, TargetError, decode};

/// What a URL may say beside the common settings; the common `topic` names the topics.
pub const SETTINGS: &[&str] = &["prefetch", "from"];

/// Opens a source; it connects when it is first asked.
///
/// # Errors
/// What the URL has wrong.
pub fn open(target: &Target, consumer: &str) -> Result<KafkaSource, TargetError> {
    let topics: Vec<String> = target
        .setting("topic")
        .unwrap_or_default()
        .split(',')
        .filter(|name| !name.is_empty())
        .map(Into::into)
        .collect();
    if topics.is_empty() {
        return Err(TargetError("a Kafka source names its topic: kafka://host:9092?topic=orders".into()));
    }
    let from = match target.setting("from") {
        None => "earliest",
        Some(known @ ("earliest" | "latest")) => known,
        Some(_) => return Err(TargetError("from is earliest or latest".into())),
    };
    let mut config = config(target)?;
    config
        .set("group.id", consumer)
        .set("enable.auto.commit", "false")
        .set("enable.auto.offset.store", "false")
        .set("auto.offset.reset", from)
        // How long the others wait for the partitions of one that has died.
        .set("session.timeout.ms", "10000")
        .set("heartbeat.interval.ms", "2000")
        .set("queued.max.messages.kbytes", "16384");
    Ok(KafkaSource {
        config,
        topics,
        shared: Arc::new(Shared::default()),
        permits: Arc::new(Semaphore::new(usize::from(prefetch(target)?))),
        timeout: target.timeout()?,
        consumer: None,
        early: VecDeque::new(),
        paused: false,
    })
}

type GroupConsumer = StreamConsumer<Group>;

/// See [`open`].
pub struct KafkaSource {
    config: ClientConfig,
    topics: Vec<String>,
    shared: Arc<Shared>,
    /// One a delivery that is out.
    permits: Arc<Semaphore>,
    timeout: Duration,
    consumer: Option<Arc<GroupConsumer>>,
    /// Came although no permit was free; given out when one is.
    early: VecDeque<(Message, Ticket)>,
    paused: bool,
}

/// What receipts and the group's callbacks know of.
#[derive(Debug, Default)]
struct Shared {
    tracker: Mutex<Tracker>,
    retries: Mutex<Vec<Retry>>,
    /// A delivery has ended, or is to come again.
    changed: Notify,
}

#[derive(Debug)]
struct Retry {
    due: Instant,
    message: Message,
    ticket: Ticket,
    /// It is still out while it waits.
    permit: OwnedSemaphorePermit,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl std::fmt::Debug for KafkaSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The config may hold a password.
        f.debug_struct("KafkaSource").field("topics", &self.topics).finish_non_exhaustive()
    }
}

impl Source for KafkaSource {
    fn next(&mut self, max: usize) -> BoxFuture<'_, Result<Vec<Delivery>, SourceError>> {
        Box::pin(async move {
            let consumer = self.consumer()?;
            loop {
                let ready = self.ready(&consumer, max.max(1))?;
                if !ready.is_empty() {
                    return Ok(ready);
                }
                self.wait(&consumer).await?;
            }
        })
    }

    fn reach(&mut self) -> BoxFuture<'_, Result<(), SourceError>> {
        Box::pin(async move {
            let (consumer, timeout) = (self.consumer()?, self.timeout);
            // The client connects by itself, and says nothing where it cannot: it is asked for something. Asking blocks.
            let asked = tokio::task::spawn_blocking(move || consumer.fetch_metadata(None, timeout).map(drop));
            asked.await.map_err(SourceError::new)?.map_err(SourceError::new)
        })
    }

    fn close(&mut self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            self.early.clear();
            let Some(consumer) = self.consumer.take() else { return };
            let done = list(locked(&self.shared.tracker).done());
            let leave = tokio::task::spawn_blocking(move || {
                if done.count() > 0 {
                    let _ = consumer.commit(&done, CommitMode::Sync);
                }
                consumer.unsubscribe();
                drop(consumer);
            });
            let _ = tokio::time::timeout(self.timeout, leave).await;
        })
    }
}

impl KafkaSource {
    fn consumer(&mut self) -> Result<Arc<GroupConsumer>, SourceError> {
        if let Some(consumer) = &self.consumer {
            return Ok(Arc::clone(consumer));
        }
        let context = Group(Arc::clone(&self.shared));
        let consumer: GroupConsumer = self.config.create_with_context(context).map_err(SourceError::new)?;
        let topics: Vec<&str> = self.topics.iter().map(String::as_str).collect();
        consumer.subscribe(&topics).map_err(SourceError::new)?;
        Ok(Arc::clone(self.consumer.insert(Arc::new(consumer))))
    }

    /// What can be given out now: what is to come again, what came early, what is here; as far as permits go.
    fn ready(&mut self, consumer: &Arc<GroupConsumer>, max: usize) -> Result<Vec<Delivery>, SourceError> {
        let mut ready = Vec::new();
        while ready.len() < max {
            if let Some(Retry { message, ticket, permit, .. }) = self.shared.due() {
                ready.push(self.delivery(consumer, message, ticket, true, permit));
                continue;
            }
            let Ok(permit) = Arc::clone(&self.permits).try_acquire_owned() else { break };
            let (message, ticket) = match self.early.pop_front() {
                Some((_, ticket)) if !locked(&self.shared.tracker).holds(&ticket) => continue,
                Some(early) => early,
                None => match consumer.recv().now_or_never() {
                    Some(Ok(message)) => self.shared.take(&message),
                    // What was taken is given out first; the error is not the last of its kind.
                    Some(Err(error)) if ready.is_empty() => return Err(SourceError::new(error)),
                    Some(Err(_)) | None => break,
                },
            };
            ready.push(self.delivery(consumer, message, ticket, false, permit));
        }
        Ok(ready)
    }

    /// Waits for any of them. The group is polled all the while, or it would think that we are dead; without a
    /// permit that is done with its partitions paused.
    async fn wait(&mut self, consumer: &Arc<GroupConsumer>) -> Result<(), SourceError> {
        let full = self.permits.available_permits() == 0;
        if full != self.paused {
            let assigned = consumer.assignment().map_err(SourceError::new)?;
            if full { consumer.pause(&assigned) } else { consumer.resume(&assigned) }.map_err(SourceError::new)?;
            self.paused = full;
        }
        let due = self.shared.next_due();
        let due = async {
            match due {
                Some(due) => tokio::time::sleep_until(due).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            message = consumer.recv() => {
                self.early.push_back(self.shared.take(&message.map_err(SourceError::new)?));
                // A rebalance brings partitions that are not paused.
                self.paused &= !full;
            }
            () = self.shared.changed.notified() => {}
            () = due => {}
        }
        Ok(())
    }

    fn delivery(
        &self,
        consumer: &Arc<GroupConsumer>,
        message: Message,
        ticket: Ticket,
        redelivered: bool,
        permit: OwnedSemaphorePermit,
    ) -> Delivery {
        let receipt = KafkaReceipt {
            message: message.clone(),
            source: format!("kafka:{}", ticket.place.0),
            ticket,
            shared: Arc::clone(&self.shared),
            consumer: Arc::clone(consumer),
            permit: Some(permit),
        };
        let place = format!("{} {}:{}", receipt.source, receipt.ticket.place.1, receipt.ticket.offset);
        Delivery { message, source: receipt.source.clone(), place, redelivered, receipt: Box::new(receipt) }
    }
}

impl Shared {
    /// A message of the broker's, which is out from now on.
    fn take(&self, message: &BorrowedMessage<'_>) -> (Message, Ticket) {
        let place = (message.topic().to_owned(), message.partition());
        let ticket = locked(&self.tracker).give(place, message.offset());
        (read(message), ticket)
    }

    /// One that is to come again now. Those whose partitions were taken away come by themselves.
    fn due(&self) -> Option<Retry> {
        let mut retries = locked(&self.retries);
        let tracker = locked(&self.tracker);
        retries.retain(|retry| tracker.holds(&retry.ticket));
        let now = Instant::now();
        let at = retries.iter().position(|retry| retry.due <= now)?;
        Some(retries.remove(at))
    }

    fn next_due(&self) -> Option<Instant> {
        locked(&self.retries).iter().map(|retry| retry.due).min()
    }
}

/// The callbacks of the group.
struct Group(Arc<Shared>);

impl ClientContext for Group {
    fn log(&self, _level: RDKafkaLogLevel, facility: &str, message: &str) {
        tracing::debug!(facility, "{message}");
    }

    fn error(&self, error: KafkaError, reason: &str) {
        tracing::debug!(%error, "{reason}");
    }
}

impl ConsumerContext for Group {
    fn pre_rebalance(&self, consumer: &BaseConsumer<Self>, rebalance: &Rebalance<'_>) {
        if let Rebalance::Revoke(partitions) = rebalance {
            let mut tracker = locked(&self.0.tracker);
            let done = partitions.elements().into_iter().filter_map(|element| {
                let place = (element.topic().to_owned(), element.partition());
                tracker.forget(&place).map(|offset| (place, offset))
            });
            let done = list(done.collect());
            if done.count() > 0 {
                // It goes out before we leave the partitions to others, on the same connection.
                let _ = consumer.commit(&done, CommitMode::Async);
            }
        }
    }
}

fn list(places: Vec<(Place, i64)>) -> TopicPartitionList {
    let mut list = TopicPartitionList::new();
    for ((topic, partition), offset) in places {
        let _ = list.add_partition_offset(&topic, partition, Offset::Offset(offset));
    }
    list
}

fn read(message: &BorrowedMessage<'_>) -> Message {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let mut content_type = None;
    let mut headers = Vec::new();
    for header in message.headers().into_iter().flat_map(|headers| headers.iter()) {
        let value = text(header.value.unwrap_or_default());
        if header.key.eq_ignore_ascii_case("content-type") {
            content_type = Some(value);
        } else {
            headers.push((header.key.to_owned(), value));
        }
    }
    let body = message.payload().unwrap_or_default().to_vec();
    let mut read = decode(content_type.as_deref(), headers, body.into());
    if read.id.is_empty() {
        read.id = format!("{}:{}", message.partition(), message.offset());
    }
    if read.ordering_key.is_none() {
        read.ordering_key = message.key().map(text);
    }
    message.topic().clone_into(&mut read.topic);
    read
}

struct KafkaReceipt {
    message: Message,
    source: String,
    ticket: Ticket,
    shared: Arc<Shared>,
    consumer: Arc<GroupConsumer>,
    permit: Option<OwnedSemaphorePermit>,
}

impl std::fmt::Debug for KafkaReceipt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KafkaReceipt").field("ticket", &self.ticket).finish_non_exhaustive()
    }
}

impl Drop for KafkaReceipt {
    fn drop(&mut self) {
        drop(self.permit.take());
        self.shared.changed.notify_one();
    }
}

impl Receipt for KafkaReceipt {
    fn ack(self: Box<Self>) -> BoxFuture<'static, Result<(), SourceError>> {
        // Under the lock: a later commit must not overtake this one. It is queued, not waited for.
        let mut tracker = locked(&self.shared.tracker);
        let outcome = match tracker.end(&self.ticket) {
            Err(()) => Err(SourceError::new("the partition was taken away: the delivery comes again")),
            Ok(None) => Ok(()),
            Ok(Some(done)) => {
                let list = list(vec![(self.ticket.place.clone(), done)]);
                self.consumer.commit(&list, CommitMode::Async).map_err(SourceError::new)
            }
        };
        drop(tracker);
        Box::pin(std::future::ready(outcome))
    }

    /// The topic keeps it; its offset is passed.
    fn refuse(self: Box<Self>) -> BoxFuture<'static, Result<(), SourceError>> {
        self.ack()
    }

    /// It stays out, so nothing is committed beyond it, and is given out once more by this process.
    fn retry(mut self: Box<Self>, delay: Duration) -> BoxFuture<'static, Result<(), SourceError>> {
        let (message, ticket) = (std::mem::take(&mut self.message), self.ticket.clone());
        if let Some(permit) = self.permit.take() {
            locked(&self.shared.retries).push(Retry { due: Instant::now() + delay, message, ticket, permit });
        }
        Box::pin(std::future::ready(Ok(())))
    }
}
