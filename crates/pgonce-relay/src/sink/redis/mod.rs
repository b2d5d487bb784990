//! Redis Streams: one entry a message. A message is delivered when Redis has answered, which is as durable as its
//! own settings make it (`appendfsync`, replicas). A script notes the message's id beside the entry, in one step, so
//! that a message that is sent again is stored once.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::BoxFuture;
use redis::aio::{ConnectionLike as _, MultiplexedConnection};
use redis::{AsyncConnectionConfig, Client, Cmd, ErrorKind, Pipeline, RedisError, Script, Value};
use tokio::sync::Mutex;

use super::template::Template;
use super::{CLOSED, Sink, Verdict};
use crate::{Encoded, Envelope, Message, Target, TargetError};

/// What a URL may say beside the common settings.
pub const SETTINGS: &[&str] = &["stream", "dedup", "maxlen", "replicas", "bytes_max"];

/// The setting `dedup`: how long an id is remembered.
const DEDUP: Duration = Duration::from_secs(24 * 3_600);
/// The setting `bytes_max`: Redis's own limit of one value, beyond which it closes the connection.
const BYTES_MAX: u64 = 512 * 1024 * 1024;
/// Messages in one round trip.
const WINDOW: usize = 1_000;

/// The entry first: whatever goes wrong between the two, the message is not lost. Where the id is known, its expiry
/// is written again: WAIT counts replicas from this connection's last write, and there has to be one.
static ADD: LazyLock<Script> = LazyLock::new(|| {
    Script::new(
        "local ttl, maxlen = ARGV[1], tonumber(ARGV[2])
         local known = redis.call('GET', KEYS[2])
         if known then
           redis.call('PEXPIRE', KEYS[2], ttl)
           return known
         end
         local entry
         if maxlen > 0 then
           entry = redis.call('XADD', KEYS[1], 'MAXLEN', '~', maxlen, '*', unpack(ARGV, 3))
         else
           entry = redis.call('XADD', KEYS[1], '*', unpack(ARGV, 3))
         end
         redis.call('SET', KEYS[2], entry, 'PX', ttl)
         return entry",
    )
});

/// Opens a sink; it connects when it first sends.
///
/// # Errors
/// What the URL has wrong.
pub fn open(target: &Target) -> Result<RedisSink, TargetError> {
    let dedup = target.duration("dedup", Duration::from_secs(1)..=Duration::from_secs(366 * 86_400))?;
    Ok(RedisSink {
        client: crate::redis::client(target)?,
        stream: Template::of(target, "stream")?,
        envelope: target.envelope()?,
        timeout: target.timeout()?,
        dedup: dedup.unwrap_or(DEDUP),
        maxlen: target.number("maxlen", 1..=1_000_000_000_000)?.unwrap_or(0),
        replicas: target.number("replicas", 1..=100)?.unwrap_or(0),
        bytes_max: target.number("bytes_max", 1..=BYTES_MAX)?.unwrap_or(BYTES_MAX),
        connection: Mutex::new(None),
        closed: AtomicBool::new(false),
    })
}

/// See [`open`].
pub struct RedisSink {
    client: Client,
    stream: Template,
    envelope: Envelope,
    timeout: Duration,
    dedup: Duration,
    maxlen: u64,
    replicas: u64,
    bytes_max: u64,
    connection: Mutex<Option<MultiplexedConnection>>,
    closed: AtomicBool,
}

impl std::fmt::Debug for RedisSink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The client would show its password.
        f.debug_struct("RedisSink").field("stream", &self.stream).finish_non_exhaustive()
    }
}

impl Sink for RedisSink {
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
            self.connection.lock().await.take();
        })
    }
}

impl RedisSink {
    async fn send_window(&self, messages: &[Message]) -> Vec<Verdict> {
        let mut verdicts = vec![Verdict::Delivered; messages.len()];
        let mut commands = Vec::with_capacity(messages.len());
        for (at, message) in messages.iter().enumerate() {
            let encoded = self.envelope.encode(message, "ce-");
            if encoded.body.len() as u64 > self.bytes_max {
                let reason = format!("{} bytes are more than bytes_max {}", encoded.body.len(), self.bytes_max);
                verdicts[at] = Verdict::refused(reason);
            } else {
                commands.push((at, self.command(message, &encoded)));
            }
        }
        let all: Vec<usize> = commands.iter().map(|(at, _)| *at).collect();
        if let Err(away) = self.run(commands, &mut verdicts).await {
            all.into_iter().for_each(|at| verdicts[at] = away.clone());
        }
        verdicts
    }

    /// Runs the commands and judges each answer. `Err` is for all of them: nothing is known.
    async fn run(&self, mut commands: Vec<(usize, Cmd)>, verdicts: &mut [Verdict]) -> Result<(), Verdict> {
        if commands.is_empty() {
            return Ok(());
        }
        let mut connection = self.connected().await?;
        let outcome: Result<(), RedisError> = async {
            // A second time for those whose script Redis does not know: it forgets all when it starts.
            for second in [false, true] {
                let mut pipeline = Pipeline::with_capacity(commands.len());
                commands.iter().for_each(|(_, command)| {
                    pipeline.add_command(command.clone());
                });
                let answers = connection.req_packed_commands(&pipeline, 0, commands.len()).await?;
                let mut unknown = Vec::new();
                for ((at, command), answer) in commands.into_iter().zip(answers) {
                    let error = match answer {
                        Value::ServerError(error) => RedisError::from(error),
                        _ => continue,
                    };
                    if !second && error.kind() == ErrorKind::Server(redis::ServerErrorKind::NoScript) {
                        unknown.push((at, command));
                    } else {
                        verdicts[at] = verdict(&error);
                    }
                }
                if unknown.is_empty() {
                    break;
                }
                ADD.load_async(&mut connection).await?;
                commands = unknown;
            }
            self.replicated(&mut connection, verdicts).await
        }
        .await;
        if let Err(error) = outcome {
            // It may be half dead: the next call makes another.
            self.connection.lock().await.take();
            return Err(Verdict::away(error));
        }
        Ok(())
    }

    async fn connected(&self) -> Result<MultiplexedConnection, Verdict> {
        let mut connection = self.connection.lock().await;
        if self.closed.load(Ordering::Acquire) {
            return Err(Verdict::away(CLOSED));
        }
        if let Some(connection) = &*connection {
            return Ok(connection.clone());
        }
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.timeout))
            .set_response_timeout(Some(self.timeout));
        let opened = self.client.get_multiplexed_async_connection_with_config(&config).await;
        let opened = opened.map_err(Verdict::away)?;
        Ok(connection.insert(opened).clone())
    }

    /// Waits for the replicas that the setting wants.
    async fn replicated(
        &self,
        connection: &mut MultiplexedConnection,
        verdicts: &mut [Verdict],
    ) -> Result<(), RedisError> {
        if self.replicas == 0 {
            return Ok(());
        }
        // Redis must give up before our own limit does, or its answer is lost.
        let limit_ms = u64::try_from(self.timeout.as_millis()).unwrap_or(u64::MAX) / 2;
        let mut wait = redis::cmd("WAIT");
        let reached: u64 = wait.arg(self.replicas).arg(limit_ms).query_async(connection).await?;
        if reached < self.replicas {
            let reason = format!("{reached} of {} replicas have it", self.replicas);
            verdicts.iter_mut().filter(|verdict| **verdict == Verdict::Delivered).for_each(|verdict| {
                *verdict = Verdict::away(&reason);
            });
        }
        Ok(())
    }

    fn command(&self, message: &Message, encoded: &Encoded) -> Cmd {
        let stream = self.stream.fill(message);
        // In a cluster, the braces put the id beside its stream.
        let sent = format!("pgonce:sent:{{{stream}}}:{}:{}", message.tenant, message.id);
        let mut command = redis::cmd("EVALSHA");
        command.arg(ADD.get_hash()).arg(2).arg(&*stream).arg(sent);
        command.arg(u64::try_from(self.dedup.as_millis()).unwrap_or(u64::MAX)).arg(self.maxlen);
        for (name, value) in &encoded.headers {
            command.arg(name).arg(value);
        }
        command.arg("content-type").arg(encoded.content_type).arg("payload").arg(&encoded.body[..]);
        command
    }
}

fn verdict(error: &RedisError) -> Verdict {
    match error.code() {
        // The key of the stream is something else.
        Some("WRONGTYPE") => Verdict::refused(error),
        Some(
            "OOM" | "READONLY" | "LOADING" | "MASTERDOWN" | "CLUSTERDOWN" | "NOREPLICAS" | "MISCONF" | "BUSY"
            | "NOPERM" | "NOAUTH" | "MOVED" | "TRYAGAIN",
        ) => Verdict::away(error),
        _ => Verdict::retry(error),
    }
}
