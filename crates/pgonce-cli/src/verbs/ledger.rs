//! `pgonce ledger`: installs it, proves it, shows it, and takes postings back.

use clap::{Args, Subcommand};
use pgonce::ledger::PostedKind;
use serde_json::{Value, json};
use tokio_postgres::Client;
use tokio_postgres::types::Type;

use crate::database::{self, Param};
use crate::output::{Column, Out, say};
use crate::{Found, WrongUse};

/// `pgonce ledger …`
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Make the schema once_ledger; from then on `pgonce migrate` keeps it up to date
    Install(InstallOptions),
    /// Compute every balance anew from the entries, and show what differs
    Verify(VerifyOptions),
    /// Accounts and their balances
    Accounts(AccountsOptions),
    /// The entries of an account, newest first
    Show(ShowOptions),
    /// Take a posting back, by a new one with the opposite entries
    Reverse(ReverseOptions),
}

/// Runs one of them.
pub async fn run(command: Command, url: &str, out: Out) -> anyhow::Result<()> {
    let mut client = database::connect(url).await?;
    if let Command::Install(options) = command {
        return install(&options, &mut client, out).await;
    }
    let sql = "SELECT to_jsonb(EXISTS (SELECT FROM pg_catalog.pg_namespace n WHERE n.nspname = 'once_ledger'))";
    if database::json_row(&client, sql, &[]).await? != true {
        return Err(WrongUse("there is no ledger in this database: pgonce ledger install".into()).into());
    }
    match command {
        Command::Install(_) => Ok(()),
        Command::Verify(options) => verify(&options, &client, out).await,
        Command::Accounts(options) => accounts(&options, &client, out).await,
        Command::Show(options) => show(&options, &client, out).await,
        Command::Reverse(options) => reverse(&options, &client, out).await,
    }
}

/// `pgonce ledger install`
#[derive(Debug, Args)]
pub struct InstallOptions {
    /// Run everything and roll it back
    #[arg(long)]
    dry_run: bool,
}

async fn install(options: &InstallOptions, client: &mut Client, out: Out) -> anyhow::Result<()> {
    let report = pgonce::migrate::install_ledger(client, options.dry_run).await?;
    if out.json {
        return Ok(out.value(&json!(report))?);
    }
    for name in &report.applied {
        out.line(&format!("{} {name}", if report.dry_run { "would apply" } else { "applied" }))?;
    }
    say(if report.dry_run { "Dry run: all of it worked, and was rolled back." } else { "The ledger is in place." });
    Ok(())
}

/// `pgonce ledger verify`
#[derive(Debug, Args)]
pub struct VerifyOptions {
    /// Only this account, and the postings that touch it
    #[arg(long)]
    account: Option<String>,
    /// Only of this tenant ('' is the one without a name)
    #[arg(long)]
    tenant: Option<String>,
    /// Show at most so many differences
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(i32).range(1..=100_000))]
    limit: i32,
}

const DIFFERENCES: [Column; 7] = [
    ("FINDING", "finding"),
    ("TENANT", "tenant"),
    ("ACCOUNT", "account"),
    ("SOURCE", "source"),
    ("OPERATION", "operation"),
    ("EXPECTED", "expected"),
    ("FOUND", "found"),
];

async fn verify(options: &VerifyOptions, client: &Client, out: Out) -> anyhow::Result<()> {
    // One snapshot for the counts and the differences: what is said was true at one moment.
    client.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY").await.map_err(pgonce::Error::from)?;
    let params: [Param<'_>; 3] =
        [(&options.account, Type::TEXT), (&options.tenant, Type::TEXT), (&options.limit, Type::INT4)];
    let found =
        database::json_rows(client, "SELECT to_jsonb(v) FROM once_ledger.verify($1, $2, $3) v", &params).await?;
    let sql = "SELECT jsonb_build_object('accounts', count(*), 'entries', coalesce(sum(a.entries), 0)) FROM once_ledger.accounts a
        WHERE ($1::text IS NULL OR a.account = $1) AND ($2::text IS NULL OR a.tenant = $2)";
    let counted = database::json_row(client, sql, &params[..2]).await?;
    client.batch_execute("COMMIT").await.map_err(pgonce::Error::from)?;
    if out.json {
        let report = json!({"accounts": counted["accounts"], "entries": counted["entries"], "differences": Value::Array(found.clone())});
        out.value(&report)?;
    } else if !found.is_empty() {
        out.rows(&DIFFERENCES, &found)?;
    }
    if found.is_empty() {
        say(&format!(
            "{} accounts are the sums of their {} entries, and every posting balances.",
            counted["accounts"], counted["entries"]
        ));
        return Ok(());
    }
    say("The ledger was changed by other means than its functions: see docs/guides/ledger.md.");
    Err(Found.into())
}

/// `pgonce ledger accounts`
#[derive(Debug, Args)]
pub struct AccountsOptions {
    /// Only of this tenant ('' is the one without a name)
    #[arg(long)]
    tenant: Option<String>,
    /// Only accounts whose names begin so
    #[arg(long)]
    prefix: Option<String>,
    /// At most so many
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(i64).range(1..=100_000))]
    limit: i64,
}

const ACCOUNTS: [Column; 7] = [
    ("TENANT", "tenant"),
    ("ACCOUNT", "account"),
    ("SIDE", "side"),
    ("BALANCE", "amount"),
    ("CURRENCY", "currency"),
    ("OVERDRAFT", "overdraft"),
    ("ENTRIES", "entries"),
];

async fn accounts(options: &AccountsOptions, client: &Client, out: Out) -> anyhow::Result<()> {
    let sql = "SELECT to_jsonb(a) FROM once_ledger.accounts a
        WHERE ($1::text IS NULL OR a.tenant = $1) AND ($2::text IS NULL OR starts_with(a.account, $2))
        ORDER BY a.tenant, a.account LIMIT $3";
    let params: [Param<'_>; 3] =
        [(&options.tenant, Type::TEXT), (&options.prefix, Type::TEXT), (&options.limit, Type::INT8)];
    let rows = database::json_rows(client, sql, &params).await?;
    out.rows(&ACCOUNTS, &rows)?;
    if rows.is_empty() {
        say("No account is open.");
    }
    Ok(())
}

/// `pgonce ledger show`
#[derive(Debug, Args)]
pub struct ShowOptions {
    /// The account
    account: String,
    /// Whose account
    #[arg(long, default_value = "")]
    tenant: String,
    /// At most so many entries
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(i64).range(1..=100_000))]
    limit: i64,
}

const ENTRIES: [Column; 7] = [
    ("NUMBER", "number"),
    ("AT", "at"),
    ("AMOUNT", "amount_text"),
    ("BALANCE", "balance_text"),
    ("SOURCE", "source"),
    ("OPERATION", "operation"),
    ("DESCRIPTION", "description"),
];

async fn show(options: &ShowOptions, client: &Client, out: Out) -> anyhow::Result<()> {
    let account: [Param<'_>; 2] = [(&options.account, Type::TEXT), (&options.tenant, Type::TEXT)];
    let sql = "SELECT to_jsonb(a) FROM once_ledger.accounts a WHERE a.account = $1 AND a.tenant = $2";
    let found = database::json_row(client, sql, &account).await?;
    if found.is_null() {
        return Err(anyhow::anyhow!("there is no such account"));
    }
    let sql = "SELECT to_jsonb(e) || jsonb_build_object('amount_text', once_ledger.format_amount(e.amount, e.currency),
            'balance_text', once_ledger.format_amount(e.balance, e.currency))
        FROM once_ledger.entries e WHERE e.account = $1 AND e.tenant = $2 ORDER BY e.number DESC LIMIT $3";
    let params: [Param<'_>; 3] =
        [(&options.account, Type::TEXT), (&options.tenant, Type::TEXT), (&options.limit, Type::INT8)];
    let rows = database::json_rows(client, sql, &params).await?;
    if out.json {
        return Ok(out.value(&json!({"account": found, "entries": Value::Array(rows)}))?);
    }
    out.rows(&ACCOUNTS, &[found])?;
    out.line("")?;
    Ok(out.rows(&ENTRIES, &rows)?)
}

/// `pgonce ledger reverse`
#[derive(Debug, Args)]
pub struct ReverseOptions {
    /// The source that the posting was made with
    source: String,
    /// The operation that it was made with
    operation: String,
    /// Why: stands in the new posting
    #[arg(long)]
    reason: String,
    /// The operation of the new posting, whose source is `reversal`; SOURCE/OPERATION if it is not given
    #[arg(long = "as", value_name = "OPERATION")]
    as_operation: Option<String>,
    /// Whose posting
    #[arg(long, default_value = "")]
    tenant: String,
}

async fn reverse(options: &ReverseOptions, client: &Client, out: Out) -> anyhow::Result<()> {
    if options.reason.trim().is_empty() {
        return Err(WrongUse("a decision needs its reason: --reason is empty".into()).into());
    }
    let by = options.as_operation.clone().unwrap_or_else(|| format!("{}/{}", options.source, options.operation));
    let posted = pgonce::ledger::reverse(
        client,
        &options.tenant,
        ("reversal", &by),
        (&options.source, &options.operation),
        Some(&options.reason),
    )
    .await?;
    let already = posted.kind == PostedKind::Already;
    if out.json {
        let balances: serde_json::Map<String, Value> =
            posted.balances.into_iter().map(|(account, balance)| (account, json!(balance))).collect();
        let kind = if already { "already" } else { "posted" };
        return Ok(out.value(&json!({"posting_id": posted.id, "kind": kind, "balances": balances}))?);
    }
    for (account, balance) in &posted.balances {
        out.line(&format!("{} {balance}", crate::output::printable(account)))?;
    }
    say(if already {
        "It was taken back before, by this operation."
    } else {
        "Taken back; balances are in minor units."
    });
    Ok(())
}
