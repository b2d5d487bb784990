//! The stored inbox's worker: takes, runs, finishes; what fails is recorded after its rollback.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};
use tracing::Instrument as _;
use uuid::Uuid;

use super::tx::End;
use super::{Inbox, MessageTx, is_again, told};
use crate::claim::interval;
use crate::error::Failure;
use crate::sql::Call;
use crate::tx::Undone;
use crate::{Error, observe};

/// A message of the stored inbox, as a handler gets it.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct StoredMessage {
    /// Its number in the inbox.
    pub number: i64,
    /// The fence of this attempt.
    pub claim_id: Uuid,
    /// Whose it is.
    pub tenant: String,
    /// Where it came from.
    pub source: String,
    /// The producer's id.
    pub id: String,
    /// Where it was published.
    pub topic: Option<String>,
    /// What it says happened.
    pub kind: Option<String>,
    /// What it stays in order with.
    pub ordering_key: Option<String>,
    /// The thing whose versions are counted.
    pub entity: Option<String>,
    /// Its version with this message.
    pub version: Option<i64>,
    /// Headers.
    pub headers: Option<serde_json::Value>,
    /// The body's media type.
    pub content_type: Option<String>,
    /// The body, as it came.
    pub body: Vec<u8>,
    /// Which attempt this is, from one.
    pub attempt: u32,
}

impl StoredMessage {
    fn read(row: &Row) -> Result<Self, tokio_postgres::Error> {
        Ok(Self {
            number: row.try_get(0)?,
            claim_id: row.try_get(1)?,
            tenant: row.try_get(2)?,
            source: row.try_get(3)?,
            id: row.try_get(4)?,
            topic: row.try_get(5)?,
            kind: row.try_get(6)?,
            ordering_key: row.try_get(7)?,
            entity: row.try_get(8)?,
            version: row.try_get(9)?,
            headers: row.try_get(10)?,
            content_type: row.try_get(11)?,
            body: row.try_get(12)?,
            attempt: u32::try_from(row.try_get::<_, i32>(13)?).unwrap_or(1),
        })
    }
}

/// What a handler did with its message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Handled {
    /// Its effect is in the transaction: commit it.
    Applied,
    /// Nothing was to be done (a stale version, an event that nobody needs): commit that.
    Ignored,
    /// It came before its turn: roll back, and park it until the missing version is applied.
    Gap,
}

/// Works on the stored messages of one consumer. Each message's effect commits in one transaction with its end; a worker
/// that dies, or outlives its lease, leaves nothing of it.
#[derive(Debug, Clone)]
#[must_use = "a worker does nothing until it is run"]
pub struct InboxWorker<'a> {
    inbox: Inbox<'a>,
    name: String,
    at_once: usize,
    lease: Duration,
    poll: Duration,
    every_tenant: bool,
}

/// How often messages that wait for a version are looked after.
const RECOVER_EVERY: Duration = Duration::from_secs(10);
/// How many of them at a time.
const RECOVER_MAX: i32 = 1000;

impl<'a> InboxWorker<'a> {
    pub(super) fn new(inbox: Inbox<'a>) -> Self {
        let at_once = (inbox.once.shared.settings.pool_max / 2).clamp(1, 8);
        let name = format!("worker {}", std::process::id());
        let (lease, poll) = (Duration::from_secs(30), Duration::from_millis(500));
        Self { inbox, name, at_once, lease, poll, every_tenant: true }
    }

    /// What operators see as the holder of a message.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// How many messages are worked on at once, each on a connection of the pool: at most 1000. Half of the pool, up
    /// to 8, if not called.
    pub fn at_once(mut self, messages: usize) -> Self {
        self.at_once = messages.clamp(1, 1000);
        self
    }

    /// How long a message is this worker's: 30 seconds if not called. A handler has three quarters of it.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// How long to wait before asking an empty inbox again: 500 ms if not called.
    pub fn poll(mut self, pause: Duration) -> Self {
        self.poll = pause;
        self
    }

    /// Only the messages of the consumer's tenant; of every tenant if not called.
    pub fn one_tenant(mut self) -> Self {
        self.every_tenant = false;
        self
    }

    /// Works until `stop` resolves, then finishes what it holds. A database that is away is waited for.
    pub async fn run_until<F, R>(&self, stop: impl Future<Output = ()>, handler: F)
    where
        F: Fn(MessageTx, Arc<StoredMessage>) -> R,
        R: Future<Output = Result<Handled, Failure>>,
    {
        let mut stop = pin!(stop);
        let mut stopping = false;
        let mut running = FuturesUnordered::new();
        let mut recovered = Instant::now();
        while !stopping || !running.is_empty() {
            let free = if stopping { 0 } else { self.at_once - running.len() };
            let taken = if free > 0 { self.take_or_wait(free).await } else { Vec::new() };
            let is_idle = taken.len() < free;
            running.extend(taken.into_iter().map(|message| self.work(message, &handler)));
            if is_idle && recovered.elapsed() >= RECOVER_EVERY {
                recovered = Instant::now();
                self.recover().await;
            }
            tokio::select! {
                Some(()) = running.next() => {}
                () = &mut stop, if !stopping => stopping = true,
                () = tokio::time::sleep(self.poll), if is_idle && !stopping => {}
            }
        }
    }

    /// Works until there is nothing to take, and returns how many messages were worked on: for tests, and jobs that
    /// run now and then.
    ///
    /// # Errors
    /// What the database says to the taking of messages.
    pub async fn run_until_empty<F, R>(&self, handler: F) -> Result<usize, Error>
    where
        F: Fn(MessageTx, Arc<StoredMessage>) -> R,
        R: Future<Output = Result<Handled, Failure>>,
    {
        let mut count = 0;
        loop {
            let taken = self.take(self.at_once).await?;
            if taken.is_empty() {
                return Ok(count);
            }
            count += taken.len();
            let mut running: FuturesUnordered<_> =
                taken.into_iter().map(|message| self.work(message, &handler)).collect();
            while running.next().await.is_some() {}
        }
    }

    async fn take_or_wait(&self, free: usize) -> Vec<StoredMessage> {
        self.take(free).await.unwrap_or_else(|error| {
            tracing::warn!(%error, "the inbox cannot be asked; asking again");
            Vec::new()
        })
    }

    async fn take(&self, limit: usize) -> Result<Vec<StoredMessage>, Error> {
        let connection = self.inbox.once.connection().await?;
        let limit = i32::try_from(limit).unwrap_or(1000);
        let lease = interval(self.lease);
        let tenant = (!self.every_tenant).then_some(&self.inbox.tenant);
        let parameters: [(&(dyn ToSql + Sync), Type); 5] = [
            (&self.inbox.consumer, Type::TEXT),
            (&self.name, Type::TEXT),
            (&limit, Type::INT4),
            (&lease, Type::TEXT),
            (&tenant, Type::TEXT),
        ];
        let rows = connection.rows(Call::InboxTake, &parameters).await?;
        Ok(rows.iter().map(StoredMessage::read).collect::<Result<_, _>>()?)
    }

    /// One message, from its taking to its end, whatever comes.
    async fn work<F, R>(&self, message: StoredMessage, handler: &F)
    where
        F: Fn(MessageTx, Arc<StoredMessage>) -> R,
        R: Future<Output = Result<Handled, Failure>>,
    {
        let span = self.inbox.span(&message.source, &message.id);
        let message = Arc::new(message);
        let deadline = Instant::now() + self.lease.mul_f64(0.75);
        async {
            let mut ended = self.attempt(&message, handler, deadline).await;
            // A serialization failure says nothing about the message: again, while the lease lasts.
            while ended.as_ref().is_err_and(is_again) && Instant::now() < deadline {
                ended = self.attempt(&message, handler, deadline).await;
            }
            let verdict = match ended {
                Ok(Handled::Applied) => "applied",
                Ok(Handled::Ignored) => "ignored",
                Ok(Handled::Gap) => self.park(&message).await,
                // Another worker's by now, or its end may be there: nothing of ours to record.
                Err(Error::MessageLost) => "lost",
                Err(error @ Error::InDoubt { .. }) => {
                    tracing::warn!(%error, "the message's end is in doubt; it is there, or its lease will end");
                    "in_doubt"
                }
                Err(error) => self.fail(&message, &error).await,
            };
            observe::consumed(&self.inbox.consumer, verdict);
        }
        .instrument(span)
        .await;
    }

    async fn attempt<F, R>(
        &self,
        message: &Arc<StoredMessage>,
        handler: &F,
        deadline: Instant,
    ) -> Result<Handled, Error>
    where
        F: Fn(MessageTx, Arc<StoredMessage>) -> R,
        R: Future<Output = Result<Handled, Failure>>,
    {
        let connection = self.inbox.once.connection().await?;
        connection.dirty.store(true, Ordering::SeqCst);
        connection.client.batch_execute(self.inbox.begin()).await?;
        let end = End::Finish { id: message.number, claim_id: message.claim_id };
        let tx = MessageTx::new(connection, self.inbox.consumer.clone(), message.tenant.clone(), end);
        let running = handler(tx.clone(), Arc::clone(message));
        let Ok(handled) = tokio::time::timeout_at(deadline.into(), running).await else {
            // It may still be in the middle of a statement: the rollback waits for that, and nobody waits for it.
            tokio::spawn(tx.rollback());
            let message = format!("the handler took longer than three quarters of the lease ({:?})", self.lease);
            return Err(Error::FailedRetryable { code: "timeout".into(), message });
        };
        match handled {
            Ok(Handled::Gap) => undone(tx.rollback().await).map(|()| Handled::Gap),
            Ok(handled) => {
                if handled == Handled::Ignored {
                    tx.ignored();
                }
                self.inbox.commit(tx).await.map(|()| handled)
            }
            Err(failure) => undone(tx.rollback().await).and(Err(told(failure))),
        }
    }

    /// Records a failure, in a transaction of its own. Where that cannot be done, the lease ends by itself.
    async fn fail(&self, message: &StoredMessage, error: &Error) -> &'static str {
        let retryable = error.is_retryable() || matches!(error, Error::FailedRetryable { .. });
        let text = error.to_string();
        let parameters: [(&(dyn ToSql + Sync), Type); 4] = [
            (&message.number, Type::INT8),
            (&message.claim_id, Type::UUID),
            (&retryable, Type::BOOL),
            (&text, Type::TEXT),
        ];
        match self.record(Call::InboxFail, &parameters).await.as_deref() {
            Some("failed_retryable") => "failed_retryable",
            Some("failed_final") => "failed_final",
            _ => "lost",
        }
    }

    async fn park(&self, message: &StoredMessage) -> &'static str {
        let parameters: [(&(dyn ToSql + Sync), Type); 2] =
            [(&message.number, Type::INT8), (&message.claim_id, Type::UUID)];
        match self.record(Call::InboxWait, &parameters).await.as_deref() {
            Some(_) => "gap",
            None => "lost",
        }
    }

    async fn record(&self, call: Call, parameters: &[(&(dyn ToSql + Sync), Type)]) -> Option<String> {
        let recorded = async {
            let connection = self.inbox.once.connection().await?;
            Ok::<String, Error>(connection.call(call, parameters).await?.try_get(0)?)
        };
        match recorded.await {
            Ok(state) => Some(state),
            Err(error) => {
                tracing::warn!(%error, "what became of the message could not be recorded; its lease will end");
                None
            }
        }
    }

    async fn recover(&self) {
        let recovered = async {
            let connection = self.inbox.once.connection().await?;
            connection.call(Call::InboxRecover, &[(&RECOVER_MAX, Type::INT4)]).await?;
            Ok::<(), Error>(())
        };
        if let Err(error) = recovered.await {
            tracing::warn!(%error, "waiting messages could not be looked after");
        }
    }
}

fn undone(undone: Undone) -> Result<(), Error> {
    match undone {
        Undone::Kept => Err(Error::Kept),
        Undone::Confirmed | Undone::Lost => Ok(()),
    }
}
