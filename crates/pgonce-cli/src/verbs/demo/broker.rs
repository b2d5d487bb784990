//! The demo's own NATS: on a free port of this machine, with its store beside the demo's data; killed and started again on the
//! same store, and gone when we are.

use std::fs::File;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use async_nats::jetstream::{self, stream};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};

/// The stream that messages go through.
pub const STREAM: &str = "PGONCE_DEMO";
/// Names the server, where PATH does not lead to it or leads to another one.
const PROGRAM: &str = "PGONCE_NATS_SERVER";
const START_MAX: Duration = Duration::from_secs(10);
/// The server runs as long as the guard's standard input is open, which ends with us, however we end. It is in a
/// process group of its own: Ctrl-C is for us to heed.
const GUARD: &str = r#""$@" </dev/null & read -r _; kill -9 $!; wait"#;

/// A nats-server with JetStream. Dropping it kills the server.
#[derive(Debug)]
pub struct Broker {
    program: PathBuf,
    store: PathBuf,
    /// Locked, and the server's output: held by both of us, so that nobody else uses the store before both are gone.
    log: File,
    port: u16,
    guard: Option<Child>,
}

/// The server's program, where there is one. Debian's is where only root's PATH looks.
pub fn find() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os(PROGRAM) {
        return Some(PathBuf::from(named)).filter(|path| path.is_file());
    }
    let paths = std::env::var_os("PATH").unwrap_or_default();
    let dirs = std::env::split_paths(&paths).chain([PathBuf::from("/usr/sbin")]);
    dirs.map(|dir| dir.join("nats-server")).find(|path| path.is_file())
}

impl Broker {
    /// Starts one, with the stream, on what its predecessor stored.
    pub async fn start(program: PathBuf, store: PathBuf) -> anyhow::Result<Self> {
        std::fs::create_dir_all(&store).with_context(|| format!("{} cannot be made", store.display()))?;
        let log = locked(&store).await?;
        let mut broker = Self { program, store, log, port: 0, guard: None };
        // The port was free when it was looked for; somebody may be faster.
        for _ in 0..3 {
            broker.port = TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port();
            if broker.run().await? {
                broker.make_stream().await?;
                return Ok(broker);
            }
        }
        anyhow::bail!("nats-server does not answer; its log: {}", log_path(&broker.store).display())
    }

    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    /// SIGKILL, and again on the same port and the same store.
    pub async fn crash(&mut self) -> anyhow::Result<()> {
        self.kill().await;
        let deadline = Instant::now() + START_MAX;
        while !self.run().await? {
            anyhow::ensure!(Instant::now() < deadline, "nats-server did not start again");
        }
        Ok(())
    }

    /// Whether the consumer has got and acknowledged everything.
    pub async fn is_idle(&self, consumer: &str) -> anyhow::Result<bool> {
        let context = jetstream::new(async_nats::connect(self.url()).await?);
        let info = context.get_stream(STREAM).await?.consumer_info(consumer).await?;
        Ok(info.num_pending == 0 && info.num_ack_pending == 0)
    }

    /// Nothing is left for the next demo. A server that was killed may still have what was acknowledged before, and would
    /// deliver it when the inbox does not know it any more.
    pub async fn clear(&self) -> anyhow::Result<()> {
        let context = jetstream::new(async_nats::connect(self.url()).await?);
        context.get_stream(STREAM).await?.purge().await?;
        Ok(())
    }

    async fn kill(&mut self) {
        if let Some(mut guard) = self.guard.take() {
            drop(guard.stdin.take());
            let _ = guard.wait().await;
        }
    }

    /// Starts the server; whether it answers, and is ours.
    async fn run(&mut self) -> anyhow::Result<bool> {
        let name = format!("pgonce-{}", uuid::Uuid::new_v4().simple());
        let mut command = Command::new("/bin/sh");
        command.args(["-c", GUARD, "sh"]).arg(&self.program);
        command.args(["-a", "127.0.0.1", "-p", &self.port.to_string(), "-n", &name, "-js", "-sd"]).arg(&self.store);
        command.process_group(0).stdin(Stdio::piped());
        command.stdout(self.log.try_clone()?).stderr(self.log.try_clone()?);
        self.guard = Some(command.spawn().context("/bin/sh cannot be started")?);
        let deadline = Instant::now() + START_MAX;
        while Instant::now() < deadline {
            match greeting(self.port).await {
                Some(greeting) if greeting["server_name"] == *name => return Ok(true),
                // Somebody else's server has the port.
                Some(_) => break,
                None => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
        self.kill().await;
        Ok(false)
    }

    /// A work queue: what was acknowledged leaves the store.
    async fn make_stream(&self) -> anyhow::Result<()> {
        let context = jetstream::new(async_nats::connect(self.url()).await?);
        let config = stream::Config {
            name: STREAM.into(),
            subjects: vec![super::flow::TOPIC.into()],
            retention: stream::RetentionPolicy::WorkQueue,
            ..stream::Config::default()
        };
        // JetStream may still be reading its store when the server already answers.
        let deadline = Instant::now() + START_MAX;
        loop {
            match context.get_or_create_stream(config.clone()).await {
                Ok(_) => return Ok(()),
                Err(error) if Instant::now() > deadline => return Err(error.into()),
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    }
}

fn log_path(store: &Path) -> PathBuf {
    store.join("nats-server.log")
}

/// A server whose owner was killed a moment ago is waited for.
async fn locked(store: &Path) -> anyhow::Result<File> {
    let path = log_path(store);
    let log = File::options().append(true).create(true).open(&path)?;
    let deadline = Instant::now() + START_MAX;
    while let Err(error) = log.try_lock() {
        anyhow::ensure!(Instant::now() < deadline, "{} is in use: {error}", path.display());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    log.set_len(0)?;
    Ok(log)
}

/// What a server says first: `INFO {…}`.
async fn greeting(port: u16) -> Option<serde_json::Value> {
    let read = async {
        let mut line = String::new();
        let stream = TcpStream::connect(("127.0.0.1", port)).await.ok()?;
        BufReader::new(stream).read_line(&mut line).await.ok()?;
        serde_json::from_str(line.strip_prefix("INFO ")?).ok()
    };
    tokio::time::timeout(Duration::from_secs(1), read).await.ok()?
}
