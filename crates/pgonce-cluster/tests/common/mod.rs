//! What the test files share.

#![allow(
    dead_code,
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "each file uses a part of it; a test fails by panicking"
)]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use pgonce_cluster::{Binaries, Cluster, ClusterOptions};
use tempfile::TempDir;
use tokio_postgres::{Client, NoTls};

/// Polls until `condition` holds; fails the test after 30 s.
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !condition() {
        assert!(Instant::now() < deadline, "not within 30 s: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A folder that the server's account can get into.
pub fn scratch() -> TempDir {
    let open = fs::Permissions::from_mode(0o711);
    tempfile::Builder::new().prefix("pgonce-test-").permissions(open).tempdir().unwrap()
}

pub fn binaries() -> Binaries {
    Binaries::find().expect("the tests need PostgreSQL's server binaries")
}

pub fn start(dir: &Path) -> Cluster {
    Cluster::start(&binaries(), ClusterOptions::new(dir)).unwrap()
}

/// Runs `work` with a connection to `url`.
pub fn with_client<T>(url: &str, work: impl AsyncFnOnce(Client) -> T) -> T {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let (client, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
        tokio::spawn(connection);
        work(client).await
    })
}

pub fn insert_row(cluster: &Cluster) {
    with_client(&cluster.url("postgres"), async |client| {
        let sql = "CREATE TABLE IF NOT EXISTS kept (n int); INSERT INTO kept VALUES (1)";
        client.batch_execute(sql).await.unwrap();
    });
}

pub fn rows(cluster: &Cluster) -> i64 {
    with_client(&cluster.url("postgres"), async |client| {
        client.query_one("SELECT count(*) FROM kept", &[]).await.unwrap().get(0)
    })
}

pub fn is_alive(pid: u32) -> bool {
    // A zombie has no command line.
    fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| !line.is_empty())
}

pub fn kill(signal: &str, pid: u32) {
    let pid = pid.to_string();
    let status = Command::new("kill").args(["-s", signal, &pid]).status();
    assert!(status.unwrap().success());
}

/// This test binary again, running one ignored helper.
pub fn helper(name: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--ignored", "--nocapture"]);
    command
}
