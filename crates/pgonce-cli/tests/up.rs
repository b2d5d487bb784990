//! `pgonce up`, started, killed and stopped as a newcomer would.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod common;

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use common::{Ran, command, pgonce, temp_dir};
use pgonce_testkit::TestDb;

const READY_LIMIT: Duration = Duration::from_secs(60);

/// A running `pgonce up`, with what it says.
struct Up {
    child: Child,
    lines: Receiver<String>,
    said: Vec<String>,
}

impl Up {
    /// Starts it and waits for its `ready` line.
    fn start(dir: &Path, args: &[&str]) -> Self {
        Self::spawn(command(dir).arg("up").args(args))
    }

    fn spawn(command: &mut Command) -> Self {
        let mut child = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        let mut up = Self { child, lines, said: Vec::new() };
        while !up.said.last().is_some_and(|line| line.starts_with("ready ")) {
            let line = up.lines.recv_timeout(READY_LIMIT);
            up.said.push(line.unwrap_or_else(|_| panic!("not ready: {:#?}", up.said)));
        }
        up
    }

    fn signal(&self, signal: &str) {
        let status = Command::new("kill").args([signal, &self.child.id().to_string()]).status().unwrap();
        assert!(status.success());
    }

    /// Waits for its end: the code, and all that it said.
    fn end(mut self) -> (Option<i32>, Vec<String>) {
        let status = self.child.wait().unwrap();
        self.said.extend(self.lines.iter());
        (status.code(), std::mem::take(&mut self.said))
    }
}

/// A test that fails leaves nothing running: the server goes with its owner.
impl Drop for Up {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The private database's URL, as the printed line would export it.
fn url(dir: &Path) -> String {
    let read = |name: &str| std::fs::read_to_string(dir.join(".pgonce").join(name)).unwrap().trim().to_owned();
    format!("postgres://postgres:{}@127.0.0.1:{}/pgonce", read("password"), read("port"))
}

fn postmaster(dir: &Path) -> u32 {
    let text = std::fs::read_to_string(dir.join(".pgonce/pgdata/postmaster.pid")).unwrap();
    text.lines().next().unwrap().parse().unwrap()
}

fn is_alive(pid: u32) -> bool {
    // Until it is reaped too: PostgreSQL takes a zombie's pid in postmaster.pid for a running server.
    Path::new(&format!("/proc/{pid}")).exists()
}

/// The postmaster and all that it has started.
fn family(postmaster: u32) -> Vec<u32> {
    let all = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let is_child = |pid: &u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let after_name = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
        after_name.split(' ').nth(1) == Some(&postmaster.to_string())
    };
    std::iter::once(postmaster).chain(pids.filter(is_child)).collect()
}

fn wait_until_gone(pids: &[u32]) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while pids.iter().any(|pid| is_alive(*pid)) {
        assert!(Instant::now() < deadline, "still there: {pids:?}");
        std::thread::yield_now();
    }
}

/// Runs a demo to its end; what it found.
fn demo(command: &mut Command) -> (Ran, serde_json::Value) {
    let ran: Ran = command.args(["up", "--demo", "--json", "--demo-seconds"]).arg("5").output().unwrap().into();
    let ran = ran.done();
    let summary = ran.json();
    (ran, summary)
}

/// That everything arrived, once, and that something happened on the way.
fn judge(summary: &serde_json::Value) {
    assert_eq!(summary["effects_equal_intents"], true, "{summary}");
    assert_eq!(summary["effects"], summary["intents"]);
    assert_eq!(summary["deliveries_equal_orders"], true, "{summary}");
    assert_eq!(summary["messages_emitted"], summary["effects"]);
    assert_eq!(summary["messages_delivered"], summary["effects"]);
    let many = |field: &str, least: u64| assert!(summary[field].as_u64().unwrap() >= least, "{field}: {summary}");
    many("intents", 20);
    many("attempts", 60);
    many("replays", 20);
    many("conflicts", 1);
    many("crashes_injected", 3);
}

#[test]
fn the_demo_ends_with_as_many_effects_as_intents_and_deliveries_as_orders() {
    if pgonce_testkit::brokers_skipped("the demo with NATS") {
        return;
    }
    let dir = temp_dir();
    let (ran, summary) = demo(&mut command(dir.path()));
    judge(&summary);
    assert_eq!(summary["broker"], "nats", "{ran:#?}");
    assert!(ran.stderr.lines().any(|line| line.ends_with("effects = intents: yes")), "{ran:#?}");
    assert!(ran.stderr.contains(" messages emitted, ") && ran.stderr.contains(" duplicates absorbed"), "{ran:#?}");
    assert!(ran.stderr.contains("Stopped"), "{ran:#?}");
    assert_eq!(nats_servers(dir.path()), Vec::<u32>::new(), "gone with the demo");
}

#[test]
fn without_nats_the_demo_goes_from_outbox_to_inbox() {
    let dir = temp_dir();
    let (ran, summary) = demo(command(dir.path()).env("PGONCE_NATS_SERVER", "/nowhere/nats-server"));
    judge(&summary);
    assert_eq!(summary["broker"], "none");
    let told: Vec<&str> = ran.stderr.lines().filter(|line| line.contains("No nats-server")).collect();
    assert!(told.len() == 1 && told[0].contains("scripts/setup.sh nats"), "{ran:#?}");
    assert!(!dir.path().join(".pgonce/nats").exists());
}

/// The servers whose store is in this directory.
fn nats_servers(dir: &Path) -> Vec<u32> {
    let store = dir.join(".pgonce/nats").display().to_string();
    let all = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|pid| {
        let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.contains("nats-server") && line.contains(&store)
    })
    .collect()
}

/// What was on its way when everything died arrives with the next demo, once.
#[test]
fn a_demo_that_was_killed_is_finished_by_the_next_one() {
    if pgonce_testkit::brokers_skipped("the demo with NATS") {
        return;
    }
    let dir = temp_dir();
    let mut up = Up::start(dir.path(), &["--demo"]);
    let flows = |line: &str| line.contains(" messages emitted, ") && !line.contains(" 0 delivered");
    while !up.said.last().is_some_and(|line| flows(line)) {
        let line = up.lines.recv_timeout(READY_LIMIT);
        up.said.push(line.unwrap_or_else(|_| panic!("nothing is delivered: {:#?}", up.said)));
    }
    let mut gone = family(postmaster(dir.path()));
    gone.extend(nats_servers(dir.path()));
    up.signal("-KILL");
    assert_eq!(up.end().0, None, "killed");
    wait_until_gone(&gone);

    judge(&demo(&mut command(dir.path())).1);
    let up = Up::start(dir.path(), &[]);
    let (orders, wrong) = all_deliveries(&url(dir.path()));
    assert!(orders > 20 && wrong == 0, "{wrong} of {orders}");
    up.signal("-TERM");
    assert_eq!(up.end().0, Some(0));
}

/// The orders of all demos, and those that were not delivered once.
#[tokio::main]
async fn all_deliveries(url: &str) -> (i64, i64) {
    let client = pgonce::migrate::connect(url).await.unwrap();
    let sql = "SELECT count(*), count(*) FILTER (WHERE (SELECT count(*) FROM pgonce_demo.deliveries d
        WHERE d.message_id = o.message_id::text) <> 1) FROM pgonce_demo.orders o";
    let row = client.query_one(sql, &[]).await.unwrap();
    (row.get(0), row.get(1))
}

/// Somebody else's database: only the demo's own messages move, and nothing of it keeps the log.
#[test]
fn the_demo_keeps_to_its_own_messages() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let db = runtime.block_on(TestDb::new());
    let dir = temp_dir();
    // Without NATS, so that whatever is relayed is in the inbox: a stream has its own filter.
    let mut demo = command(dir.path());
    demo.env("PGONCE_NATS_SERVER", "").args(["up", "--demo", "--demo-seconds", "4"]);
    let up = Up::spawn(demo.env("DATABASE_URL", db.direct_url()));
    runtime.block_on(async {
        let client = db.client().await;
        let ours = "SELECT sink FROM once.sinks WHERE sink = 'pgonce_demo'";
        pgonce_testkit::eventually("the demo's sink is made", async || {
            client.query_opt(ours, &[]).await.is_ok_and(|row| row.is_some())
        })
        .await;
        // The last topic is one that an unescaped pattern would take for the demo's.
        let theirs = "SELECT once.open_sink('theirs'); SELECT once.emit('orders', 'order.created', '{}');
            SELECT once.emit('pgonceXdemo.orders', 'order.created', '{}')";
        client.batch_execute(theirs).await.unwrap();
    });
    let (code, said) = up.end();
    assert_eq!(code, Some(0), "{said:#?}");
    runtime.block_on(async {
        let client = db.client().await;
        let one = async |sql: &str| client.query_one(sql, &[]).await.unwrap().get::<_, i64>(0);
        assert_eq!(
            one("SELECT count(*) FROM once.sinks WHERE sink = 'theirs' AND lag_messages = 2").await,
            1,
            "theirs, and none of the demo's"
        );
        assert_eq!(one("SELECT count(*) FROM once.sinks").await, 1, "the demo's own is forgotten");
        assert_eq!(one("SELECT count(*) FROM once.inbox_messages WHERE topic <> 'pgonce_demo.orders'").await, 0);
        let strangers = "SELECT count(*) FROM pgonce_demo.deliveries WHERE chapter NOT LIKE 'demo\\_%'";
        assert_eq!(one(strangers).await, 0);
    });
}

/// The demo's own checks have to be able to fail.
#[test]
fn the_demo_sees_a_second_effect() {
    for (table, said_at_the_end) in
        [("orders", "effects = intents: NO"), ("deliveries", "deliveries = orders: NO; effects = intents: yes")]
    {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let db = runtime.block_on(TestDb::new());
        let dir = temp_dir();
        let up = Up::start(dir.path(), &["--demo", "--demo-seconds", "3", "--database-url", db.direct_url()]);
        runtime.block_on(async {
            let client = db.client().await;
            let double = format!("INSERT INTO pgonce_demo.{table} SELECT * FROM pgonce_demo.{table} LIMIT 1");
            pgonce_testkit::eventually("a row is doubled", async || {
                client.execute(&double, &[]).await.is_ok_and(|n| n == 1)
            })
            .await;
        });
        let (code, said) = up.end();
        assert_eq!(code, Some(1), "{said:#?}");
        assert!(said.iter().any(|line| line.ends_with(said_at_the_end)), "{said:#?}");
        // The broker's store is in the data directory; a private server may move in later.
        let up = Up::start(dir.path(), &[]);
        up.signal("-TERM");
        assert_eq!(up.end().0, Some(0));
    }
}

#[test]
fn sigterm_stops_everything_and_the_data_stays() {
    let dir = temp_dir();
    let up = Up::start(dir.path(), &[]);
    let server = family(postmaster(dir.path()));
    let second: Ran = command(dir.path()).arg("up").output().unwrap().into();
    assert!(second.done().stderr.contains("already runs"));
    pgonce(&url(dir.path()), &["doctor"]).done();
    let password = url(dir.path());
    let password = password.split(':').nth(2).unwrap().split('@').next().unwrap().to_owned();
    up.signal("-TERM");
    let (code, said) = up.end();
    assert_eq!(code, Some(0), "{said:#?}");
    assert_eq!(said.iter().filter(|line| line.starts_with("ready ")).count(), 1);
    assert!(!said.join("\n").contains(&password), "the password is not printed");
    wait_until_gone(&server);

    let up = Up::start(dir.path(), &[]);
    assert!(up.said.iter().any(|line| line.contains("up to date")), "{:#?}", up.said);
    up.signal("-INT");
    assert_eq!(up.end().0, Some(0));
}

/// Roles are the server's, so this one has a server of its own.
#[test]
fn doctor_misses_the_role_of_relays() {
    let dir = temp_dir();
    let up = Up::start(dir.path(), &[]);
    let url = url(dir.path());
    let roles = || {
        let report = pgonce(&url, &["doctor", "--json"]).done().json();
        let found = report.as_array().unwrap().iter().find(|finding| finding["check"] == "roles");
        found.unwrap().clone()
    };
    assert_eq!(roles()["level"], "ok");
    drop_relay_role(&url);
    let found = roles();
    assert_eq!((&found["level"], &found["what"]), (&"warn".into(), &"missing: once_relay".into()));
    up.signal("-TERM");
    assert_eq!(up.end().0, Some(0));
}

#[tokio::main]
async fn drop_relay_role(url: &str) {
    let client = pgonce::migrate::connect(url).await.unwrap();
    client.batch_execute("DROP OWNED BY once_relay; DROP ROLE once_relay").await.unwrap();
}

#[test]
fn after_kill_9_of_everything_it_starts_on_the_same_data() {
    let dir = temp_dir();
    let up = Up::start(dir.path(), &[]);
    let before = url(dir.path());
    make_intent(&before);
    let server = family(postmaster(dir.path()));
    let mut kill = Command::new("kill");
    kill.arg("-9").arg(up.child.id().to_string()).args(server.iter().map(u32::to_string));
    // A backend may have ended by itself in between, which kill would report.
    kill.stderr(Stdio::null()).status().unwrap();
    assert_eq!(up.end().0, None, "killed");
    wait_until_gone(&server);

    let up = Up::start(dir.path(), &[]);
    assert_eq!(url(dir.path()), before, "the same port");
    let listed = pgonce(&before, &["intents", "list", "--json"]).done().json();
    assert_eq!(listed[0]["key"], "survivor");
    up.signal("-TERM");
    assert_eq!(up.end().0, Some(0));
}

#[tokio::main]
async fn make_intent(url: &str) {
    let once = pgonce::Once::connect(url).await.unwrap();
    once.intent("create_order", "survivor").run(async |_| Ok(7)).await.unwrap();
}

#[test]
fn a_given_database_is_used_in_place_of_a_private_one() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let db = runtime.block_on(TestDb::new());
    let dir = temp_dir();
    let up = Up::start(dir.path(), &["--database-url", db.direct_url()]);
    assert!(!dir.path().join(".pgonce").exists());
    up.signal("-TERM");
    assert_eq!(up.end().0, Some(0));
}

#[test]
fn recover_watches_until_it_is_stopped() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let db = runtime.block_on(TestDb::new());
    let dir = temp_dir();
    let watch = ["intents", "recover", "--watch", "20ms", "--database-url", db.direct_url()];
    let up = Up::spawn(command(dir.path()).args(watch));
    runtime.block_on(async {
        let sql = "SELECT once.claim(p_scope => 's', p_key => 'k', p_fingerprint => sha256(''), p_mode => 'leased',
            p_lease => '10 milliseconds')";
        db.client().await.batch_execute(sql).await.unwrap();
        pgonce_testkit::eventually("it is sorted", async || db.status("s", "k").await.as_deref() == Some("uncertain"))
            .await;
    });
    up.signal("-TERM");
    assert_eq!(up.end().0, Some(0));
}
