//! A shop with its database, the provider's process and whoever restarts it, the receiver of webhooks, and `pgonce`.

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pgonce_testkit::TestDb;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpListener;
use tokio_postgres::Client;

use crate::provider;

/// What a busy machine may take.
const LIMIT: Duration = Duration::from_secs(100);

const SHOP: &str = "CREATE SCHEMA app; GRANT USAGE ON SCHEMA app TO PUBLIC;
    CREATE TABLE app.settled (at bigint GENERATED ALWAYS AS IDENTITY, call_id uuid, verdict text);
    CREATE FUNCTION app.on_settled(p_id uuid, p_verdict text, p_reference text) RETURNS void LANGUAGE sql SECURITY DEFINER AS
        $$ INSERT INTO app.settled (call_id, verdict) VALUES (p_id, p_verdict) $$";

pub struct Rig {
    pub db: TestDb,
    pub client: Client,
    pub books: PathBuf,
    running: Arc<AtomicBool>,
    _dir: tempfile::TempDir,
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.running.store(false, Ordering::SeqCst);
    }
}

impl Rig {
    /// With a provider that knows a call by its key, or charges for every request.
    pub async fn new(knows_keys: bool, policy: &str) -> Self {
        let db = TestDb::new().await;
        let client = db.client().await;
        client.batch_execute(SHOP).await.unwrap();
        let dir = crate::common::temp_dir();
        let (port, books) = (free_port(), dir.path().join("books"));
        let mut policy: serde_json::Value = serde_json::from_str(policy).unwrap();
        policy["base_url"] = format!("http://127.0.0.1:{port}/v1").into();
        policy["on_settled"] = "app.on_settled".into();
        client.execute("SELECT once.define_provider('bank', $1)", &[&policy]).await.unwrap();
        let running = Arc::new(AtomicBool::new(true));
        let hook = receive(db.client().await).await;
        keep_alive(port, &books, hook, knows_keys, &running).await;
        Self { db, client, books, running, _dir: dir }
    }

    /// So many charges, each with its fault.
    pub async fn charge(&self, faults: &[&str]) {
        for (place, fault) in faults.iter().enumerate() {
            let sql =
                "SELECT once.call('bank', 'charge', '/charges', jsonb_build_object('amount', 7, 'fault', $1::text),
                p_scope => 'pay', p_key => $2)";
            self.client.query_one(sql, &[fault, &format!("{place} {fault}")]).await.unwrap();
        }
    }

    pub fn reconcile(&self) -> Run {
        Run::new(self.db.direct_url(), &["reconcile", "--allow-private", "--poll", "20ms", "--at-once", "8"])
    }

    pub async fn number(&self, sql: &str) -> i64 {
        self.client.query_one(sql, &[]).await.unwrap_or_else(|error| panic!("{sql}: {error:?}")).get(0)
    }

    pub async fn open(&self) -> i64 {
        self.number("SELECT coalesce(sum(calls), 0)::bigint FROM once.calls_open WHERE state <> 'escalated'").await
    }

    pub async fn until_settled(&self) {
        let deadline = Instant::now() + LIMIT;
        while self.open().await > 0 {
            if Instant::now() > deadline {
                let sql = "SELECT string_agg(concat_ws(' ', key, state, attempts, asked, worker, leased_until, next_at, last_note), E'\\n'), once.clock()::text
                    FROM once.calls WHERE state NOT IN ('confirmed', 'failed')";
                let row = self.client.query_one(sql, &[]).await.unwrap();
                panic!("not settled at {}: {}", row.get::<_, &str>(1), row.get::<_, &str>(0));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// What the provider has done: how often each key was charged.
    pub fn charged(&self) -> BTreeMap<String, usize> {
        let mut charged = BTreeMap::new();
        for entry in provider::books(&self.books) {
            if entry["status"] == "succeeded" {
                *charged.entry(entry["key"].as_str().unwrap().to_owned()).or_default() += 1;
            }
        }
        charged
    }

    /// A person looks into the provider's books, and settles what contradicted itself by them.
    pub async fn settle_escalated(&self) -> usize {
        let charged = self.charged();
        let escalated =
            self.client.query("SELECT id::text FROM once.calls WHERE state = 'escalated'", &[]).await.unwrap();
        for row in &escalated {
            let id: String = row.get(0);
            let verdict = if charged.contains_key(&id) { "confirmed" } else { "failed" };
            let args = ["calls", "settle", &id, "--verdict", verdict, "--reason", "their books say so"];
            crate::common::pgonce(self.db.direct_url(), &args).done();
        }
        escalated.len()
    }

    /// The provider's books are ours: what is confirmed was charged once, what failed never; the shop heard each verdict.
    pub async fn judge(&self, count: usize) {
        let charged = self.charged();
        let sql = "SELECT c.id::text, c.state, array(SELECT s.verdict FROM app.settled s WHERE s.call_id = c.id ORDER BY s.at),
            c.contradicted, c.path || ' ' || c.key FROM once.calls c";
        let rows = self.client.query(sql, &[]).await.unwrap();
        assert_eq!(rows.len(), count);
        let mut wrong = Vec::new();
        for row in &rows {
            let (id, state, heard): (String, String, Vec<String>) = (row.get(0), row.get(1), row.get(2));
            let times = charged.get(&id).copied().unwrap_or(0);
            let is_right = match state.as_str() {
                "confirmed" => times == 1,
                "failed" => times == 0,
                _ => false,
            };
            // One verdict, and a second one only where a person changed it.
            let is_heard = heard.last() == Some(&state) && (heard.len() == 1 || row.get::<_, bool>(3));
            if !is_right || !is_heard {
                let said = "SELECT coalesce(string_agg(concat_ws(' ', to_char(at, 'MI:SS.MS'), kind, source, verdict, state, code, note), '; ' ORDER BY id), '')
                    FROM once.calls_evidence WHERE call_id = $1::text::uuid";
                let said: String = self.client.query_one(said, &[&id]).await.unwrap().get(0);
                wrong.push(format!(
                    "{} is {state}, charged {times} times, heard {heard:?}: {said}",
                    row.get::<_, &str>(4)
                ));
            }
        }
        assert!(wrong.is_empty(), "the books differ:\n{}", wrong.join("\n"));
        assert_eq!(charged.values().sum::<usize>(), charged.len(), "nobody was charged twice");
    }
}

/// Starts the provider, and again whenever it was killed.
async fn keep_alive(port: u16, books: &std::path::Path, hook: u16, knows_keys: bool, running: &Arc<AtomicBool>) {
    let (books, running) = (books.to_owned(), Arc::clone(running));
    let start = move || -> Child {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "provider::in_a_process_of_its_own", "--ignored", "--nocapture"]);
        command
            .env("PROVIDER_PORT", port.to_string())
            .env("PROVIDER_BOOKS", &books)
            .env("PROVIDER_HOOK", hook.to_string());
        if knows_keys {
            command.env("PROVIDER_KNOWS_KEYS", "1");
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    };
    std::thread::spawn(move || {
        while running.load(Ordering::SeqCst) {
            let mut child = start();
            while running.load(Ordering::SeqCst) && child.try_wait().unwrap().is_none() {
                std::thread::sleep(Duration::from_millis(10));
            }
            let _ = child.kill();
            let _ = child.wait();
        }
    });
    until("the provider answers", async || tokio::net::TcpStream::connect(("127.0.0.1", port)).await.is_ok()).await;
}

/// The shop's receiver of webhooks: what it was told is in the database before it says so.
async fn receive(client: Client) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let client = Arc::new(client);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let client = Arc::clone(&client);
            tokio::spawn(async move {
                let Some(entry) = provider::receive(&mut stream).await else { return };
                let text = |name: &str| entry[name].as_str().unwrap().to_owned();
                let verdict = if text("status") == "succeeded" { "confirmed" } else { "failed" };
                let sql = "SELECT once.call_notice('bank', $1, $2, $3, $4)";
                let told =
                    client.query_one(sql, &[&format!("evt {}", text("id")), &verdict, &text("key"), &text("id")]).await;
                let code = if told.is_ok() { 200 } else { 503 };
                let _ = stream.write_all(format!("HTTP/1.1 {code} x\r\n\r\n").as_bytes()).await;
            });
        }
    });
    port
}

pub async fn until(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !condition().await {
        assert!(Instant::now() < deadline, "did not happen in time: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A port for a server that will be killed and started again. Not one that the system hands out.
fn free_port() -> u16 {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    loop {
        let offset = std::process::id() as usize * 37 + NEXT.fetch_add(1, Ordering::SeqCst);
        let port = u16::try_from(12_000 + offset % 7_000).unwrap();
        if std::net::TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// A command to be run, with its faults.
pub struct Run {
    command: Command,
    dir: tempfile::TempDir,
}

impl Run {
    pub fn new(url: &str, args: &[&str]) -> Self {
        let dir = crate::common::temp_dir();
        let mut command = crate::common::command(dir.path());
        command.env("DATABASE_URL", url).args(args);
        Self { command, dir }
    }

    pub fn args(mut self, args: &[&str]) -> Self {
        self.command.args(args);
        self
    }

    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.command.env(name, value);
        self
    }

    /// Runs it to its end.
    pub async fn ran(mut self) -> crate::common::Ran {
        tokio::task::spawn_blocking(move || self.command.output().unwrap().into()).await.unwrap()
    }

    pub fn start(mut self) -> Process {
        let mut child = self.command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let said = Arc::new(Mutex::new(Vec::new()));
        let (lines, stderr) = (Arc::clone(&said), child.stderr.take().unwrap());
        std::thread::spawn(move || {
            for line in std::io::BufRead::lines(std::io::BufReader::new(stderr)).map_while(Result::ok) {
                lines.lock().unwrap().push(line);
            }
        });
        Process { child, said, _dir: self.dir }
    }
}

/// One that runs; gone with this.
pub struct Process {
    child: Child,
    said: Arc<Mutex<Vec<String>>>,
    _dir: tempfile::TempDir,
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            for line in self.said.lock().unwrap().iter() {
                eprintln!("{line}");
            }
        }
    }
}

impl Process {
    pub async fn ready(self) -> Self {
        until("it is ready", async || self.said.lock().unwrap().iter().any(|line| line.starts_with("ready "))).await;
        self
    }

    /// Whether it is gone: killed by what it was armed with.
    pub fn is_gone(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Waits for the SIGKILL that it was armed with: one that never fires fails the test.
    pub async fn killed(mut self) {
        until("armed, and fired", async || self.child.try_wait().unwrap().is_some()).await;
        let status = self.child.wait().unwrap();
        assert_eq!(status.signal(), Some(9), "ended by itself: {status}");
    }

    pub fn signal(&self, signal: &str) {
        assert!(Command::new("kill").args([signal, &self.child.id().to_string()]).status().unwrap().success());
    }

    /// Until it has stopped itself (SIGSTOP).
    pub async fn stopped(&self) {
        let stat = format!("/proc/{}/stat", self.child.id());
        until("it is stopped", async || {
            let stat = std::fs::read_to_string(&stat).unwrap();
            stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('T'))
        })
        .await;
    }

    /// SIGTERM, and it ends as it should.
    pub async fn stop(mut self) {
        self.signal("-TERM");
        until("it ends", async || self.child.try_wait().unwrap().is_some()).await;
        let status = self.child.wait().unwrap();
        assert!(status.success(), "{status}");
    }
}
