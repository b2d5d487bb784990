//! What can go wrong, and what each error says about the effect.

use std::time::Duration;

use crate::sqlstate::{self, Verdict};

/// An error of pgonce. Every variant says what became of the effect; [`Error::is_retryable`] says whether
/// the same call may simply be made again with the same key.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The key was used before with another payload. Nothing was run by this call.
    #[error("the key was used before with another payload; nothing was run [P4002]")]
    Conflict,
    /// Another attempt at this intent is running. Its effect is not known yet.
    #[error("the intent is being processed; ask again in {retry_after:?} [P4029]")]
    InProgress {
        /// When to come again.
        retry_after: Duration,
    },
    /// The intent failed finally before; the effect is not there.
    #[error("the intent failed before, finally: {code} [P4030]")]
    FailedBefore {
        /// The failure code that was recorded.
        code: String,
        /// The failure message that was recorded.
        message: Option<String>,
    },
    /// The intent's owner vanished and policy says to hold: the effect may or may not be there.
    #[error(
        "the intent is uncertain until somebody settles it (pgonce intents settle); the effect may or may not be there"
    )]
    Uncertain,
    /// The intent succeeded, and its answer is past its retention. The effect is there.
    #[error("the intent succeeded before, and its answer has expired; the effect is there")]
    ResultExpired,
    /// The intent succeeded, but its scope keeps no answer that this type could be rebuilt from.
    #[error(
        "the intent succeeded before; its stored answer cannot be read as the type asked for ({reason}); the effect is there"
    )]
    AnswerUnreadable {
        /// Why not.
        reason: String,
        /// The type of the resource that the effect made, where it was recorded.
        result_type: Option<String>,
        /// Its id.
        result_id: Option<String>,
    },
    /// The effect refused, finally; it was rolled back, and the failure is recorded.
    #[error("the effect failed finally and was rolled back: {code}: {message}")]
    Failed {
        /// A code for programs.
        code: String,
        /// A message for people.
        message: String,
    },
    /// The effect failed in a way that may pass; it was rolled back, and the budget is used up.
    #[error("the effect failed and was rolled back; it may work later: {code}: {message}")]
    FailedRetryable {
        /// A code for programs.
        code: String,
        /// A message for people.
        message: String,
    },
    /// The lease was lost while working. Whatever was done outside the database may be there; policy decides.
    #[error(
        "the lease was lost while working: another attempt may have taken over; no outcome was recorded by this one [P4010]"
    )]
    LeaseLost,
    /// The message id was used before with another body. Nothing was applied by this call.
    #[error("the message id was used before with another body; nothing was applied by this call [P4050]")]
    OtherBody,
    /// The message of the stored inbox is not this worker's any more. Its effect is rolled back.
    #[error(
        "the message is not this worker's any more, or was never admitted; roll back: nothing of this attempt stays [P4051]"
    )]
    MessageLost,
    /// The job is not this worker's any more. Its effect is rolled back.
    #[error("the job is not this worker's any more; roll back: nothing of this attempt stays [P4060]")]
    JobLost,
    /// The call is not this worker's any more. Whoever has it asks the provider what became of it.
    #[error("the call is not this worker's any more; whoever has it asks the provider what became of it [P4061]")]
    CallLost,
    /// The intent made this call before, with another request. Nothing was recorded by this one.
    #[error("the intent made this call before, with another request; nothing was recorded by this one [P4062]")]
    OtherRequest,
    /// The import is not this importer's any more: somebody took it over. The batch under way is rolled back.
    #[error(
        "the import is not this importer's any more: somebody took it over; nothing of the batch under way stays [P4081]"
    )]
    ImportLost,
    /// The outcome could not be determined in time: none or one effect. Retrying with the same key is safe.
    #[error(
        "the outcome is not known: the effect is there once or not at all; retry with the same key to learn it ({reason})"
    )]
    InDoubt {
        /// Why not.
        reason: String,
    },
    /// The effect kept its transaction beyond its own end. Nothing was committed.
    #[error("the effect kept its transaction beyond its end; nothing was committed")]
    Kept,
    /// Too many callers wait for a database connection; nothing was run.
    #[error("overloaded: no database connection within the limit; nothing was run; retry in {retry_after:?}")]
    Overloaded {
        /// When to come again.
        retry_after: Duration,
    },
    /// The database could not be reached, or did not answer in time. Nothing may be run on the strength of this
    /// call; whether it wrote anything is not known.
    #[error("the database did not answer ({reason}); nothing may be run without its answer; retry with the same key")]
    Away {
        /// Why.
        reason: String,
    },
    /// The database refused this intent of a batch, and will every time. Nothing was written by this call.
    #[error("the database refused it: {message} [{sqlstate}]; nothing was written by this call")]
    Refused {
        /// The SQLSTATE; see docs/reference/errors.md.
        sqlstate: String,
        /// What is wrong with it.
        message: String,
    },
    /// The schema in the database does not fit this binary.
    #[error("{0}")]
    Schema(String),
    /// A setting or an argument cannot be used. Nothing was run.
    #[error("{0}")]
    Invalid(String),
    /// The payload or the answer cannot be written as JSON. Nothing was committed.
    #[error("cannot be written as JSON: {0}; nothing was committed")]
    Json(#[from] serde_json::Error),
    /// The database said no, or could not be reached. Nothing was committed by this call.
    #[error("database: {}", describe(.0))]
    Database(#[source] tokio_postgres::Error),
}

pub(crate) fn describe(error: &tokio_postgres::Error) -> String {
    match error.as_db_error() {
        Some(db) => {
            let hint = db.hint().map(|hint| format!(" {hint}")).unwrap_or_default();
            format!("{} [{}]{hint}", db.message(), db.code().code())
        }
        None => match std::error::Error::source(error) {
            Some(source) => format!("{error}: {source}"),
            None => error.to_string(),
        },
    }
}

impl Error {
    /// Whether the same call with the same key may be made again and can then come out differently.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::InProgress { .. }
            | Self::FailedRetryable { .. }
            | Self::InDoubt { .. }
            | Self::LeaseLost
            | Self::Away { .. }
            | Self::Overloaded { .. } => true,
            Self::Database(error) => {
                matches!(sqlstate::verdict_of(error), Verdict::Again | Verdict::Later | Verdict::InDoubt)
            }
            _ => false,
        }
    }

    /// The SQLSTATE behind this error, where there is one.
    #[must_use]
    pub fn sqlstate(&self) -> Option<&str> {
        match self {
            Self::Conflict => Some("P4002"),
            Self::InProgress { .. } => Some("P4029"),
            Self::FailedBefore { .. } => Some("P4030"),
            Self::LeaseLost => Some("P4010"),
            Self::OtherBody => Some("P4050"),
            Self::MessageLost => Some("P4051"),
            Self::JobLost => Some("P4060"),
            Self::CallLost => Some("P4061"),
            Self::OtherRequest => Some("P4062"),
            Self::ImportLost => Some("P4081"),
            Self::Refused { sqlstate, .. } => Some(sqlstate),
            Self::Database(error) => error.code().map(tokio_postgres::error::SqlState::code),
            _ => None,
        }
    }
}

impl From<tokio_postgres::Error> for Error {
    fn from(error: tokio_postgres::Error) -> Self {
        match error.code().map(tokio_postgres::error::SqlState::code) {
            Some("P4002") => Self::Conflict,
            Some("P4010" | "P4011" | "P4012") => Self::LeaseLost,
            Some("P4050") => Self::OtherBody,
            Some("P4051") => Self::MessageLost,
            Some("P4060") => Self::JobLost,
            Some("P4061") => Self::CallLost,
            Some("P4062") => Self::OtherRequest,
            Some("P4081") => Self::ImportLost,
            _ => Self::Database(error),
        }
    }
}

/// Why an effect did not happen: what the closure of `run` returns. Any error converts into it with `?`;
/// a database error is judged by its SQLSTATE, any other is final unless made with [`Failure::retry`].
#[derive(Debug, Clone)]
pub struct Failure {
    pub(crate) code: String,
    pub(crate) message: String,
    pub(crate) verdict: Verdict,
    refused: bool,
}

impl Failure {
    /// The effect is refused for good: recorded, and every retry with this key gets the same answer.
    pub fn refuse(code: impl Into<String>, message: impl Into<String>) -> Self {
        Self { code: code.into(), message: message.into(), verdict: Verdict::Final, refused: true }
    }

    /// The effect could not happen now, and may later: a retry with the same key runs it again.
    pub fn retry(code: impl Into<String>, message: impl Into<String>) -> Self {
        Self { code: code.into(), message: message.into(), verdict: Verdict::Later, refused: false }
    }

    /// The code for programs: a SQLSTATE, where the database said no.
    #[must_use]
    pub fn code(&self) -> &str {
        &self.code
    }

    /// The message for people. PostgreSQL's may quote values.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Whether another attempt may come out differently.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self.verdict, Verdict::Again | Verdict::Later | Verdict::InDoubt)
    }

    /// Whether the effect itself said no ([`Failure::refuse`]), and not something that broke under it.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        self.refused
    }

    pub(crate) fn of_database(error: &tokio_postgres::Error) -> Self {
        Self {
            code: error.code().map_or_else(|| "connection".to_owned(), |code| code.code().to_owned()),
            message: describe(error),
            verdict: sqlstate::verdict_of(error),
            refused: false,
        }
    }
}

impl<E: std::error::Error + Send + Sync + 'static> From<E> for Failure {
    fn from(error: E) -> Self {
        let any: &(dyn std::error::Error + 'static) = &error;
        if let Some(database) = any.downcast_ref::<tokio_postgres::Error>() {
            return Self::of_database(database);
        }
        if let Some(Error::Database(database)) = any.downcast_ref::<Error>() {
            return Self::of_database(database);
        }
        let verdict = match any.downcast_ref::<Error>() {
            Some(ours) if ours.is_retryable() => Verdict::Later,
            _ => Verdict::Final,
        };
        Self { code: "effect".to_owned(), message: error.to_string(), verdict, refused: false }
    }
}
