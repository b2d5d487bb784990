//! The transaction of a job: its effect and its finish, or, in a group, those of several.

use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};

use tokio_postgres::{Client, Statement};
use uuid::Uuid;

use super::{Job, NewJob};
use crate::Error;
use crate::outbox::{self, Event};
use crate::pool::Pooled;
use crate::sql::Call;
use crate::tx::{Undone, only_handle, rollback};

/// The open transaction that a job's handler writes through. It is a `tokio_postgres::Client` whose transaction pgonce
/// began and ends: do not send BEGIN, COMMIT or ROLLBACK (savepoints are fine). A handle, cheap to clone; none may outlive
/// the handler: then nothing is committed, and the connection is closed under the one that was kept.
#[derive(Debug, Clone)]
pub struct JobTx(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    connection: Pooled,
    queue: Arc<str>,
    job: Arc<Job>,
    result: Mutex<Option<serde_json::Value>>,
}

impl JobTx {
    pub(super) fn new(connection: Pooled, queue: Arc<str>, job: Arc<Job>) -> Self {
        Self(Arc::new(Inner { connection, queue, job, result: Mutex::default() }))
    }

    /// The fence of this attempt.
    #[must_use]
    pub fn claim_id(&self) -> Uuid {
        self.0.job.claim_id
    }

    /// A UUID that is the same in every attempt at this job, for the id of what it creates.
    #[must_use]
    pub fn stable_uuid(&self, part: &str) -> Uuid {
        crate::stable_uuid(&self.0.job.tenant, &format!("queue {}", self.0.queue), &self.0.job.id.to_string(), part)
    }

    /// What is kept of the job when it has succeeded: see [`super::Queue::look`]. At most 1 MiB.
    pub fn result(&self, result: serde_json::Value) {
        *self.0.result.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
    }

    /// Adds a message to the outbox: it is there if and only if this job's effect is. Its id is derived from the job, the
    /// same in every attempt; further ones of a type by [`Event::ordinal`].
    ///
    /// # Errors
    /// P4040 where the message cannot be emitted, P4041 where another one of the type was emitted for this job.
    pub async fn emit(&self, event: Event) -> Result<Uuid, Error> {
        let Inner { connection, queue, job, .. } = &*self.0;
        let event = event.clone().id(outbox::derived_id(&[&job.tenant, "queue", queue, &job.id.to_string()], &event));
        let wire = outbox::Wire::new(&event)?;
        let parameters = wire.parameters(&event, &job.tenant, &None::<&str>, &None::<&str>);
        Ok(connection.call(Call::Emit, &parameters).await?.try_get(0)?)
    }

    /// Adds a further job, of the same tenant: it is there if and only if this job's effect is.
    ///
    /// # Errors
    /// What the database refuses.
    pub async fn enqueue(&self, queue: &str, job: &NewJob) -> Result<i64, Error> {
        job.add(&self.0.connection, queue, &self.0.job.tenant).await
    }

    /// A prepared statement, kept with the connection; see [`crate::Tx::prepared`].
    ///
    /// # Errors
    /// What the server says about the text.
    pub async fn prepared(&self, text: &str) -> Result<Statement, tokio_postgres::Error> {
        self.0.connection.cached(text).await
    }

    /// The connection again, and the result, unless a handle was kept.
    pub(super) fn into_parts(self) -> Option<(Pooled, Option<serde_json::Value>)> {
        let Inner { connection, result, .. } = only_handle(self.0, |inner| &inner.connection)?;
        Some((connection, result.into_inner().unwrap_or_else(PoisonError::into_inner)))
    }

    /// Rolls back, and gives the connection back only if that was confirmed.
    pub(super) async fn rollback(self) -> Undone {
        let Some((connection, _)) = self.into_parts() else { return Undone::Kept };
        if rollback(connection).await { Undone::Confirmed } else { Undone::Lost }
    }
}

impl Deref for JobTx {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.0.connection.client
    }
}
