//! `pgonce calls`: which calls there are, what is known of each, and what a person decides.

use clap::{Args, Subcommand, ValueEnum};
use serde_json::{Value, json};
use tokio_postgres::Client;
use tokio_postgres::types::Type;
use uuid::Uuid;

use crate::WrongUse;
use crate::database::{self, Param};
use crate::output::{Column, Out, say, text};

/// `pgonce calls …`
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Calls, newest first; or what nobody knows, oldest first
    List(ListOptions),
    /// One call, and everything that was said about it
    Show(ShowOptions),
    /// Decide about a call that is unknown or escalated
    Settle(SettleOptions),
}

/// Runs one of them.
pub async fn run(command: Command, url: &str, out: Out) -> anyhow::Result<()> {
    let client = database::connect(url).await?;
    match command {
        Command::List(options) => list(options, &client, out).await,
        Command::Show(options) => show(options, &client, out).await,
        Command::Settle(options) => settle(options, &client, out).await,
    }
}

#[derive(Debug, Clone, Copy, ValueEnum)]
#[value(rename_all = "snake_case")]
enum State {
    Requested,
    Sent,
    Unknown,
    Confirmed,
    Failed,
    Escalated,
}

/// `pgonce calls list`
#[derive(Debug, Args)]
pub struct ListOptions {
    /// Only of this provider
    #[arg(long)]
    provider: Option<String>,
    /// Only in this state
    #[arg(long)]
    state: Option<State>,
    /// What nobody knows: since when, how often it was asked, what was said last
    #[arg(long, conflicts_with = "state")]
    unknown: bool,
    /// At most so many
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(i64).range(1..=10_000))]
    limit: i64,
}

const LISTED: [Column; 8] = [
    ("ID", "id"),
    ("PROVIDER", "provider"),
    ("OPERATION", "operation"),
    ("STATE", "state"),
    ("ATTEMPTS", "attempts"),
    ("REFERENCE", "reference"),
    ("REQUESTED", "requested_at"),
    ("NOTE", "last_note"),
];

const UNKNOWN: [Column; 9] = [
    ("ID", "id"),
    ("PROVIDER", "provider"),
    ("OPERATION", "operation"),
    ("STATE", "state"),
    ("UNKNOWN FOR", "unknown_for"),
    ("ASKED", "asked"),
    ("LAST SAID", "last_said_at"),
    ("VERDICT", "last_verdict"),
    ("NOTE", "last_note"),
];

async fn list(options: ListOptions, client: &Client, out: Out) -> anyhow::Result<()> {
    let state = options.state.map(|state| format!("{state:?}").to_lowercase());
    let params: [Param<'_>; 3] = [(&options.provider, Type::TEXT), (&state, Type::TEXT), (&options.limit, Type::INT8)];
    let sql = if options.unknown {
        "SELECT to_jsonb(v) FROM once.calls_unknown v WHERE ($1::text IS NULL OR v.provider = $1) AND $2::text IS NULL
         ORDER BY v.unknown_since LIMIT $3"
    } else {
        "SELECT to_jsonb(v) FROM once.calls v WHERE ($1::text IS NULL OR v.provider = $1)
         AND ($2::text IS NULL OR v.state = $2) ORDER BY v.requested_at DESC LIMIT $3"
    };
    let rows = database::json_rows(client, sql, &params).await?;
    out.rows(if options.unknown { &UNKNOWN } else { &LISTED }, &rows)?;
    if rows.is_empty() {
        say(if options.unknown { "Nothing is unknown." } else { "No call is here." });
    }
    Ok(())
}

/// `pgonce calls show`
#[derive(Debug, Args)]
pub struct ShowOptions {
    /// Its id, which is the provider's idempotency key
    id: Uuid,
}

const EVIDENCE: [Column; 7] = [
    ("AT", "at"),
    ("KIND", "kind"),
    ("BY", "source"),
    ("VERDICT", "verdict"),
    ("BECAME", "state"),
    ("STATUS", "code"),
    ("NOTE", "note"),
];

async fn show(options: ShowOptions, client: &Client, out: Out) -> anyhow::Result<()> {
    let id: [Param<'_>; 1] = [(&options.id, Type::UUID)];
    let call = database::json_row(client, "SELECT to_jsonb(c) FROM once.calls c WHERE c.id = $1", &id).await?;
    let Value::Object(fields) = &call else { anyhow::bail!("there is no call {}", options.id) };
    let sql =
        "SELECT to_jsonb(e) - 'body' || jsonb_build_object('body', encode(e.body, 'escape')) FROM once.calls_evidence e
        WHERE e.call_id = $1 ORDER BY e.id";
    let evidence = database::json_rows(client, sql, &id).await?;
    if out.json {
        return Ok(out.value(&json!({"call": call, "evidence": evidence}))?);
    }
    for (name, value) in fields.iter().filter(|(_, value)| !value.is_null()) {
        out.line(&format!("{name:14}  {}", text(name, value)))?;
    }
    out.line("")?;
    out.rows(&EVIDENCE, &evidence)?;
    if let Some(body) = evidence.iter().rev().find_map(|said| said["body"].as_str().filter(|body| !body.is_empty())) {
        out.line(&format!("\nthe last body: {}", text("", &Value::String(body.chars().take(2000).collect()))))?;
    }
    Ok(())
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Verdict {
    /// It is done there
    Confirmed,
    /// It is not done, and will not be
    Failed,
    /// Send it again, under the same key
    Retry,
    /// Ask the provider again
    Ask,
}

/// `pgonce calls settle`
#[derive(Debug, Args)]
pub struct SettleOptions {
    /// Its id
    id: Uuid,
    /// What is decided
    #[arg(long)]
    verdict: Verdict,
    /// Why: goes into the audit trail
    #[arg(long)]
    reason: String,
    /// The provider's own id for it
    #[arg(long)]
    reference: Option<String>,
    /// Who decides
    #[arg(long, env = "USER", hide_env = true)]
    actor: Option<String>,
}

async fn settle(options: SettleOptions, client: &Client, out: Out) -> anyhow::Result<()> {
    let actor = options
        .actor
        .as_deref()
        .filter(|actor| !actor.trim().is_empty())
        .ok_or_else(|| WrongUse("nobody knows who decides: give --actor, for the audit trail".into()))?;
    if options.reason.trim().is_empty() {
        return Err(WrongUse("a decision needs its reason: --reason is empty".into()).into());
    }
    let verdict = format!("{:?}", options.verdict).to_lowercase();
    let params: [Param<'_>; 5] = [
        (&options.id, Type::UUID),
        (&verdict, Type::TEXT),
        (&actor, Type::TEXT),
        (&options.reason, Type::TEXT),
        (&options.reference, Type::TEXT),
    ];
    let sql = "SELECT to_jsonb(once.call_settle($1, $2, $3, $4, $5))";
    let state = database::json_row(client, sql, &params).await?;
    if out.json {
        return Ok(out.value(&json!({"id": options.id, "state": state}))?);
    }
    say(&format!("{} is {}.", options.id, state.as_str().unwrap_or_default()));
    Ok(())
}
