//! `pgonce up`: all of it on one machine. A private PostgreSQL, or yours; migrated, looked after, shown.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::{Pin, pin};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::Args;
use pgonce_cluster::{Binaries, Cluster, ClusterOptions, StopMode};
use pgonce_http::InProgress;
use pgonce_http::gateway::{self, config::ConfigSource, config::Overrides, config::Stale};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio_postgres::Client;

use crate::output::{Out, say};
use crate::verbs::{demo, shop};
use crate::{config, database};

/// `pgonce up`
#[derive(Debug, Args)]
pub struct Options {
    /// Send a stream of duplicated, raced and crashed commands, and show that effects = intents
    /// and, behind outbox, broker and inbox, deliveries = orders
    #[arg(long)]
    pub demo: bool,
    /// End the demo after so many seconds, with a summary; exit 1 if effects <> intents or deliveries <> orders
    #[arg(long, value_name = "N", requires = "demo", value_parser = clap::value_parser!(u64).range(1..))]
    demo_seconds: Option<u64>,
    /// Where the private PostgreSQL keeps everything [default: ./.pgonce]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Its port [default: that of the last start, or a free one]
    #[arg(long, value_name = "N")]
    port: Option<u16>,
    /// The port of the gateway before the demo shop [default: 8480, or a free one if that is taken]
    #[arg(long, value_name = "N")]
    gateway_port: Option<u16>,
}

/// Where the gateway listens if nobody says otherwise.
const GATEWAY_PORT: u16 = 8480;

const DATABASE: &str = "pgonce";
const RECOVER_EVERY: Duration = Duration::from_secs(5);
const PURGE_EVERY: Duration = Duration::from_secs(60);

/// The database that serves.
struct Served {
    url: String,
    /// What to type to get the URL into the environment; never with a password in it.
    export: String,
    /// Ours to stop, where we started it.
    cluster: Option<Cluster>,
}

/// Starts, serves until told to stop, stops.
pub async fn run(options: Options, url: Option<String>, config: config::Up, out: Out) -> anyhow::Result<()> {
    let dir = options.data_dir.clone().or(config.data_dir).unwrap_or_else(|| PathBuf::from(".pgonce"));
    let binaries = match url {
        None => {
            Some(tokio::task::spawn_blocking(|| Binaries::find_or_fetch(&cache_dir(), &mut |step| say(step))).await??)
        }
        Some(_) => None,
    };
    // From here on a signal does not end the process: whatever is started is stopped in order.
    let mut stop = pin!(stop_signal()?);
    let mut served = match (url, binaries) {
        (None, Some(binaries)) => match start_private(binaries, &dir, options.port.or(config.port)).await? {
            Start::Theirs(served) if !options.demo => {
                say(&format!("A server already runs on {}: {}", dir.display(), database::redacted(&served.url)));
                say(&try_this(&served));
                return Ok(());
            }
            Start::Theirs(served) | Start::Ours(served) => served,
        },
        (url, _) => Served {
            export: "export DATABASE_URL='…'   # the URL that you gave".into(),
            url: database::needed(url)?,
            cluster: None,
        },
    };
    let served_well = serve(&options, &dir, &mut served, stop.as_mut(), out).await;
    let stopped = stop_server(served).await;
    served_well.and(stopped)
}

enum Start {
    Ours(Served),
    /// Another `pgonce up` serves this directory.
    Theirs(Served),
}

async fn start_private(binaries: Binaries, dir: &Path, port: Option<u16>) -> anyhow::Result<Start> {
    say(&format!("Starting PostgreSQL {} in {} …", binaries.version(), dir.display()));
    let mut options = ClusterOptions::new(dir);
    options.port = port;
    let started = tokio::task::spawn_blocking(move || Cluster::start(&binaries, options)).await?;
    let dir = std::path::absolute(dir)?;
    match started {
        Ok(cluster) => {
            let url = cluster.url(DATABASE);
            create_database(&cluster.url("postgres")).await?;
            Ok(Start::Ours(Served { export: export(&dir, &url), url, cluster: Some(cluster) }))
        }
        Err(pgonce_cluster::Error::AlreadyRunning { url, .. }) => {
            let url = format!("{}/{DATABASE}", url.rsplit_once('/').map_or(url.as_str(), |(base, _)| base));
            Ok(Start::Theirs(Served { export: export(&dir, &url), url, cluster: None }))
        }
        Err(error) => Err(error.into()),
    }
}

/// Fetched server programs; root's own cache is closed to the account that runs the server.
fn cache_dir() -> PathBuf {
    let is_root = std::fs::metadata("/proc/self").is_ok_and(|meta| std::os::unix::fs::MetadataExt::uid(&meta) == 0);
    if is_root {
        return PathBuf::from("/var/cache/pgonce");
    }
    let base = std::env::var_os("XDG_CACHE_HOME").filter(|dir| !dir.is_empty()).map(PathBuf::from);
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
    base.or_else(home).unwrap_or_else(std::env::temp_dir).join("pgonce")
}

async fn create_database(admin_url: &str) -> anyhow::Result<()> {
    let admin = database::connect(admin_url).await?;
    let sql = "SELECT to_jsonb(EXISTS (SELECT 1 FROM pg_catalog.pg_database WHERE datname = 'pgonce'))";
    if database::json_row(&admin, sql, &[]).await? != serde_json::Value::Bool(true) {
        let made = admin.batch_execute("CREATE DATABASE pgonce TEMPLATE template0 ENCODING 'UTF8'").await;
        made.map_err(pgonce::Error::from).context("the database pgonce cannot be made")?;
    }
    Ok(())
}

/// The password stays in its file: the shell reads it there.
fn export(dir: &Path, url: &str) -> String {
    let password = dir.join("password");
    let shown = database::redacted(url);
    match shown.split_once('@').filter(|_| password.exists()) {
        Some((user, rest)) => {
            let file = password.display().to_string().replace('\'', r"'\''");
            format!("export DATABASE_URL=\"{user}:$(cat '{file}')@{rest}\"")
        }
        None => format!("export DATABASE_URL='{shown}'"),
    }
}

fn try_this(served: &Served) -> String {
    format!("Try:\n  {}\n  psql \"$DATABASE_URL\" -c 'TABLE once.scopes'\n  {} intents list", served.export, own_name())
}

/// How a shell finds this program: by its name, if that is on PATH, else where it is.
fn own_name() -> String {
    let own = std::env::current_exe().ok();
    let paths = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&paths).map(|dir| dir.join("pgonce")).find(|path| path.is_file());
    let canonical = |path: Option<PathBuf>| path.and_then(|path| path.canonicalize().ok());
    match own {
        Some(own) if canonical(on_path) != own.canonicalize().ok() => own.display().to_string(),
        _ => "pgonce".to_owned(),
    }
}

async fn serve(
    options: &Options,
    dir: &Path,
    served: &mut Served,
    stop: Pin<&mut impl Future<Output = ()>>,
    out: Out,
) -> anyhow::Result<()> {
    let mut client = database::connect(&served.url).await?;
    let report = pgonce::migrate::apply(&mut client, false).await?;
    drop(client);
    say(&match report.applied.is_empty() {
        true => "The schema once is up to date.".into(),
        false => format!("The schema once is there: {}.", report.applied.join(", ")),
    });
    say(&try_this(served));
    let (shop_stop, shop_stopped) = watch::channel(());
    let (gateway, address) = start_gateway(&served.url, options.gateway_port, shop_stopped).await?;
    say(&format!(
        "A shop behind the gateway: http://{address}/orders. Twice the same, then another payload with that key:"
    ));
    for (payload, comment) in
        [("tea", "201; again: the same answer, replayed"), ("coffee", "422: not what that key was for")]
    {
        say(&format!(
            "  curl -i http://{address}/orders -H 'Idempotency-Key: \"order-1\"' -d '{{\"item\":\"{payload}\"}}'   # {comment}"
        ));
    }
    say("Meanwhile: expired leases are recovered every 5 s, and what is past its window is purged every minute.");
    say("Ctrl-C stops it.");
    say(&format!("ready {}", database::redacted(&served.url)));
    let upkeep = tokio::spawn(look_after(served.url.clone()));
    let work = async {
        if options.demo {
            return demo::run(&served.url, dir, options.demo_seconds, stop, out).await;
        }
        stop.await;
        Ok(())
    };
    let ended = tokio::select! {
        died = server_died(&mut served.cluster), if served.cluster.is_some() => Err(died),
        done = work => done,
    };
    upkeep.abort();
    drop(shop_stop); // lets what runs come to its end
    let _ = gateway.await;
    ended
}

/// The gateway, in this process, before a shop that commits its outcomes with its orders. It ends with `stopped`'s sender.
async fn start_gateway(
    url: &str,
    port: Option<u16>,
    stopped: watch::Receiver<()>,
) -> anyhow::Result<(tokio::task::JoinHandle<()>, SocketAddr)> {
    let shop = shop::start(url).await?;
    // Tried and not looked at first: somebody may take it between the look and the start.
    match listen(url, shop, port.unwrap_or(GATEWAY_PORT), stopped.clone()).await {
        Err(_) if port.is_none() => listen(url, shop, 0, stopped).await,
        started => started,
    }
}

async fn listen(
    url: &str,
    shop: SocketAddr,
    port: u16,
    mut stopped: watch::Receiver<()>,
) -> anyhow::Result<(tokio::task::JoinHandle<()>, SocketAddr)> {
    let overrides = Overrides {
        listen: Some(SocketAddr::from(([127, 0, 0, 1], port))),
        upstream: Some(format!("http://{shop}").parse()?),
        in_progress: Some(InProgress::Wait),
        // The shop's outcome commits with its order: what has none has not happened, and may run.
        stale: Some(Stale::Rerun),
        ..Overrides::default()
    };
    let (ready, address) = tokio::sync::oneshot::channel();
    let settings = pgonce::Settings::from_url(url);
    let (_reload, reloads) = tokio::sync::mpsc::channel(1);
    let serving = tokio::spawn(async move {
        let stop = async move {
            let _ = stopped.changed().await;
        };
        let ready = move |address| {
            let _ = ready.send(address);
        };
        let source = ConfigSource { path: None, overrides };
        gateway::run(settings, source, ready, stop, reloads).await
    });
    match address.await {
        Ok(address) => Ok((tokio::spawn(async move { drop(serving.await) }), address)),
        Err(_) => match serving.await? {
            Err(error) => Err(error.into()),
            Ok(()) => anyhow::bail!("the gateway ended before it began"),
        },
    }
}

/// Comes back only when the server is gone without having been asked to.
async fn server_died(cluster: &mut Option<Cluster>) -> anyhow::Error {
    let Some(cluster) = cluster else { return anyhow::anyhow!("there is no private server") };
    while cluster.is_running() {
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    anyhow::anyhow!(
        "the server ended by itself; what was committed is safe, and pgonce up starts it again. Its log: {}",
        cluster.log_path().display()
    )
}

async fn stop_server(served: Served) -> anyhow::Result<()> {
    let Some(mut cluster) = served.cluster else { return Ok(()) };
    if !cluster.is_running() {
        return Ok(());
    }
    say("Stopping …");
    tokio::task::spawn_blocking(move || cluster.stop(StopMode::Fast)).await??;
    say("Stopped; the data stays for the next pgonce up.");
    Ok(())
}

/// Recovery and retention, as a deployment would schedule them.
async fn look_after(url: String) {
    let mut purged = Instant::now();
    let mut connected: Option<Client> = None;
    loop {
        tokio::time::sleep(RECOVER_EVERY).await;
        let client = match connected.take().filter(|client| !client.is_closed()) {
            Some(client) => client,
            None => match database::connect(&url).await {
                Ok(client) => client,
                Err(error) => {
                    tracing::warn!("not recovering: {}", crate::output::explain(&error));
                    continue;
                }
            },
        };
        let mut sql = "SELECT count(*) FROM once.recover(1000)".to_owned();
        if purged.elapsed() >= PURGE_EVERY {
            purged = Instant::now();
            sql.push_str(
                "; SELECT once.purge(10000); SELECT once.purge_inbox(10000); SELECT once.purge_imports(10000)",
            );
        }
        if let Err(error) = client.batch_execute(&sql).await {
            tracing::warn!(error = %pgonce::Error::from(error), "recovery or purge failed; tried again soon");
        }
        connected = Some(client);
    }
}

/// Turns true when somebody wants us to stop.
pub fn stop_watch() -> std::io::Result<watch::Receiver<bool>> {
    let (stopping, stop) = watch::channel(false);
    let signal = stop_signal()?;
    tokio::spawn(async move {
        signal.await;
        stopping.send_replace(true);
    });
    Ok(stop)
}

/// Resolves at the first SIGINT or SIGTERM from now on.
pub fn stop_signal() -> std::io::Result<impl Future<Output = ()>> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    })
}
