//! What a postmaster leaves and shows: its pid file, its processes, its port.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::time::Duration;

use rand::RngExt as _;
use rustix::process::Signal;

use crate::Error;
use crate::home::Home;
use crate::process::{self, Kin};

const STOP_LIMIT: Duration = Duration::from_secs(60);
const KILL_LIMIT: Duration = Duration::from_secs(10);
const CONNECT_LIMIT: Duration = Duration::from_secs(1);
/// Below the ports that Linux and macOS give to outgoing connections: a
/// stopped server's port is still free when it starts again.
const PORTS: std::ops::Range<u16> = 20_000..32_000;

/// Makes sure that nothing of an earlier server is in the way.
///
/// The caller holds the directory's lock, so whatever of this cluster lives
/// has lost its owner: a postmaster gets a fast shutdown; children whose
/// postmaster was killed still hold the shared memory, which the next server
/// would refuse to start over.
pub(crate) fn clear_leftovers(home: &Home) -> Result<(), Error> {
    let name = &home.cluster_name;
    if let Some((pid, Kin::Postmaster)) = process::of_cluster(name).first().copied() {
        tracing::info!(pid, "stopping the server that a crashed owner left behind");
        process::signal(pid, Signal::INT);
        process::signal(pid, Signal::CONT);
        process::wait_until(STOP_LIMIT, || process::of_cluster(name).is_empty());
    }
    if !process::kill_all(name, KILL_LIMIT) {
        let pid = process::of_cluster(name).first().map_or(0, |(pid, _)| *pid);
        return Err(Error::StopTimeout { pid, limit_s: KILL_LIMIT.as_secs() });
    }

    let path = home.pgdata().join("postmaster.pid");
    let Some((pid, port, _)) = read_postmaster_pid(&home.pgdata()) else {
        return Ok(());
    };
    match process::command_line(pid).map(|line| process::kin(&line, name)) {
        // Somebody started a server on this data by hand: theirs to stop.
        Some(Kin::UnknownServer) => {
            Err(Error::AlreadyRunning { dir: home.dir.clone(), url: home.url(port, "postgres") })
        }
        // Gone; or the pid went to another program, frequent in containers, where
        // pids are few; or it is a zombie that nobody reaps. PostgreSQL would take
        // the latter two for its predecessor and refuse to start.
        Some(Kin::Stranger) | None => fs::remove_file(&path).map_err(Error::io("remove", &path)),
        Some(_) => Ok(()),
    }
}

/// The pid, the port and the state that a postmaster has written down.
fn read_postmaster_pid(pgdata: &Path) -> Option<(u32, u16, String)> {
    let text = fs::read_to_string(pgdata.join("postmaster.pid")).ok()?;
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let port = lines.get(3).and_then(|line| line.parse().ok()).unwrap_or(0);
    let state = lines.get(7).copied().unwrap_or_default();
    Some((lines.first()?.parse().ok()?, port, state.to_owned()))
}

/// What `pg_ctl -w` looks at, and that the port really answers. A file of
/// another pid is a leftover that the new server has not replaced yet.
pub(crate) fn is_ready(pgdata: &Path, pid: u32, port: u16) -> bool {
    let Some((written, _, state)) = read_postmaster_pid(pgdata) else {
        return false;
    };
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    written == pid
        && matches!(state.as_str(), "ready" | "standby")
        && TcpStream::connect_timeout(&address, CONNECT_LIMIT).is_ok()
}

pub(crate) fn is_free(port: u16) -> bool {
    TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok()
}

pub(crate) fn free_port() -> Result<u16, Error> {
    const TRIES_MAX: usize = 200;
    let mut rng = rand::rng();
    let mut ports = std::iter::repeat_with(|| rng.random_range(PORTS)).take(TRIES_MAX);
    ports.find(|port| is_free(*port)).ok_or(Error::PortInUse { port: PORTS.start })
}
