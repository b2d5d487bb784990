//! How verbs talk to the database: one connection, rows as JSON, no named statements (a pooler may be between).

use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde_json::Value;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, GenericClient};

use crate::WrongUse;

/// A parameter and its type.
pub type Param<'a> = (&'a (dyn ToSql + Sync), Type);

/// The URL, or what to do about its absence.
pub fn needed(url: Option<String>) -> Result<String, WrongUse> {
    url.ok_or_else(|| {
        WrongUse(
            "no database: give --database-url, set DATABASE_URL, or start one with `pgonce up` and copy the line that it prints"
                .into(),
        )
    })
}

/// Whether a database can be connected to: one that is away (a machine that starts, a failover) is waited for, and that
/// is told; one that refuses is an error at once. False where `stop` came first.
pub async fn is_there(url: &str, wait_max: Duration, stop: impl Future<Output = ()>) -> anyhow::Result<bool> {
    let connected = async {
        let (begun, mut pause, mut told_at) = (Instant::now(), PAUSE.0, None::<Instant>);
        loop {
            let error = match pgonce::migrate::connect(url).await {
                Ok(_) => return Ok(true),
                Err(error) => error,
            };
            let left = wait_max.saturating_sub(begun.elapsed());
            if left.is_zero() || !error.is_retryable() {
                return Err(error).with_context(|| format!("cannot use the database {}", redacted(url)));
            }
            if told_at.is_none_or(|at| at.elapsed() >= TELL_EVERY) {
                told_at = Some(Instant::now());
                tracing::warn!(%error, "waiting for the database {}, {}s at most", redacted(url), left.as_secs());
            }
            tokio::time::sleep(pause.min(left)).await;
            pause = (pause * 2).min(PAUSE.1);
        }
    };
    tokio::select! {
        connected = connected => connected,
        () = stop => Ok(false),
    }
}

/// Between two attempts at a database that is away: doubling from the first to the second.
const PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(1));
/// How often it is told that it is waited for.
const TELL_EVERY: Duration = Duration::from_secs(10);

/// One connection.
pub async fn connect(url: &str) -> anyhow::Result<Client> {
    pgonce::migrate::connect(url).await.with_context(|| format!("cannot use the database {}", redacted(url)))
}

/// The rows of a query whose one column is jsonb.
pub async fn json_rows(
    client: &impl GenericClient,
    sql: &str,
    params: &[Param<'_>],
) -> Result<Vec<Value>, pgonce::Error> {
    let rows = client.query_typed(sql, params).await?;
    rows.iter().map(|row| Ok(row.try_get(0)?)).collect()
}

/// The first row of such a query; null where there is none.
pub async fn json_row(client: &impl GenericClient, sql: &str, params: &[Param<'_>]) -> Result<Value, pgonce::Error> {
    Ok(json_rows(client, sql, params).await?.into_iter().next().unwrap_or(Value::Null))
}

/// Sorting a table this large by time would take longer than an operator waits.
const ROWS_SORTABLE_MAX: i64 = 200_000;

/// Whether the intents are few enough to be sorted by their age, by the planner's estimate.
pub async fn is_sortable(client: &impl GenericClient) -> Result<bool, pgonce::Error> {
    let sql = "SELECT to_jsonb(coalesce((SELECT s.rows_estimated FROM once.sizes s WHERE s.relation = 'intent'), 0))";
    Ok(json_row(client, sql, &[]).await?.as_i64().unwrap_or(0) <= ROWS_SORTABLE_MAX)
}

/// The URL without its password, for people to see.
pub fn redacted(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else {
        // key=value pairs: only what is known to be harmless.
        let harmless = ["host=", "hostaddr=", "port=", "dbname=", "user="];
        let kept = url.split_whitespace().filter(|pair| harmless.iter().any(|name| pair.starts_with(name)));
        return kept.collect::<Vec<_>>().join(" ");
    };
    // Query parameters may hold a password as well.
    let base = rest.split_once('?').map_or(rest, |(base, _)| base);
    match base.rsplit_once('@') {
        Some((user, host)) => format!("{scheme}://{}@{host}", user.split(':').next().unwrap_or_default()),
        None => format!("{scheme}://{base}"),
    }
}

/// A duration as people write it: 500ms, 30s, 5m, 24h, 30d.
pub use pgonce_http::gateway::config::duration;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_do_not_show() {
        assert_eq!(redacted("postgres://me:s@cret@h:1/d?password=x"), "postgres://me@h:1/d");
        assert_eq!(redacted("postgres://h/d"), "postgres://h/d");
        assert_eq!(redacted("host=h password=secret dbname=d"), "host=h dbname=d");
    }
}
