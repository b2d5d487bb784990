//! `pgonce archive`: purge that keeps what goes, and what the history holds.

use clap::{Args, Subcommand};
use serde_json::Value;
use tokio_postgres::Client;
use tokio_postgres::types::Type;

use crate::database;
use crate::output::{Out, say};
use crate::verbs::purge;

/// `pgonce archive`
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Options {
    #[command(subcommand)]
    command: Option<Command>,
    /// Where to: `history` for the partitioned table once.intent_history, or a directory for .jsonl.gz files
    #[arg(long, value_name = "history|DIR", required = true)]
    to: Option<purge::Archive>,
    /// Rows a transaction
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(i64).range(1..=100_000))]
    batch: i64,
    /// Stop after so many rows
    #[arg(long, value_name = "TOTAL", value_parser = clap::value_parser!(i64).range(1..))]
    limit: Option<i64>,
}

#[derive(Debug, Clone, Copy, Subcommand)]
enum Command {
    /// The partitions of the history, with their rows and sizes
    List,
}

/// Archives, or lists.
pub async fn run(options: Options, url: &str, out: Out) -> anyhow::Result<()> {
    let Options { command, to, batch, limit } = options;
    match command {
        Some(Command::List) => list(&database::connect(url).await?, out).await,
        None => {
            // Only intents can be kept: what else is past its window is purge's.
            purge::run(purge::Options { batch, archive: to, limit }, purge::Extent::Intents, url, out).await
        }
    }
}

const PARTITIONS: &str = "
SELECT jsonb_build_object('partition', c.relname, 'bytes', pg_total_relation_size(c.oid),
    'size', pg_size_pretty(pg_total_relation_size(c.oid)), 'rows', greatest(c.reltuples, 0)::bigint, 'exact', false)
FROM pg_catalog.pg_inherits i JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid
WHERE i.inhparent = 'once.intent_history'::regclass ORDER BY c.relname";
const COUNT: &str = "
SELECT to_jsonb(count(*)) FROM once.history h
WHERE h.archived_at >= to_date($1, 'YYYY_MM')::timestamp AT TIME ZONE 'UTC'
  AND h.archived_at < (to_date($1, 'YYYY_MM') + interval '1 month') AT TIME ZONE 'UTC'";
/// Beyond this the planner's estimate has to do.
const COUNTED_BYTES_MAX: i64 = 256 * 1024 * 1024;

async fn list(client: &Client, out: Out) -> anyhow::Result<()> {
    let mut partitions = database::json_rows(client, PARTITIONS, &[]).await?;
    for partition in &mut partitions {
        let month = partition["partition"].as_str().and_then(|name| name.strip_prefix("intent_history_"));
        let Some(month) = month.map(str::to_owned).filter(|_| partition["bytes"].as_i64() < Some(COUNTED_BYTES_MAX))
        else {
            continue;
        };
        partition["rows"] = database::json_row(client, COUNT, &[(&month, Type::TEXT)]).await?;
        partition["exact"] = Value::Bool(true);
    }
    out.rows(&[("PARTITION", "partition"), ("ROWS", "rows"), ("EXACT", "exact"), ("SIZE", "size")], &partitions)?;
    if partitions.is_empty() {
        say("Nothing was archived into the table yet: pgonce archive --to history.");
    }
    Ok(())
}
