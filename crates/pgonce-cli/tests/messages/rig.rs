//! Two services with a database each, NATS between them, and the processes that move messages.

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_nats::jetstream;
use pgonce_testkit::{NatsServer, TestDb, eventually};
use tokio_postgres::Client;

pub const STREAM: &str = "SHOP";

/// The sender takes from accounts and tells; the receiver gives to accounts what it was told, and notes every time that it did.
const SENDER: &str = "CREATE TABLE account (id int PRIMARY KEY, sent bigint NOT NULL DEFAULT 0, n bigint NOT NULL DEFAULT 0);
    INSERT INTO account SELECT n FROM generate_series(0, 499) n;
    CREATE FUNCTION transfer(p_account int, p_amount bigint) RETURNS uuid LANGUAGE plpgsql AS $$
    DECLARE v_n bigint;
    BEGIN
        UPDATE account SET sent = sent + p_amount, n = n + 1 WHERE id = p_account RETURNING n INTO v_n;
        RETURN once.emit('transfers', 'transfer', jsonb_build_object('account', p_account, 'amount', p_amount, 'n', v_n),
            'account-' || p_account, 'account', p_account::text, v_n);
    END $$";
const RECEIVER: &str = "CREATE SCHEMA app;
    CREATE TABLE app.account (id int PRIMARY KEY, received bigint NOT NULL);
    CREATE TABLE app.applied (at bigint GENERATED ALWAYS AS IDENTITY, message_id text NOT NULL, account int NOT NULL, n bigint NOT NULL);
    CREATE FUNCTION app.on_transfer(p_message jsonb) RETURNS void LANGUAGE plpgsql AS $$
    DECLARE v_account int := (p_message #>> '{payload,account}')::int;
    BEGIN
        INSERT INTO app.account VALUES (v_account, (p_message #>> '{payload,amount}')::bigint)
            ON CONFLICT (id) DO UPDATE SET received = app.account.received + excluded.received;
        INSERT INTO app.applied (message_id, account, n)
        VALUES (p_message ->> 'id', v_account, (p_message #>> '{payload,n}')::bigint);
    END $$";

pub struct Rig {
    pub sender: TestDb,
    pub receiver: TestDb,
    pub nats: NatsServer,
}

impl Rig {
    pub async fn new() -> Self {
        let (sender, receiver) = (TestDb::new().await, TestDb::new().await);
        sender.client().await.batch_execute(SENDER).await.unwrap();
        receiver.client().await.batch_execute(RECEIVER).await.unwrap();
        let nats = tokio::task::spawn_blocking(NatsServer::start).await.unwrap();
        let rig = Self { sender, receiver, nats };
        let config = jetstream::stream::Config {
            name: STREAM.into(),
            subjects: vec!["transfers".into()],
            ..jetstream::stream::Config::default()
        };
        rig.jetstream().await.create_stream(config).await.unwrap();
        rig
    }

    async fn jetstream(&self) -> jetstream::Context {
        jetstream::new(async_nats::connect(self.nats.url()).await.unwrap())
    }

    /// Transfers over all accounts, one a transaction.
    pub async fn transfer(&self, count: i64) {
        let client = self.sender.client().await;
        for n in 0..count {
            client.query_one("SELECT transfer($1, $2)", &[&i32::try_from(n % 20).unwrap(), &(n + 1)]).await.unwrap();
        }
    }

    pub fn relay(&self) -> Run {
        Run::new(self.sender.direct_url(), &["relay", "--lease", "1s", "--sink", &self.nats.url()])
    }

    pub fn consume(&self) -> Run {
        // A delivery that its consumer did not live to acknowledge comes again after a second.
        let source = format!("{}/{STREAM}?ack_wait=1s", self.nats.url());
        Run::new(
            self.receiver.direct_url(),
            &[
                "consume",
                "--lease",
                "2s",
                "--source",
                &source,
                "--consumer",
                "books",
                "--handler",
                "sql:app.on_transfer",
            ],
        )
    }

    /// What the stream holds, first occurrences only, by ordering key: each message's number within its account.
    pub async fn stream(&self) -> BTreeMap<String, Vec<i64>> {
        let mut keys: BTreeMap<String, Vec<i64>> = BTreeMap::new();
        let mut seen = std::collections::HashSet::new();
        let mut stream = self.jetstream().await.get_stream(STREAM).await.unwrap();
        let last = stream.info().await.unwrap().state.last_sequence;
        for sequence in 1..=last {
            let message = stream.get_raw_message(sequence).await.unwrap();
            let id = message.headers.get("Nats-Msg-Id").unwrap().to_string();
            if seen.insert(id) {
                let payload: serde_json::Value = serde_json::from_slice(&message.payload).unwrap();
                let key = message.headers.get("ce-partitionkey").unwrap().to_string();
                keys.entry(key).or_default().push(payload["n"].as_i64().unwrap());
            }
        }
        keys
    }

    /// What the sender's rows say was emitted: I10 and I12 are that the stream has just this, in this order.
    pub async fn emitted(&self) -> BTreeMap<String, Vec<i64>> {
        let rows =
            self.sender.client().await.query("SELECT 'account-' || id, n FROM account WHERE n > 0", &[]).await.unwrap();
        rows.iter().map(|row| (row.get(0), (1..=row.get::<_, i64>(1)).collect())).collect()
    }

    /// What the receiver did, in the order in which it did it.
    pub async fn applied(&self) -> BTreeMap<String, Vec<i64>> {
        let sql = "SELECT 'account-' || account, array_agg(n ORDER BY at) FROM app.applied GROUP BY account";
        let rows = self.receiver.client().await.query(sql, &[]).await.unwrap();
        rows.iter().map(|row| (row.get(0), row.get(1))).collect()
    }

    /// Until the receiver has applied so many, with a limit of its own: killed processes wait for leases.
    pub async fn until_applied(&self, count: i64, limit: Duration) {
        let client = self.receiver.client().await;
        let deadline = std::time::Instant::now() + limit;
        // Counting takes from the two cores what it counts: seldom, where there is much. That each is there once is judged later.
        let pause = Duration::from_millis(if count > 1000 { 250 } else { 20 });
        while number(&client, "SELECT count(*) FROM app.applied").await < count {
            if std::time::Instant::now() > deadline {
                let stored = "SELECT string_agg(concat_ws(' ', state, count, last_error), '; ') FROM (SELECT state, count(*), max(last_error) AS last_error FROM once.inbox GROUP BY 1) s";
                let stored: Option<String> = client.query_one(stored, &[]).await.unwrap().get(0);
                let applied = number(&client, "SELECT count(*) FROM app.applied").await;
                panic!("{applied} of {count} applied; the inbox: {stored:?}");
            }
            tokio::time::sleep(pause).await;
        }
    }

    /// I11, and the books: every message once, and both sides have the same sums.
    pub async fn judge(&self, count: i64) {
        let (sender, receiver) = (self.sender.client().await, self.receiver.client().await);
        assert_eq!(number(&receiver, "SELECT count(*) FROM app.applied").await, count, "one effect a message");
        assert_eq!(number(&receiver, "SELECT count(DISTINCT message_id) FROM app.applied").await, count);
        let sent = sender.query("SELECT id, sent FROM account WHERE sent > 0 ORDER BY id", &[]).await.unwrap();
        let received = receiver.query("SELECT id, received FROM app.account ORDER BY id", &[]).await.unwrap();
        let pairs =
            |rows: &[tokio_postgres::Row]| rows.iter().map(|row| (row.get(0), row.get(1))).collect::<Vec<(i32, i64)>>();
        assert_eq!(pairs(&sent), pairs(&received), "balances are equal");
    }
}

pub async fn number(client: &Client, sql: &str) -> i64 {
    client.query_one(sql, &[]).await.unwrap_or_else(|error| panic!("{sql}: {error:?}")).get(0)
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
    pub async fn done(self) {
        self.ran().await.done();
    }

    /// Runs it to its end, whichever.
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
        eventually("it is ready", async || self.said.lock().unwrap().iter().any(|line| line.starts_with("ready ")))
            .await;
        self
    }

    /// Whether a line of its talk has this in it.
    pub fn says(&self, what: &str) -> bool {
        self.said.lock().unwrap().iter().any(|line| line.contains(what))
    }

    /// Waits for the SIGKILL that it was armed with: one that never fires fails the test.
    pub async fn killed(mut self) {
        eventually("armed, and fired", async || self.child.try_wait().unwrap().is_some()).await;
        let status = self.child.wait().unwrap();
        assert_eq!(status.signal(), Some(9), "ended by itself: {status}");
    }

    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub fn signal(&self, signal: &str) {
        assert!(Command::new("kill").args([signal, &self.child.id().to_string()]).status().unwrap().success());
    }

    /// Until it has stopped itself (SIGSTOP).
    pub async fn stopped(&self) {
        let stat = format!("/proc/{}/stat", self.child.id());
        eventually("it is stopped", async || {
            let stat = std::fs::read_to_string(&stat).unwrap();
            stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('T'))
        })
        .await;
    }

    /// SIGTERM, and it ends as it should.
    pub async fn stop(mut self) {
        self.signal("-TERM");
        eventually("it ends", async || self.child.try_wait().unwrap().is_some()).await;
        let status = self.child.wait().unwrap();
        assert!(status.success(), "{status}");
    }
}
