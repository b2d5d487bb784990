//! `pgonce intents recover`: claims whose owners will never tell any more.

use std::time::Duration;

use clap::Args;
use serde_json::Value;
use tokio_postgres::Client;
use tokio_postgres::types::Type;

use crate::database;
use crate::output::{self, Column, Out, say};
use crate::verbs::up::stop_signal;

/// `pgonce intents recover`
#[derive(Debug, Args)]
pub struct Options {
    /// At most so many; all if not given
    #[arg(long, value_parser = clap::value_parser!(i64).range(1..))]
    limit: Option<i64>,
    /// Look again every so often (30s, 5m), until stopped
    #[arg(long, value_name = "DURATION", value_parser = database::duration)]
    watch: Option<Duration>,
}

const BATCH: i64 = 100;
const COLUMNS: [Column; 5] =
    [("CLASS", "class"), ("ACTION", "action"), ("TENANT", "tenant"), ("SCOPE", "scope"), ("KEY", "key")];

/// Sorts until nothing is left, and with `--watch` again and again.
pub async fn run(options: Options, client: &Client, out: Out) -> anyhow::Result<()> {
    let Some(every) = options.watch else {
        let sorted = sort_all(client, options.limit).await?;
        out.rows(&COLUMNS, &sorted)?;
        say(&format!("{} sorted.", sorted.len()));
        return Ok(());
    };
    let stop = stop_signal()?;
    tokio::pin!(stop);
    say(&format!("ready to recover every {every:?}"));
    loop {
        // What is sorted is committed and printed before a stop is heeded.
        for row in sort_all(client, options.limit).await? {
            out.line(&if out.json { row.to_string() } else { line(&row) })?;
        }
        tokio::select! {
            () = tokio::time::sleep(every) => {}
            () = &mut stop => return Ok(()),
        }
    }
}

/// Each batch is a transaction of its own; recovery skips what others hold.
async fn sort_all(client: &Client, limit: Option<i64>) -> Result<Vec<Value>, pgonce::Error> {
    let mut sorted = Vec::new();
    let mut left = limit.unwrap_or(i64::MAX);
    while left > 0 {
        let batch = i32::try_from(left.min(BATCH)).unwrap_or(i32::MAX);
        let rows =
            database::json_rows(client, "SELECT to_jsonb(r) FROM once.recover($1) r", &[(&batch, Type::INT4)]).await?;
        if rows.is_empty() {
            break;
        }
        left -= i64::try_from(rows.len()).unwrap_or(i64::MAX);
        sorted.extend(rows);
    }
    Ok(sorted)
}

fn line(row: &Value) -> String {
    let texts = COLUMNS.map(|(_, field)| output::text(field, &row[field]));
    texts.join("  ")
}
