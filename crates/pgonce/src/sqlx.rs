//! The protocol over sqlx, for services that own their transactions there: the same functions, the same
//! answers, the same errors. Commit through [`commit`]: sqlx takes a COMMIT that the server answered with
//! ROLLBACK for success (trap 10).

use std::time::Duration;

use sqlx::postgres::{PgConnection, PgRow};
use sqlx::{Postgres, Row, Transaction};

use crate::claim::{Answer, Claim, ClaimOptions, IntentName, Mode, Owned, interval};
use crate::sql::{self, Call, ClaimRow};
use crate::sqlstate::{Verdict, verdict};

/// An error of the adapter.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The key was used before with another payload. Nothing was run by this call.
    #[error("the key was used before with another payload; nothing was run [P4002]")]
    Conflict,
    /// The claim is not the caller's any more: roll back.
    #[error("this call does not own the claim: roll back, nothing of it may stay [P4010]")]
    LeaseLost,
    /// The transaction was aborted before COMMIT: nothing of it is there.
    #[error("the transaction was aborted before its COMMIT: nothing was committed")]
    RolledBack,
    /// An answer of the database that this version does not know.
    #[error("{0}")]
    Protocol(String),
    /// Whatever else the database or the driver says.
    #[error(transparent)]
    Database(sqlx::Error),
}

impl Error {
    /// Whether the whole transaction may be run again.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::LeaseLost => true,
            Self::Database(sqlx::Error::Database(error)) => error
                .code()
                .is_some_and(|code| matches!(verdict(&code), Verdict::Again | Verdict::Later | Verdict::InDoubt)),
            Self::Database(sqlx::Error::Io(_) | sqlx::Error::PoolTimedOut) => true,
            _ => false,
        }
    }
}

impl From<sqlx::Error> for Error {
    fn from(error: sqlx::Error) -> Self {
        match error.as_database_error().and_then(|error| error.code()).as_deref() {
            Some("P4002") => Self::Conflict,
            Some("P4010" | "P4011" | "P4012") => Self::LeaseLost,
            Some("25P02") => Self::RolledBack,
            _ => Self::Database(error),
        }
    }
}

/// Claims an intent in the caller's transaction.
///
/// # Errors
/// As [`crate::claim`].
pub async fn claim(connection: &mut PgConnection, name: IntentName, options: &ClaimOptions) -> Result<Claim, Error> {
    let row = sqlx::query(sql::text(Call::Claim, true))
        .bind(&name.scope)
        .bind(&name.key)
        .bind(name.fingerprint.0.as_slice())
        .bind(options.mode.map(Mode::as_str))
        .bind(options.claimed_by.as_deref())
        .bind(options.lease.map(interval))
        .bind(options.wait.map(interval))
        .bind(&name.tenant)
        .fetch_one(connection)
        .await?;
    Claim::read(name, claim_row(&row)?).map_err(|error| Error::Protocol(error.to_string()))
}

/// Records success in the caller's transaction.
///
/// # Errors
/// `Error::LeaseLost` where the claim is not the current one.
pub async fn succeed(connection: &mut PgConnection, owned: Owned, answer: &Answer) -> Result<(), Error> {
    sqlx::query(sql::text(Call::Succeed, true))
        .bind(&owned.name.scope)
        .bind(&owned.name.key)
        .bind(owned.claim_id)
        .bind(answer.body.as_deref())
        .bind(answer.code)
        .bind(answer.headers.as_ref())
        .bind(answer.result_type.as_deref())
        .bind(answer.result_id.as_deref())
        .bind(&owned.name.tenant)
        .execute(connection)
        .await?;
    Ok(())
}

/// Records a failure in the caller's transaction, which must not be the one that failed.
///
/// # Errors
/// `Error::LeaseLost` where the claim is not the current one.
pub async fn fail(
    connection: &mut PgConnection,
    owned: Owned,
    retryable: bool,
    code: &str,
    message: &str,
) -> Result<(), Error> {
    sqlx::query(sql::text(Call::Fail, true))
        .bind(&owned.name.scope)
        .bind(&owned.name.key)
        .bind(owned.claim_id)
        .bind(retryable)
        .bind(code)
        .bind(message)
        .bind(&owned.name.tenant)
        .execute(connection)
        .await?;
    Ok(())
}

/// Extends the lease.
///
/// # Errors
/// `Error::LeaseLost` where the lease is over or the claim is not the current one.
pub async fn renew(connection: &mut PgConnection, owned: &Owned, lease: Duration) -> Result<(), Error> {
    sqlx::query(sql::text(Call::Renew, true))
        .bind(&owned.name.scope)
        .bind(&owned.name.key)
        .bind(owned.claim_id)
        .bind(interval(lease))
        .bind(&owned.name.tenant)
        .execute(connection)
        .await?;
    Ok(())
}

/// Gives the claim back.
///
/// # Errors
/// `Error::LeaseLost` where there is nothing to give back.
pub async fn release(connection: &mut PgConnection, owned: Owned) -> Result<(), Error> {
    sqlx::query(sql::text(Call::Release, true))
        .bind(&owned.name.scope)
        .bind(&owned.name.key)
        .bind(owned.claim_id)
        .bind(&owned.name.tenant)
        .execute(connection)
        .await?;
    Ok(())
}

/// Commits, and only takes a real COMMIT for one: a statement before it fails where the transaction was
/// aborted, which COMMIT itself would answer as success.
///
/// # Errors
/// `Error::RolledBack` where the transaction was aborted before; `Error::Database` otherwise.
pub async fn commit(mut transaction: Transaction<'_, Postgres>) -> Result<(), Error> {
    sqlx::query("SELECT 1").execute(&mut *transaction).await?;
    Ok(transaction.commit().await?)
}

fn claim_row(row: &PgRow) -> Result<ClaimRow, Error> {
    Ok(ClaimRow {
        kind: row.try_get("kind")?,
        claim_id: row.try_get("claim_id")?,
        attempt_count: row.try_get("attempt_count")?,
        response_code: row.try_get("response_code")?,
        response_headers: row.try_get("response_headers")?,
        response_body: row.try_get("response_body")?,
        result_type: row.try_get("result_type")?,
        result_id: row.try_get("result_id")?,
        failure_code: row.try_get("failure_code")?,
        failure_message: row.try_get("failure_message")?,
        retry_after_ms: row.try_get("retry_after_ms")?,
        fence: row.try_get("fence")?,
        lease_ms: row.try_get("lease_ms")?,
        waited_ms: row.try_get("waited_ms")?,
    })
}
