//! Ratios to the bare limit, and to the usual way of doing it, measured side by side. See bench/README.md.

mod coalesce;
mod http;
mod import;
mod inbox;
mod ledger;
mod measure;
mod outbox;
mod queue;
mod relay;
mod scenarios;
mod work;

use std::time::Duration;

use anyhow::{Context, Result};
use clap::Parser;

/// Prints what a protected write costs against an unprotected one.
#[derive(Debug, Parser)]
pub struct Arguments {
    /// Which scenarios: write, delay, replay, storm, coalesce, cpu, cost, growth, emit, relay, inbox, ledger, queue, import, http. All if none is named.
    scenarios: Vec<String>,
    /// Seconds a contender runs in each round.
    #[arg(long, default_value_t = 3.0)]
    seconds: f64,
    /// Rounds; contenders take turns in each.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// The largest table of the growth scenario.
    #[arg(long, default_value_t = 10_000_000)]
    rows_max: u64,
    /// Jobs that are enqueued and done by each contender of the queue scenario, in each round.
    #[arg(long, default_value_t = 100_000)]
    jobs: usize,
    /// A broker that runs, as nats://host:4222 or kafka://host:9092: measures its sink, and nothing else.
    #[arg(long = "broker")]
    brokers: Vec<String>,
    /// A PostgreSQL to measure on; a private one is started where none is given. The schema bench in it is replaced.
    #[arg(long, env = "BENCH_DATABASE_URL")]
    database_url: Option<String>,
}

impl Arguments {
    fn window(&self) -> Duration {
        Duration::from_secs_f64(self.seconds)
    }

    fn wants(&self, scenario: &str) -> bool {
        self.scenarios.is_empty() || self.scenarios.iter().any(|wanted| wanted == scenario)
    }
}

#[tokio::main]
async fn main() -> Result<()> {
    let arguments = Arguments::parse();
    if !arguments.brokers.is_empty() {
        return relay::sinks(&arguments).await;
    }
    let (url, _cluster) = scenarios::database(&arguments).await.context("no database to measure on")?;
    scenarios::prepare(&url).await?;
    if arguments.wants("write") {
        scenarios::write(&arguments, &url).await?;
    }
    if arguments.wants("delay") {
        scenarios::delay(&arguments, &url).await?;
    }
    if arguments.wants("replay") {
        scenarios::replay(&arguments, &url).await?;
    }
    if arguments.wants("storm") {
        scenarios::storm(&arguments, &url).await?;
    }
    if arguments.wants("coalesce") {
        coalesce::coalesce(&arguments, &url).await?;
    }
    if arguments.wants("cpu") {
        scenarios::cpu(&arguments, &url).await?;
    }
    if arguments.wants("cost") {
        scenarios::cost(&url).await?;
    }
    if arguments.wants("growth") {
        scenarios::growth(&arguments, &url).await?;
    }
    if arguments.wants("emit") {
        outbox::emit(&arguments, &url).await?;
    }
    if arguments.wants("relay") {
        outbox::relay(&arguments, &url).await?;
    }
    if arguments.wants("inbox") {
        inbox::inbox(&arguments, &url).await?;
    }
    if arguments.wants("ledger") {
        ledger::ledger(&arguments, &url).await?;
    }
    if arguments.wants("queue") {
        queue::queue(&arguments, &url).await?;
    }
    if arguments.wants("import") {
        import::import(&arguments, &url).await?;
    }
    if arguments.wants("http") {
        http::http(&arguments, &url).await?;
    }
    Ok(())
}
