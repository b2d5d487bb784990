//! A server that a test runs as a process of its own, and the shell that ends it where the test could not.

use std::net::{TcpListener, TcpStream};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A running server: a process group of its own, and a guard that kills the group when our pipe closes.
#[derive(Debug)]
pub(crate) struct Running {
    server: Child,
    guard: Child,
}

impl Running {
    /// Starts it; `missing` says what to do where there is no such program. `dir` goes with the test process.
    pub(crate) fn start(command: &mut Command, dir: &Path, missing: &str) -> Self {
        let server = command.stdin(Stdio::null()).process_group(0).spawn().unwrap_or_else(|_| panic!("{missing}"));
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

/// A loopback port that is free when it is looked for; somebody may take it before the server does.
pub(crate) fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
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
