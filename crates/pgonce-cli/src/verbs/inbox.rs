//! `pgonce inbox`: stored messages, what is parked among them, and replay.

use clap::{Args, Subcommand, ValueEnum};
use serde_json::{Value, json};
use tokio_postgres::Client;
use tokio_postgres::types::Type;

use crate::database::{self, Param};
use crate::decision::Decision;
use crate::output::{Column, Out, say};

/// `pgonce inbox …`
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Stored messages by consumer and state, and how old the oldest is
    Status(StatusOptions),
    /// Messages that failed finally or wait for a version, and what stands behind them
    Parked(ParkedOptions),
    /// Put messages back, to be processed again without their broker
    Replay(ReplayOptions),
}

/// Runs one of them.
pub async fn run(command: Command, url: &str, out: Out) -> anyhow::Result<()> {
    let client = database::connect(url).await?;
    match command {
        Command::Status(options) => status(options, &client, out).await,
        Command::Parked(options) => parked(options, &client, out).await,
        Command::Replay(options) => replay(options, &client, out).await,
    }
}

/// `pgonce inbox status`
#[derive(Debug, Args)]
pub struct StatusOptions {
    /// Only of this consumer
    #[arg(long)]
    consumer: Option<String>,
}

const STATUS: [Column; 6] = [
    ("TENANT", "tenant"),
    ("CONSUMER", "consumer"),
    ("STATE", "state"),
    ("MESSAGES", "messages"),
    ("OLDEST", "oldest_at"),
    ("AGE", "oldest_age"),
];

async fn status(options: StatusOptions, client: &Client, out: Out) -> anyhow::Result<()> {
    let sql = "SELECT to_jsonb(v) FROM once.inbox_status v WHERE $1::text IS NULL OR v.consumer = $1
        ORDER BY v.tenant, v.consumer, v.state";
    let rows = database::json_rows(client, sql, &[(&options.consumer, Type::TEXT)]).await?;
    out.rows(&STATUS, &rows)?;
    if rows.is_empty() {
        say("No message is stored.");
    }
    Ok(())
}

/// `pgonce inbox parked`
#[derive(Debug, Args)]
pub struct ParkedOptions {
    /// Only of this consumer
    #[arg(long)]
    consumer: Option<String>,
    /// At most so many
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(i64).range(1..=10_000))]
    limit: i64,
}

const PARKED: [Column; 8] = [
    ("ID", "id"),
    ("CONSUMER", "consumer"),
    ("MESSAGE", "message_id"),
    ("STATE", "state"),
    ("ATTEMPTS", "attempts"),
    ("KEY", "ordering_key"),
    ("BEHIND", "behind"),
    ("REASON", "last_error"),
];

async fn parked(options: ParkedOptions, client: &Client, out: Out) -> anyhow::Result<()> {
    let sql = "SELECT to_jsonb(v) FROM once.inbox_parked v WHERE $1::text IS NULL OR v.consumer = $1
        ORDER BY v.id LIMIT $2";
    let params: [Param<'_>; 2] = [(&options.consumer, Type::TEXT), (&options.limit, Type::INT8)];
    let rows = database::json_rows(client, sql, &params).await?;
    out.rows(&PARKED, &rows)?;
    say(if rows.is_empty() {
        "Nothing is parked."
    } else {
        "pgonce inbox replay puts them back; once.inbox_discard lets them go, and their keys with them."
    });
    Ok(())
}

#[derive(Debug, Clone, Copy, ValueEnum)]
#[value(rename_all = "snake_case")]
enum State {
    FailedFinal,
    FailedRetryable,
    Waiting,
    /// Their effects happen again: only where that converges
    Processed,
}

impl State {
    fn as_str(self) -> &'static str {
        match self {
            Self::FailedFinal => "failed_final",
            Self::FailedRetryable => "failed_retryable",
            Self::Waiting => "waiting",
            Self::Processed => "processed",
        }
    }
}

/// `pgonce inbox replay`
#[derive(Debug, Args)]
pub struct ReplayOptions {
    /// Whose messages
    #[arg(long)]
    consumer: String,
    #[command(flatten)]
    decision: Decision,
    /// Only this one, by its id in `inbox parked`; may be given several times
    #[arg(long = "id", value_name = "ID")]
    ids: Vec<i64>,
    /// In this state; may be given several times. failed_final if neither states nor ids are given
    #[arg(long = "state", value_name = "STATE")]
    states: Vec<State>,
    /// Received at or after this time
    #[arg(long, value_name = "TIME")]
    from: Option<String>,
    /// Received before this time
    #[arg(long, value_name = "TIME")]
    to: Option<String>,
    /// Only of this tenant ('' is the one without a name)
    #[arg(long)]
    tenant: Option<String>,
    /// At most so many, oldest first
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(i32).range(1..=10_000))]
    limit: i32,
    /// Show them, and change nothing
    #[arg(long)]
    dry_run: bool,
}

const REPLAYED: [Column; 4] = [("ID", "id"), ("SOURCE", "source"), ("MESSAGE", "message_id"), ("WAS", "from_state")];

async fn replay(options: ReplayOptions, client: &Client, out: Out) -> anyhow::Result<()> {
    let actor = options.decision.actor()?;
    let ids = (!options.ids.is_empty()).then_some(&options.ids);
    let states: Vec<&str> = options.states.iter().map(|state| state.as_str()).collect();
    let states = (!states.is_empty()).then_some(states);
    let sql = "SELECT to_jsonb(r) FROM once.inbox_replay(p_consumer => $1, p_actor => $2, p_reason => $3, p_ids => $4,
        p_states => $5, p_from => $6::text::timestamptz, p_to => $7::text::timestamptz, p_dry_run => $8, p_limit => $9,
        p_tenant => $10) r";
    let params: [Param<'_>; 10] = [
        (&options.consumer, Type::TEXT),
        (&actor, Type::TEXT),
        (&options.decision.reason, Type::TEXT),
        (&ids, Type::INT8_ARRAY),
        (&states, Type::TEXT_ARRAY),
        (&options.from, Type::TEXT),
        (&options.to, Type::TEXT),
        (&options.dry_run, Type::BOOL),
        (&options.limit, Type::INT4),
        (&options.tenant, Type::TEXT),
    ];
    let rows = database::json_rows(client, sql, &params).await?;
    if out.json {
        return Ok(out.value(&json!({"dry_run": options.dry_run, "replayed": Value::Array(rows)}))?);
    }
    out.rows(&REPLAYED, &rows)?;
    let limited = usize::try_from(options.limit).is_ok_and(|limit| rows.len() >= limit);
    let more = if limited { " There may be more: that was the limit." } else { "" };
    say(&match options.dry_run {
        true => format!("{} would be put back; nothing was changed.{more}", rows.len()),
        false => format!("{} put back.{more}", rows.len()),
    });
    Ok(())
}
