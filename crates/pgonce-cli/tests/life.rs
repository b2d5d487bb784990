//! How long-running verbs begin where the database is away, and how a gateway ends while it holds something.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod common;

use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{command, temp_dir};
use pgonce_testkit::{TestDb, eventually, free_port};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, Command};

const LIMIT: Duration = Duration::from_secs(60);

/// The real binary, and what it says.
struct Running {
    child: Child,
    said: Arc<Mutex<String>>,
    _dir: tempfile::TempDir,
}

impl Running {
    fn start(url: &str, args: &[&str], config: &str) -> Self {
        let dir = temp_dir();
        std::fs::write(dir.path().join("pgonce.toml"), config).unwrap();
        let mut command = Command::from(command(dir.path()));
        command.env("DATABASE_URL", url).args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.kill_on_drop(true).spawn().unwrap();
        let said = Arc::new(Mutex::new(String::new()));
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let kept = Arc::clone(&said);
        tokio::spawn(async move {
            while let Ok(Some(line)) = lines.next_line().await {
                kept.lock().unwrap().push_str(&format!("{line}\n"));
            }
        });
        Self { child, said, _dir: dir }
    }

    fn said(&self) -> String {
        self.said.lock().unwrap().clone()
    }

    async fn says(&self, words: &str) {
        eventually(words, async || self.said().contains(words)).await;
    }

    async fn terminate(&self) {
        let pid = self.child.id().unwrap().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().await.unwrap().success());
    }

    async fn code(&mut self) -> Option<i32> {
        tokio::time::timeout(LIMIT, self.child.wait()).await.expect("it ends").unwrap().code()
    }
}

/// The same database behind another port.
fn behind(url: &str, port: u16) -> String {
    let config: tokio_postgres::Config = url.parse().unwrap();
    let (user, name) = (config.get_user().unwrap(), config.get_dbname().unwrap());
    format!("postgres://{user}@127.0.0.1:{port}/{name}?sslmode=disable")
}

/// Lets connections to a port through to a database.
async fn lead(port: u16, url: &str) {
    let config: tokio_postgres::Config = url.parse().unwrap();
    let to = config.get_ports()[0];
    let listener = TcpListener::bind(("127.0.0.1", port)).await.unwrap();
    tokio::spawn(async move {
        while let Ok((mut near, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut far = TcpStream::connect(("127.0.0.1", to)).await.unwrap();
                let _ = tokio::io::copy_bidirectional(&mut near, &mut far).await;
            });
        }
    });
}

const GATEWAY: [&str; 5] = ["gateway", "--listen", "127.0.0.1:0", "--upstream", "http://127.0.0.1:1"];

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_is_away_at_the_start_is_waited_for() {
    let db = TestDb::new().await;
    for args in [&GATEWAY[..], &["relay", "--sink", "stdout:"]] {
        let port = free_port();
        let mut running = Running::start(&behind(db.direct_url(), port), args, "");
        running.says("waiting for the database").await;
        assert!(!running.said().contains("ready"), "{}", running.said());
        lead(port, db.direct_url()).await;
        running.says("ready ").await;
        running.terminate().await;
        assert_eq!(running.code().await, Some(0), "{}", running.said());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_for_a_database_ends() {
    let db = TestDb::new().await;
    let away = behind(db.direct_url(), free_port());
    let mut given_up = Running::start(&away, &[&GATEWAY[..], &["--wait-max", "300ms"]].concat(), "");
    assert_eq!(given_up.code().await, Some(1));
    given_up.says("error: cannot use the database postgres://").await;
    let mut stopped = Running::start(&away, &GATEWAY, "");
    stopped.says("waiting for the database").await;
    stopped.terminate().await;
    assert_eq!(stopped.code().await, Some(0), "{}", stopped.said());
    // What refuses is not away.
    let none = db.direct_url().replace(db.name(), "no_such_database");
    let mut refused = Running::start(&none, &GATEWAY, "");
    assert_eq!(refused.code().await, Some(1));
    refused.says("error: ").await;
    assert!(!refused.said().contains("waiting"), "{}", refused.said());
}

/// It says what it waits for, ends in its time all the same, and leaves the claim to its policy.
#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_that_stops_says_what_it_waits_for() {
    let db = TestDb::new().await;
    let service = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let upstream = format!("http://{}", service.local_addr().unwrap());
    let args = ["gateway", "--listen", "127.0.0.1:0", "--upstream", &upstream, "--scope", "slow"];
    let mut gateway = Running::start(db.direct_url(), &args, "[gateway]\ndrain_timeout = \"3s\"\n");
    gateway.says("ready http://").await;
    let said = gateway.said();
    let address = said.lines().find_map(|line| line.strip_prefix("ready http://")).unwrap();
    let mut client = TcpStream::connect(address).await.unwrap();
    let request = "POST / HTTP/1.1\r\nhost: h\r\nidempotency-key: \"k\"\r\ncontent-length: 0\r\n\r\n";
    client.write_all(request.as_bytes()).await.unwrap();
    let (mut held, _) = service.accept().await.unwrap();
    let mut piece = [0; 1024];
    assert!(held.read(&mut piece).await.unwrap() > 0);
    gateway.terminate().await;
    assert_eq!(gateway.code().await, Some(0), "{}", gateway.said());
    gateway.says("stopping: waiting for 1 guarded requests that run, 0 that wait").await;
    gateway.says("stopped with 1 guarded requests that run").await;
    let sql = "SELECT scope || ' ' || status FROM once.intents WHERE key = 'k'";
    let row: String = db.client().await.query_one(sql, &[]).await.unwrap().get(0);
    assert_eq!(row, "slow processing", "its lease runs out");
}
