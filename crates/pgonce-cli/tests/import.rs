//! `pgonce import` and `imports`, by the real binary: killed, stopped, starved of disk, fed by a pipe.

#![cfg_attr(not(feature = "failpoints"), allow(dead_code, unused_imports))]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod common;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{Ran, command, pgonce, temp_dir};
use pgonce_testkit::TestDb;
use rand::RngExt as _;
use serde_json::Value;
use tempfile::TempDir;
use tokio_postgres::Client;

const ORDERS: &str = "CREATE TABLE public.orders (reference text PRIMARY KEY, amount numeric(12, 2), note text)";
/// Rows named in `gate` wait for the advisory lock 42.
const GATE: &str = "CREATE TABLE gate (reference text);
    CREATE FUNCTION at_gate() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF EXISTS (SELECT FROM public.gate g WHERE g.reference = NEW.reference) THEN PERFORM pg_advisory_xact_lock_shared(42); END IF;
        RETURN NEW; END $$;
    CREATE TRIGGER gate BEFORE INSERT ON orders FOR EACH ROW EXECUTE FUNCTION at_gate()";
const INTO: [&str; 4] = ["--into", "public.orders", "--natural-key", "reference"];

struct Desk {
    db: TestDb,
    client: Client,
    dir: TempDir,
}

impl Desk {
    async fn new(sql: &str) -> Self {
        let db = TestDb::new().await;
        let client = db.client().await;
        client.batch_execute(sql).await.unwrap();
        Self { client, db, dir: temp_dir() }
    }

    fn file(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.dir.path().join(name);
        std::fs::write(&path, content).unwrap();
        path
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = command(self.dir.path());
        command.env("DATABASE_URL", self.db.direct_url()).args(args);
        command
    }

    fn import(&self, file: &str, args: &[&str]) -> Command {
        let mut command = self.command(&["import", file]);
        command.args(INTO).args(args);
        command
    }

    fn run(&self, file: &str, args: &[&str]) -> Ran {
        self.import(file, args).output().unwrap().into()
    }

    async fn text(&self, sql: &str) -> String {
        text(&self.client, sql).await
    }

    /// The table and what became of each row: equal texts mean equal imports.
    async fn everything(&self) -> String {
        let rows = "SELECT string_agg(concat_ws(' ', reference, amount, note), '; ' ORDER BY reference) FROM orders";
        let results =
            "SELECT string_agg(concat_ws(' ', r.n, o.outcome, o.reason, o.message, o.line), E'\\n' ORDER BY r.n)
            FROM once.imports j, generate_series(1, j.rows) r (n), once.import_result(j.id, r.n) o";
        self.text(rows).await + "\n" + &self.text(results).await
    }
}

async fn text(client: &Client, sql: &str) -> String {
    client.query_one(&format!("SELECT coalesce(({sql})::text, '-')"), &[]).await.unwrap().get(0)
}

fn orders(rows: std::ops::Range<u32>) -> String {
    let mut csv = "reference,amount,note\n".to_owned();
    for row in rows {
        // Some are bad, some come again: every kind of result has to survive.
        match row {
            _ if row % 97 == 13 => csv.push_str(&format!("r{row:05},bad,x\n")),
            _ if row % 89 == 17 => csv.push_str(&format!("r{:05},{row}.25,again\n", row - 11)),
            _ => csv.push_str(&format!("r{row:05},{row}.25,\"n {row}\"\n")),
        }
    }
    csv
}

/// Polls until the condition holds; a machine may be slow.
async fn eventually(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !condition().await {
        assert!(Instant::now() < deadline, "did not happen in time: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Waits until a session of this database stands at the gate.
async fn at_gate(observer: &Client) {
    eventually("somebody stands at the gate", async || {
        let sql =
            "SELECT count(*) = 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
        observer.query_one(sql, &[]).await.unwrap().get(0)
    })
    .await;
}

fn killed(mut child: Child) {
    child.kill().unwrap();
    assert_eq!(child.wait().unwrap().signal(), Some(9));
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_at_twenty_random_rows_it_equals_one_that_was_never_killed() {
    const ROWS: u32 = 1200;
    let csv = orders(0..ROWS);
    for policy in ["skip", "update"] {
        let whole = Desk::new(ORDERS).await;
        whole.file("orders.csv", &csv);
        let args = ["--batch", "40", "--on-conflict", policy];
        whole.run("orders.csv", &args).done();
        let desk = Desk::new(&format!("{ORDERS}; {GATE}")).await;
        desk.file("orders.csv", &csv);
        let holder = desk.db.client().await;
        let mut at: Vec<u32> =
            (0..20).map(|part| part * (ROWS / 20) + rand::rng().random_range(0..ROWS / 20)).collect();
        at.sort_unstable();
        for row in at {
            // A row that is inserted: neither bad nor one that comes again.
            let row = (row..).find(|row| row % 97 != 13 && row % 89 != 17).unwrap();
            let gate = format!("DELETE FROM gate; INSERT INTO gate VALUES ('r{row:05}'); SELECT pg_advisory_lock(42)");
            holder.batch_execute(&gate).await.unwrap();
            let child = desk.import("orders.csv", &args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
            at_gate(&desk.client).await;
            killed(child);
            holder.batch_execute("DELETE FROM gate; SELECT pg_advisory_unlock_all()").await.unwrap();
        }
        let ran = desk.run("orders.csv", &[&args[..], &["--json"]].concat()).done().json();
        assert_eq!((ran["state"].as_str(), ran["rows"].as_u64()), (Some("done"), Some(ROWS.into())), "{ran}");
        assert!(ran["from_row"].as_u64() > Some(40), "it went on from somewhere: {ran}");
        assert_eq!(desk.everything().await, whole.everything().await, "{policy}");
        let errors = |desk: &Desk| std::fs::read_to_string(desk.dir.path().join("orders.csv.errors.jsonl")).unwrap();
        assert_eq!(errors(&desk), errors(&whole), "the error file, too");
    }
}

#[cfg(feature = "failpoints")]
#[tokio::test(flavor = "multi_thread")]
async fn killed_around_its_commits_it_loses_and_doubles_nothing() {
    let csv = orders(0..150);
    let whole = Desk::new(ORDERS).await;
    whole.file("orders.csv", &csv);
    whole.run("orders.csv", &["--batch", "20"]).done();
    let everything = whole.everything().await;
    for point in ["pgonce::import_staged", "pgonce::import_before_commit", "pgonce::import_after_commit"] {
        let desk = Desk::new(ORDERS).await;
        desk.file("orders.csv", &csv);
        let mut kills = 0;
        loop {
            let mut import = desk.import("orders.csv", &["--batch", "20"]);
            let ran = import.env("PGONCE_KILL_AT", point).output().unwrap();
            match ran.status.signal() {
                Some(9) => kills += 1,
                _ => assert!(ran.status.success(), "{ran:?}"),
            }
            // One that dies before its commit gets nowhere: the last one is let go on.
            if ran.status.success() || kills == 3 {
                break;
            }
        }
        assert!(kills > 0, "{point} was never come by");
        desk.run("orders.csv", &["--batch", "20"]).done();
        assert_eq!(desk.everything().await, everything, "{point}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sigterm_ends_it_after_the_batch() {
    let desk = Desk::new(&format!("{ORDERS}; {GATE}; INSERT INTO gate VALUES ('r00025')")).await;
    desk.file("orders.csv", orders(0..100));
    desk.client.batch_execute("SELECT pg_advisory_lock(42)").await.unwrap();
    let mut import = desk.import("orders.csv", &["--batch", "10", "--json"]);
    let mut child = import.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let observer = desk.db.client().await;
    at_gate(&observer).await;
    assert!(Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap().success());
    // It has heard it before the batch can end.
    let mut talk = BufReader::new(child.stderr.take().unwrap());
    let mut said = String::new();
    while !said.contains("Stopping") {
        assert!(talk.read_line(&mut said).unwrap() > 0, "{said}");
    }
    desk.client.batch_execute("SELECT pg_advisory_unlock(42)").await.unwrap();
    talk.read_to_string(&mut said).unwrap();
    let ran = Ran::from(child.wait_with_output().unwrap()).failed();
    assert!(said.contains("the same command goes on from there"), "{said}");
    let stopped = ran.json();
    assert_eq!(stopped["state"], "interrupted");
    assert_eq!(
        desk.text("SELECT state || ' ' || rows FROM once.imports").await,
        format!("stopped {}", stopped["rows"])
    );
    assert_eq!(stopped["rows"], 30, "the batch under way is settled, and none after it");
    let ran = desk.run("orders.csv", &["--json"]).done().json();
    assert_eq!(ran["rows"], 100);
}

#[tokio::test(flavor = "multi_thread")]
async fn from_a_pipe_and_what_it_says() {
    let desk = Desk::new(ORDERS).await;
    let csv = "reference,amount,note\na,1,x\nb,bad,\na,2,again\n";
    let feed = |args: &[&str]| -> Ran {
        let mut child =
            desk.import("-", args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(csv.as_bytes()).unwrap();
        child.wait_with_output().unwrap().into()
    };
    let ran = feed(&["--format", "csv"]).done();
    assert_eq!(ran.stdout.trim(), "3 rows: 1 applied, 1 skipped, 1 failed");
    assert!(ran.stderr.contains("row 2, line 3:") && ran.stderr.contains("Done: import 1"), "{ran:#?}");
    let ran = feed(&["--format", "csv"]).done();
    assert!(ran.stderr.contains("Already done: import 1"), "{ran:#?}");
    assert_eq!(feed(&[]).code, 2, "what it is written in cannot be guessed");
    assert_eq!(desk.run("nowhere.csv", &[]).code, 2);
    desk.file("o.csv", csv);
    assert_eq!(desk.run("o.csv", &["--map", "nonsense"]).code, 2);
    let missing = Ran::from(
        desk.command(&["import", "o.csv", "--into", "public.orders", "--natural-key", "amount"]).output().unwrap(),
    );
    assert!(missing.code == 2 && missing.stderr.contains("CREATE UNIQUE INDEX"), "{missing:#?}");
    let dry = desk.run("o.csv", &["--dry-run", "--json", "--on-conflict", "update"]).done().json();
    assert_eq!((dry["state"].as_str(), dry["job"].as_i64(), dry["failed"].as_i64()), (Some("dry_run"), None, Some(1)));
    desk.file("p.csv", "reference,amount,note\nq,bad,\n");
    let stopped = desk.run("p.csv", &["--max-failures", "0"]).failed();
    assert!(stopped.stderr.contains("more than 0 rows failed"), "{stopped:#?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_pipe_does_not_hold_it() {
    let desk = Desk::new(ORDERS).await;
    let mut import = desk.import("-", &["--format", "csv"]);
    let mut child = import.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let talk = child.stdin.take().unwrap();
    // Once it is connected it has its signals, and waits for the pipe.
    let observer = desk.db.client().await;
    eventually("it is connected", async || {
        let sql = "SELECT count(*) > 0 FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'pgonce'";
        observer.query_one(sql, &[]).await.unwrap().get(0)
    })
    .await;
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let ran: Ran = child.wait_with_output().unwrap().into();
    assert!(ran.code == 1 && ran.stderr.contains("Stopped before anything was imported"), "{ran:#?}");
    drop(talk);
}

#[tokio::test(flavor = "multi_thread")]
async fn operators_see_imports_and_mend_what_failed() {
    let desk = Desk::new(ORDERS).await;
    desk.file("orders.csv", "reference,amount,note\na,1,x\nb,bad,y\nc,3,z\na,9,\n");
    desk.run("orders.csv", &[]).done();
    let list = Ran::from(desk.command(&["imports", "list", "--json"]).output().unwrap()).done().json();
    assert_eq!(
        (list[0]["state"].as_str(), list[0]["failed"].as_i64(), list[0]["actor"].as_str()),
        (Some("done"), Some(1), Some("tester"))
    );
    let show = |args: &[&str]| Ran::from(desk.command(&[&["imports"], args].concat()).output().unwrap());
    assert_eq!(show(&["show", "1", "--row", "2", "--json"]).done().json()["reason"], "22P02");
    assert_eq!(show(&["show", "1", "--row", "4", "--json"]).done().json()["reason"], "exists");
    assert_eq!(show(&["show", "1", "--row", "3", "--json"]).done().json()["outcome"], "applied");
    assert_eq!(show(&["show", "1", "--row", "5", "--json"]).done().json()["outcome"], "not reached");
    assert!(show(&["show", "1"]).done().stdout.contains("orders.csv"));
    assert_eq!(show(&["show", "9"]).code, 2);
    assert!(show(&["errors", "1"]).done().stdout.contains("b,bad,y"));
    let raw = show(&["errors", "1", "--raw"]).done().stdout;
    assert_eq!(raw, "reference,amount,note\nb,bad,y\n");
    desk.file("mended.csv", raw.replace("bad", "2"));
    assert_eq!(desk.run("mended.csv", &["--json"]).done().json()["applied"], 1);
    assert_eq!(
        desk.text("SELECT string_agg(reference || amount, ' ' ORDER BY reference) FROM orders").await,
        "a1.00 b2.00 c3.00"
    );

    desk.file("bad.csv", "reference,amount\nq,bad\n");
    desk.run("bad.csv", &["--max-failures", "0"]).failed();
    let doctor = pgonce(desk.db.direct_url(), &["doctor", "--json"]).json();
    let found = doctor.as_array().unwrap().iter().find(|finding| finding["check"] == "imports").unwrap().clone();
    assert!(found["level"] == "warn" && found["what"].as_str().unwrap().contains("stopped"), "{found}");
    assert_eq!(show(&["abandon", "3", "--reason", "not needed"]).done().code, 0);
    assert_eq!(show(&["abandon", "3", "--reason", "not needed"]).code, 2);
    let doctor = pgonce(desk.db.direct_url(), &["doctor", "--json"]).json();
    assert!(doctor.as_array().unwrap().iter().any(|finding| finding["check"] == "imports" && finding["level"] == "ok"));
}

/// The most memory that an import had, in kilobytes, as the kernel kept it until shortly before its end.
fn peak_kb(desk: &Desk, rows: u32) -> u64 {
    let mut csv = "reference,amount,note\n".to_owned();
    for row in 0..rows {
        csv.push_str(&format!("{rows}-{row},1,{}\n", "x".repeat(80)));
    }
    let name = format!("{rows}.csv");
    desk.file(&name, csv);
    let mut child =
        desk.import(&name, &["--batch", "1000"]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let mut peak = 0;
    while child.try_wait().unwrap().is_none() {
        let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let now = line.and_then(|line| line.trim().trim_end_matches(" kB").parse().ok());
        peak = peak.max(now.unwrap_or(0));
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(child.wait().unwrap().success() && peak > 0);
    peak
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_does_not_grow_with_the_file() {
    let desk = Desk::new(ORDERS).await;
    let (small, large) = (peak_kb(&desk, 20_000), peak_kb(&desk, 200_000));
    // The larger one is 17 MB larger.
    assert!(large < small + 8_000, "{small} kB for 20,000 rows, {large} kB for 200,000");
}

/// A small file system of its own, unmounted with the test.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(dir: &Path) -> Option<Self> {
        let path = dir.join("small");
        std::fs::create_dir(&path).unwrap();
        let mounted =
            Command::new("mount").args(["-t", "tmpfs", "-o", "size=8m,mode=0777", "tmpfs"]).arg(&path).output();
        mounted.is_ok_and(|mounted| mounted.status.success()).then_some(Self(path))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).output();
    }
}

/// A server of the test's own, with the table: what befalls it befalls nobody else.
async fn own_server(sql: &str) -> (pgonce_cluster::Cluster, Client) {
    let cluster = tokio::task::spawn_blocking(pgonce_testkit::cluster).await.unwrap();
    let mut client = pgonce::migrate::connect(&cluster.url("postgres")).await.unwrap();
    pgonce::migrate::apply(&mut client, false).await.unwrap();
    client.batch_execute(sql).await.unwrap();
    (cluster, client)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_stops_it_and_room_lets_it_go_on() {
    let dir = temp_dir();
    let Some(disk) = SmallDisk::mount(dir.path()) else {
        eprintln!("SKIPPED: this account may not mount a file system: a full disk");
        return;
    };
    let (cluster, client) = own_server("SELECT 1").await;
    // The server's own account has to own it.
    let place = disk.0.join("space");
    let made = r#"mkdir "$1" && chown --reference="$2" "$1" && chmod 700 "$1""#;
    let made = Command::new("sh").args(["-c", made, "sh"]).arg(&place).arg(cluster.data_dir()).status();
    assert!(made.unwrap().success());
    client.batch_execute(&format!("CREATE TABLESPACE small LOCATION '{}'", place.display())).await.unwrap();
    let table = ORDERS.replace("PRIMARY KEY", "PRIMARY KEY USING INDEX TABLESPACE small");
    client.batch_execute(&format!("{table} TABLESPACE small")).await.unwrap();
    let mut csv = "reference,amount,note\n".to_owned();
    for row in 0..30_000 {
        csv.push_str(&format!("r{row:05},1,{}\n", "x".repeat(300)));
    }
    std::fs::write(dir.path().join("orders.csv"), csv).unwrap();
    let import = || -> Ran {
        let mut import = command(dir.path());
        import.env("DATABASE_URL", cluster.url("postgres")).args(["import", "orders.csv", "--json", "--batch", "1000"]);
        import.args(["--wait-max", "1ms"]).args(INTO).output().unwrap().into()
    };
    let ran = import().failed();
    assert!(ran.stderr.contains("53100") && ran.stderr.contains("goes on from there"), "{ran:#?}");
    let settled: i64 = text(&client, "SELECT applied FROM once.imports").await.parse().unwrap();
    assert!(settled > 0 && settled < 30_000, "{settled}");
    assert_eq!(text(&client, "SELECT count(*) FROM orders").await, settled.to_string(), "what is told is there");
    assert_eq!(text(&client, "SELECT failed FROM once.imports").await, "0", "no row is to blame");
    assert!(Command::new("mount").args(["-o", "remount,size=200m"]).arg(&disk.0).status().unwrap().success());
    let ran = import().done().json();
    assert_eq!((ran["from_row"].as_i64(), ran["applied"].as_i64()), (Some(settled + 1), Some(30_000)), "{ran}");
    assert_eq!(text(&client, "SELECT count(*) FROM orders").await, "30000");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_restarts_is_waited_for() {
    let dir = temp_dir();
    let gate = format!("{ORDERS}; {GATE}; INSERT INTO gate VALUES ('r00055'); SELECT pg_advisory_lock(42)");
    let (mut cluster, client) = own_server(&gate).await;
    let url = cluster.url("postgres");
    std::fs::write(dir.path().join("orders.csv"), orders(0..200)).unwrap();
    let mut import = command(dir.path());
    import
        .env("DATABASE_URL", &url)
        .args(["import", "orders.csv", "--batch", "10", "--json", "--wait-max", "10m"])
        .args(INTO);
    let child = import.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    at_gate(&pgonce::migrate::connect(&url).await.unwrap()).await;
    let (cluster, client) = tokio::task::spawn_blocking(move || {
        cluster.kill_9().unwrap();
        cluster.restart().unwrap();
        (cluster, client)
    })
    .await
    .unwrap();
    drop(client);
    let ran: Ran = tokio::task::spawn_blocking(|| child.wait_with_output()).await.unwrap().unwrap().into();
    let ran = ran.done().json();
    assert_eq!((ran["state"].as_str(), ran["rows"].as_i64()), (Some("done"), Some(200)), "{ran}");
    let client = pgonce::migrate::connect(&cluster.url("postgres")).await.unwrap();
    let rows = text(&client, "SELECT count(*) FROM orders").await;
    assert_eq!(Value::from(rows), Value::from(ran["applied"].to_string()));
}
