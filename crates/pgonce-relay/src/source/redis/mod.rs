//! Redis Streams: a consumer group. What was read and not acknowledged is pending in Redis; it is claimed, by
//! whichever consumer of the group looks first, once it has been idle for `ack_wait`.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::BoxFuture;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, RedisError};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use super::{Delivery, Receipt, Source, SourceError, prefetch};
use crate::{Target, TargetError, decode};

/// What a URL may say beside the common settings.
pub const SETTINGS: &[&str] = &["stream", "prefetch", "ack_wait"];

/// The setting `ack_wait`: after it, a delivery that was not ended comes again.
const ACK_WAIT: Duration = Duration::from_secs(30);
/// How long Redis holds a read that finds nothing.
const BLOCK: Duration = Duration::from_millis(500);
/// All processes share one name in the group: what is theirs is told by its idle time, and a name for each would
/// stay for ever.
const MEMBER: &str = "pgonce";

/// Opens a source; it connects when it is first asked.
///
/// # Errors
/// What the URL has wrong.
pub fn open(target: &Target, consumer: &str) -> Result<RedisSource, TargetError> {
    let stream = target.setting("stream").unwrap_or_default().to_owned();
    if stream.is_empty() {
        return Err(TargetError("a Redis source names its stream: redis://host?stream=orders".into()));
    }
    let ack_wait = target.duration("ack_wait", Duration::from_secs(1)..=Duration::from_secs(86_400))?;
    Ok(RedisSource {
        client: crate::redis::client(target)?,
        group: Group { stream, name: consumer.to_owned(), ack_wait: ack_wait.unwrap_or(ACK_WAIT) },
        timeout: target.timeout()?,
        permits: Arc::new(Semaphore::new(usize::from(prefetch(target)?))),
        claim_at: Arc::new(Mutex::new(Instant::now())),
        links: None,
        reading: None,
        read: VecDeque::new(),
    })
}

/// Which group of which stream.
#[derive(Debug, Clone)]
struct Group {
    stream: String,
    name: String,
    ack_wait: Duration,
}

/// See [`open`].
pub struct RedisSource {
    client: Client,
    group: Group,
    timeout: Duration,
    /// One a delivery that is out.
    permits: Arc<Semaphore>,
    /// When to look for pending ones; a retry brings it nearer.
    claim_at: Arc<Mutex<Instant>>,
    links: Option<Links>,
    /// A read that is under way. Kept between calls: Redis has given what it answers to us already.
    reading: Option<BoxFuture<'static, Result<Vec<Entry>, RedisError>>>,
    read: VecDeque<Entry>,
}

/// A read blocks its connection: acknowledgements have one of their own.
#[derive(Clone)]
struct Links {
    reads: MultiplexedConnection,
    acks: MultiplexedConnection,
}

/// An entry, and the permit that it was read under.
struct Entry {
    id: String,
    fields: Vec<(String, Vec<u8>)>,
    redelivered: bool,
    permit: OwnedSemaphorePermit,
}

impl std::fmt::Debug for RedisSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RedisSource").field("group", &self.group).finish_non_exhaustive()
    }
}

impl Source for RedisSource {
    fn next(&mut self, max: usize) -> BoxFuture<'_, Result<Vec<Delivery>, SourceError>> {
        Box::pin(async move {
            while self.read.is_empty() {
                if let Err(error) = self.fill(max.max(1)).await {
                    self.links = None;
                    return Err(error);
                }
            }
            let acks = self.links.as_ref().map(|links| links.acks.clone());
            let acks = acks.ok_or_else(|| SourceError::new("no connection"))?;
            let count = self.read.len().min(max.max(1));
            Ok(self.read.drain(..count).map(|entry| delivery(entry, &self.group, &acks, &self.claim_at)).collect())
        })
    }

    fn reach(&mut self) -> BoxFuture<'_, Result<(), SourceError>> {
        Box::pin(async move { self.connected().await.map(drop) })
    }

    fn close(&mut self) -> BoxFuture<'_, ()> {
        // What is pending stays so, and is claimed.
        self.links = None;
        self.reading = None;
        self.read.clear();
        Box::pin(std::future::ready(()))
    }
}

impl RedisSource {
    /// Reads once: pending entries where it is time for them, else new ones.
    async fn fill(&mut self, max: usize) -> Result<(), SourceError> {
        if self.reading.is_none() {
            let links = self.connected().await?;
            let permits = permits(Arc::clone(&self.permits), max).await?;
            let claim = {
                let mut claim_at = self.claim_at.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                let due = *claim_at <= Instant::now();
                if due {
                    *claim_at = Instant::now() + self.group.ack_wait / 4;
                }
                due
            };
            let group = self.group.clone();
            self.reading = Some(Box::pin(async move {
                if claim { group.claim(links.reads, permits).await } else { group.read(links.reads, permits).await }
            }));
        }
        if let Some(reading) = &mut self.reading {
            let outcome = reading.await;
            self.reading = None;
            self.read.extend(outcome.map_err(SourceError::new)?);
        }
        Ok(())
    }

    async fn connected(&mut self) -> Result<Links, SourceError> {
        if let Some(links) = &self.links {
            return Ok(links.clone());
        }
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.timeout))
            .set_response_timeout(Some(self.timeout + BLOCK));
        let connect = || self.client.get_multiplexed_async_connection_with_config(&config);
        let mut links = Links {
            reads: connect().await.map_err(SourceError::new)?,
            acks: connect().await.map_err(SourceError::new)?,
        };
        let mut create = redis::cmd("XGROUP");
        create.arg("CREATE").arg(&self.group.stream).arg(&self.group.name).arg("0").arg("MKSTREAM");
        match create.query_async::<()>(&mut links.reads).await {
            Err(error) if error.code() != Some("BUSYGROUP") => return Err(SourceError::new(error)),
            _ => {}
        }
        Ok(self.links.insert(links).clone())
    }
}

/// At least one, at most `max`.
async fn permits(free: Arc<Semaphore>, max: usize) -> Result<Vec<OwnedSemaphorePermit>, SourceError> {
    let mut permits = vec![Arc::clone(&free).acquire_owned().await.map_err(SourceError::new)?];
    while permits.len() < max
        && let Ok(permit) = Arc::clone(&free).try_acquire_owned()
    {
        permits.push(permit);
    }
    Ok(permits)
}

/// An entry as Redis writes it: its id and its fields.
type Raw = (String, Vec<(String, Vec<u8>)>);

impl Group {
    /// Entries that nobody has had.
    async fn read(
        self,
        mut link: MultiplexedConnection,
        permits: Vec<OwnedSemaphorePermit>,
    ) -> Result<Vec<Entry>, RedisError> {
        let mut command = redis::cmd("XREADGROUP");
        command.arg("GROUP").arg(&self.name).arg(MEMBER).arg("COUNT").arg(permits.len());
        command.arg("BLOCK").arg(BLOCK.as_millis() as u64).arg("STREAMS").arg(&self.stream).arg(">");
        let streams: Option<Vec<(String, Vec<Raw>)>> = command.query_async(&mut link).await?;
        let entries = streams.into_iter().flatten().flat_map(|(_, entries)| entries);
        Ok(permitted(entries, permits, false))
    }

    /// Entries that somebody has had, and has not ended in time.
    async fn claim(
        self,
        mut link: MultiplexedConnection,
        permits: Vec<OwnedSemaphorePermit>,
    ) -> Result<Vec<Entry>, RedisError> {
        let mut command = redis::cmd("XAUTOCLAIM");
        command.arg(&self.stream).arg(&self.name).arg(MEMBER).arg(self.ack_wait.as_millis() as u64);
        command.arg("0-0").arg("COUNT").arg(permits.len());
        // Where to go on, the entries, and from Redis 7 on those that are deleted.
        let answer: Vec<redis::Value> = command.query_async(&mut link).await?;
        let entries = answer.into_iter().nth(1).unwrap_or_default();
        let entries: Vec<Option<Raw>> = redis::from_redis_value(entries)?;
        Ok(permitted(entries.into_iter().flatten(), permits, true))
    }
}

fn permitted(entries: impl Iterator<Item = Raw>, permits: Vec<OwnedSemaphorePermit>, redelivered: bool) -> Vec<Entry> {
    entries.zip(permits).map(|((id, fields), permit)| Entry { id, fields, redelivered, permit }).collect()
}

fn delivery(entry: Entry, group: &Group, link: &MultiplexedConnection, claim_at: &Arc<Mutex<Instant>>) -> Delivery {
    let Entry { id, fields, redelivered, permit } = entry;
    let (mut headers, mut content_type, mut payload) = (Vec::new(), None, Vec::new());
    for (name, value) in fields {
        match name.as_str() {
            "payload" => payload = value,
            "content-type" => content_type = Some(String::from_utf8_lossy(&value).into_owned()),
            _ => headers.push((name, String::from_utf8_lossy(&value).into_owned())),
        }
    }
    let mut message = decode(content_type.as_deref(), headers, payload.into());
    if message.id.is_empty() {
        message.id.clone_from(&id);
    }
    message.topic.clone_from(&group.stream);
    let source = format!("redis:{}", group.stream);
    let place = format!("{source} {id}");
    let receipt = Box::new(RedisReceipt {
        id,
        group: group.clone(),
        link: link.clone(),
        claim_at: Arc::clone(claim_at),
        _permit: permit,
    });
    Delivery { message, source, place, redelivered, receipt }
}

struct RedisReceipt {
    id: String,
    group: Group,
    link: MultiplexedConnection,
    claim_at: Arc<Mutex<Instant>>,
    _permit: OwnedSemaphorePermit,
}

impl std::fmt::Debug for RedisReceipt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RedisReceipt").field("id", &self.id).finish_non_exhaustive()
    }
}

impl Receipt for RedisReceipt {
    fn ack(mut self: Box<Self>) -> BoxFuture<'static, Result<(), SourceError>> {
        Box::pin(async move {
            let mut command = redis::cmd("XACK");
            command.arg(&self.group.stream).arg(&self.group.name).arg(&self.id);
            command.query_async::<u64>(&mut self.link).await.map(|_| ()).map_err(SourceError::new)
        })
    }

    /// The stream keeps the entry; the group is done with it.
    fn refuse(self: Box<Self>) -> BoxFuture<'static, Result<(), SourceError>> {
        self.ack()
    }

    /// Makes it look as idle as it takes to be claimed after the delay; a longer one than `ack_wait` is cut to it.
    fn retry(mut self: Box<Self>, delay: Duration) -> BoxFuture<'static, Result<(), SourceError>> {
        Box::pin(async move {
            let delay = delay.min(self.group.ack_wait);
            let idle = self.group.ack_wait - delay;
            let mut command = redis::cmd("XCLAIM");
            command.arg(&self.group.stream).arg(&self.group.name).arg(MEMBER).arg(0).arg(&self.id);
            command.arg("IDLE").arg(idle.as_millis() as u64).arg("JUSTID");
            command.query_async::<Vec<String>>(&mut self.link).await.map_err(SourceError::new)?;
            let mut claim_at = self.claim_at.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            *claim_at = (*claim_at).min(Instant::now() + delay);
            Ok(())
        })
    }
}
