//! The one transaction of an intent: claim, effect and outcome.

use std::ops::Deref;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use futures_util::future::{join, poll_immediate};
use tokio::task::JoinHandle;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Statement};
use uuid::Uuid;

use crate::claim::{Answer, ClaimWire, IntentName, succeed_parameters};
use crate::direct::{DirectClaim, Policy, claim_parameters, is_overtaken, read_claim};
use crate::outbox::{self, Event};
use crate::pool::{Connection, Pooled};
use crate::queue::NewJob;
use crate::sql::{Call, ClaimRow};
use crate::sqlstate::is_disconnect;

/// The open transaction that the effect writes through. It is a `tokio_postgres::Client` whose transaction
/// pgonce began and ends: do not send BEGIN, COMMIT or ROLLBACK (savepoints are fine).
///
/// Its `cancel_token()` does not know where the server is, because the crate makes the sockets: use `cancel_query_raw` with a
/// socket of your own.
///
/// It is a handle, passed by value so that the effect's future is `Send` whatever it borrows, and cheap to
/// clone. None may outlive the effect: then nothing is committed, and the connection is closed under the
/// handle that was kept.
#[derive(Debug, Clone)]
pub struct Tx(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    connection: Pooled,
    name: IntentName,
    claim_id: Uuid,
    attempt: u32,
    /// Set where the claim was made directly: the completion is then, too.
    direct: Option<DirectClaim>,
    answer: Mutex<Answer>,
    emitted: AtomicBool,
    /// None: every message waits for its answer, because one that was posted was refused before, or because a pooler is
    /// between, which may not know what was prepared.
    posted: Option<Posted>,
}

/// How a transaction ended, as far as the connection could tell.
#[derive(Debug)]
pub(crate) enum Ended {
    Committed,
    /// The server said no: everything is rolled back.
    Refused(tokio_postgres::Error),
    /// A rival settled the intent first: rolled back, and the next claim replays.
    Overtaken,
    /// The effect kept a handle: nothing was committed, and the connection is being closed.
    Kept,
    /// The connection broke after COMMIT was sent, or the server warned: only the row knows.
    InDoubt(String),
}

/// How a rollback ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Undone {
    Confirmed,
    /// The connection was gone before: the server rolls back by itself.
    Lost,
    /// The effect kept a handle; the connection is being closed.
    Kept,
}

impl Tx {
    /// The claim's fence: store it with the effect where an audit should find it.
    #[must_use]
    pub fn claim_id(&self) -> Uuid {
        self.0.claim_id
    }

    /// Which attempt at the intent this is, by what is recorded.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.0.attempt
    }

    /// A prepared statement, kept with the connection: `tx.execute(&tx.prepared("…").await?, &[…])` costs one
    /// round trip from its second use on, where a text costs one more. Not behind a transaction pooler that
    /// does not know prepared statements: there use the `_typed` calls.
    ///
    /// # Errors
    /// What the server says about the text.
    pub async fn prepared(&self, text: &str) -> Result<Statement, tokio_postgres::Error> {
        self.0.connection.cached(text).await
    }

    /// A UUID that is the same in every attempt at this intent, for the id of what it creates.
    #[must_use]
    pub fn stable_uuid(&self, part: &str) -> Uuid {
        crate::stable_uuid(&self.0.name.tenant, &self.0.name.scope, &self.0.name.key, part)
    }

    /// Records what the effect made, beside the answer.
    pub fn made(&self, result_type: impl Into<String>, result_id: impl Into<String>) {
        let mut answer = self.answer();
        answer.result_type = Some(result_type.into());
        answer.result_id = Some(result_id.into());
    }

    /// Records a status code with the answer.
    pub fn status(&self, code: i32) {
        self.answer().code = Some(code);
    }

    /// Adds a message to the outbox: it is there if and only if this transaction commits. Its id is derived from the
    /// intent, the same in every attempt; one message of a type an intent, further ones by [`Event::ordinal`]. Emit
    /// after the row that it tells of was written: messages with one ordering key then arrive in commit order.
    ///
    /// A small message costs no round trip: it is sent, and nobody waits for the answer before the outcome's. Where the server
    /// refuses it, the next statement fails with 25P02, and [`Intent::run`](crate::Intent::run) tells the message's own
    /// error. Large ones, and all behind a transaction pooler, wait.
    ///
    /// # Errors
    /// P4040 where the message cannot be emitted, P4041 where the intent emitted another one of the type: here for messages
    /// that wait, by the run for the others.
    pub async fn emit(&self, event: Event) -> Result<Uuid, crate::Error> {
        let Inner { connection, name, direct, posted, .. } = &*self.0;
        self.0.emitted.store(true, Ordering::Relaxed);
        let plain = direct.is_some() && outbox::is_plain(&event);
        if let Some(posted) = posted
            && outbox::is_small(&event)
        {
            let id = outbox::message_id(name, &event);
            let call = if plain { Call::DirectPost } else { Call::Emit };
            posted.send(connection, call, name, event, id).await?;
            return Ok(id);
        }
        let wire = outbox::Wire::new(&event)?;
        if plain {
            let id = outbox::message_id(name, &event);
            if connection.execute(Call::DirectEmit, &wire.direct(&event, name, &id)).await? == 1 {
                return Ok(id);
            }
        }
        let parameters = wire.parameters(&event, &name.tenant, &name.scope, &name.key);
        Ok(connection.call(Call::Emit, &parameters).await?.try_get(0)?)
    }

    /// Asks for a call of a provider: it is sent if and only if this transaction commits, and after that, by
    /// `pgonce reconcile` or a [`crate::CallWorker`]. Its id, which is the provider's idempotency key, is derived from the
    /// intent: the same in every attempt; one call of an operation an intent, further ones by [`crate::Call::ordinal`].
    ///
    /// # Errors
    /// P4063 where the call cannot be made; `Error::OtherRequest` where the intent made another one of the operation.
    pub async fn call(&self, call: crate::Call) -> Result<Uuid, crate::Error> {
        let Inner { connection, name, .. } = &*self.0;
        let wire = crate::call::Wire::new(&call)?;
        let parameters = wire.parameters(&call, &name.tenant, &name.scope, &name.key);
        Ok(connection.call(Call::ProviderRequest, &parameters).await?.try_get(0)?)
    }

    /// Adds a job to a queue: it is there if and only if this transaction commits. Returns its id, or that of the job that
    /// has its unique key.
    ///
    /// # Errors
    /// What the database refuses: names out of their limits, a payload over 1 MiB.
    pub async fn enqueue(&self, queue: &str, job: &NewJob) -> Result<i64, crate::Error> {
        job.add(&self.0.connection, queue, &self.0.name.tenant).await
    }

    /// Adds many messages by one statement, each as [`Tx::emit`] would; their ids, in the order given. Where no event has an
    /// ordinal, the messages of each type are numbered in their order, which must then be the same in every attempt.
    ///
    /// # Errors
    /// As [`Tx::emit`], for all of them: none was added.
    pub async fn emit_batch(&self, events: &[Event]) -> Result<Vec<Uuid>, crate::Error> {
        let Inner { connection, name, .. } = &*self.0;
        let wire = outbox::BatchWire::new(events)?;
        self.0.emitted.store(true, Ordering::Relaxed);
        let parameters = wire.parameters(&name.tenant, &name.scope, &name.key);
        let rows = connection.rows(Call::EmitBatch, &parameters).await?;
        rows.iter().map(|row| Ok(row.try_get(0)?)).collect()
    }

    /// Posts to the ledger (`pgonce ledger install`), for the intent's tenant: it is there if and only if this transaction
    /// commits, once for its source and operation. Several in one transaction: in the order of their accounts in every
    /// transaction, or two of them may wait for each other and one is run again (40P01).
    ///
    /// # Errors
    /// P4090 to P4094, see docs/reference/errors.md; nothing was posted.
    pub async fn post(&self, posting: &crate::ledger::Posting) -> Result<crate::ledger::Posted, crate::Error> {
        crate::ledger::post_on(&self.0.connection, &self.0.name.tenant, posting).await
    }

    /// Whether relays have something to do once this has committed.
    pub(crate) fn emitted(&self) -> bool {
        self.0.emitted.load(Ordering::Relaxed)
    }

    fn answer(&self) -> std::sync::MutexGuard<'_, Answer> {
        self.0.answer.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Begins and claims in one round trip. The connection is dirty from here until the transaction's end
    /// was seen, so that a dropped future never gives a half-open transaction back to the pool.
    pub(crate) async fn begin(
        connection: &Pooled,
        begin: &str,
        name: &IntentName,
        wire: &ClaimWire,
        direct: Option<Policy>,
    ) -> Result<(ClaimRow, Option<DirectClaim>), tokio_postgres::Error> {
        connection.dirty.store(true, Ordering::SeqCst);
        // `join` polls in order: BEGIN is on the wire before the claim.
        let begun = connection.client.batch_execute(begin);
        if let Some(policy) = direct {
            let parameters = claim_parameters(name);
            let (begun, claimed) = join(begun, connection.call(Call::DirectClaim, &parameters)).await;
            begun?;
            if let Some(row) = read_claim(&claimed?)? {
                return Ok((row, Some(DirectClaim { policy })));
            }
            let claimed = connection.call(Call::Claim, &wire.parameters(name)).await?;
            return Ok((ClaimRow::read(&claimed)?, None));
        }
        let (begun, claimed) = join(begun, connection.call(Call::Claim, &wire.parameters(name))).await;
        begun?;
        Ok((ClaimRow::read(&claimed?)?, None))
    }

    pub(crate) fn new(
        connection: Pooled,
        name: IntentName,
        claim_id: Uuid,
        attempt: u32,
        direct: Option<DirectClaim>,
        posts: bool,
    ) -> Self {
        let posts = posts && connection.may_prepare();
        Self(Arc::new(Inner {
            connection,
            name,
            claim_id,
            attempt,
            direct,
            answer: Mutex::default(),
            emitted: AtomicBool::new(false),
            posted: posts.then(Posted::default),
        }))
    }

    /// Why the server refused a posted message, if it did: then whatever failed after it failed because of that.
    pub(crate) async fn refused_post(&self) -> Option<tokio_postgres::Error> {
        self.0.posted.as_ref()?.answers().await.err()
    }

    /// Completes and commits in one round trip. The completion also proves that the transaction was not
    /// aborted before: an aborted one makes it fail (25P02), so a COMMIT that is in truth a ROLLBACK is never
    /// taken for one (trap 10).
    ///
    /// What the effect noted goes into the answer where the answer itself does not say. An error is the effect's own: the
    /// server refused a message that nobody had waited for.
    pub(crate) async fn commit(self, mut answer: Answer) -> Result<Ended, tokio_postgres::Error> {
        let Some(Inner { connection, name, claim_id, direct, answer: noted, posted, .. }) = self.only_handle() else {
            return Ok(Ended::Kept);
        };
        let posted = posted.unwrap_or_default();
        let noted = noted.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        answer.code = answer.code.or(noted.code);
        answer.result_type = answer.result_type.or(noted.result_type);
        answer.result_id = answer.result_id.or(noted.result_id);
        // A larger answer is the function's to refuse, which it does before anything else (P4005).
        let direct = direct.filter(|_| answer.surely_fits());
        fail::fail_point!("pgonce::before_commit");
        let ended = if let Some(DirectClaim { policy }) = direct {
            let answer = policy.kept(answer);
            let parameters = policy.complete_parameters(&name, &claim_id, &answer);
            commit_behind(&connection, Call::DirectComplete, &parameters).await
        } else {
            commit_behind(&connection, Call::Succeed, &succeed_parameters(&name, &claim_id, &answer)).await
        };
        fail::fail_point!("pgonce::after_commit");
        // A refused message aborted the transaction: the completion's error only follows from it. Where the completion went
        // well all the same, the effect went back to a savepoint from before the message.
        match (ended, posted.answers().await) {
            (Ended::Refused(_), Err(refused)) => Err(refused),
            (ended, _) => Ok(ended),
        }
    }

    /// Rolls back, and gives the connection back only if that was confirmed.
    pub(crate) async fn rollback(self) -> Undone {
        let Some(inner) = self.only_handle() else { return Undone::Kept };
        if rollback(inner.connection).await { Undone::Confirmed } else { Undone::Lost }
    }

    fn only_handle(self) -> Option<Inner> {
        only_handle(self.0, |inner| &inner.connection)
    }
}

/// Messages that were sent and whose answers nobody has waited for.
#[derive(Debug, Default)]
struct Posted(Mutex<Vec<JoinHandle<Result<u64, tokio_postgres::Error>>>>);

/// How many may be unanswered: a transaction that emits without end waits for the server now and then.
const POSTED_MAX: usize = 64;

impl Posted {
    /// Sends a message behind what was sent before it. Returns when it is on its way.
    async fn send(
        &self,
        connection: &Connection,
        call: Call,
        name: &IntentName,
        event: Event,
        id: Uuid,
    ) -> Result<(), tokio_postgres::Error> {
        if self.lock().len() >= POSTED_MAX
            && let Err(refused) = self.answers().await
        {
            // Kept for the attempt's end. The transaction is aborted: nothing that follows is done.
            self.lock().push(tokio::spawn(std::future::ready(Err(refused))));
        }
        let statement = connection.prepared_call(call).await?;
        let (client, name) = (Arc::clone(&connection.client), name.clone());
        let mut sent = Box::pin(async move {
            let Ok(wire) = outbox::Wire::new(&event) else { return Ok(0) }; // not small: it was looked at before
            if call == Call::DirectPost {
                let parameters = wire.direct(&event, &name, &id);
                return client.execute(&statement, &parameters.map(|(value, _)| value)).await;
            }
            let parameters = wire.parameters(&event, &name.tenant, &name.scope, &name.key);
            client.execute(&statement, &parameters.map(|(value, _)| value)).await
        });
        // The driver sends when it is first asked, which is here: before the effect's next statement.
        if let Some(answer) = poll_immediate(&mut sent).await {
            return answer.map(|_| ());
        }
        // Somebody has to take the answer: one that nobody takes would hold up those behind it.
        self.lock().push(tokio::spawn(sent));
        Ok(())
    }

    /// Waits for all answers; the first refusal.
    async fn answers(&self) -> Result<(), tokio_postgres::Error> {
        let waiting = std::mem::take(&mut *self.lock());
        let mut first = Ok(());
        for answer in waiting {
            // A task that did not end well: the runtime is shutting down, and the completion's answer will say so.
            let answer = answer.await.map_or(Ok(()), |answer| answer.map(|_| ()));
            first = first.and(answer);
        }
        first
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<JoinHandle<Result<u64, tokio_postgres::Error>>>> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// What a transaction behind a shared handle holds, if no handle was kept. A kept one must not go on writing, least of
/// all after a ROLLBACK, when every statement would commit by itself; and what it locked must not stay locked for as long
/// as it lives. So the session is ended, by one message: nothing of the keeper's comes between its two halves.
pub(crate) fn only_handle<T: Send + Sync + 'static>(shared: Arc<T>, connection: fn(&T) -> &Pooled) -> Option<T> {
    const END: &str = "ROLLBACK; SELECT pg_catalog.pg_terminate_backend(pg_catalog.pg_backend_pid())";
    match Arc::try_unwrap(shared) {
        Ok(inner) => Some(inner),
        Err(kept) => {
            tokio::spawn(async move {
                let _ = connection(&kept).client.batch_execute(END).await;
            });
            None
        }
    }
}

/// Sends a transaction's last statement, which proves that it may commit, and COMMIT behind it, in one round trip; says how
/// it ended.
pub(crate) async fn commit_behind(
    connection: &Connection,
    last: Call,
    parameters: &[(&(dyn ToSql + Sync), Type)],
) -> Ended {
    // Prepared before: a COMMIT behind a Parse would commit before the last statement was carried out.
    if let Err(error) = connection.warm(last).await {
        return not_committed(connection, error, connection.client.batch_execute("ROLLBACK").await);
    }
    connection.expect_no_warning();
    let mut sent = pin!(connection.rows(last, parameters));
    let commit = || connection.client.batch_execute("COMMIT");
    // The driver sends when it is first asked. What fails then may not have been sent, and would not keep a COMMIT from
    // committing: so there is none, and no doubt either, whatever became of the connection.
    let (completed, committed) = match poll_immediate(&mut sent).await {
        None => join(sent, commit()).await,
        Some(Ok(rows)) => (Ok(rows), commit().await),
        Some(Err(error)) => {
            return not_committed(connection, error, connection.client.batch_execute("ROLLBACK").await);
        }
    };
    ended(connection, completed.map(|_| ()), committed)
}

/// The last statement failed, and what was sent behind it did no more than roll back.
fn not_committed(
    connection: &Connection,
    error: tokio_postgres::Error,
    undone: Result<(), tokio_postgres::Error>,
) -> Ended {
    connection.dirty.store(undone.is_err(), Ordering::SeqCst);
    if is_overtaken(&error) { Ended::Overtaken } else { Ended::Refused(error) }
}

/// How a transaction ended, by the answers to its last statement and to the COMMIT that was sent behind it. Only a real
/// COMMIT counts: in an aborted transaction the last statement fails, and the COMMIT is a ROLLBACK (trap 10).
fn ended(
    connection: &Connection,
    completed: Result<(), tokio_postgres::Error>,
    committed: Result<(), tokio_postgres::Error>,
) -> Ended {
    match (completed, committed) {
        (Ok(()), Ok(())) if connection.warned() => {
            Ended::InDoubt("the server warned that the commit may not be durable on its standby".into())
        }
        (Ok(()), Ok(())) => {
            connection.dirty.store(false, Ordering::SeqCst);
            Ended::Committed
        }
        (Err(error), _) | (Ok(()), Err(error)) if is_disconnect(&error) => {
            Ended::InDoubt("the connection was lost during COMMIT".into())
        }
        // The outcome was refused, the transaction aborted, and the COMMIT behind it rolled it back.
        (Err(error), committed) => not_committed(connection, error, committed),
        (Ok(()), Err(error)) => Ended::Refused(error),
    }
}

/// Ends a transaction that did nothing; false: not confirmed.
pub(crate) async fn rollback(connection: Pooled) -> bool {
    let confirmed = connection.client.batch_execute("ROLLBACK").await.is_ok();
    if confirmed {
        connection.dirty.store(false, Ordering::SeqCst);
    }
    confirmed
}

impl Deref for Tx {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.0.connection.client
    }
}
