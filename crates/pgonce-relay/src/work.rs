//! Handlers of jobs in other languages: a SQL function, whose effect commits with the job's end, or an HTTP service.

#[cfg(feature = "webhook")]
use std::time::Duration;

use pgonce::{Failure, Job, JobTx};
use serde_json::{Value, json};
use tokio_postgres::Client;
use tokio_postgres::types::Type;

use crate::TargetError;
use crate::consume::handler::{SqlHandler, Unfit};

/// Who is given a job.
#[derive(Debug, Clone)]
pub enum JobHandler {
    /// A function that is called in the job's transaction.
    Sql(SqlJobHandler),
    /// A service that gets the payload by POST. Its effect is its own: it has to know the job by its `Idempotency-Key`.
    #[cfg(feature = "webhook")]
    Http(HttpJobHandler),
}

impl JobHandler {
    /// Reads `sql:schema.function` or `http://…`.
    ///
    /// # Errors
    /// What it should be.
    pub fn parse(text: &str, queue: &str) -> Result<Self, TargetError> {
        if let Some(name) = text.strip_prefix("sql:") {
            return Ok(Self::Sql(SqlJobHandler { function: SqlHandler::new(name)?, queue: queue.to_owned() }));
        }
        #[cfg(feature = "webhook")]
        if text.starts_with("http://") || text.starts_with("https://") {
            return HttpJobHandler::new(text, queue).map(Self::Http);
        }
        Err(TargetError("a handler is sql:schema.function or http://host/path".into()))
    }

    /// Whether it can be called at all: a mistake in its name or its rights is told before the first job, and costs none of
    /// them an attempt. A service is not called.
    ///
    /// # Errors
    /// Why a function cannot be called.
    pub async fn rehearse(&self, client: &Client) -> Result<(), Unfit> {
        match self {
            Self::Sql(handler) => handler.function.rehearse(client).await,
            #[cfg(feature = "webhook")]
            Self::Http(_) => Ok(()),
        }
    }
}

/// `schema.function(job jsonb)`. What it writes commits with the job's end, once. A JSON object or array that it returns
/// is kept as the job's result. What it raises fails the attempt; P4030 says that no other will do better.
#[derive(Debug, Clone)]
pub struct SqlJobHandler {
    function: SqlHandler,
    queue: String,
}

impl SqlJobHandler {
    /// Handles one job.
    ///
    /// # Errors
    /// What the function raised.
    pub async fn call(&self, tx: &JobTx, job: &Job) -> Result<(), Failure> {
        let row = match tx.query_typed_one(&self.function.call, &[(&described(job, &self.queue), Type::JSONB)]).await {
            Ok(row) => row,
            Err(error) if error.code().is_some_and(|code| code.code() == "P4030") => {
                let message = error.as_db_error().map_or("", tokio_postgres::error::DbError::message);
                return Err(Failure::refuse("P4030", message));
            }
            Err(error) => return Err(error.into()),
        };
        if let Some(result) = row.try_get::<_, Option<&str>>(0)?.and_then(|text| as_result(text.as_bytes())) {
            tx.result(result);
        }
        Ok(())
    }
}

/// A job as a handler gets it.
fn described(job: &Job, queue: &str) -> Value {
    json!({
        "id": job.id, "queue": queue, "tenant": job.tenant, "key": job.key, "priority": job.priority,
        "payload": job.payload, "attempt": job.attempt, "attempts_max": job.attempts_max,
    })
}

/// What is kept: an object or an array. Anything else a handler answers for reasons of its own.
fn as_result(bytes: &[u8]) -> Option<Value> {
    serde_json::from_slice(bytes).ok().filter(|value: &Value| value.is_object() || value.is_array())
}

/// An HTTP service as a handler.
#[cfg(feature = "webhook")]
#[derive(Debug, Clone)]
pub struct HttpJobHandler {
    client: reqwest::Client,
    url: reqwest::Url,
    queue: String,
}

/// The largest answer that is kept as a result.
#[cfg(feature = "webhook")]
const RESULT_BYTES_MAX: usize = 256 * 1024;

#[cfg(feature = "webhook")]
impl HttpJobHandler {
    fn new(url: &str, queue: &str) -> Result<Self, TargetError> {
        let url = url.parse().map_err(|_| TargetError("the handler's URL cannot be read".into()))?;
        let client = reqwest::Client::builder()
            .connect_timeout(Duration::from_secs(5))
            .redirect(reqwest::redirect::Policy::none())
            .build()
            .map_err(|error| TargetError(format!("the HTTP client cannot be built: {error}")))?;
        Ok(Self { client, url, queue: queue.to_owned() })
    }

    /// Handles one job; the result is what a 2xx answered as JSON. It may take as long as it likes: the job's lease is
    /// prolonged meanwhile, and the request is dropped where the job is lost or cancelled.
    ///
    /// # Errors
    /// `408`, `409`, `425`, `429`, `5xx` and no answer may go better; every other status is a refusal.
    pub async fn call(&self, job: &Job) -> Result<Option<Value>, Failure> {
        let mut request = self
            .client
            .post(self.url.clone())
            .header("idempotency-key", format!("\"job-{}\"", job.id))
            .header("pgonce-job", job.id)
            .header("pgonce-claim", job.claim_id.to_string())
            .header("pgonce-attempt", job.attempt)
            .header("content-type", "application/json");
        let named = [
            ("pgonce-queue", Some(&self.queue)),
            ("pgonce-tenant", Some(&job.tenant)),
            ("pgonce-key", job.key.as_ref()),
        ];
        for (name, value) in named {
            // A value that no header can hold is left out: the id names the job all the same.
            if let Some(value) = value.and_then(|value| reqwest::header::HeaderValue::from_str(value).ok()) {
                request = request.header(name, value);
            }
        }
        let answer = request.body(job.payload.to_string()).send().await;
        let mut answer = answer.map_err(|_| Failure::retry("http", "the handler did not answer"))?;
        let status = answer.status();
        match status.as_u16() {
            200..300 => {
                let mut body = Vec::new();
                while let Ok(Some(part)) = answer.chunk().await {
                    body.extend_from_slice(&part);
                    if body.len() > RESULT_BYTES_MAX {
                        return Ok(None);
                    }
                }
                Ok(as_result(&body))
            }
            408 | 409 | 425 | 429 | 500.. => Err(Failure::retry("http", format!("the handler answered {status}"))),
            _ => Err(Failure::refuse("http", format!("the handler answered {status}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_and_arrays_are_results() {
        assert_eq!(as_result(br#"{"a": 1}"#), Some(json!({"a": 1})));
        assert_eq!(as_result(b"[1]"), Some(json!([1])));
        for other in ["", "true", "1", "\"text\"", "null", "ok"] {
            assert_eq!(as_result(other.as_bytes()), None, "{other}");
        }
        assert!(JobHandler::parse("ftp://x", "q").is_err());
        assert!(JobHandler::parse("sql:f", "q").is_err());
    }
}
