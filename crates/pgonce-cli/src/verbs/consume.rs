//! `pgonce consume`: a broker's messages into the stored inbox, and from there to a handler in any language.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use pgonce::{Once, Settings};
use pgonce_http::gateway::config;
use pgonce_relay::consume::Intake;
use pgonce_relay::consume::handler::Handler;
use pgonce_relay::source;
use tokio::sync::watch;

use crate::output::say;
use crate::verbs::up::stop_watch;
use crate::{WrongUse, database, metrics};

/// `pgonce consume`
///
/// A delivery is acknowledged when it is stored; a stored message is handed out until it is dealt with, once. A SQL
/// function's effect commits with the message's end. See docs/guides/consumers.md.
#[derive(Debug, Args)]
pub struct Options {
    /// Where messages come from: nats://host/STREAM, amqp://host?queue=…, kafka://host?topic=…, redis://host?stream=…,
    /// webhook://ADDR:PORT/path
    #[arg(long, value_name = "URL")]
    source: String,
    /// The consumer's name: another name gets every message anew
    #[arg(long, value_name = "NAME")]
    consumer: String,
    /// Who handles them; none: they are only stored
    #[arg(long, value_name = "http://…|sql:schema.function")]
    handler: Option<String>,
    /// Messages that are handled at once
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=256))]
    at_once: u16,
    /// How long a message is one worker's
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = config::lease)]
    lease: Duration,
    /// Where Prometheus finds /metrics
    #[arg(long, value_name = "ADDR:PORT", value_parser = config::listen_address)]
    metrics: Option<SocketAddr>,
    /// How long to wait at the start for a database that is away
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = config::duration)]
    wait_max: Duration,
}

/// Consumes until told to stop.
pub async fn run(options: Options, url: &str) -> anyhow::Result<()> {
    let (target, source) =
        source::open(&options.source, &options.consumer).map_err(|error| WrongUse(format!("--source: {error}")))?;
    let handler = options.handler.as_deref().map(|text| Handler::parse(text, &options.consumer));
    let handler = handler.transpose().map_err(|error| WrongUse(format!("--handler: {error}")))?;
    metrics::serve(options.metrics).await?;
    let mut settings = Settings::from_url(url);
    // One for each message at work, and some for taking, storing and recording.
    settings.pool_max = usize::from(options.at_once) + 4;
    settings.claimed_by = Some(format!("pgonce consume {}", options.consumer));
    let stop = stop_watch()?;
    let stopped = |mut stop: watch::Receiver<bool>| async move {
        let _ = stop.wait_for(|stop| *stop).await;
    };
    if !database::is_there(url, options.wait_max, stopped(stop.clone())).await? {
        return Ok(());
    }
    let once = Once::with_settings(settings).await?;
    let intake = Intake::new(source, &options.consumer).run(&once, stopped(stop.clone()));
    let worker = once
        .consumer(&options.consumer)
        .worker()
        .name(format!("pgonce consume {}", std::process::id()))
        .at_once(options.at_once.into())
        .lease(options.lease)
        .poll(Duration::from_millis(20));
    let work = async {
        let Some(handler) = &handler else { return stopped(stop.clone()).await };
        let handler = Arc::new(handler.clone());
        worker
            .run_until(stopped(stop.clone()), |tx, message| {
                let handler = Arc::clone(&handler);
                async move { handler.call(&tx, &message).await }
            })
            .await;
    };
    say(&format!("ready consuming {} as {}", target.shown, options.consumer));
    tokio::join!(intake, work);
    Ok(())
}
