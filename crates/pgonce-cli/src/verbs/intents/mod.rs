//! `pgonce intents`: what operators ask, decide and have sorted.

mod recover;
mod show;

use std::io::Read as _;

use anyhow::Context as _;
use clap::{Args, Subcommand, ValueEnum};
use serde_json::{Value, json};
use tokio_postgres::Client;
use tokio_postgres::types::Type;

use crate::WrongUse;
use crate::database::{self, Param};
use crate::decision::Decision;
use crate::output::{Column, Out, say};

/// `pgonce intents …`
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List intents, newest first
    List(ListOptions),
    /// Everything about one intent, and what was done to it
    Show(show::Options),
    /// Decide what became of an intent that is uncertain, retryable, or whose lease is over
    Settle(SettleOptions),
    /// Sort claims whose lease is over, as their scopes' policies say
    Recover(recover::Options),
}

/// Runs one of them.
pub async fn run(command: Command, url: &str, out: Out) -> anyhow::Result<()> {
    let client = database::connect(url).await?;
    match command {
        Command::List(options) => list(options, &client, out).await,
        Command::Show(options) => show::run(options, &client, out).await,
        Command::Settle(options) => settle(options, &client, out).await,
        Command::Recover(options) => recover::run(options, &client, out).await,
    }
}

#[derive(Debug, Clone, Copy, ValueEnum)]
#[value(rename_all = "snake_case")]
enum Status {
    Processing,
    Succeeded,
    FailedRetryable,
    FailedFinal,
    Uncertain,
}

impl Status {
    fn as_str(self) -> &'static str {
        match self {
            Self::Processing => "processing",
            Self::Succeeded => "succeeded",
            Self::FailedRetryable => "failed_retryable",
            Self::FailedFinal => "failed_final",
            Self::Uncertain => "uncertain",
        }
    }
}

/// `pgonce intents list`
#[derive(Debug, Args)]
pub struct ListOptions {
    /// Only of this scope
    #[arg(long)]
    scope: Option<String>,
    /// Only of this tenant ('' is the one without a name)
    #[arg(long)]
    tenant: Option<String>,
    /// Only with this status
    #[arg(long)]
    status: Option<Status>,
    /// Claims whose lease is over, the longest overdue first
    #[arg(long, group = "question", conflicts_with = "status")]
    stale: bool,
    /// Intents that wait for somebody to settle them, oldest first
    #[arg(long, group = "question", conflicts_with = "status")]
    uncertain: bool,
    /// The most retried first
    #[arg(long, group = "question")]
    retried: bool,
    /// At most so many
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(i64).range(1..=10_000))]
    limit: i64,
}

/// A view, its order, and the columns worth a person's screen.
struct Question {
    view: &'static str,
    order: &'static str,
    columns: &'static [Column],
}

const STALE: Question = Question {
    view: "once.stale_claims",
    order: "v.locked_until",
    columns: &[
        ("TENANT", "tenant"),
        ("SCOPE", "scope"),
        ("KEY", "key"),
        ("CLAIMED BY", "claimed_by"),
        ("ATTEMPTS", "attempt_count"),
        ("LEASE ENDED", "locked_until"),
        ("OVERDUE", "overdue"),
    ],
};
const UNCERTAIN: Question = Question {
    view: "once.uncertain",
    order: "v.created_at",
    columns: &[
        ("TENANT", "tenant"),
        ("SCOPE", "scope"),
        ("KEY", "key"),
        ("ATTEMPTS", "attempt_count"),
        ("REASON", "failure_code"),
        ("SINCE", "since"),
        ("CREATED", "created_at"),
    ],
};
const RETRIED: Question = Question {
    view: "once.most_retried",
    order: "v.attempt_count DESC",
    columns: &[
        ("TENANT", "tenant"),
        ("SCOPE", "scope"),
        ("KEY", "key"),
        ("STATUS", "status"),
        ("ATTEMPTS", "attempt_count"),
        ("FAILURE", "failure_code"),
        ("UPDATED", "updated_at"),
    ],
};
const ALL_COLUMNS: &[Column] = &[
    ("TENANT", "tenant"),
    ("SCOPE", "scope"),
    ("KEY", "key"),
    ("STATUS", "status"),
    ("ATTEMPTS", "attempt_count"),
    ("RESULT", "result_type"),
    ("RESULT ID", "result_id"),
    ("CODE", "response_code"),
    ("CREATED", "created_at"),
    ("EXPIRES", "expires_at"),
];
const NEWEST: Question = Question { view: "once.intents", order: "v.created_at DESC", columns: ALL_COLUMNS };
/// Only the expiry is indexed in a table of any size; for one retention it is the same order.
const NEWEST_OF_MANY: Question = Question { view: "once.intents", order: "v.expires_at DESC", columns: ALL_COLUMNS };

async fn list(options: ListOptions, client: &Client, out: Out) -> anyhow::Result<()> {
    let question = match &options {
        ListOptions { stale: true, .. } => STALE,
        ListOptions { uncertain: true, .. } => UNCERTAIN,
        ListOptions { retried: true, .. } => RETRIED,
        _ if database::is_sortable(client).await? => NEWEST,
        _ => {
            say(
                "Many intents: the latest to expire, without those that never do. Narrow it by --stale, --uncertain or --retried.",
            );
            NEWEST_OF_MANY
        }
    };
    // Bodies, headers and fingerprints are for `show`.
    let mut sql = format!(
        "SELECT to_jsonb(v) - 'response_body' - 'response_headers' - 'fingerprint' FROM {} v WHERE true",
        question.view
    );
    let status = options.status.map(Status::as_str);
    let mut params: Vec<Param<'_>> = vec![(&options.limit, Type::INT8)];
    for (column, value) in [("scope", &options.scope), ("tenant", &options.tenant)] {
        if let Some(value) = value {
            params.push((value, Type::TEXT));
            sql.push_str(&format!(" AND v.{column} = ${}", params.len()));
        }
    }
    if let Some(status) = &status {
        params.push((status, Type::TEXT));
        sql.push_str(&format!(" AND v.status = ${}", params.len()));
    }
    if question.order == NEWEST_OF_MANY.order {
        sql.push_str(" AND v.expires_at IS NOT NULL");
    }
    sql.push_str(&format!(" ORDER BY {} LIMIT $1", question.order));
    let rows = database::json_rows(client, &sql, &params).await?;
    out.rows(&without_lone_tenant(question.columns, &rows), &rows)?;
    if rows.is_empty() {
        say("No intent matches.");
    }
    Ok(())
}

/// Where nobody has a tenant, nobody needs the column.
fn without_lone_tenant(columns: &[Column], rows: &[Value]) -> Vec<Column> {
    let used = rows.iter().any(|row| row["tenant"].as_str().is_some_and(|tenant| !tenant.is_empty()));
    columns.iter().filter(|(_, field)| used || *field != "tenant").copied().collect()
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Verdict {
    /// The effect is there
    Succeeded,
    /// It is not, and the next attempt may run
    Retry,
    /// It is not, and never will be
    Failed,
    /// Nobody will find out; no attempt runs any more
    Abandoned,
}

impl Verdict {
    fn as_str(self) -> &'static str {
        match self {
            Self::Succeeded => "succeeded",
            Self::Retry => "retry",
            Self::Failed => "failed",
            Self::Abandoned => "abandoned",
        }
    }
}

/// `pgonce intents settle`
#[derive(Debug, Args)]
pub struct SettleOptions {
    /// The intent's key
    key: String,
    /// Its scope
    #[arg(long)]
    scope: String,
    /// Its tenant
    #[arg(long, default_value = "")]
    tenant: String,
    /// What became of it
    #[arg(long)]
    verdict: Verdict,
    #[command(flatten)]
    decision: Decision,
    /// What the effect made, for later replays
    #[arg(long)]
    result_type: Option<String>,
    /// Its id
    #[arg(long)]
    result_id: Option<String>,
    /// The status code that replays answer with
    #[arg(long)]
    response_code: Option<i32>,
    /// A file with the bytes that replays answer with, or - for stdin
    #[arg(long, value_name = "FILE")]
    response_body: Option<String>,
}

async fn settle(options: SettleOptions, client: &Client, out: Out) -> anyhow::Result<()> {
    let actor = options.decision.actor()?;
    let body = options.response_body.as_deref().map(read_body).transpose()?;
    let sql = "SELECT to_jsonb(once.settle(p_scope => $1, p_key => $2, p_verdict => $3, p_actor => $4, p_reason => $5,
        p_result_type => $6, p_result_id => $7, p_response_code => $8, p_response_body => $9, p_tenant => $10))";
    let verdict = options.verdict.as_str();
    let params: [Param<'_>; 10] = [
        (&options.scope, Type::TEXT),
        (&options.key, Type::TEXT),
        (&verdict, Type::TEXT),
        (&actor, Type::TEXT),
        (&options.decision.reason, Type::TEXT),
        (&options.result_type, Type::TEXT),
        (&options.result_id, Type::TEXT),
        (&options.response_code, Type::INT4),
        (&body, Type::BYTEA),
        (&options.tenant, Type::TEXT),
    ];
    let status = database::json_row(client, sql, &params).await?;
    if out.json {
        let Value::String(status) = status else { anyhow::bail!("settle answered without a status") };
        let done = json!({"tenant": options.tenant, "scope": options.scope, "key": options.key, "status": status, "actor": actor});
        return Ok(out.value(&done)?);
    }
    let means = match options.verdict {
        Verdict::Succeeded => "every later attempt gets this outcome, none runs",
        Verdict::Retry => "the next attempt runs",
        Verdict::Failed | Verdict::Abandoned => "every later attempt gets this failure, none runs",
    };
    Ok(out.line(&format!("settled: {}; {means}", status.as_str().unwrap_or_default()))?)
}

const BODY_BYTES_MAX: u64 = 64 * 1024 * 1024;

fn read_body(path: &str) -> anyhow::Result<Vec<u8>> {
    let mut body = Vec::new();
    let limit = BODY_BYTES_MAX + 1;
    match path {
        "-" => std::io::stdin().lock().take(limit).read_to_end(&mut body).context("stdin cannot be read")?,
        path => {
            let file = std::fs::File::open(path).with_context(|| format!("{path} cannot be read"))?;
            file.take(limit).read_to_end(&mut body).with_context(|| format!("{path} cannot be read"))?
        }
    };
    if body.len() as u64 >= limit {
        return Err(WrongUse(format!("the response body is larger than {BODY_BYTES_MAX} bytes")).into());
    }
    Ok(body)
}
