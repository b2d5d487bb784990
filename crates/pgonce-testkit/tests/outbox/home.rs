//! A log belongs to the database that numbered it.

use std::process::Command;

use pgonce_testkit::TestDb;

use crate::{Reader, number, refused, text};

fn pg(program: &str) -> Command {
    let binaries = pgonce_cluster::Binaries::find().unwrap();
    let beside = binaries.dir().join(program);
    Command::new(if beside.exists() { beside } else { program.into() })
}

/// A real dump, restored beside it: the numbers of the new database have nothing to do with the cursors.
#[tokio::test]
async fn a_restored_dump_is_refused_until_it_is_adopted() {
    let db = TestDb::new().await;
    let mut reader = Reader::new(&db).await;
    let client = db.client().await;
    let emit = |n: i32| format!("SELECT once.emit('t', 'x', '{{\"n\": {n}}}', 'k')");
    client.batch_execute(&emit(1)).await.unwrap();
    assert_eq!(reader.next().await, [1]);
    client.batch_execute(&format!("UPDATE once.lane SET delivered = '{}'", reader.delivered)).await.unwrap();
    client.batch_execute(&emit(2)).await.unwrap();
    client.batch_execute("SELECT once.hold_lanes('s', 'before')").await.unwrap();

    let copy = format!("{}_copy", db.name());
    let dump = pg("pg_dump").args(["--format=plain", db.direct_url()]).output().expect("pg_dump");
    assert!(dump.status.success(), "{}", String::from_utf8_lossy(&dump.stderr));
    client.batch_execute(&format!("CREATE DATABASE {copy}")).await.unwrap();
    let copy_url = db.direct_url().replace(db.name(), &copy);
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), &dump.stdout).unwrap();
    let restored =
        pg("psql").args(["-q", "-v", "ON_ERROR_STOP=1", "-f"]).arg(file.path()).arg(&copy_url).output().expect("psql");
    assert!(restored.status.success(), "{}", String::from_utf8_lossy(&restored.stderr));

    let there = pgonce::migrate::connect(&copy_url).await.unwrap();
    // As from a cluster that had counted further: what is emitted here has lower numbers than the cursors know.
    there
        .batch_execute(
            "UPDATE once.lane SET delivered = '9000000000:9000000000:';
             UPDATE once.outbox SET xid = CASE payload ->> 'n' WHEN '1' THEN '8999999999'::xid8 ELSE '9000000001'::xid8 END",
        )
        .await
        .unwrap();
    // Effects go on: only the relay has to wait.
    there.batch_execute(&emit(3)).await.unwrap();
    for sql in ["SELECT once.open_sink('s')", "SELECT once.hold_lanes('s', 'r')", "SELECT once.rotate_outbox()"] {
        let error = there.batch_execute(sql).await.expect_err(sql);
        let error = error.as_db_error().unwrap();
        assert_eq!(error.code().code(), "P4070", "{sql}");
        assert!(error.hint().unwrap().contains("pgonce outbox adopt"), "it says what to do");
    }
    assert_eq!(refused(&there, "SELECT once.adopt_outbox('ann', '')").await, "P4013");
    let again = number(&there, "SELECT once.adopt_outbox('ann', 'restored for a test')").await;
    assert!((2..=3).contains(&again), "2 and 3 were not delivered; 1 may be provable: {again}");
    let delivered = text(&there, "SELECT DISTINCT delivered::text FROM once.lane").await;
    let mut reader = Reader { client: there, delivered };
    let came = reader.next().await;
    assert!(came.ends_with(&[2, 3]), "{came:?}");
    reader.client.batch_execute("SELECT once.hold_lanes('s', 'r')").await.unwrap();
    reader.client.batch_execute(&emit(4)).await.unwrap();
    assert_eq!(reader.next().await, [4]);
    // The database that it was taken from is not disturbed.
    client.batch_execute("SELECT once.hold_lanes('s', 'before')").await.unwrap();
}

/// A program of PostgreSQL's, as an account that it agrees to run under.
fn unprivileged(program: &str) -> Command {
    let inner = pg(program);
    if !std::fs::metadata("/proc/self").is_ok_and(|meta| std::os::unix::fs::MetadataExt::uid(&meta) == 0) {
        return inner;
    }
    let mut command = Command::new("setpriv");
    command.args(["--reuid=postgres", "--regid=postgres", "--clear-groups", "--reset-env"]).arg(inner.get_program());
    command.current_dir("/");
    command
}

/// A standby, to be promoted. Stopped when it is dropped.
struct Standby {
    dir: tempfile::TempDir,
    port: u16,
}

impl Standby {
    fn of(cluster: &pgonce_cluster::Cluster) -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
        let data = dir.path().join("data");
        let source = format!("host=127.0.0.1 port={} user=postgres", cluster.port());
        let copied = unprivileged("pg_basebackup")
            .args(["-X", "stream", "-c", "fast", "-R", "--no-sync", "-d", &source, "-D"])
            .arg(&data)
            .output()
            .expect("pg_basebackup");
        assert!(copied.status.success(), "{}", String::from_utf8_lossy(&copied.stderr));
        let port = pgonce_testkit::free_port();
        let standby = Self { dir, port };
        let options = format!(
            "-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={} -c hot_standby=on -c max_connections=200",
            data.display()
        );
        standby.control(&["-o", &options, "-l", &data.join("log").to_string_lossy(), "start"]);
        standby
    }

    fn control(&self, args: &[&str]) {
        let done = unprivileged("pg_ctl").arg("-D").arg(self.dir.path().join("data")).args(["-w"]).args(args).status();
        let log = || std::fs::read_to_string(self.dir.path().join("data/log")).unwrap_or_default();
        assert!(done.unwrap().success(), "pg_ctl {args:?}: {}", log());
    }

    fn url(&self, database: &str) -> String {
        format!("postgres://postgres@127.0.0.1:{}/{database}?sslmode=disable", self.port)
    }
}

impl Drop for Standby {
    fn drop(&mut self) {
        let data = self.dir.path().join("data");
        let _ = unprivileged("pg_ctl").arg("-D").arg(data).args(["-m", "immediate", "stop"]).status();
    }
}

/// A physical standby is the same cluster: cursors, and the transactions that they were open over, mean there what they meant.
#[tokio::test]
async fn cursors_survive_a_physical_failover() {
    let mut cluster = tokio::task::spawn_blocking(pgonce_testkit::cluster).await.unwrap();
    let mut client = pgonce::migrate::connect(&cluster.url("postgres")).await.unwrap();
    pgonce::migrate::apply(&mut client, false).await.unwrap();
    let emit = |n: i32| format!("SELECT once.emit('t', 'x', '{{\"n\": {n}}}', 'k')");
    client.batch_execute("SELECT once.open_sink('s')").await.unwrap();
    let late = pgonce::migrate::connect(&cluster.url("postgres")).await.unwrap();
    late.batch_execute(&format!("BEGIN; {}", emit(1))).await.unwrap();
    client.batch_execute(&emit(2)).await.unwrap();
    let reading = pgonce::migrate::connect(&cluster.url("postgres")).await.unwrap();
    let mut reader = Reader { client: reading, delivered: "1:1:".into() };
    assert_eq!(reader.next().await, [2]);
    client.batch_execute(&format!("UPDATE once.lane SET delivered = '{}'", reader.delivered)).await.unwrap();
    let lost = pgonce::migrate::connect(&cluster.url("postgres")).await.unwrap();
    lost.batch_execute(&format!("BEGIN; {}", emit(9))).await.unwrap();
    let (standby, back) = tokio::task::spawn_blocking(move || (Standby::of(&cluster), cluster)).await.unwrap();
    cluster = back;
    late.batch_execute("COMMIT").await.unwrap();
    client.batch_execute(&emit(3)).await.unwrap();
    let flushed = text(&client, "SELECT pg_current_wal_flush_lsn()::text").await;
    let there = pgonce::migrate::connect(&standby.url("postgres")).await.unwrap();
    pgonce_testkit::eventually("the standby has all of it", async || {
        let sql = format!("SELECT (coalesce(pg_last_wal_replay_lsn(), '0/0') >= '{flushed}')::text");
        text(&there, &sql).await == "true"
    })
    .await;
    tokio::task::spawn_blocking(move || cluster.kill_9()).await.unwrap().unwrap();
    let standby = tokio::task::spawn_blocking(move || {
        standby.control(&["promote"]);
        standby
    })
    .await
    .unwrap();
    there.batch_execute("SELECT once.hold_lanes('s', 'after')").await.expect("no refusal");
    let delivered = text(&there, "SELECT DISTINCT delivered::text FROM once.lane").await;
    let mut reader = Reader { client: there, delivered };
    assert_eq!(reader.next().await, [1, 3], "the late one and the new one; not what was lost with the primary");
    reader.client.batch_execute(&emit(4)).await.unwrap();
    assert_eq!(reader.next().await, [4]);
    drop(reader);
    tokio::task::spawn_blocking(move || drop(standby)).await.unwrap();
}
