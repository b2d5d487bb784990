//! `pgonce gateway`: `Idempotency-Key` for a service in any language.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::pin;
use std::time::Duration;

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use http::{HeaderName, Uri};
use pgonce_http::InProgress;
use pgonce_http::gateway::config::{self, ConfigSource, Overrides, RedisUrl, Stale};
use pgonce_http::gateway::{self, GatewayError};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use crate::output::say;
use crate::verbs::up::stop_signal;
use crate::{WrongUse, database};

/// `pgonce gateway`
///
/// What is given here wins over the section [gateway] of pgonce.toml, on every route. SIGHUP reads the file again.
#[derive(Debug, Args)]
pub struct Options {
    /// Where clients find it
    #[arg(long, value_name = "ADDR:PORT", value_parser = config::listen_address)]
    listen: Option<SocketAddr>,
    /// The service behind it
    #[arg(long, value_name = "URL", value_parser = config::upstream_url)]
    upstream: Option<Uri>,
    /// Refuse guarded requests that have no key
    #[arg(long)]
    require_key: bool,
    /// Take keys in quotes only, as the draft says
    #[arg(long)]
    strict_keys: bool,
    /// The header that names the tenant; whoever reaches the gateway is believed
    #[arg(long, value_name = "NAME", value_parser = config::header_name)]
    tenant_header: Option<HeaderName>,
    /// The scope of routes that name none; two gateways of different services on one database each need their own [default: http]
    #[arg(long, value_name = "NAME", value_parser = config::scope)]
    scope: Option<String>,
    /// What becomes of a request whose outcome nobody knows [default: hold]
    #[arg(long, value_name = "rerun|probe|hold", value_parser = stale())]
    stale: Option<Stale>,
    /// How long a claim holds without a heartbeat [default: 30s]
    #[arg(long, value_name = "DURATION", value_parser = config::lease)]
    lease: Option<Duration>,
    /// What a duplicate of a running request gets [default: refuse]
    #[arg(long, value_name = "wait|refuse|status", value_parser = in_progress())]
    in_progress: Option<InProgress>,
    /// A Redis or Valkey that keeps outcomes for all gateways
    #[arg(long, value_name = "redis://…")]
    cache: Option<RedisUrl>,
    /// The largest body of a guarded request [default: 1MiB]
    #[arg(long, value_name = "BYTES", value_parser = config::max_body)]
    max_body: Option<usize>,
    /// How long to wait at the start for a database that is away; until then nothing is listened to
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = config::duration)]
    wait_max: Duration,
}

fn stale() -> impl TypedValueParser<Value = Stale> {
    PossibleValuesParser::new(["rerun", "probe", "hold"]).map(|text| match text.as_str() {
        "rerun" => Stale::Rerun,
        "probe" => Stale::Probe,
        _ => Stale::Hold,
    })
}

fn in_progress() -> impl TypedValueParser<Value = InProgress> {
    PossibleValuesParser::new(["wait", "refuse", "status"]).map(|text| match text.as_str() {
        "wait" => InProgress::Wait,
        "status" => InProgress::Status,
        _ => InProgress::Refuse,
    })
}

/// Serves until told to stop.
pub async fn run(options: Options, path: Option<PathBuf>, url: &str) -> anyhow::Result<()> {
    let overrides = Overrides {
        listen: options.listen,
        upstream: options.upstream,
        require_key: options.require_key,
        strict_keys: options.strict_keys,
        tenant_header: options.tenant_header,
        scope: options.scope,
        stale: options.stale,
        lease: options.lease,
        in_progress: options.in_progress,
        cache: options.cache,
        body_bytes_max: options.max_body,
    };
    let mut stop = pin!(stop_signal()?);
    let reload = reload_signal()?;
    let ready = |address| say(&format!("ready http://{address}"));
    let source = ConfigSource { path, overrides };
    // A mistake is told before anything is waited for.
    source.load().map_err(|error| WrongUse(error.to_string()))?;
    if !database::is_there(url, options.wait_max, stop.as_mut()).await? {
        return Ok(());
    }
    match gateway::run(pgonce::Settings::from_url(url), source, ready, stop, reload).await {
        Err(GatewayError::Config(error)) => Err(WrongUse(error.to_string()).into()),
        other => Ok(other?),
    }
}

/// A message for each SIGHUP from now on; one is enough for several that come together.
fn reload_signal() -> std::io::Result<mpsc::Receiver<()>> {
    let mut hangup = signal(SignalKind::hangup())?;
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(async move {
        while hangup.recv().await.is_some() {
            if let Err(mpsc::error::TrySendError::Closed(())) = sender.try_send(()) {
                return;
            }
        }
    });
    Ok(receiver)
}
