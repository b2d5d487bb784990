//! Inbound messages: each applied once, whatever the broker delivers. The rules are in `sql/functions/inbox/`.

mod tx;
mod worker;

use std::sync::atomic::Ordering;

use futures_util::future::join;
use sha2::{Digest, Sha256};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{GenericClient, IsolationLevel, Row};
use tracing::Instrument as _;

pub use self::tx::MessageTx;
pub use self::worker::{Handled, InboxWorker, StoredMessage};

use self::tx::End;
use crate::error::Failure;
use crate::outbox::Waker;
use crate::retry::Budget;
use crate::sql::{self, Call};
use crate::sqlstate::Verdict as Means;
use crate::tx::{self as transaction, Ended, Undone};
use crate::{Error, Once, key_hash, observe};

/// A consumer of messages, and where they come from. Messages are told apart by tenant, consumer, source and id.
#[derive(Debug, Clone)]
#[must_use = "a consumer does nothing until it is given messages"]
pub struct Inbox<'a> {
    once: &'a Once,
    consumer: String,
    source: String,
    tenant: String,
    isolation: Option<IsolationLevel>,
}

/// A message as it is told from others: its source, its id there, and a hash of its body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Incoming {
    /// Where its id is unique: a topic, a stream, a webhook's sender.
    pub source: String,
    /// The producer's id: the same in every delivery.
    pub id: String,
    /// Pins the body: the same id with another hash is an error, not a duplicate. 1 to 64 bytes.
    pub body_hash: Vec<u8>,
}

impl Incoming {
    /// A message with the SHA-256 of its body.
    pub fn new(source: impl Into<String>, id: impl Into<String>, body: &[u8]) -> Self {
        Self { source: source.into(), id: id.into(), body_hash: Sha256::digest(body).to_vec() }
    }
}

/// What became of a delivery.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Processed<T> {
    /// The handler ran, and its effect has committed.
    Applied(T),
    /// An earlier delivery's effect has committed; nothing was run.
    Duplicate,
}

/// What a delivery is taken for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The first: apply it, in this transaction.
    New,
    /// Applied before, or a second time in the batch.
    Duplicate,
    /// The id was used with another body: do not apply it.
    Conflict,
}

impl Verdict {
    fn read(row: &Row) -> Result<Self, Error> {
        match row.try_get(0)? {
            "new" => Ok(Self::New),
            "duplicate" => Ok(Self::Duplicate),
            "conflict" => Ok(Self::Conflict),
            other => Err(Error::Schema(format!("the database answered a verdict that is not known: {other:?}"))),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::New => "new",
            Self::Duplicate => "duplicate",
            Self::Conflict => "conflict",
        }
    }
}

/// What `once.advance` says of a version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Advance {
    /// It is the next, and the last one now: apply it.
    Apply,
    /// It was applied before, or a later one was: nothing to do.
    Stale,
    /// One before it is missing.
    Gap,
}

impl Advance {
    fn read(text: &str) -> Result<Self, Error> {
        match text {
            "apply" => Ok(Self::Apply),
            "stale" => Ok(Self::Stale),
            "gap" => Ok(Self::Gap),
            other => Err(Error::Schema(format!("the database answered an advance that is not known: {other:?}"))),
        }
    }
}

/// A message to be stored and processed later.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Arrival {
    /// The producer's id: the same in every delivery.
    pub id: String,
    /// The body, as it came. At most 16 MiB.
    pub body: Vec<u8>,
    /// Where it was published.
    pub topic: Option<String>,
    /// What it says happened.
    pub kind: Option<String>,
    /// Messages with the same key are processed in the order in which they were stored.
    pub ordering_key: Option<String>,
    /// The thing whose versions are counted.
    pub entity: Option<String>,
    /// Its version with this message.
    pub version: Option<i64>,
    /// Headers: an object.
    pub headers: Option<serde_json::Value>,
    /// The body's media type.
    pub content_type: Option<String>,
}

type Parameters<'p, const N: usize> = [(&'p (dyn ToSql + Sync), Type); N];

impl<'a> Inbox<'a> {
    pub(crate) fn new(once: &'a Once, consumer: String) -> Self {
        Self { once, consumer, source: "default".into(), tenant: String::new(), isolation: None }
    }

    /// Where messages come from: their ids are unique there. `default` if not called.
    pub fn source(mut self, source: impl Into<String>) -> Self {
        self.source = source.into();
        self
    }

    /// Whose messages they are.
    pub fn tenant(mut self, tenant: impl Into<String>) -> Self {
        self.tenant = tenant.into();
        self
    }

    /// The isolation level of [`Inbox::process`]; the server's default if not called.
    pub fn isolation(mut self, level: IsolationLevel) -> Self {
        self.isolation = Some(level);
        self
    }

    /// A message of this source.
    #[must_use]
    pub fn message(&self, id: impl Into<String>, body: &[u8]) -> Incoming {
        Incoming::new(self.source.clone(), id, body)
    }

    /// A worker on this consumer's stored messages.
    pub fn worker(self) -> InboxWorker<'a> {
        InboxWorker::new(self)
    }

    /// Applies a message once: begins, admits, runs the handler and commits, in no more round trips than begin, effect
    /// and commit take. A duplicate runs nothing. Acknowledge the delivery after either answer, and only then.
    ///
    /// Serialization failures and deadlocks are run again from the transaction's start, so the handler may be called
    /// several times; only one call's writes ever commit. Every other failure is rolled back, admission and all, and
    /// told: a redelivery runs the handler again.
    ///
    /// # Errors
    /// `Error::OtherBody` for an id that was used with another body; `Error::InDoubt` where the answer to COMMIT was lost:
    /// let it be delivered again, which then is a duplicate, or runs. See [`Error`] for the others.
    pub async fn process<T, F, R>(&self, message: &Incoming, handler: F) -> Result<Processed<T>, Error>
    where
        F: Fn(MessageTx) -> R,
        R: Future<Output = Result<T, Failure>>,
    {
        let span = self.span(&message.source, &message.id);
        async move {
            let mut budget = Budget::new(&self.once.shared.settings.retry);
            loop {
                let reason = match self.attempt(message, &handler).await {
                    Err(reason) if is_again(&reason) => reason,
                    ended => return ended,
                };
                observe::retried(reason.sqlstate().unwrap_or("connection"));
                tracing::Span::current().record("retry_attempt_count", budget.attempt);
                if !budget.pause(None).await {
                    return Err(reason);
                }
            }
        }
        .instrument(span)
        .await
    }

    /// One transaction, from its beginning to its end.
    async fn attempt<T, F, R>(&self, message: &Incoming, handler: &F) -> Result<Processed<T>, Error>
    where
        F: Fn(MessageTx) -> R,
        R: Future<Output = Result<T, Failure>>,
    {
        let connection = self.once.connection().await?;
        connection.dirty.store(true, Ordering::SeqCst);
        // `join` polls in order: BEGIN is on the wire before the admission.
        let begun = connection.client.batch_execute(self.begin());
        let (begun, admitted) = join(begun, connection.call(Call::Admit, &self.admit_parameters(message))).await;
        let verdict = match begun.and(admitted) {
            Ok(row) => Verdict::read(&row)?,
            Err(error) => {
                transaction::rollback(connection).await;
                let error = Error::from(error);
                if matches!(error, Error::OtherBody) {
                    self.count(Verdict::Conflict);
                }
                return Err(error);
            }
        };
        self.count(verdict);
        if verdict != Verdict::New {
            // Nothing was written: the answer need not wait for the transaction's end.
            tokio::spawn(transaction::rollback(connection));
            return Ok(Processed::Duplicate);
        }
        fail::fail_point!("pgonce::inbox_after_admit");
        let end = End::Admitted { source: message.source.clone(), id: message.id.clone() };
        let tx = MessageTx::new(connection, self.consumer.clone(), self.tenant.clone(), end);
        match handler(tx.clone()).await {
            Ok(value) => self.commit(tx).await.map(|()| Processed::Applied(value)),
            Err(failure) => match tx.rollback().await {
                Undone::Kept => Err(Error::Kept),
                Undone::Confirmed | Undone::Lost => Err(told(failure)),
            },
        }
    }

    /// Ends a message's transaction, and wakes relays where it emitted.
    async fn commit(&self, tx: MessageTx) -> Result<(), Error> {
        let emitted = tx.emitted();
        let ended = tx.commit().await;
        if emitted && matches!(ended, Ended::Committed | Ended::InDoubt(_)) {
            Waker::wake(&self.once.shared);
        }
        committed(ended)
    }

    /// Records, in a transaction of its own, that a message is given up or needs nothing: later deliveries are
    /// duplicates. For after a failure of [`Inbox::process`] that will repeat itself.
    ///
    /// # Errors
    /// `Error::OtherBody`, or what the database refuses.
    pub async fn set_aside(
        &self,
        message: &Incoming,
        failed: bool,
        reference: Option<(&str, &str)>,
    ) -> Result<(), Error> {
        let result = if failed { "failed_final" } else { "ignored" };
        let (kind, id) = reference.unzip();
        let note = async |tx: MessageTx| {
            let parameters: Parameters<'_, 7> = [
                (&self.consumer, Type::TEXT),
                (&message.source, Type::TEXT),
                (&message.id, Type::TEXT),
                (&result, Type::TEXT),
                (&kind, Type::TEXT),
                (&id, Type::TEXT),
                (&self.tenant, Type::TEXT),
            ];
            tx.query_typed_one(sql::text(Call::NoteResult, true), &parameters).await?;
            Ok(())
        };
        self.process(message, note).await.map(|_| ())
    }

    /// Admits a message in the caller's own transaction, for effects that are elsewhere in it.
    ///
    /// # Errors
    /// `Error::OtherBody` for an id that was used with another body, and what the database refuses.
    pub async fn admit(&self, client: &impl GenericClient, message: &Incoming) -> Result<Verdict, Error> {
        let parameters = self.admit_parameters(message);
        let verdict = Verdict::read(&client.query_typed_one(sql::text(Call::Admit, true), &parameters).await?)?;
        self.count(verdict);
        Ok(verdict)
    }

    /// Admits many messages of this source in the caller's own transaction: a verdict each, in their order. Apply
    /// those that are new. A conflict costs its neighbours nothing, and must not be applied.
    ///
    /// # Errors
    /// What the database refuses.
    pub async fn admit_batch(&self, client: &impl GenericClient, messages: &[Incoming]) -> Result<Vec<Verdict>, Error> {
        let ids: Vec<&str> = messages.iter().map(|message| message.id.as_str()).collect();
        let hashes: Vec<&[u8]> = messages.iter().map(|message| message.body_hash.as_slice()).collect();
        if messages.iter().any(|message| message.source != self.source) {
            return Err(Error::Invalid("a batch has messages of one source: this consumer's".into()));
        }
        let parameters: Parameters<'_, 5> = [
            (&self.consumer, Type::TEXT),
            (&self.source, Type::TEXT),
            (&ids, Type::TEXT_ARRAY),
            (&hashes, Type::BYTEA_ARRAY),
            (&self.tenant, Type::TEXT),
        ];
        self.verdicts(client.query_typed(sql::text(Call::AdmitBatch, true), &parameters).await?)
    }

    /// Stores messages of this source for a worker, in one transaction of their own: a verdict each. What is new or a
    /// duplicate may be acknowledged now. Their order is kept.
    ///
    /// # Errors
    /// What the database refuses: then nothing is stored.
    pub async fn receive(&self, messages: &[Arrival]) -> Result<Vec<Verdict>, Error> {
        let ids: Vec<&str> = messages.iter().map(|message| message.id.as_str()).collect();
        let bodies: Vec<&[u8]> = messages.iter().map(|message| message.body.as_slice()).collect();
        let topics: Vec<_> = messages.iter().map(|message| message.topic.as_deref()).collect();
        let kinds: Vec<_> = messages.iter().map(|message| message.kind.as_deref()).collect();
        let keys: Vec<_> = messages.iter().map(|message| message.ordering_key.as_deref()).collect();
        let entities: Vec<_> = messages.iter().map(|message| message.entity.as_deref()).collect();
        let versions: Vec<_> = messages.iter().map(|message| message.version).collect();
        let headers: Vec<_> = messages.iter().map(|message| message.headers.as_ref()).collect();
        let content_types: Vec<_> = messages.iter().map(|message| message.content_type.as_deref()).collect();
        let parameters: Parameters<'_, 12> = [
            (&self.consumer, Type::TEXT),
            (&self.source, Type::TEXT),
            (&ids, Type::TEXT_ARRAY),
            (&bodies, Type::BYTEA_ARRAY),
            (&topics, Type::TEXT_ARRAY),
            (&kinds, Type::TEXT_ARRAY),
            (&keys, Type::TEXT_ARRAY),
            (&entities, Type::TEXT_ARRAY),
            (&versions, Type::INT8_ARRAY),
            (&headers, Type::JSONB_ARRAY),
            (&content_types, Type::TEXT_ARRAY),
            (&self.tenant, Type::TEXT),
        ];
        self.verdicts(self.once.connection().await?.rows(Call::ReceiveBatch, &parameters).await?)
    }

    fn verdicts(&self, rows: Vec<Row>) -> Result<Vec<Verdict>, Error> {
        let verdicts: Vec<Verdict> = rows.iter().map(Verdict::read).collect::<Result<_, _>>()?;
        verdicts.iter().for_each(|verdict| self.count(*verdict));
        Ok(verdicts)
    }

    fn admit_parameters<'p>(&'p self, message: &'p Incoming) -> Parameters<'p, 5> {
        [
            (&self.consumer, Type::TEXT),
            (&message.source, Type::TEXT),
            (&message.id, Type::TEXT),
            (&message.body_hash, Type::BYTEA),
            (&self.tenant, Type::TEXT),
        ]
    }

    fn begin(&self) -> &'static str {
        match self.isolation {
            None => "BEGIN",
            Some(IsolationLevel::RepeatableRead) => "BEGIN ISOLATION LEVEL REPEATABLE READ",
            Some(IsolationLevel::Serializable) => "BEGIN ISOLATION LEVEL SERIALIZABLE",
            Some(_) => "BEGIN ISOLATION LEVEL READ COMMITTED",
        }
    }

    fn span(&self, source: &str, id: &str) -> tracing::Span {
        tracing::info_span!(
            "pgonce.consume",
            consumer = %self.consumer,
            tenant = %self.tenant,
            source,
            key_hash = %key_hash(id),
            retry_attempt_count = tracing::field::Empty,
            deduplication_decision = tracing::field::Empty,
        )
    }

    fn count(&self, verdict: Verdict) {
        tracing::Span::current().record(
            "deduplication_decision",
            match verdict {
                Verdict::New => "new_execution",
                Verdict::Duplicate => "db_hit",
                Verdict::Conflict => "conflict_retry",
            },
        );
        observe::consumed(&self.consumer, verdict.name());
    }
}

/// What the end of a message's transaction means for its delivery.
fn committed(ended: Ended) -> Result<(), Error> {
    match ended {
        Ended::Committed => Ok(()),
        Ended::Refused(error) => Err(error.into()),
        Ended::Overtaken => Err(Error::FailedRetryable { code: "40001".into(), message: "a rival was first".into() }),
        Ended::Kept => Err(Error::Kept),
        Ended::InDoubt(reason) => {
            metrics::counter!("pgonce_in_doubt_total").increment(1);
            Err(Error::InDoubt { reason })
        }
    }
}

/// A handler's failure as the caller gets it; everything is rolled back.
fn told(failure: Failure) -> Error {
    let Failure { code, message, verdict, .. } = failure;
    match verdict {
        Means::Lost => Error::MessageLost,
        Means::Again | Means::Later | Means::InDoubt => Error::FailedRetryable { code, message },
        Means::Final | Means::Classify => Error::Failed { code, message },
    }
}

/// Whether the whole transaction is to be run again at once: a serialization failure or a deadlock.
fn is_again(error: &Error) -> bool {
    let code = match error {
        Error::FailedRetryable { code, .. } => code.as_str(),
        error => error.sqlstate().unwrap_or_default(),
    };
    crate::sqlstate::verdict(code) == Means::Again
}
