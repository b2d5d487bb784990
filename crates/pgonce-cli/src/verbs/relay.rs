//! `pgonce relay`: from the outbox to wherever it goes.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use pgonce_http::gateway::config;
use pgonce_relay::Target;
use pgonce_relay::relay::{self, Finished, Lag, RelaySettings, SinkSettings};
use pgonce_relay::sink::{self, Sink};
use serde_json::json;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::output::{Out, say};
use crate::verbs::up::stop_watch;
use crate::{Found, WrongUse, metrics};

/// `pgonce relay`
///
/// Any number of them share the work; each message goes out at least once, under one id, in commit order for each ordering
/// key. A sink's settings are in its URL: see docs/reference/sinks.md.
#[derive(Debug, Args)]
pub struct Options {
    /// Where messages go: nats://, amqp://, kafka://, redis://, https://, postgres://, stdout: (several times for several)
    #[arg(long, value_name = "URL", required = true)]
    sink: Vec<String>,
    /// Only these topics, with * for anything
    #[arg(long, value_name = "PATTERN")]
    topic: Vec<String>,
    /// Only these types, with * for anything
    #[arg(long = "type", value_name = "PATTERN")]
    types: Vec<String>,
    /// Only these tenants
    #[arg(long)]
    tenant: Vec<String>,
    /// Stop when nothing is left to send
    #[arg(long)]
    until_empty: bool,
    /// A sink that was never used before starts with what is emitted from now on
    #[arg(long)]
    from_now: bool,
    /// How long a dead relay's work waits for another one
    #[arg(long, value_name = "DURATION", default_value = "15s", value_parser = lease)]
    lease: Duration,
    /// Messages that are sent and recorded together
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    batch: u32,
    /// Attempts at a message before it is parked with its key
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1000))]
    attempts: u32,
    /// The longest pause between two attempts at a message
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = config::duration)]
    backoff_max: Duration,
    /// How long the database may be away at the start
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = config::duration)]
    wait_max: Duration,
    /// Where Prometheus finds /metrics
    #[arg(long, value_name = "ADDR:PORT", value_parser = config::listen_address)]
    metrics: Option<SocketAddr>,
}

fn lease(text: &str) -> Result<Duration, String> {
    let lease = config::duration(text)?;
    if (1..=3600).contains(&lease.as_secs()) { Ok(lease) } else { Err("expected 1s to 1h".into()) }
}

/// LIKE's pattern for one with `*`.
pub(super) fn like(pattern: &str) -> String {
    pattern.replace('\\', "\\\\").replace('%', "\\%").replace('_', "\\_").replace('*', "%")
}

/// Opens a sink; what is wrong with its URL is the caller's mistake.
pub(super) fn open(url: &str) -> Result<(Target, Arc<dyn Sink>), WrongUse> {
    let (target, sink) = sink::open(url).map_err(|error| WrongUse(format!("--sink: {error}")))?;
    Ok((target, Arc::from(sink)))
}

/// Relays until told to stop.
pub async fn run(options: Options, url: &str, out: Out) -> anyhow::Result<()> {
    let mut settings = RelaySettings::new(url);
    settings.lease = options.lease;
    settings.batch_max = options.batch as usize;
    settings.attempts_max = options.attempts;
    settings.backoff_max = options.backoff_max;
    settings.until_empty = options.until_empty;
    settings.wait_max = options.wait_max;
    let opened = options.sink.iter().map(|url| open(url)).collect::<Result<Vec<_>, _>>()?;
    let mut names: Vec<&str> = opened.iter().map(|(target, _)| target.name()).collect();
    names.sort_unstable();
    if names.windows(2).any(|pair| pair[0] == pair[1]) {
        return Err(WrongUse("two sinks have the same name: give each its own, as ?name=…".into()).into());
    }
    metrics::serve(options.metrics).await?;
    let stop = stop_watch()?;
    let (ready, mut is_ready) = mpsc::channel(opened.len());
    let mut running = JoinSet::new();
    let count = opened.len();
    let to_stdout = opened.iter().any(|(target, _)| target.scheme == "stdout");
    for (target, sink) in opened {
        let name = target.name().to_owned();
        // What the flags say is for all sinks; what a URL says, for its own.
        let both = |flags: &[String], setting: &str| -> Vec<String> {
            let own = target.setting(setting).into_iter().flat_map(|list| list.split(',')).map(str::to_owned);
            flags.iter().cloned().chain(own).collect()
        };
        let sink_settings = SinkSettings {
            name: name.clone(),
            topics: both(&options.topic, "topic").iter().map(|pattern| like(pattern)).collect(),
            types: both(&options.types, "type").iter().map(|pattern| like(pattern)).collect(),
            tenants: both(&options.tenant, "tenant"),
            from_now: options.from_now,
        };
        let (settings, stop, ready) = (settings.clone(), stop.clone(), ready.clone());
        running.spawn(async move {
            let tell = move || {
                let _ = ready.try_send(());
            };
            (name, relay::run(&settings, &sink_settings, sink, stop, tell).await)
        });
    }
    drop(ready);
    tokio::spawn(async move {
        for _ in 0..count {
            if is_ready.recv().await.is_none() {
                return;
            }
        }
        say(&format!("ready relaying to {count} sink{}", if count == 1 { "" } else { "s" }));
    });
    let mut all = Vec::new();
    while let Some(ended) = running.join_next().await {
        let (name, finished) = ended?;
        all.push((name, finished?));
    }
    report(&all, options.until_empty, Out { json: out.json && !to_stdout })
}

/// What was done, and all that is left. With --until-empty, something left behind is a failure.
fn report(all: &[(String, Finished)], until_empty: bool, out: Out) -> anyhow::Result<()> {
    for (name, Finished { delivered, left }) in all {
        say(&format!("{name}: {delivered} delivered; {}", describe(left.as_ref())));
        if left.is_some_and(|left| left.parked > 0) {
            say("    parked messages wait for somebody: pgonce outbox parked");
        }
    }
    if out.json {
        let rows = all.iter().map(|(name, Finished { delivered, left })| match left {
            Some(Lag { messages, failing, parked, behind, .. }) => json!({"sink": name, "delivered": delivered,
                "left": messages, "failing": failing, "parked": parked, "behind": behind}),
            None => json!({"sink": name, "delivered": delivered, "left": null}),
        });
        out.value(&rows.collect())?;
    }
    let is_all_sent = all.iter().all(|(_, finished)| finished.left.is_some_and(|left| left.is_nothing()));
    if until_empty && !is_all_sent { Err(Found.into()) } else { Ok(()) }
}

fn describe(left: Option<&Lag>) -> String {
    match left {
        None => "what is left could not be asked".into(),
        Some(left) if left.is_nothing() => "nothing is left".into(),
        Some(Lag { messages, failing, parked, behind, .. }) => {
            format!("left: {messages} not sent, {failing} to be tried again, {parked} parked, {behind} behind those")
        }
    }
}
