//! The gateway, a service behind it and clients before it, all real processes, and PostgreSQL.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pgonce_testkit::programs::{Installed, Programs, finish};
use pgonce_testkit::{TestDb, eventually};
use serde::Deserialize;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, AsyncRead, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::common;

const CLIENT_LIMIT: Duration = Duration::from_secs(120);
const READY_LIMIT: Duration = Duration::from_secs(30);
const SIGKILL: i32 = 9;

#[derive(Debug, Clone, Copy)]
pub enum Language {
    Python,
    Node,
}

/// What a client was told about one of its orders.
#[derive(Debug, Clone, Deserialize)]
pub struct Told {
    pub key: String,
    pub status: u16,
    pub body: String,
    pub attempts: usize,
    pub replayed: bool,
}

/// A retrying client of `examples/`.
#[derive(Debug, Clone)]
pub struct Client {
    pub name: &'static str,
    installed: Installed,
    script: &'static str,
}

impl Client {
    pub async fn send(&self, rig: &Rig, prefix: &str, count: usize, clients: usize) -> Vec<Told> {
        self.clone().send_to(rig.gateway.url.clone(), prefix, count, clients).await
    }

    /// Sends `count` orders from each of `clients` at once, to the end.
    pub fn send_to(
        self,
        url: String,
        prefix: &str,
        count: usize,
        clients: usize,
    ) -> impl Future<Output = Vec<Told>> + use<> {
        let mut command = self.installed.script(self.script);
        command.args([&url, prefix, &count.to_string(), &clients.to_string()]);
        async move { serde_json::from_str(&finish(&mut command, CLIENT_LIMIT).await).unwrap() }
    }
}

/// A service's language, and all clients that can be run.
pub struct World {
    language: Language,
    service: Installed,
    pub clients: Vec<Client>,
}

impl World {
    pub async fn new(language: Language) -> Option<Self> {
        let programs = Programs::under(env!("CARGO_TARGET_TMPDIR"));
        let python = programs.python("gateway-python").await;
        let node = programs.node("gateway-node").await;
        let service = match language {
            Language::Python => python.clone()?,
            Language::Node => node.clone()?,
        };
        let client = |name, script, installed: &Option<Installed>| {
            installed.clone().map(|installed| Client { name, installed, script })
        };
        let clients = [
            client("requests", "retrying_requests.py", &python),
            client("httpx", "retrying_httpx.py", &python),
            client("fetch", "retrying_fetch.js", &node),
        ];
        Some(Self { language, service, clients: clients.into_iter().flatten().collect() })
    }

    /// A database, the service, and the gateway before it.
    pub async fn rig(&self, crash_at: Option<&str>, more: &[&str]) -> Rig {
        let db = TestDb::new().await;
        let dir = common::temp_dir();
        let port = free_port();
        let service = self.service.clone();
        let script = match self.language {
            Language::Python => "orders.py",
            Language::Node => "orders.js",
        };
        let url = db.direct_url().to_owned();
        let crash_at = crash_at.map(str::to_owned);
        let mark = dir.path().join("crashed");
        let service = Service::start(port, move || {
            let mut command = service.script(script);
            command.arg(port.to_string()).env("DATABASE_URL", &url).env_remove("CRASH_AT");
            if let Some(point) = &crash_at {
                command.env("CRASH_AT", point).env("CRASH_ONCE", &mark);
            }
            command
        })
        .await;
        let gateway = Gateway::start(&db, &service.url, more).await;
        Rig { db, service, gateway, dir }
    }

    /// All kinds of clients at once, each with its prefix of keys.
    pub async fn all_send(
        &self,
        rig: &Rig,
        count: usize,
        clients: usize,
        prefix: impl Fn(&Client) -> String,
    ) -> Vec<Told> {
        let url = &rig.gateway.url;
        let sending: Vec<_> = self
            .clients
            .iter()
            .map(|client| tokio::spawn(client.clone().send_to(url.clone(), &prefix(client), count, clients)))
            .collect();
        let mut told = Vec::new();
        for client in sending {
            told.extend(client.await.unwrap());
        }
        told
    }
}

pub struct Rig {
    pub db: TestDb,
    pub service: Service,
    pub gateway: Gateway,
    dir: TempDir,
}

impl Rig {
    /// There while the service does not crash (again).
    pub fn mark(&self) -> PathBuf {
        self.dir.path().join("crashed")
    }

    /// So often, so far. The answer may be here before the supervisor has noticed.
    pub async fn died(&self, times: usize) {
        let deaths = &self.service.deaths;
        eventually("the service dies", async || deaths.load(Ordering::SeqCst) >= times).await;
        assert_eq!(deaths.load(Ordering::SeqCst), times);
    }

    /// Every client was told 201 and the stored bytes; there is one order a key; nothing is left open.
    pub async fn one_order_each(&self, told: &[Told]) {
        let client = self.db.client().await;
        let rows =
            client.query("SELECT key, status, response_code, response_body FROM once.intents", &[]).await.unwrap();
        let stored: BTreeMap<String, String> = rows
            .iter()
            .map(|row| {
                let (key, status): (String, String) = (row.get(0), row.get(1));
                assert_eq!((status.as_str(), row.get::<_, i32>(2)), ("succeeded", 201), "{key}");
                (key, String::from_utf8(row.get(3)).unwrap())
            })
            .collect();
        for answer in told {
            assert_eq!((answer.status, Some(&answer.body)), (201, stored.get(&answer.key)), "{answer:?}");
        }
        let sql = "SELECT customer, count(*) FROM gateway_orders GROUP BY customer";
        let orders: BTreeMap<String, i64> =
            client.query(sql, &[]).await.unwrap().iter().map(|row| (row.get(0), row.get(1))).collect();
        let keys: BTreeSet<&String> = told.iter().map(|answer| &answer.key).collect();
        assert!(orders.keys().eq(keys.iter().copied()) && stored.keys().eq(keys), "{orders:?}");
        assert!(orders.values().all(|count| *count == 1), "more than one order: {orders:?}");
    }

    /// Two inserts were made (a rollback does not give a sequence's number back), and no transaction is open.
    pub async fn both_attempts_ended(&self) {
        let client = self.db.client().await;
        let sql = "SELECT (SELECT last_value = 2 FROM pg_sequences WHERE sequencename = 'gateway_orders_id_seq')
            AND NOT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database()
                AND pid <> pg_backend_pid() AND xact_start IS NOT NULL)";
        eventually("both attempts end", async || client.query_one(sql, &[]).await.unwrap().get(0)).await;
    }

    /// Until let go, the service gets as far as its INSERT, and waits there.
    pub async fn hold_inserts(&self) -> Held {
        let client = self.db.client().await;
        client.batch_execute("BEGIN; LOCK TABLE gateway_orders IN SHARE MODE").await.unwrap();
        Held(client)
    }
}

pub struct Held(tokio_postgres::Client);

impl Held {
    pub async fn let_go(self) {
        self.0.batch_execute("COMMIT").await.unwrap();
    }
}

/// A service that is started again whenever it is killed.
pub struct Service {
    pub url: String,
    deaths: Arc<AtomicUsize>,
    supervisor: JoinHandle<()>,
    said: Said,
}

impl Service {
    async fn start(port: u16, command: impl Fn() -> Command + Send + 'static) -> Self {
        let deaths = Arc::new(AtomicUsize::new(0));
        let said = Said::default();
        let (ready, is_ready) = oneshot::channel();
        let mut ready = Some(ready);
        let supervisor = tokio::spawn({
            let (deaths, said) = (Arc::clone(&deaths), said.clone());
            async move {
                loop {
                    let mut child = spawn(command());
                    said.until_ready(child.stderr.take().unwrap()).await;
                    if let Some(ready) = ready.take() {
                        let _ = ready.send(());
                    }
                    let status = child.wait().await.unwrap();
                    assert_eq!(status.signal(), Some(SIGKILL), "the service ended by itself");
                    deaths.fetch_add(1, Ordering::SeqCst);
                }
            }
        });
        is_ready.await.unwrap_or_else(|_| panic!("the service did not start: {said:?}"));
        Self { url: format!("http://127.0.0.1:{port}"), deaths, supervisor, said }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.supervisor.abort();
        self.said.tell("service");
    }
}

/// The real binary, which can be killed, and started again on the same port.
pub struct Gateway {
    pub url: String,
    arguments: Vec<String>,
    child: Child,
    said: Said,
}

impl Gateway {
    pub async fn start(db: &TestDb, upstream: &str, more: &[&str]) -> Self {
        let listen = format!("127.0.0.1:{}", free_port());
        let mut arguments = vec!["gateway", "--database-url", db.url(), "--listen", &listen, "--upstream", upstream];
        // A service that commits its own outcome is safe to run again: an attempt whose claim is over cannot commit.
        arguments.extend(["--require-key", "--lease", "2s", "--stale", "rerun"]);
        arguments.extend(more);
        let arguments: Vec<String> = arguments.into_iter().map(str::to_owned).collect();
        let said = Said::default();
        let (child, url) = Self::run(&arguments, &said).await;
        Self { url, arguments, child, said }
    }

    async fn run(arguments: &[String], said: &Said) -> (Child, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pgonce"));
        command.args(arguments).env_remove("DATABASE_URL").current_dir(std::env::temp_dir());
        let mut child = spawn(command);
        let ready = said.until_ready(child.stderr.take().unwrap()).await;
        let url = ready.split(' ').nth(1).unwrap_or_else(|| panic!("no address: {ready}")).to_owned();
        (child, url)
    }

    pub async fn kill_9(&mut self) {
        self.child.kill().await.unwrap();
    }

    pub async fn signal(&self, name: &str) {
        let pid = self.child.id().unwrap().to_string();
        finish(Command::new("kill").args(["-s", name, &pid]), READY_LIMIT).await;
    }

    pub async fn restart(&mut self) {
        let (child, url) = Self::run(&self.arguments, &self.said).await;
        assert_eq!(url, self.url);
        self.child = child;
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.said.tell("gateway");
    }
}

/// What a process said on stderr, told when the test fails.
#[derive(Debug, Clone, Default)]
struct Said(Arc<Mutex<Vec<String>>>);

impl Said {
    /// Reads until the line that says so, and returns it; what comes after it is read too.
    async fn until_ready(&self, stderr: impl AsyncRead + Send + Unpin + 'static) -> String {
        let mut lines = BufReader::new(stderr).lines();
        let ready = async {
            loop {
                let line = lines.next_line().await.unwrap().unwrap_or_else(|| panic!("ended: {self:?}"));
                if line.starts_with("ready ") {
                    return line;
                }
                self.0.lock().unwrap().push(line);
            }
        };
        let ready = tokio::time::timeout(READY_LIMIT, ready).await.unwrap_or_else(|_| panic!("not ready: {self:?}"));
        let said = self.clone();
        tokio::spawn(async move {
            while let Ok(Some(line)) = lines.next_line().await {
                said.0.lock().unwrap().push(line);
            }
        });
        ready
    }

    fn tell(&self, who: &str) {
        if std::thread::panicking() {
            for line in self.0.lock().unwrap().iter() {
                eprintln!("{who}: {line}");
            }
        }
    }
}

fn spawn(mut command: Command) -> Child {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true).spawn().unwrap()
}

/// A port for a server that will be killed and started again. Not one that the system hands out: while the
/// server is away, somebody's connection would get it.
fn free_port() -> u16 {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    loop {
        let offset = std::process::id() as usize * 101 + NEXT.fetch_add(1, Ordering::SeqCst);
        let port = u16::try_from(20_000 + offset % 12_000).unwrap();
        if std::net::TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}
