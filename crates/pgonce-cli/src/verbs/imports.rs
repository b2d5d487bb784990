//! `pgonce imports`: what was imported, what became of its rows, and what failed.

use std::io::Write as _;

use clap::{Args, Subcommand};
use serde_json::{Value, json};
use tokio_postgres::Client;
use tokio_postgres::types::Type;

use crate::WrongUse;
use crate::database::{self, Param};
use crate::output::{Column, Out, say, text};

/// `pgonce imports …`
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Imports, the newest first
    List(ListOptions),
    /// Everything about one, or what became of one of its rows
    Show(ShowOptions),
    /// The rows that failed, with their lines
    Errors(ErrorsOptions),
    /// Let an import go that nobody will resume: what it applied stays
    Abandon(AbandonOptions),
}

/// Runs one of them.
pub async fn run(command: Command, url: &str, out: Out) -> anyhow::Result<()> {
    let client = database::connect(url).await?;
    match command {
        Command::List(options) => list(options, &client, out).await,
        Command::Show(options) => show(options, &client, out).await,
        Command::Errors(options) => errors(options, &client, out).await,
        Command::Abandon(options) => abandon(options, &client, out).await,
    }
}

/// `pgonce imports list`
#[derive(Debug, Args)]
pub struct ListOptions {
    /// Only these: running, stopped, done or abandoned
    #[arg(long, value_parser = ["running", "stopped", "done", "abandoned"])]
    state: Option<String>,
    /// At most so many
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(i64).range(1..=10_000))]
    limit: i64,
}

const LIST: [Column; 9] = [
    ("ID", "id"),
    ("STATE", "state"),
    ("FILE", "name"),
    ("INTO", "target"),
    ("ROWS", "rows"),
    ("APPLIED", "applied"),
    ("SKIPPED", "skipped"),
    ("FAILED", "failed"),
    ("UPDATED", "updated_at"),
];

async fn list(options: ListOptions, client: &Client, out: Out) -> anyhow::Result<()> {
    let sql = "SELECT to_jsonb(v) - 'header' FROM once.imports v WHERE $1::text IS NULL OR v.state = $1
        ORDER BY v.id DESC LIMIT $2";
    let params: [Param<'_>; 2] = [(&options.state, Type::TEXT), (&options.limit, Type::INT8)];
    let rows = database::json_rows(client, sql, &params).await?;
    out.rows(&LIST, &rows)?;
    if rows.is_empty() {
        say("No import is there.");
    }
    Ok(())
}

/// `pgonce imports show`
#[derive(Debug, Args)]
pub struct ShowOptions {
    /// Its number
    id: i64,
    /// What became of this row of the file, counted from 1, the header not counted
    #[arg(long, value_name = "N")]
    row: Option<i64>,
}

async fn job(client: &Client, id: i64) -> anyhow::Result<Value> {
    let sql = "SELECT to_jsonb(v) - 'header' FROM once.imports v WHERE v.id = $1";
    match database::json_row(client, sql, &[(&id, Type::INT8)]).await? {
        Value::Null => Err(WrongUse(format!("there is no import {id}: pgonce imports list")).into()),
        job => Ok(job),
    }
}

async fn show(options: ShowOptions, client: &Client, out: Out) -> anyhow::Result<()> {
    let job = job(client, options.id).await?;
    let shown = match options.row {
        None => job,
        Some(row) => {
            let sql = "SELECT to_jsonb(r) FROM once.import_result($1, $2) r";
            let found = database::json_row(client, sql, &[(&options.id, Type::INT8), (&row, Type::INT8)]).await?;
            match found {
                Value::Null => json!({"row": row, "outcome": "not reached"}),
                found => found,
            }
        }
    };
    if out.json {
        return Ok(out.value(&shown)?);
    }
    for (name, value) in shown.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null()) {
        out.line(&format!("{name:14}  {}", text(name, value)))?;
    }
    Ok(())
}

/// `pgonce imports errors`
#[derive(Debug, Args)]
pub struct ErrorsOptions {
    /// The import's number
    id: i64,
    /// The rows as they stand in the file, under its header: to be mended and imported
    #[arg(long, conflicts_with = "limit")]
    raw: bool,
    /// At most so many
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(i64).range(1..=100_000))]
    limit: i64,
}

const ERRORS: [Column; 5] =
    [("ROW", "row"), ("LINE", "line"), ("CODE", "code"), ("MESSAGE", "message"), ("INPUT", "input")];

async fn errors(options: ErrorsOptions, client: &Client, out: Out) -> anyhow::Result<()> {
    let job = job(client, options.id).await?;
    if options.raw {
        return raw(options.id, client).await;
    }
    // Bytes that are no text of the database are shown by their codes.
    let sql = "SELECT jsonb_build_object('row', e.row, 'line', e.line, 'code', e.code, 'message', e.message,
            'input', encode(e.input, 'escape'))
        FROM once.import_errors e WHERE e.job = $1 ORDER BY e.row LIMIT $2";
    let params: [Param<'_>; 2] = [(&options.id, Type::INT8), (&options.limit, Type::INT8)];
    let rows = database::json_rows(client, sql, &params).await?;
    out.rows(&ERRORS, &rows)?;
    let failed = job["failed"].as_u64().unwrap_or_default();
    if failed > rows.len() as u64 {
        say(&format!("{} of {failed} are shown; --limit shows more.", rows.len()));
    }
    Ok(())
}

async fn raw(id: i64, client: &Client) -> anyhow::Result<()> {
    let mut stdout = std::io::stdout().lock();
    let sql = "SELECT v.header FROM once.imports v WHERE v.id = $1";
    let header = client.query_typed_one(sql, &[(&id, Type::INT8)]).await.map_err(pgonce::Error::from)?;
    let header: Option<Vec<u8>> = header.try_get(0).map_err(pgonce::Error::from)?;
    let mut line = header.filter(|header| !header.is_empty());
    let mut after = 0_i64;
    loop {
        if let Some(line) = line.take() {
            stdout.write_all(&line)?;
            stdout.write_all(b"\n")?;
        }
        let sql =
            "SELECT e.row, e.input FROM once.import_errors e WHERE e.job = $1 AND e.row > $2 ORDER BY e.row LIMIT 500";
        let params: [Param<'_>; 2] = [(&id, Type::INT8), (&after, Type::INT8)];
        let rows = client.query_typed(sql, &params).await.map_err(pgonce::Error::from)?;
        let Some(last) = rows.last() else { break };
        after = last.try_get(0).map_err(pgonce::Error::from)?;
        for row in &rows {
            stdout.write_all(row.try_get(1).map_err(pgonce::Error::from)?)?;
            stdout.write_all(b"\n")?;
        }
    }
    Ok(stdout.flush()?)
}

/// `pgonce imports abandon`
#[derive(Debug, Args)]
pub struct AbandonOptions {
    /// The import's number
    id: i64,
    /// Why: goes into the audit trail
    #[arg(long)]
    reason: String,
    /// Who decides
    #[arg(long, env = "USER", hide_env = true)]
    actor: Option<String>,
}

async fn abandon(options: AbandonOptions, client: &Client, out: Out) -> anyhow::Result<()> {
    let actor = options.actor.filter(|actor| !actor.trim().is_empty());
    let actor = actor.ok_or_else(|| WrongUse("nobody knows who decides: give --actor, for the audit trail".into()))?;
    job(client, options.id).await?;
    let sql = "SELECT to_jsonb(once.import_abandon($1, $2, $3))";
    let params: [Param<'_>; 3] = [(&options.id, Type::INT8), (&actor, Type::TEXT), (&options.reason, Type::TEXT)];
    let abandoned = database::json_row(client, sql, &params).await? == Value::Bool(true);
    if !abandoned {
        return Err(WrongUse("it is running, or has ended: pgonce imports show".into()).into());
    }
    if out.json {
        return Ok(out.value(&json!({"abandoned": options.id}))?);
    }
    say("Abandoned. What it applied stays; the same file starts a new import.");
    Ok(())
}
