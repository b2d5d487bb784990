//! A database, a service, and gateways before it: processes of their own, to be killed and stopped.

use std::os::unix::process::ExitStatusExt as _;
use std::process::{ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pgonce_testkit::{TestDb, eventually};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, AsyncRead, BufReader};
use tokio::process::{Child, Command};
use tokio_postgres::{Client, NoTls};

use crate::book::{Book, SCOPE, WITNESS};
use crate::service::{self, Service};

const READY_LIMIT: Duration = Duration::from_secs(30);
const SIGKILL: i32 = 9;

/// One database with everything that a test needs in it.
pub struct Rig {
    pub url: String,
    pub book: Arc<Book>,
    dir: TempDir,
}

impl Rig {
    pub async fn new() -> Self {
        let db = TestDb::new().await;
        Self::on(db.direct_url()).await
    }

    /// On a database that has the schema and the table of effects.
    pub async fn on(url: &str) -> Self {
        let rig = Self { url: url.to_owned(), book: Arc::default(), dir: tempfile::tempdir().unwrap() };
        rig.client().await.batch_execute(&format!("{WITNESS};{}", service::SCHEMA)).await.unwrap();
        rig
    }

    /// A service in this process.
    pub async fn service(&self, options: service::Options) -> Service {
        Service::start(&self.url, options).await
    }

    /// A file of the test's own.
    pub fn path(&self, name: &str) -> std::path::PathBuf {
        self.dir.path().join(name)
    }

    /// A gateway before a service, by a configuration file (lines of its route, and sections) and flags.
    pub async fn gateway(&self, config: &Config<'_>) -> Gateway {
        Gateway::start(self, config).await
    }

    pub async fn client(&self) -> Client {
        let (client, connection) = tokio_postgres::connect(&self.url, NoTls).await.unwrap();
        tokio::spawn(connection);
        client
    }

    pub async fn judge(&self, waived: &[&str]) {
        self.book.judge(&self.client().await, waived).await;
    }

    pub async fn effects(&self, key: &str) -> i64 {
        let sql = "SELECT count(*) FROM public.effect WHERE key = $1";
        self.client().await.query_one(sql, &[&key]).await.unwrap().get(0)
    }

    /// The row's status.
    pub async fn status(&self, key: &str) -> String {
        let sql = "SELECT status FROM once.intents WHERE key = $1";
        self.client().await.query_one(sql, &[&key]).await.unwrap().get(0)
    }

    /// All of the row: equal before and after means that nothing was written.
    pub async fn row(&self, key: &str) -> String {
        let sql = "SELECT i::text FROM once.intent i WHERE key = $1";
        self.client().await.query_one(sql, &[&key]).await.unwrap().get(0)
    }

    /// Until the lease has ended by the database's clock.
    pub async fn lease_over(&self, key: &str) {
        let client = self.client().await;
        eventually("the lease ends", async || {
            let sql = "SELECT locked_until <= once.clock() FROM once.intents WHERE key = $1 AND status = 'processing'";
            client.query_one(sql, &[&key]).await.unwrap().get(0)
        })
        .await;
    }

    /// Decides as an operator would who looked whether the effect is there.
    pub async fn settle(&self, key: &str) {
        let done = self.effects(key).await > 0;
        let (verdict, code, body) =
            if done { ("succeeded", Some(201), Some(b"settled".as_slice())) } else { ("retry", None, None) };
        let sql = "SELECT once.settle($1, $2, $3, 'test', 'looked', p_response_code => $4, p_response_body => $5)";
        self.client().await.execute(sql, &[&SCOPE, &key, &verdict, &code, &body]).await.unwrap();
    }
}

/// How a gateway is run.
#[derive(Debug, Clone, Default)]
pub struct Config<'a> {
    pub upstream: String,
    /// Lines of the route for everything.
    pub route: &'a str,
    /// Lines of the upstream.
    pub of_upstream: &'a str,
    /// Whole sections.
    pub sections: &'a str,
    pub flags: Vec<&'a str>,
    pub env: Vec<(&'a str, &'a str)>,
}

impl<'a> Config<'a> {
    pub fn new(service: std::net::SocketAddr, route: &'a str) -> Self {
        Self { upstream: format!("http://{service}"), route, ..Self::default() }
    }

    pub fn env(&self, name: &'a str, value: &'a str) -> Self {
        let mut config = self.clone();
        config.env.push((name, value));
        config
    }
}

/// The real binary.
#[derive(Debug)]
pub struct Gateway {
    pub address: String,
    child: Child,
    _said: Said,
}

impl Gateway {
    async fn start(rig: &Rig, config: &Config<'_>) -> Self {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let Config { upstream, route, of_upstream, sections, flags, env } = config;
        let path = rig.path(&format!("pgonce-{}.toml", NUMBER.fetch_add(1, Ordering::SeqCst)));
        let file = format!("[gateway.upstream]\n{of_upstream}\n[[gateway.route]]\npath = \"*\"\n{route}\n{sections}\n");
        std::fs::write(&path, file).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_pgonce"));
        command.arg("--config").arg(&path).args(["gateway", "--database-url", &rig.url, "--require-key"]);
        command.args(["--listen", "127.0.0.1:0", "--upstream", upstream]).args(flags).envs(env.iter().copied());
        command.env_remove("DATABASE_URL").env_remove("RUST_LOG").current_dir(rig.dir.path());
        let said = Said::new("gateway");
        let mut child = spawn(command);
        let ready = said.until_ready(child.stderr.take().unwrap()).await;
        let address = ready.strip_prefix("http://").unwrap_or_else(|| panic!("no address: {ready}")).to_owned();
        Self { address, child, _said: said }
    }

    /// Waits for the SIGKILL that it was armed with: one that never fires fails the test.
    pub async fn killed(&mut self) {
        killed(&mut self.child).await;
    }

    /// Waits until it has stopped itself.
    pub async fn stopped(&self) {
        let stat = format!("/proc/{}/stat", self.child.id().unwrap());
        eventually("the gateway is stopped", async || {
            let stat = std::fs::read_to_string(&stat).unwrap();
            stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('T'))
        })
        .await;
    }

    pub async fn signal(&self, signal: &str) {
        let pid = self.child.id().unwrap().to_string();
        assert!(Command::new("kill").args([signal, &pid]).status().await.unwrap().success());
    }

    /// Waits for its end.
    pub async fn ended(&mut self) -> ExitStatus {
        tokio::time::timeout(READY_LIMIT, self.child.wait()).await.expect("it ends").unwrap()
    }

    /// The value of a metric, all labels that contain these summed up.
    pub async fn metric(&self, name: &str, labels: &[&str]) -> f64 {
        let got = crate::http::send(&self.address, "GET", "/_pgonce/metrics", &[], "").await;
        let crate::http::Got::Reply(page) = got else { panic!("no metrics: {got:?}") };
        let text = page.text();
        let lines = text.lines().filter(|line| line.starts_with(name) && labels.iter().all(|one| line.contains(one)));
        lines.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
    }
}

pub async fn killed(child: &mut Child) {
    let status = tokio::time::timeout(READY_LIMIT, child.wait()).await.expect("armed, and never fired").unwrap();
    assert_eq!(status.signal(), Some(SIGKILL), "ended by itself: {status}");
}

/// What a process said on stderr, told when the test fails.
#[derive(Debug)]
pub struct Said {
    who: &'static str,
    lines: Arc<Mutex<Vec<String>>>,
}

impl Said {
    pub fn new(who: &'static str) -> Self {
        Self { who, lines: Arc::default() }
    }

    /// Reads until the line that says `ready`, and returns the rest of it; what comes after it is read too.
    pub async fn until_ready(&self, stderr: impl AsyncRead + Send + Unpin + 'static) -> String {
        let mut lines = BufReader::new(stderr).lines();
        let ready = async {
            loop {
                let line = lines.next_line().await.unwrap().unwrap_or_else(|| panic!("ended: {self:?}"));
                match line.strip_prefix("ready ") {
                    Some(rest) => return rest.to_owned(),
                    None => self.lines.lock().unwrap().push(line),
                }
            }
        };
        let ready = tokio::time::timeout(READY_LIMIT, ready).await.unwrap_or_else(|_| panic!("not ready: {self:?}"));
        let said = Arc::clone(&self.lines);
        tokio::spawn(async move {
            while let Ok(Some(line)) = lines.next_line().await {
                said.lock().unwrap().push(line);
            }
        });
        ready
    }
}

impl Drop for Said {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for line in self.lines.lock().unwrap().iter() {
                eprintln!("{}: {line}", self.who);
            }
        }
    }
}

pub fn spawn(mut command: Command) -> Child {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true).spawn().unwrap()
}

/// A port for a server that will be killed and started again. Not one that the system hands out: while the
/// server is away, somebody's connection would get it.
pub fn free_port() -> u16 {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    loop {
        let offset = std::process::id() as usize * 101 + NEXT.fetch_add(1, Ordering::SeqCst);
        let port = u16::try_from(20_000 + offset % 12_000).unwrap();
        if std::net::TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}
