//! `pgonce queue`: jobs, those that are buried among them, and jobs from the shell.

use clap::{Args, Subcommand};
use pgonce_http::gateway::config;
use serde_json::{Value, json};
use tokio_postgres::Client;
use tokio_postgres::types::Type;

use crate::WrongUse;
use crate::database::{self, Param};
use crate::output::{Column, Out, say};

/// `pgonce queue …`
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Jobs by queue and state, and how old the oldest is
    Status(StatusOptions),
    /// Jobs that were given up, and why
    Buried(BuriedOptions),
    /// Put buried jobs back, to be tried again
    Retry(DecideOptions),
    /// Remove buried jobs for good
    Discard(DecideOptions),
    /// Enqueue a job
    Add(AddOptions),
    /// Stop a job: at once, or, where it runs, by its worker
    Cancel(CancelOptions),
    /// What is enqueued at set times, and when next
    Schedules,
}

/// Runs one of them.
pub async fn run(command: Command, url: &str, out: Out) -> anyhow::Result<()> {
    let client = database::connect(url).await?;
    match command {
        Command::Status(options) => status(options, &client, out).await,
        Command::Buried(options) => buried(options, &client, out).await,
        Command::Retry(options) => decide(options, "retry_buried", &client, out).await,
        Command::Discard(options) => decide(options, "discard_buried", &client, out).await,
        Command::Add(options) => add(options, &client, out).await,
        Command::Cancel(options) => cancel(options, &client, out).await,
        Command::Schedules => schedules(&client, out).await,
    }
}

/// `pgonce queue status`
#[derive(Debug, Args)]
pub struct StatusOptions {
    /// Only of this queue
    #[arg(long)]
    queue: Option<String>,
}

const STATUS: [Column; 5] =
    [("QUEUE", "queue"), ("STATE", "state"), ("JOBS", "jobs"), ("OLDEST", "oldest_at"), ("AGE", "oldest_age")];

async fn status(options: StatusOptions, client: &Client, out: Out) -> anyhow::Result<()> {
    let sql =
        "SELECT to_jsonb(v) FROM once.queue_status v WHERE $1::text IS NULL OR v.queue = $1 ORDER BY v.queue, v.state";
    let rows = database::json_rows(client, sql, &[(&options.queue, Type::TEXT)]).await?;
    out.rows(&STATUS, &rows)?;
    if rows.is_empty() {
        say("No job is there.");
    }
    Ok(())
}

/// `pgonce queue buried`
#[derive(Debug, Args)]
pub struct BuriedOptions {
    /// Only of this queue
    #[arg(long)]
    queue: Option<String>,
    /// At most so many
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(i64).range(1..=10_000))]
    limit: i64,
}

const BURIED: [Column; 7] = [
    ("ID", "id"),
    ("QUEUE", "queue"),
    ("TENANT", "tenant"),
    ("KEY", "key"),
    ("ATTEMPTS", "attempts"),
    ("BURIED", "buried_at"),
    ("REASON", "last_error"),
];

async fn buried(options: BuriedOptions, client: &Client, out: Out) -> anyhow::Result<()> {
    let sql =
        "SELECT to_jsonb(v) FROM once.jobs_buried v WHERE $1::text IS NULL OR v.queue = $1 ORDER BY v.id LIMIT $2";
    let params: [Param<'_>; 2] = [(&options.queue, Type::TEXT), (&options.limit, Type::INT8)];
    let rows = database::json_rows(client, sql, &params).await?;
    out.rows(&BURIED, &rows)?;
    say(if rows.is_empty() {
        "Nothing is buried."
    } else {
        "pgonce queue retry puts them back; pgonce queue discard removes them for good."
    });
    Ok(())
}

/// `pgonce queue retry`, `pgonce queue discard`
#[derive(Debug, Args)]
pub struct DecideOptions {
    /// Whose jobs
    #[arg(long)]
    queue: String,
    /// Why: goes into the audit trail
    #[arg(long)]
    reason: String,
    /// Who decides
    #[arg(long, env = "USER", hide_env = true)]
    actor: Option<String>,
    /// Only this one, by its id in `queue buried`; may be given several times
    #[arg(long = "id", value_name = "ID")]
    ids: Vec<i64>,
    /// Only of this tenant ('' is the one without a name)
    #[arg(long)]
    tenant: Option<String>,
    /// At most so many, oldest first
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(i32).range(1..=10_000))]
    limit: i32,
}

const DECIDED: [Column; 3] = [("ID", "id"), ("TENANT", "tenant"), ("REASON", "last_error")];

async fn decide(options: DecideOptions, function: &str, client: &Client, out: Out) -> anyhow::Result<()> {
    let actor = options
        .actor
        .as_deref()
        .filter(|actor| !actor.trim().is_empty())
        .ok_or_else(|| WrongUse("nobody knows who decides: give --actor, for the audit trail".into()))?;
    if options.reason.trim().is_empty() {
        return Err(WrongUse("a decision needs its reason: --reason is empty".into()).into());
    }
    let ids = (!options.ids.is_empty()).then_some(&options.ids);
    let sql = format!(
        "SELECT to_jsonb(r) FROM once.{function}(p_queue => $1, p_actor => $2, p_reason => $3, p_ids => $4, p_limit => $5,
             p_tenant => $6) r"
    );
    let params: [Param<'_>; 6] = [
        (&options.queue, Type::TEXT),
        (&actor, Type::TEXT),
        (&options.reason, Type::TEXT),
        (&ids, Type::INT8_ARRAY),
        (&options.limit, Type::INT4),
        (&options.tenant, Type::TEXT),
    ];
    let rows = database::json_rows(client, &sql, &params).await?;
    let name = if function == "retry_buried" { "put_back" } else { "discarded" };
    if out.json {
        return Ok(out.value(&json!({name: Value::Array(rows)}))?);
    }
    out.rows(&DECIDED, &rows)?;
    let limited = usize::try_from(options.limit).is_ok_and(|limit| rows.len() >= limit);
    let more = if limited { " There may be more: that was the limit." } else { "" };
    say(&format!("{} {}.{more}", rows.len(), name.replace('_', " ")));
    Ok(())
}

/// `pgonce queue add`
#[derive(Debug, Args)]
pub struct AddOptions {
    /// Which queue
    queue: String,
    /// What it is about, as JSON
    #[arg(default_value = "{}")]
    payload: String,
    /// Higher ones are taken first
    #[arg(long, default_value_t = 0, allow_negative_numbers = true)]
    priority: i32,
    /// Jobs of one key run one after another
    #[arg(long)]
    key: Option<String>,
    /// Not added where a job with this key is there
    #[arg(long, value_name = "KEY")]
    unique: Option<String>,
    /// Not before so much time has passed
    #[arg(long, value_name = "DURATION", value_parser = config::duration)]
    after: Option<std::time::Duration>,
    /// How often it is tried; as its queue says if not given
    #[arg(long, value_parser = clap::value_parser!(i32).range(1..=1_000_000))]
    attempts_max: Option<i32>,
    /// Whose it is
    #[arg(long, default_value = "")]
    tenant: String,
}

async fn add(options: AddOptions, client: &Client, out: Out) -> anyhow::Result<()> {
    let payload: Value = serde_json::from_str(&options.payload)
        .map_err(|error| WrongUse(format!("the payload is not JSON: {error}")))?;
    let after = options.after.map(|after| format!("{} milliseconds", after.as_millis()));
    let sql = "SELECT to_jsonb(once.enqueue(p_queue => $1, p_payload => $2, p_priority => $3,
        p_available_at => once.clock() + $4::text::interval, p_unique_key => $5, p_attempts_max => $6, p_key => $7, p_tenant => $8))";
    let params: [Param<'_>; 8] = [
        (&options.queue, Type::TEXT),
        (&payload, Type::JSONB),
        (&options.priority, Type::INT4),
        (&after, Type::TEXT),
        (&options.unique, Type::TEXT),
        (&options.attempts_max, Type::INT4),
        (&options.key, Type::TEXT),
        (&options.tenant, Type::TEXT),
    ];
    let id = database::json_rows(client, sql, &params).await?.pop().unwrap_or_default();
    if out.json {
        return Ok(out.value(&json!({"id": id}))?);
    }
    Ok(out.line(&id.to_string())?)
}

/// `pgonce queue cancel`
#[derive(Debug, Args)]
pub struct CancelOptions {
    /// The job
    id: i64,
    /// Whose it is
    #[arg(long, default_value = "")]
    tenant: String,
}

async fn cancel(options: CancelOptions, client: &Client, out: Out) -> anyhow::Result<()> {
    let params: [Param<'_>; 2] = [(&options.id, Type::INT8), (&options.tenant, Type::TEXT)];
    let sql = "SELECT coalesce(to_jsonb(once.cancel_job($1, $2)), 'null')";
    let state = database::json_rows(client, sql, &params).await?.pop().unwrap_or_default();
    if out.json {
        return Ok(out.value(&json!({"id": options.id, "state": state}))?);
    }
    match state.as_str() {
        Some("asked") => Ok(out.line("asked: its worker stops it at its next heartbeat, unless it is finished first")?),
        Some(state) => Ok(out.line(state)?),
        None => anyhow::bail!("no such job is alive"),
    }
}

const SCHEDULES: [Column; 6] = [
    ("SCHEDULE", "schedule"),
    ("QUEUE", "queue"),
    ("CRON", "cron"),
    ("TIMEZONE", "timezone"),
    ("NEXT", "next_at"),
    ("ERROR", "last_error"),
];

async fn schedules(client: &Client, out: Out) -> anyhow::Result<()> {
    let rows = database::json_rows(client, "SELECT to_jsonb(v) FROM once.schedules v ORDER BY v.schedule", &[]).await?;
    out.rows(&SCHEDULES, &rows)?;
    if rows.is_empty() {
        say("No schedule is defined: once.define_schedule does that.");
    }
    Ok(())
}
