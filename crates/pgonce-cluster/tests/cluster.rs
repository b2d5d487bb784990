//! A private cluster on real binaries and real data: start, stop, refusals.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::process::Stdio;
use std::sync::Barrier;
use std::thread;

use common::{binaries, eventually, insert_row, is_alive, rows, scratch, start, with_client};
use pgonce_cluster::{Auth, Cluster, ClusterOptions, Error, StopMode};
use tokio_postgres::NoTls;

fn show(cluster: &Cluster, setting: &str) -> String {
    let sql = format!("SHOW {setting}");
    with_client(&cluster.url("postgres"), async |client| client.query_one(&sql, &[]).await.unwrap().get(0))
}

#[test]
fn starts_stops_and_starts_again_on_the_same_data_and_port() {
    let dir = scratch();
    let home = dir.path().join("some/new/home");
    let mut cluster = start(&home);
    insert_row(&cluster);
    let (url, port) = (cluster.url("postgres"), cluster.port());
    for setting in ["fsync", "full_page_writes", "synchronous_commit", "data_checksums"] {
        assert_eq!(show(&cluster, setting), "on", "{setting}");
    }
    assert_eq!(show(&cluster, "listen_addresses"), "127.0.0.1");
    assert!(cluster.is_running());
    let pid = cluster.pid().unwrap();
    cluster.stop(StopMode::Fast).unwrap();
    assert!(!cluster.is_running());
    assert_eq!(cluster.pid(), None);
    assert!(!is_alive(pid));
    cluster.stop(StopMode::Fast).unwrap();
    drop(cluster);

    let mut cluster = start(&home);
    assert_eq!((cluster.url("postgres"), cluster.port()), (url, port));
    assert_eq!(rows(&cluster), 1);
    cluster.restart().unwrap();
    assert_eq!((rows(&cluster), cluster.port()), (1, port));
    let pid = cluster.pid().unwrap();
    drop(cluster);
    assert!(!is_alive(pid), "dropping stops the server");
}

#[test]
fn the_server_is_not_root_and_the_password_is_private() {
    let dir = scratch();
    let cluster = start(&dir.path().join("home"));
    let server = fs::metadata(format!("/proc/{}", cluster.pid().unwrap())).unwrap();
    let data_dir = cluster.data_dir();
    assert_ne!(server.uid(), 0);
    assert_eq!(fs::metadata(&data_dir).unwrap().uid(), server.uid());
    let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
    assert_eq!(mode(&cluster.dir().join("password")), 0o600);
    assert_eq!(mode(&data_dir), 0o700);
    assert_eq!(mode(cluster.socket_dir()), 0o700);

    let without = format!("postgres://postgres@127.0.0.1:{}/postgres", cluster.port());
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let connected = runtime.block_on(tokio_postgres::connect(&without, NoTls));
    assert!(connected.is_err(), "a password is needed");
}

#[test]
fn a_second_owner_is_told_where_it_listens() {
    let dir = scratch();
    let cluster = start(dir.path());
    let second = Cluster::start(&binaries(), ClusterOptions::new(dir.path()));
    let Err(Error::AlreadyRunning { url, .. }) = second else {
        panic!("expected AlreadyRunning, got {second:?}");
    };
    assert_eq!(url, cluster.url("postgres"));
    with_client(&url, async |client| client.query_one("SELECT 1", &[]).await.map(drop)).unwrap();
}

#[test]
fn a_server_started_by_hand_is_left_alone() {
    let dir = scratch();
    let cluster = start(dir.path());
    let (data_dir, port) = (cluster.data_dir(), cluster.port().to_string());
    let mut by_hand = cluster.command("postgres");
    let mut pg_ctl = cluster.command("pg_ctl");
    drop(cluster);
    let log = fs::File::create(dir.path().join("by-hand.log")).unwrap();
    let socket = format!("unix_socket_directories={}", dir.path().join("run").display());
    by_hand.arg("-D").arg(&data_dir).args(["-p", &port, "-c", &socket]).stderr(log);
    let mut by_hand = by_hand.spawn().unwrap();
    let pid_file = data_dir.join("postmaster.pid");
    eventually("ready", || fs::read_to_string(&pid_file).is_ok_and(|text| text.contains("ready")));

    let second = Cluster::start(&binaries(), ClusterOptions::new(dir.path()));
    assert!(matches!(second, Err(Error::AlreadyRunning { .. })), "{second:?}");
    assert!(by_hand.try_wait().unwrap().is_none());
    pg_ctl.arg("-D").arg(&data_dir).args(["stop", "-m", "immediate"]).stdout(Stdio::null());
    assert!(pg_ctl.status().unwrap().success());
    by_hand.wait().unwrap();
}

#[test]
fn a_temporary_cluster_trusts_and_is_removed() {
    let mut cluster = Cluster::temporary_with(&binaries(), |options| {
        options.durable = false;
        options.settings.push(("max_connections".to_owned(), "7".to_owned()));
    })
    .unwrap();
    assert_eq!(show(&cluster, "fsync"), "off");
    assert_eq!(show(&cluster, "max_connections"), "7");
    assert!(!cluster.dir().join("password").exists());
    cluster.stop(StopMode::Immediate).unwrap();
    cluster.restart().unwrap();
    let (dir, pid) = (cluster.dir().to_owned(), cluster.pid().unwrap());
    drop(cluster);
    assert!(!dir.exists());
    assert!(!is_alive(pid));
}

#[test]
fn a_long_path_gets_a_socket_elsewhere() {
    let dir = scratch();
    let cluster = start(&dir.path().join("long".repeat(40)));
    assert!(!cluster.socket_dir().starts_with(cluster.dir()));
    let socket = cluster.socket_dir().join(format!(".s.PGSQL.{}", cluster.port()));
    assert!(socket.exists());
    let socket_dir = cluster.socket_dir().to_owned();
    drop(cluster);
    assert!(!socket_dir.exists());
}

#[test]
fn a_taken_port_is_told_or_avoided() {
    let dir = scratch();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let mut options = ClusterOptions::new(dir.path());
    options.auth = Auth::Trust;
    options.port = Some(port);
    let refused = Cluster::start(&binaries(), options.clone());
    assert!(matches!(refused, Err(Error::PortInUse { port: told }) if told == port), "{refused:?}");

    // A port that was only remembered gives way.
    fs::write(dir.path().join("port"), port.to_string()).unwrap();
    options.port = None;
    let cluster = Cluster::start(&binaries(), options).unwrap();
    assert_ne!(cluster.port(), port);
}

#[test]
fn a_server_that_cannot_start_tells_its_log() {
    let dir = scratch();
    let mut options = ClusterOptions::new(dir.path());
    options.settings.push(("shared_buffers".to_owned(), "nonsense".to_owned()));
    let refused = Cluster::start(&binaries(), options).unwrap_err().to_string();
    assert!(refused.contains("shared_buffers"), "{refused}");
}

#[test]
fn a_directory_with_other_things_is_not_touched() {
    let dir = scratch();
    fs::write(dir.path().join("thesis.txt"), "mine").unwrap();
    let refused = Cluster::start(&binaries(), ClusterOptions::new(dir.path()));
    assert!(matches!(refused, Err(Error::NotOurs { .. })), "{refused:?}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn a_closed_parent_folder_is_named() {
    let dir = scratch();
    let closed = dir.path().join("closed");
    fs::create_dir(&closed).unwrap();
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o700)).unwrap();
    let started = Cluster::start(&binaries(), ClusterOptions::new(closed.join("home")));
    if fs::metadata("/proc/self").unwrap().uid() == 0 {
        let Err(Error::NotSearchable { folder, .. }) = started else {
            panic!("expected NotSearchable, got {started:?}");
        };
        assert_eq!(folder, closed.canonicalize().unwrap());
    } else {
        // The server runs as this very user, who may enter.
        started.unwrap();
    }
}

#[test]
fn data_of_another_version_is_not_started() {
    let dir = scratch();
    let cluster = start(dir.path());
    let version_file = cluster.data_dir().join("PG_VERSION");
    drop(cluster);
    fs::write(&version_file, "11\n").unwrap();
    let refused = Cluster::start(&binaries(), ClusterOptions::new(dir.path()));
    assert!(matches!(refused, Err(Error::VersionMismatch { data: 11, .. })), "{refused:?}");
}

#[test]
fn of_owners_that_race_for_a_new_directory_one_wins() {
    const OWNERS: usize = 4;
    let dir = scratch();
    let (begin, end) = (Barrier::new(OWNERS), Barrier::new(OWNERS));
    let race = || {
        begin.wait();
        let started = Cluster::start(&binaries(), ClusterOptions::new(dir.path()));
        // The winner keeps it until all have tried.
        end.wait();
        match started {
            Ok(_) => 1,
            Err(Error::AlreadyRunning { .. } | Error::Busy { .. }) => 0,
            Err(other) => panic!("{other}"),
        }
    };
    let winners: i32 = thread::scope(|scope| {
        let owners: Vec<_> = (0..OWNERS).map(|_| scope.spawn(race)).collect();
        owners.into_iter().map(|owner| owner.join().unwrap()).sum()
    });
    assert_eq!(winners, 1);
}
