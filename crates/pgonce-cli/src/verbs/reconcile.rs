//! `pgonce reconcile`: sends the calls that committed, and asks what became of those that nobody knows.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use pgonce::{CallWorker, Once, Settings};
use pgonce_http::gateway::config;
use pgonce_relay::call::HttpProvider;
use serde_json::json;

use crate::output::{Out, say};
use crate::verbs::up::stop_signal;
use crate::{Found, database, metrics};

/// `pgonce reconcile`
///
/// A call counts as sent before its first byte goes out; one without an answer is unknown, and its provider is asked. Any
/// number may run. See docs/guides/calls.md.
#[derive(Debug, Args)]
pub struct Options {
    /// Only calls of this provider
    #[arg(long, value_name = "NAME")]
    provider: Option<String>,
    /// Send, and leave unknown calls to others
    #[arg(long, conflicts_with = "reconcile_only")]
    send_only: bool,
    /// Ask about unknown calls, and leave sending to others
    #[arg(long)]
    reconcile_only: bool,
    /// End when no call is requested, sent or unknown any more; escalated ones wait for a person
    #[arg(long)]
    until_settled: bool,
    /// With --until-settled: give up after this long, with exit code 1
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = database::duration)]
    wait_max: Duration,
    /// Requests that are under way at once
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=256))]
    at_once: u16,
    /// How long to wait before looking again when there is nothing to do
    #[arg(long, value_name = "DURATION", default_value = "200ms", value_parser = database::duration)]
    poll: Duration,
    /// Also call providers at private addresses
    #[arg(long)]
    allow_private: bool,
    /// Where Prometheus finds /metrics
    #[arg(long, value_name = "ADDR:PORT", value_parser = config::listen_address)]
    metrics: Option<SocketAddr>,
}

/// Works until told to stop, or until there is nothing left.
pub async fn run(options: Options, url: &str, out: Out) -> anyhow::Result<()> {
    let http = HttpProvider::new(options.allow_private).map_err(|error| anyhow::anyhow!("{error}"))?;
    metrics::serve(options.metrics).await?;
    let mut settings = Settings::from_url(url);
    // Requests wait for providers, not for the database: recording is short.
    settings.pool_max = (usize::from(options.at_once) / 2 + 2).min(16);
    settings.claimed_by = Some("pgonce reconcile".into());
    let once = Once::with_settings(settings).await?;
    let mut worker = CallWorker::new(&once, Arc::new(http))
        .name(format!("pgonce reconcile {}", std::process::id()))
        .at_once(options.at_once.into())
        .poll(options.poll);
    let mut does = "sending and reconciling";
    if options.send_only {
        (worker, does) = (worker.send_only(), "sending");
    }
    if options.reconcile_only {
        (worker, does) = (worker.reconcile_only(), "reconciling");
    }
    if let Some(provider) = &options.provider {
        worker = worker.only(provider);
    }
    let stop = stop_signal()?;
    say(&format!("ready {does} calls of {}", options.provider.as_deref().unwrap_or("every provider")));
    if !options.until_settled {
        worker.run_until(stop).await;
        return Ok(());
    }
    let left = worker.run_until_settled(options.wait_max, stop).await?;
    if out.json {
        out.value(&json!({"left": left}))?;
    }
    if left > 0 {
        say(&format!("{left} calls are not settled: pgonce calls list --unknown"));
        return Err(Found.into());
    }
    say("Nothing is requested, sent or unknown.");
    Ok(())
}
