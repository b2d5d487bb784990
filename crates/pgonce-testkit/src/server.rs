//! A server that a test runs as a process of its own, and the shell that ends it where the test could not.

use std::hash::{BuildHasher as _, RandomState};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A running server: a process group of its own, and a guard that kills the group when our pipe closes.
#[derive(Debug)]
pub(crate) struct Running {
    server: Child,
    guard: Child,
}

impl Running {
    /// Starts it in `dir`, which goes with the test process: what it drops where it stands (Erlang dumps its core
    /// there) is gone with it. `missing` says what to do where there is no such program.
    pub(crate) fn start(command: &mut Command, dir: &Path, missing: &str) -> Self {
        let command = command.current_dir(dir).stdin(Stdio::null()).process_group(0);
        let server = command.spawn().unwrap_or_else(|_| panic!("{missing}"));
        let guard = Command::new("/bin/sh")
            .args(["-c", r#"cat >/dev/null; kill -KILL "-$1"; rm -rf -- "$2""#, "guard", &server.id().to_string()])
            .arg(dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .unwrap();
        Self { server, guard }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.server.id()
    }

    /// Waits until it is ready; false where it ended instead, as it does where its port is taken.
    pub(crate) fn becomes_ready(&mut self, limit: Duration, mut ready: impl FnMut() -> bool) -> bool {
        let deadline = Instant::now() + limit;
        loop {
            if self.server.try_wait().unwrap().is_some() {
                return false;
            }
            if ready() {
                return true;
            }
            assert!(Instant::now() < deadline, "a server was not ready in {limit:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// A signal to all its processes.
    pub(crate) fn signal(&self, signal: &str) {
        let group = format!("-{}", self.server.id());
        assert!(Command::new("kill").args([signal, "--", &group]).status().unwrap().success());
    }

    /// SIGKILL to all its processes.
    pub(crate) fn kill(mut self) {
        // The guard first: it must not outlive the group that it would kill.
        let _ = self.guard.kill();
        self.guard.wait().unwrap();
        if self.server.try_wait().unwrap().is_none() {
            self.signal("-KILL");
            self.server.wait().unwrap();
        }
    }
}

/// From one port of a process to its next: two processes that began beside each other do not try the same ones.
const PORT_STEP: usize = 7919;
/// Below it are ports that machines use for services of their own.
const PORT_MIN: u16 = 10_000;

/// A loopback port that is free when it is looked for; somebody may take it before the server does. Outside the range
/// that the system gives to connections: a server that is started again needs its port again, and another test's
/// client must not be sitting on it. No two calls of a process get the same one.
#[must_use]
pub fn free_port() -> u16 {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    static START: LazyLock<usize> = LazyLock::new(|| RandomState::new().hash_one(std::process::id()) as usize);
    let ports = outside(ephemeral());
    for _ in 0..ports.len().min(1000) {
        let turn = START.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed).wrapping_mul(PORT_STEP));
        let port = ports[turn % ports.len()];
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// The ports that the system gives to connections, where it says so.
fn ephemeral() -> Option<(u16, u16)> {
    let text = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").ok()?;
    let mut bounds = text.split_whitespace().map(|bound| bound.parse().ok());
    Some((bounds.next()??, bounds.next()??))
}

/// The ports that are not among those; none where they are not known.
fn outside(ephemeral: Option<(u16, u16)>) -> Vec<u16> {
    let Some((first, last)) = ephemeral else { return Vec::new() };
    (PORT_MIN..=u16::MAX).filter(|port| !(first..=last).contains(port)).collect()
}

/// Waits until nobody listens on a port any more: a process of a group may end after its leader.
pub(crate) fn refused(port: u16) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while TcpStream::connect(("127.0.0.1", port)).is_ok() {
        assert!(Instant::now() < deadline, "port {port} is still open");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Whether `SKIP_BROKERS` leaves out what needs NATS, RabbitMQ or Kafka; says so where it does.
#[must_use]
pub fn brokers_skipped(test: &str) -> bool {
    let skipped = std::env::var("SKIP_BROKERS").is_ok_and(|value| !value.is_empty() && value != "0");
    if skipped {
        eprintln!("SKIPPED: brokers, as SKIP_BROKERS says: {test}");
    }
    skipped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_outside_of_what_connections_get() {
        assert_eq!(outside(None), Vec::<u16>::new());
        assert_eq!(outside(Some((1, u16::MAX))), Vec::<u16>::new());
        let ports = outside(Some((32_768, 60_999)));
        assert!(ports.contains(&PORT_MIN) && ports.contains(&32_767) && ports.contains(&61_000));
        assert!(!ports.contains(&32_768) && !ports.contains(&60_999));
        let found: Vec<u16> = (0..50).map(|_| free_port()).collect();
        let mut different = found.clone();
        different.sort_unstable();
        different.dedup();
        assert_eq!(different.len(), found.len(), "{found:?}");
        if let Some((first, last)) = ephemeral().filter(|range| outside(Some(*range)).len() > 1000) {
            assert!(found.iter().all(|port| !(first..=last).contains(port)), "{found:?} in {first} to {last}");
        }
    }

    #[test]
    fn a_server_stands_in_its_own_folder() {
        let dir = tempfile::tempdir().unwrap();
        let mut command = Command::new("/bin/sh");
        let running = Running::start(command.args(["-c", "echo dump >core; exec sleep 60"]), dir.path(), "sh");
        let deadline = Instant::now() + Duration::from_secs(30);
        while !dir.path().join("core").exists() {
            assert!(Instant::now() < deadline, "what it wrote where it stands is not in its folder");
            std::thread::sleep(Duration::from_millis(5));
        }
        running.kill();
    }
}
