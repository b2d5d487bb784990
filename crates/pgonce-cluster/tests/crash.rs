//! Servers, owners and watchdogs that die hard, and the start after that.
//!
//! The `helper_*` tests are ignored: other tests run them in a process of
//! their own, which is then killed.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use common::{eventually, helper, insert_row, is_alive, kill, rows, scratch, start};
use pgonce_cluster::Cluster;
use tokio_postgres::NoTls;

#[test]
fn data_survives_kill_9_of_everything() {
    let dir = scratch();
    let mut cluster = start(dir.path());
    insert_row(&cluster);
    let port = cluster.port();
    cluster.kill_9().unwrap();
    assert_eq!(cluster.pid(), None);
    assert!(cluster.data_dir().join("postmaster.pid").exists(), "it had no time to clean up");
    cluster.restart().unwrap();
    assert_eq!((rows(&cluster), cluster.port()), (1, port));

    // Again, but the next start is another owner's.
    cluster.kill_9().unwrap();
    drop(cluster);
    let cluster = start(dir.path());
    assert_eq!((rows(&cluster), cluster.port()), (1, port));
}

#[test]
fn children_that_outlive_their_postmaster_are_not_in_the_way() {
    let dir = scratch();
    let mut cluster = start(dir.path());
    insert_row(&cluster);
    let postmaster = cluster.pid().unwrap();
    // A paused backend does not notice that its postmaster is gone and keeps
    // the shared memory, over which PostgreSQL refuses to start.
    let url = cluster.url("postgres");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (client, connection) = runtime.block_on(tokio_postgres::connect(&url, NoTls)).unwrap();
    runtime.spawn(connection);
    let row = runtime.block_on(client.query_one("SELECT pg_backend_pid()", &[])).unwrap();
    let backend = u32::try_from(row.get::<_, i32>(0)).unwrap();
    kill("STOP", backend);
    kill("KILL", postmaster);
    eventually("the postmaster is gone", || !cluster.is_running());
    assert!(is_alive(backend));
    cluster.restart().unwrap();
    assert!(!is_alive(backend));
    assert_eq!(rows(&cluster), 1);
}

#[test]
fn a_reused_pid_in_a_stale_pid_file_is_not_taken_for_a_server() {
    let dir = scratch();
    let mut cluster = start(dir.path());
    insert_row(&cluster);
    cluster.kill_9().unwrap();
    // A live process of the server's own account now has the pid.
    let mut stranger = as_server_account(&cluster, "sleep", "300");
    let mut stranger = stranger.spawn().unwrap();
    let path = cluster.data_dir().join("postmaster.pid");
    let text = fs::read_to_string(&path).unwrap();
    let (_, rest) = text.split_once('\n').unwrap();
    fs::write(&path, format!("{}\n{rest}", stranger.id())).unwrap();
    let started = cluster.restart();
    assert!(stranger.try_wait().unwrap().is_none(), "strangers are left alone");
    stranger.kill().unwrap();
    stranger.wait().unwrap();
    started.unwrap();
    assert_eq!(rows(&cluster), 1);
}

/// A command of the system, run as the account that owns the data.
fn as_server_account(cluster: &Cluster, program: &str, argument: &str) -> Command {
    use std::os::unix::process::CommandExt as _;
    let owner = fs::metadata(cluster.data_dir()).unwrap();
    let mut command = Command::new(program);
    command.arg(argument).stdin(Stdio::null());
    if owner.uid() != fs::metadata("/proc/self").unwrap().uid() {
        command.uid(owner.uid()).gid(owner.gid());
    }
    command
}

#[test]
fn the_server_of_a_crashed_owner_stops() {
    let dir = scratch();
    let mut owner = spawn_owner("helper_owns_a_kept_cluster", dir.path());
    let postmaster = read_pid(&dir.path().join("told"));
    owner.kill().unwrap();
    owner.wait().unwrap();
    eventually("the server is gone", || !is_alive(postmaster));
    assert_eq!(rows(&start(&dir.path().join("home"))), 1);
}

#[test]
fn an_orphan_without_watchdog_is_stopped_by_the_next_start() {
    let dir = scratch();
    let mut owner = spawn_owner("helper_owns_a_kept_cluster", dir.path());
    let postmaster = read_pid(&dir.path().join("told"));
    kill("KILL", watchdog_of(dir.path()));
    owner.kill().unwrap();
    owner.wait().unwrap();
    assert!(is_alive(postmaster));
    let cluster = start(&dir.path().join("home"));
    assert!(!is_alive(postmaster));
    assert_eq!(rows(&cluster), 1);
}

fn watchdog_of(dir: &Path) -> u32 {
    let is_it = |pid: &u32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).into_owned();
        line.contains("pgonce-watchdog") && line.contains(dir.to_str().unwrap())
    };
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let mut pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.find(is_it).unwrap()
}

#[test]
fn a_crashed_owner_leaves_nothing_of_a_temporary_cluster() {
    let dir = scratch();
    let mut owner = spawn_owner("helper_owns_a_temporary_cluster", dir.path());
    let postmaster = read_pid(&dir.path().join("told"));
    assert!(is_alive(postmaster));
    owner.kill().unwrap();
    owner.wait().unwrap();
    eventually("the server is gone", || !is_alive(postmaster));
    let temporary = dir.path().join("temporary");
    eventually("the data is gone", || fs::read_dir(&temporary).unwrap().next().is_none());
}

fn spawn_owner(name: &str, dir: &Path) -> Child {
    let temporary = dir.join("temporary");
    fs::create_dir(&temporary).unwrap();
    fs::set_permissions(&temporary, fs::Permissions::from_mode(0o711)).unwrap();
    let mut command = helper(name);
    command.env("PGONCE_TEST_DIR", temporary).env("HELPER_DIR", dir);
    let child = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    eventually("the owner has told its server's pid", || dir.join("told").exists());
    child
}

fn read_pid(path: &Path) -> u32 {
    fs::read_to_string(path).unwrap().parse().unwrap()
}

/// Tells the pid in one step, then waits for the SIGKILL.
fn tell_and_wait(cluster: &Cluster) {
    let dir = PathBuf::from(std::env::var_os("HELPER_DIR").unwrap());
    fs::write(dir.join("telling"), cluster.pid().unwrap().to_string()).unwrap();
    fs::rename(dir.join("telling"), dir.join("told")).unwrap();
    // Ends by itself should the parent die first: its end of the pipe closes.
    let _ = std::io::stdin().read_line(&mut String::new());
}

#[test]
#[ignore = "run by another test"]
fn helper_owns_a_kept_cluster() {
    let cluster = start(&Path::new(&std::env::var_os("HELPER_DIR").unwrap()).join("home"));
    insert_row(&cluster);
    tell_and_wait(&cluster);
}

#[test]
#[ignore = "run by another test"]
fn helper_owns_a_temporary_cluster() {
    tell_and_wait(&Cluster::temporary().unwrap());
}

#[test]
fn a_first_start_that_was_killed_half_way_is_begun_anew() {
    let dir = scratch();
    fs::create_dir(dir.path().join("pgdata.new")).unwrap();
    for file in ["pgonce.lock", "password", "pgdata.new/PG_VERSION"] {
        fs::write(dir.path().join(file), "half").unwrap();
    }
    insert_row(&start(dir.path()));
    assert!(!dir.path().join("pgdata.new").exists());
}
