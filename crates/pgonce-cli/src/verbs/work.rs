//! `pgonce work`: jobs of a queue, for handlers in any language.

use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use pgonce::{Once, Settings};
use pgonce_http::gateway::config;
use pgonce_relay::work::JobHandler;

use crate::output::say;
use crate::verbs::up::stop_signal;
use crate::{WrongUse, database, metrics};

/// `pgonce work`
///
/// Any number of them share the work. A SQL function's effect commits with the job's end; an HTTP service gets the job at
/// least once, and knows it by its Idempotency-Key. Schedules are fired by every worker, each time once.
#[derive(Debug, Args)]
pub struct Options {
    /// Whose jobs
    #[arg(long, value_name = "NAME")]
    queue: String,
    /// Who handles them: a service that gets each by POST, or a function that takes the job as jsonb
    #[arg(long, value_name = "http://…|sql:schema.function")]
    handler: String,
    /// Jobs that are worked on at once
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=256))]
    at_once: u16,
    /// Quick jobs of a SQL function that share a transaction, at most
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u16).range(1..=50))]
    group: u16,
    /// Jobs that may be taken ahead
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u16).range(0..=10_000))]
    ahead: u16,
    /// How long a job is this worker's without a heartbeat; heartbeats prolong it
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = config::lease)]
    lease: Duration,
    /// Stop when nothing is ready to be taken; what is delayed is not waited for
    #[arg(long)]
    until_empty: bool,
    /// Do not fire schedules
    #[arg(long)]
    no_schedules: bool,
    /// How long to wait at the start for a database that is away
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = config::duration)]
    wait_max: Duration,
    /// Where Prometheus finds /metrics
    #[arg(long, value_name = "ADDR:PORT", value_parser = config::listen_address)]
    metrics: Option<SocketAddr>,
}

/// How often jobs are counted for Prometheus.
const MEASURE_EVERY: Duration = Duration::from_secs(10);

/// Works until told to stop, or until nothing is left.
pub async fn run(options: Options, url: &str) -> anyhow::Result<()> {
    let handler =
        JobHandler::parse(&options.handler, &options.queue).map_err(|error| WrongUse(format!("--handler: {error}")))?;
    metrics::serve(options.metrics).await?;
    let mut settings = Settings::from_url(url);
    // One for each job at work, and some for taking, heartbeats, recording and counting.
    settings.pool_max = usize::from(options.at_once) + 4;
    let mut stop = pin!(stop_signal()?);
    if !database::is_there(url, options.wait_max, stop.as_mut()).await? {
        return Ok(());
    }
    let once = Once::with_settings(settings).await?;
    handler.rehearse(&database::connect(url).await?).await?;
    let mut worker = once
        .queue(&options.queue)
        .worker()
        .name(format!("pgonce work {}", std::process::id()))
        .at_once(options.at_once.into())
        .group(options.group.into())
        .ahead(options.ahead.into())
        .lease(options.lease);
    if options.no_schedules {
        worker = worker.without_schedules();
    }
    say(&format!("ready working on {}", options.queue));
    let work = async {
        match handler {
            JobHandler::Sql(handler) => {
                let handle = |tx, job: Arc<pgonce::Job>| {
                    let handler = &handler;
                    async move { handler.call(&tx, &job).await }
                };
                match options.until_empty {
                    true => worker.run_until_empty(stop, handle).await,
                    false => worker.run_until(stop, handle).await,
                }
            }
            JobHandler::Http(handler) => {
                let handle = |job: Arc<pgonce::Job>| {
                    let handler = &handler;
                    async move { handler.call(&job).await }
                };
                worker.run_outside(stop, options.until_empty, handle).await;
            }
        }
    };
    tokio::select! {
        () = work => {}
        () = measure(&once, &options.queue), if options.metrics.is_some() => {}
    }
    Ok(())
}

/// Counts, for as long as the worker works.
async fn measure(once: &Once, queue: &str) {
    loop {
        if let Err(error) = once.queue(queue).measure().await {
            tracing::warn!(%error, "jobs could not be counted");
        }
        tokio::time::sleep(MEASURE_EVERY).await;
    }
}
