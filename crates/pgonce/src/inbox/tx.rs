//! The one transaction of a message: its admission, or its end in the stored inbox, and its effect.

use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Statement};
use uuid::Uuid;

use super::Advance;
use crate::Error;
use crate::outbox::{self, Event};
use crate::pool::Pooled;
use crate::queue::NewJob;
use crate::sql::Call;
use crate::tx::{Ended, Undone, commit_behind, only_handle, rollback};

/// The open transaction that a message's handler writes through. It is a `tokio_postgres::Client` whose transaction
/// pgonce began and ends: do not send BEGIN, COMMIT or ROLLBACK (savepoints are fine). A handle, cheap to clone; none
/// may outlive the handler: then nothing is committed, and the connection is closed under the one that was kept.
#[derive(Debug, Clone)]
pub struct MessageTx(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    connection: Pooled,
    consumer: String,
    tenant: String,
    end: End,
    noted: Mutex<Noted>,
    emitted: AtomicBool,
}

/// What stands at the transaction's end, before COMMIT.
#[derive(Debug)]
pub(super) enum End {
    /// The message was admitted at the beginning.
    Admitted { source: String, id: String },
    /// The message of the stored inbox is finished, under its fence.
    Finish { id: i64, claim_id: Uuid },
}

/// What the handler said about its message, where it is not simply applied.
#[derive(Debug, Default)]
struct Noted {
    ignored: bool,
    result_type: Option<String>,
    result_id: Option<String>,
}

impl MessageTx {
    pub(super) fn new(connection: Pooled, consumer: String, tenant: String, end: End) -> Self {
        let (noted, emitted) = (Mutex::default(), AtomicBool::new(false));
        Self(Arc::new(Inner { connection, consumer, tenant, end, noted, emitted }))
    }

    /// Whether a version of an entity is the next one; see `once.advance`. The entity is locked until the transaction ends.
    ///
    /// # Errors
    /// `Error::Database`: names out of their limits, or a serialization failure.
    pub async fn advance(&self, entity: &str, version: i64) -> Result<Advance, Error> {
        let parameters: [(&(dyn ToSql + Sync), Type); 4] = [
            (&self.0.consumer, Type::TEXT),
            (&entity, Type::TEXT),
            (&version, Type::INT8),
            (&self.0.tenant, Type::TEXT),
        ];
        let row = self.0.connection.call(Call::Advance, &parameters).await?;
        Advance::read(row.try_get(0)?)
    }

    /// Adds a message to the outbox: it is there if and only if this transaction commits. Its id is derived from the message
    /// that is handled, the same in every delivery; further ones of a type by [`Event::ordinal`].
    ///
    /// # Errors
    /// P4040 where the message cannot be emitted, P4041 where another one of the type was emitted for this message.
    pub async fn emit(&self, event: Event) -> Result<Uuid, Error> {
        let Inner { connection, consumer, tenant, end, .. } = &*self.0;
        self.0.emitted.store(true, Ordering::Relaxed);
        let id = match end {
            End::Admitted { source, id } => outbox::derived_id(&[tenant, "inbox", consumer, source, id], &event),
            End::Finish { id, .. } => outbox::derived_id(&[tenant, "stored inbox", consumer, &id.to_string()], &event),
        };
        let event = event.id(id);
        let wire = outbox::Wire::new(&event)?;
        let parameters = wire.parameters(&event, tenant, &None::<&str>, &None::<&str>);
        Ok(connection.call(Call::Emit, &parameters).await?.try_get(0)?)
    }

    /// A UUID that is the same in every delivery of this message to this consumer, for the id of what it creates.
    #[must_use]
    pub fn stable_uuid(&self, part: &str) -> Uuid {
        let Inner { consumer, tenant, end, .. } = &*self.0;
        match end {
            End::Admitted { source, id } => {
                crate::stable_uuid(tenant, &format!("inbox {consumer}"), &key_of(source, id), part)
            }
            End::Finish { id, .. } => {
                crate::stable_uuid(tenant, &format!("stored inbox {consumer}"), &id.to_string(), part)
            }
        }
    }

    /// Whether relays have something to do once this has committed.
    pub(super) fn emitted(&self) -> bool {
        self.0.emitted.load(Ordering::Relaxed)
    }

    /// Asks for a call of a provider: it is sent if and only if this transaction commits, and after that. Its id is derived
    /// from the message that is handled, the same in every delivery; further ones of an operation by
    /// [`crate::Call::ordinal`].
    ///
    /// # Errors
    /// P4063 where the call cannot be made; `Error::OtherRequest` where another one was made for this message.
    pub async fn call(&self, call: crate::Call) -> Result<Uuid, Error> {
        let Inner { connection, consumer, tenant, end, .. } = &*self.0;
        let key = match end {
            End::Admitted { source, id } => crate::call::derived_key(&["inbox", consumer, source, id]),
            End::Finish { id, .. } => crate::call::derived_key(&["stored inbox", consumer, &id.to_string()]),
        };
        let wire = crate::call::Wire::new(&call)?;
        let parameters = wire.parameters(&call, tenant, &"inbox", &key);
        Ok(connection.call(Call::ProviderRequest, &parameters).await?.try_get(0)?)
    }

    /// Adds a job to a queue: it is there if and only if this transaction commits; see [`crate::Tx::enqueue`].
    ///
    /// # Errors
    /// What the database refuses.
    pub async fn enqueue(&self, queue: &str, job: &NewJob) -> Result<i64, Error> {
        job.add(&self.0.connection, queue, &self.0.tenant).await
    }

    /// Posts to the ledger, for the message's tenant; see [`crate::Tx::post`].
    ///
    /// # Errors
    /// P4090 to P4094, see docs/reference/errors.md; nothing was posted.
    pub async fn post(&self, posting: &crate::ledger::Posting) -> Result<crate::ledger::Posted, Error> {
        crate::ledger::post_on(&self.0.connection, &self.0.tenant, posting).await
    }

    /// Records what the handler made, beside the message.
    pub fn made(&self, result_type: impl Into<String>, result_id: impl Into<String>) {
        let mut noted = self.noted();
        noted.result_type = Some(result_type.into());
        noted.result_id = Some(result_id.into());
    }

    /// Records that the message was dealt with by doing nothing: it counts as seen.
    pub fn ignored(&self) {
        self.noted().ignored = true;
    }

    /// A prepared statement, kept with the connection; see [`crate::Tx::prepared`].
    ///
    /// # Errors
    /// What the server says about the text.
    pub async fn prepared(&self, text: &str) -> Result<Statement, tokio_postgres::Error> {
        self.0.connection.cached(text).await
    }

    fn noted(&self) -> MutexGuard<'_, Noted> {
        self.0.noted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the message and commits, in one round trip. The statement before COMMIT also proves that the transaction
    /// was not aborted before (trap 10).
    pub(super) async fn commit(self) -> Ended {
        let Some(inner) = only_handle(self.0, |inner| &inner.connection) else { return Ended::Kept };
        let Inner { connection, consumer, tenant, end, noted, .. } = inner;
        let Noted { ignored, result_type, result_id } = noted.into_inner().unwrap_or_else(PoisonError::into_inner);
        let result = if ignored { "ignored" } else { "applied" };
        let last = Last { consumer, tenant, end, result, result_type, result_id };
        fail::fail_point!("pgonce::inbox_before_commit");
        let ended = commit_behind(&connection, last.call(), &last.parameters()).await;
        fail::fail_point!("pgonce::inbox_after_commit");
        ended
    }

    /// Rolls back, and gives the connection back only if that was confirmed.
    pub(super) async fn rollback(self) -> Undone {
        let Some(inner) = only_handle(self.0, |inner| &inner.connection) else { return Undone::Kept };
        if rollback(inner.connection).await { Undone::Confirmed } else { Undone::Lost }
    }
}

/// One text for two: no other pair makes the same.
fn key_of(source: &str, id: &str) -> String {
    format!("{}:{source}{id}", source.len())
}

impl Deref for MessageTx {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.0.connection.client
    }
}

/// The statement before COMMIT.
struct Last {
    consumer: String,
    tenant: String,
    end: End,
    result: &'static str,
    result_type: Option<String>,
    result_id: Option<String>,
}

impl Last {
    fn call(&self) -> Call {
        match &self.end {
            End::Finish { .. } => Call::InboxFinish,
            // Applied, without a reference, is what the row says already.
            End::Admitted { .. } if self.result == "applied" && self.result_type.is_none() => Call::Ping,
            End::Admitted { .. } => Call::NoteResult,
        }
    }

    fn parameters(&self) -> Vec<(&(dyn ToSql + Sync), Type)> {
        let noted: [(&(dyn ToSql + Sync), Type); 3] =
            [(&self.result, Type::TEXT), (&self.result_type, Type::TEXT), (&self.result_id, Type::TEXT)];
        let mut all: Vec<(&(dyn ToSql + Sync), Type)> = Vec::new();
        match &self.end {
            End::Admitted { .. } if self.call() == Call::Ping => {}
            End::Admitted { source, id } => {
                all.extend([
                    (&self.consumer as &(dyn ToSql + Sync), Type::TEXT),
                    (source, Type::TEXT),
                    (id, Type::TEXT),
                ]);
                all.extend(noted);
                all.push((&self.tenant, Type::TEXT));
            }
            End::Finish { id, claim_id } => {
                all.extend([(id as &(dyn ToSql + Sync), Type::INT8), (claim_id, Type::UUID)]);
                all.extend(noted);
            }
        }
        all
    }
}
