//! Services in Python and Node behind the real gateway, killed at every point, with the retrying clients of
//! requests, httpx and fetch before it: whatever dies, there is one order a key, and every client gets its bytes.
//!
//! The services commit order and outcome together (`examples/gateway-python`, `examples/gateway-node`), so
//! nothing is ever uncertain, and `--stale rerun` runs nothing twice.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests stop loudly")]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pgonce_testkit::programs::{Installed, Programs, finish};
use pgonce_testkit::{TestDb, eventually, lock_waiters};
use serde::Deserialize;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

const CLIENT_LIMIT: Duration = Duration::from_secs(120);
const READY_LIMIT: Duration = Duration::from_secs(30);
const SIGKILL: i32 = 9;

/// Where a service dies, and whether its transaction is committed by then.
const CRASH_POINTS: [(&str, bool); 6] = [
    ("before_effect", false),
    ("after_effect", false),
    ("after_succeed", false),
    ("after_commit", true),
    ("before_answer", true),
    ("in_answer", true),
];

#[derive(Debug, Clone, Copy)]
enum Language {
    Python,
    Node,
}

#[tokio::test(flavor = "multi_thread")]
async fn python_service_killed_at_every_point() {
    service_killed_at_every_point(Language::Python).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn node_service_killed_at_every_point() {
    service_killed_at_every_point(Language::Node).await;
}

async fn service_killed_at_every_point(language: Language) {
    let Some(world) = World::new(language).await else { return };
    for (number, (point, committed)) in CRASH_POINTS.into_iter().enumerate() {
        let rig = world.rig(Some(point), &[]).await;
        // Alone first: what the crash does to the request that it hits.
        let client = &world.clients[number % world.clients.len()];
        let alone = client.send(&rig, "alone", 1, 1).await;
        assert_eq!(rig.deaths(), 1, "{point}: did not die");
        // Committed: the gateway finds the answer in the row, and the client never learns that anything happened.
        // Not committed: it did not happen, and the client is told so, and comes again.
        assert_eq!(alone[0].attempts == 1, committed, "{point}: {alone:?}");
        // Then among others.
        std::fs::remove_file(rig.mark()).unwrap();
        let crowd = world.all_send(&rig, 3, 1, |client| client.name.to_owned()).await;
        assert_eq!(rig.deaths(), 2, "{point}: did not die a second time");
        rig.one_order_each(&[alone, crowd].concat()).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn python_service_commits_after_the_gateway_died() {
    service_commits_after_the_gateway_died(Language::Python).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn node_service_commits_after_the_gateway_died() {
    service_commits_after_the_gateway_died(Language::Node).await;
}

/// The gateway is killed while the service is at it. The service finishes: that is the outcome.
async fn service_commits_after_the_gateway_died(language: Language) {
    let Some(world) = World::new(language).await else { return };
    for client in &world.clients {
        let mut rig = world.rig(None, &[]).await;
        let held = rig.hold_inserts().await;
        let url = rig.gateway.url.clone();
        let sending = tokio::spawn(client.clone().send_to(url, "cut", 1, 1));
        lock_waiters(&rig.db.client().await, 1).await;
        rig.gateway.kill_9().await;
        held.let_go().await;
        let db = rig.db.client().await;
        eventually("the service commits", async || {
            db.query_one("SELECT count(*) FROM gateway_orders", &[]).await.unwrap().get::<_, i64>(0) == 1
        })
        .await;
        rig.gateway.restart().await;
        let told = sending.await.unwrap();
        assert!(told[0].attempts > 1 && told[0].replayed, "{}: {told:?}", client.name);
        rig.one_order_each(&told).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn python_service_is_fenced_when_another_gateway_took_over() {
    service_is_fenced_when_another_gateway_took_over(Language::Python).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn node_service_is_fenced_when_another_gateway_took_over() {
    service_is_fenced_when_another_gateway_took_over(Language::Node).await;
}

/// The gateway is killed while the service is at it; the lease ends, and the next gateway sends the retry to
/// the service as well. Both attempts insert. The first one's claim is over, so it rolls back.
async fn service_is_fenced_when_another_gateway_took_over(language: Language) {
    let Some(world) = World::new(language).await else { return };
    let client = &world.clients[0];
    let mut rig = world.rig(None, &[]).await;
    let held = rig.hold_inserts().await;
    let url = rig.gateway.url.clone();
    let sending = tokio::spawn(client.clone().send_to(url, "twice", 1, 1));
    let db = rig.db.client().await;
    lock_waiters(&db, 1).await;
    rig.gateway.kill_9().await;
    rig.gateway.restart().await;
    lock_waiters(&db, 2).await;
    held.let_go().await;
    let told = sending.await.unwrap();
    rig.both_attempts_ended().await;
    rig.one_order_each(&told).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn gateway_sleeps_past_its_lease_before_python() {
    gateway_sleeps_past_its_lease(Language::Python).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn gateway_sleeps_past_its_lease_before_node() {
    gateway_sleeps_past_its_lease(Language::Node).await;
}

/// The gateway is stopped while the service is at it; another one takes over. The first wakes to an answer under
/// a claim that is over: what its client gets is the other's.
async fn gateway_sleeps_past_its_lease(language: Language) {
    let Some(world) = World::new(language).await else { return };
    let (first, second) = (&world.clients[0], world.clients.last().unwrap());
    let rig = world.rig(None, &[]).await;
    let other = Gateway::start(&rig.db, &rig.service.url, &[]).await;
    let held = rig.hold_inserts().await;
    let waits = tokio::spawn(first.clone().send_to(rig.gateway.url.clone(), "slept", 1, 1));
    let db = rig.db.client().await;
    lock_waiters(&db, 1).await;
    rig.gateway.signal("STOP").await;
    let takes_over = tokio::spawn(second.clone().send_to(other.url.clone(), "slept", 1, 1));
    lock_waiters(&db, 2).await;
    held.let_go().await;
    let mut told = takes_over.await.unwrap();
    rig.gateway.signal("CONT").await;
    told.extend(waits.await.unwrap());
    rig.both_attempts_ended().await;
    rig.one_order_each(&told).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn storm_on_python() {
    storm(Language::Python).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn storm_on_node() {
    storm(Language::Node).await;
}

/// Twenty clients of each kind, all with the same fifty keys, all at once.
async fn storm(language: Language) {
    const CLIENTS: usize = 20;
    const KEYS: usize = 50;
    let Some(world) = World::new(language).await else { return };
    let rig = world.rig(None, &["--in-progress", "wait"]).await;
    let began = std::time::Instant::now();
    let told = world.all_send(&rig, KEYS, CLIENTS, |_| "storm".to_owned()).await;
    let took = began.elapsed();
    assert_eq!(told.len(), KEYS * CLIENTS * world.clients.len());
    rig.one_order_each(&told).await;
    let mut executed = BTreeMap::<&str, usize>::new();
    for answer in &told {
        *executed.entry(&answer.key).or_default() += usize::from(!answer.replayed);
    }
    assert!(executed.values().all(|count| *count == 1), "one answer a key is not a replay: {executed:?}");
    let attempts: usize = told.iter().map(|answer| answer.attempts).sum();
    eprintln!("{language:?}: {} answers, {attempts} attempts in {took:?}", told.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn python_service_gets_names_as_they_are() {
    service_gets_names_as_they_are(Language::Python).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn node_service_gets_names_as_they_are() {
    service_gets_names_as_they_are(Language::Node).await;
}

/// A tenant in UTF-8, a key with all that a quoted string can have: the service completes that very intent.
async fn service_gets_names_as_they_are(language: Language) {
    let Some(world) = World::new(language).await else { return };
    let rig = world.rig(None, &["--tenant-header", "x-tenant"]).await;
    let headers = [("x-tenant", "Zoë & Søn"), ("idempotency-key", r#""a b, \\ \"c\"; %20""#)];
    let first = post(&rig.gateway.url, &headers).await;
    assert!(first.starts_with("HTTP/1.1 201 "), "{first}");
    let again = post(&rig.gateway.url, &headers).await;
    assert!(again.contains("idempotency-replayed: true"), "{again}");
    assert_eq!(first.split("\r\n\r\n").nth(1), again.split("\r\n\r\n").nth(1));
    let client = rig.db.client().await;
    let sql = "SELECT i.key FROM once.intents i JOIN gateway_orders o USING (tenant) WHERE i.status = 'succeeded' AND tenant = 'Zoë & Søn'";
    let keys: Vec<String> = client.query(sql, &[]).await.unwrap().iter().map(|row| row.get(0)).collect();
    assert_eq!(keys, [r#"a b, \ "c"; %20"#], "one order, of one intent");
    // Called directly, it is a service like any other: nobody deduplicates.
    for _ in 0..2 {
        let direct = post(&rig.service.url, &headers).await;
        assert!(direct.starts_with("HTTP/1.1 201 "), "{direct}");
    }
    // A claim that was made up completes nothing.
    let made_up =
        [("pgonce-claim", "00000000-0000-4000-8000-000000000000"), ("pgonce-key", "k"), ("pgonce-scope", "s")];
    let refused = post(&rig.service.url, &made_up).await;
    assert!(refused.starts_with("HTTP/1.1 409 "), "{refused}");
    assert_eq!(client.query("SELECT FROM gateway_orders", &[]).await.unwrap().len(), 3);
}

/// One order, sent once, on a connection of its own: the whole response.
async fn post(url: &str, headers: &[(&str, &str)]) -> String {
    let address = url.strip_prefix("http://").unwrap();
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let body = r#"{"customer":"c-1","amount":5}"#;
    let mut request =
        format!("POST /orders HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\ncontent-length: {}\r\n", body.len());
    for (name, value) in headers {
        request.push_str(&format!("{name}: {value}\r\n"));
    }
    stream.write_all(format!("{request}\r\n{body}").as_bytes()).await.unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).await.unwrap();
    response
}

/// What a client was told about one of its orders.
#[derive(Debug, Clone, Deserialize)]
struct Told {
    key: String,
    status: u16,
    body: String,
    attempts: usize,
    replayed: bool,
}

/// A retrying client of `examples/`.
#[derive(Debug, Clone)]
struct Client {
    name: &'static str,
    installed: Installed,
    script: &'static str,
}

impl Client {
    async fn send(&self, rig: &Rig, prefix: &str, count: usize, clients: usize) -> Vec<Told> {
        self.clone().send_to(rig.gateway.url.clone(), prefix, count, clients).await
    }

    /// Sends `count` orders from each of `clients` at once, to the end.
    fn send_to(
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
struct World {
    language: Language,
    service: Installed,
    clients: Vec<Client>,
}

impl World {
    async fn new(language: Language) -> Option<Self> {
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
    async fn rig(&self, crash_at: Option<&str>, more: &[&str]) -> Rig {
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
    async fn all_send(&self, rig: &Rig, count: usize, clients: usize, prefix: impl Fn(&Client) -> String) -> Vec<Told> {
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

struct Rig {
    db: TestDb,
    service: Service,
    gateway: Gateway,
    dir: TempDir,
}

impl Rig {
    /// There while the service does not crash (again).
    fn mark(&self) -> PathBuf {
        self.dir.path().join("crashed")
    }

    fn deaths(&self) -> usize {
        self.service.deaths.load(Ordering::SeqCst)
    }

    /// Every client was told 201 and the stored bytes; there is one order a key; nothing is left open.
    async fn one_order_each(&self, told: &[Told]) {
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
    async fn both_attempts_ended(&self) {
        let client = self.db.client().await;
        let sql = "SELECT (SELECT last_value = 2 FROM pg_sequences WHERE sequencename = 'gateway_orders_id_seq')
            AND NOT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database()
                AND pid <> pg_backend_pid() AND xact_start IS NOT NULL)";
        eventually("both attempts end", async || client.query_one(sql, &[]).await.unwrap().get(0)).await;
    }

    /// Until let go, the service gets as far as its INSERT, and waits there.
    async fn hold_inserts(&self) -> Held {
        let client = self.db.client().await;
        client.batch_execute("BEGIN; LOCK TABLE gateway_orders IN SHARE MODE").await.unwrap();
        Held(client)
    }
}

struct Held(tokio_postgres::Client);

impl Held {
    async fn let_go(self) {
        self.0.batch_execute("COMMIT").await.unwrap();
    }
}

/// A service that is started again whenever it is killed.
struct Service {
    url: String,
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
struct Gateway {
    url: String,
    arguments: Vec<String>,
    child: Child,
    said: Said,
}

impl Gateway {
    async fn start(db: &TestDb, upstream: &str, more: &[&str]) -> Self {
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

    async fn kill_9(&mut self) {
        self.child.kill().await.unwrap();
    }

    async fn signal(&self, name: &str) {
        let pid = self.child.id().unwrap().to_string();
        finish(Command::new("kill").args(["-s", name, &pid]), READY_LIMIT).await;
    }

    async fn restart(&mut self) {
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
