//! `pgonce consume`: a broker's messages into the stored inbox, and from there to a handler in any language.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use pgonce::{Once, Settings};
use pgonce_http::gateway::config;
use pgonce_relay::consume::Intake;
use pgonce_relay::consume::handler::Handler;
use pgonce_relay::source;
use tokio::sync::watch;

use crate::output::{explain, say};
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
    /// How long the database and the source may be away at the start
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = config::duration)]
    wait_max: Duration,
    /// Where Prometheus finds /metrics
    #[arg(long, value_name = "ADDR:PORT", value_parser = config::listen_address)]
    metrics: Option<SocketAddr>,
}

/// Consumes until told to stop.
pub async fn run(options: Options, url: &str) -> anyhow::Result<()> {
    let (target, mut source) =
        source::open(&options.source, &options.consumer).map_err(|error| WrongUse(format!("--source: {error}")))?;
    let handler = options.handler.as_deref().map(|text| Handler::parse(text, &options.consumer));
    let handler = handler.transpose().map_err(|error| WrongUse(format!("--handler: {error}")))?;
    metrics::serve(options.metrics).await?;
    let mut settings = Settings::from_url(url);
    // One for each message at work, and some for taking, storing and recording.
    settings.pool_max = usize::from(options.at_once) + 4;
    settings.claimed_by = Some(format!("pgonce consume {}", options.consumer));
    let stop = stop_watch()?;
    let mut patience = Patience { until: Instant::now() + options.wait_max, stop: stop.clone() };
    let mut told = stop.clone();
    let told_to_stop = async move { drop(told.wait_for(|stop| *stop).await) };
    if !database::is_there(url, options.wait_max, told_to_stop).await? {
        return Ok(());
    }
    let once = Once::with_settings(settings).await?;
    if let Some(handler) = &handler {
        // What it cannot do is told now, and not by every message.
        handler.rehearse(&database::connect(url).await?).await?;
    }
    // Told to stop, or the source is not to be had: the worker ends what it holds in either case.
    let (give_up, given_up) = watch::channel(false);
    let stopped = || {
        let (mut stop, mut given_up) = (stop.clone(), given_up.clone());
        async move {
            tokio::select! {
                _ = stop.wait_for(|stop| *stop) => {}
                _ = given_up.wait_for(|given_up| *given_up) => {}
            }
        }
    };
    let intake = async {
        let reached = patience.wait(async || Ok(source.reach().await?)).await;
        match reached {
            Ok(true) => Intake::new(source, &options.consumer).run(&once, stopped()).await,
            Ok(false) => source.close().await,
            Err(error) => {
                give_up.send_replace(true);
                return Err(error.context(format!("{} was not reached within {:?}", target.shown, options.wait_max)));
            }
        }
        Ok(())
    };
    let worker = once
        .consumer(&options.consumer)
        .worker()
        .name(format!("pgonce consume {}", std::process::id()))
        .at_once(options.at_once.into())
        .lease(options.lease)
        .poll(Duration::from_millis(20));
    let work = async {
        let Some(handler) = &handler else { return stopped().await };
        let handler = Arc::new(handler.clone());
        worker
            .run_until(stopped(), |tx, message| {
                let handler = Arc::clone(&handler);
                async move { handler.call(&tx, &message).await }
            })
            .await;
    };
    say(&format!("ready consuming {} as {}", target.shown, options.consumer));
    tokio::join!(intake, work).0
}

/// How long the source may be away at the start.
struct Patience {
    until: Instant,
    stop: watch::Receiver<bool>,
}

impl Patience {
    /// Asks until it is there: true. False, where somebody says stop first.
    async fn wait(&mut self, mut ask: impl AsyncFnMut() -> anyhow::Result<()>) -> anyhow::Result<bool> {
        let mut pause = Duration::from_millis(100);
        loop {
            let asked = tokio::select! {
                asked = ask() => asked,
                _ = self.stop.wait_for(|stop| *stop) => return Ok(false),
            };
            match asked {
                Ok(()) => return Ok(true),
                Err(error) if Instant::now() < self.until => {
                    say(&format!("waiting for the source: {}", explain(&error)));
                }
                Err(error) => return Err(error),
            }
            tokio::select! {
                () = tokio::time::sleep(pause.min(self.until.saturating_duration_since(Instant::now()))) => {}
                _ = self.stop.wait_for(|stop| *stop) => return Ok(false),
            }
            pause = (pause * 2).min(Duration::from_secs(5));
        }
    }
}
