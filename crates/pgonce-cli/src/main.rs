//! `pgonce`: the command line. One file a verb, under `verbs/`.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

mod config;
mod database;
mod decision;
#[cfg(feature = "failpoints")]
mod failpoints;
mod metrics;
mod output;
mod verbs;

use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

use crate::output::Out;

/// One durable effect per intent, in your own PostgreSQL.
///
/// Data goes to stdout, talk and progress to stderr. Exit codes: 0 done, 1 failed, 2 wrong use.
#[derive(Debug, Parser)]
#[command(name = "pgonce", version, propagate_version = true, max_term_width = 100)]
struct Cli {
    #[command(flatten)]
    globals: Globals,
    #[command(subcommand)]
    verb: Verb,
}

/// What every verb understands.
#[derive(Debug, Clone, Args)]
struct Globals {
    /// The database: postgres://user:password@host:port/database
    #[arg(long, global = true, env = "DATABASE_URL", hide_env_values = true, value_name = "URL")]
    database_url: Option<String>,
    /// A configuration file; ./pgonce.toml is read if it is there
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<std::path::PathBuf>,
    /// Output for programs
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Start a private PostgreSQL with everything in it, or use yours
    Up(verbs::up::Options),
    /// Bring the schema `once` to this version
    Migrate(verbs::migrate::Options),
    /// Stand before a service, and give its clients safe retries by Idempotency-Key
    Gateway(verbs::gateway::Options),
    /// Send what the outbox holds to brokers, webhooks and other databases
    Relay(verbs::relay::Options),
    /// Take messages from a broker or webhooks, and have each handled once
    Consume(verbs::consume::Options),
    /// Bring a file's rows into a table, each once, and go on where it was killed
    Import(Box<verbs::import::Options>),
    /// See imports, what became of their rows, and what failed
    #[command(subcommand)]
    Imports(verbs::imports::Command),
    /// Give a queue's jobs to a handler, each done once
    Work(verbs::work::Options),
    /// See, explain, settle and recover intents
    #[command(subcommand)]
    Intents(verbs::intents::Command),
    /// See where messages are, and what became of those that a sink did not take
    #[command(subcommand)]
    Outbox(verbs::outbox::Command),
    /// See stored messages, and put back what is parked
    #[command(subcommand)]
    Inbox(verbs::inbox::Command),
    /// Send the calls that committed, and ask providers about those whose end nobody knows
    Reconcile(verbs::reconcile::Options),
    /// See calls of providers, what was said about each, and settle what nobody else can
    #[command(subcommand)]
    Calls(verbs::calls::Command),
    /// Double entry: install the ledger, prove it, see accounts, take postings back
    #[command(subcommand)]
    Ledger(verbs::ledger::Command),
    /// See jobs, put back what is buried, enqueue and cancel
    #[command(subcommand)]
    Queue(verbs::queue::Command),
    /// Remove what is past its window, and empty the outbox's old segments
    Purge(verbs::purge::Options),
    /// Purge, keeping what goes in the history table or in files
    Archive(verbs::archive::Options),
    /// Look for what breaks the promise, with what to do about it
    Doctor(verbs::doctor::Options),
}

/// The caller's mistake: exit code 2.
#[derive(Debug)]
struct WrongUse(String);

impl std::fmt::Display for WrongUse {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for WrongUse {}

/// It ran, and what it found is the failure; everything is said already: exit code 1.
#[derive(Debug)]
struct Found;

impl std::fmt::Display for Found {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("failed")
    }
}

impl std::error::Error for Found {}

#[tokio::main]
async fn main() -> ExitCode {
    #[cfg(feature = "failpoints")]
    failpoints::arm();
    // Two providers are in the tree; whoever opens TLS first would otherwise have to choose, and does not.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let cli = Cli::parse();
    // lapin tells bodies of returned messages.
    let quiet = matches!(&cli.verb, Verb::Up(options) if options.demo);
    log_to_stderr(if quiet { "error" } else { "warn,lapin=error" });
    match dispatch(cli).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is::<Found>() => ExitCode::FAILURE,
        Err(error) if output::is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            output::say(&format!("error: {}", output::explain(&error)));
            ExitCode::from(if error.is::<WrongUse>() { 2 } else { 1 })
        }
    }
}

async fn dispatch(cli: Cli) -> anyhow::Result<()> {
    let Cli { globals, verb } = cli;
    let out = Out { json: globals.json };
    let config = config::load(globals.config.as_deref())?;
    let url = globals.database_url.filter(|url| !url.is_empty()).or_else(|| config.database_url.clone());
    match verb {
        Verb::Up(options) => verbs::up::run(options, url, config.up, out).await,
        Verb::Migrate(options) => verbs::migrate::run(options, &database::needed(url)?, out).await,
        Verb::Gateway(options) => verbs::gateway::run(options, config.path, &database::needed(url)?).await,
        Verb::Relay(options) => verbs::relay::run(options, &database::needed(url)?, out).await,
        Verb::Consume(options) => verbs::consume::run(options, &database::needed(url)?).await,
        Verb::Import(options) => verbs::import::run(*options, &database::needed(url)?, out).await,
        Verb::Imports(command) => verbs::imports::run(command, &database::needed(url)?, out).await,
        Verb::Work(options) => verbs::work::run(options, &database::needed(url)?).await,
        Verb::Queue(command) => verbs::queue::run(command, &database::needed(url)?, out).await,
        Verb::Outbox(command) => verbs::outbox::run(command, &database::needed(url)?, out).await,
        Verb::Intents(command) => verbs::intents::run(command, &database::needed(url)?, out).await,
        Verb::Inbox(command) => verbs::inbox::run(command, &database::needed(url)?, out).await,
        Verb::Reconcile(options) => verbs::reconcile::run(options, &database::needed(url)?, out).await,
        Verb::Calls(command) => verbs::calls::run(command, &database::needed(url)?, out).await,
        Verb::Ledger(command) => verbs::ledger::run(command, &database::needed(url)?, out).await,
        Verb::Purge(options) => {
            verbs::purge::run(options, verbs::purge::Extent::Everything, &database::needed(url)?, out).await
        }
        Verb::Archive(options) => verbs::archive::run(options, &database::needed(url)?, out).await,
        Verb::Doctor(options) => verbs::doctor::run(&options, &database::needed(url)?, out).await,
    }
}

/// The demo crashes things on purpose and shows them in its own line: its default is quieter.
fn log_to_stderr(default: &str) {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(default));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
}
