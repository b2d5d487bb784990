//! A private nats-server with JetStream, to be killed and started again.

use std::io::{BufRead as _, BufReader};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::server::{Running, free_port, refused};

const START_MAX: Duration = Duration::from_secs(10);

/// A nats-server on a loopback port of its own; what it stores outlives a kill. Dropping it kills it.
#[derive(Debug)]
pub struct NatsServer {
    port: u16,
    dir: tempfile::TempDir,
    running: Option<Running>,
}

impl NatsServer {
    /// Starts one and waits until it answers.
    ///
    /// # Panics
    /// Where there is no nats-server: a suite without it would prove nothing.
    #[must_use]
    pub fn start() -> Self {
        for _ in 0..10 {
            let mut server = Self { port: free_port(), dir: tempfile::tempdir().unwrap(), running: None };
            if server.run() {
                return server;
            }
        }
        panic!("nats-server found no free port");
    }

    /// Where it listens.
    #[must_use]
    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    /// SIGKILL, and gone: connections are refused.
    pub fn kill(&mut self) {
        if let Some(running) = self.running.take() {
            running.kill();
            refused(self.port);
        }
    }

    /// SIGSTOP: it takes connections and answers nothing.
    pub fn stop_answering(&self) {
        self.running.as_ref().expect("a server that was not killed").signal("-STOP");
    }

    /// SIGCONT, after `stop_answering`.
    pub fn resume(&self) {
        self.running.as_ref().expect("a server that was not killed").signal("-CONT");
    }

    /// Starts it again on the same port, with what it had stored.
    pub fn restart(&mut self) {
        self.kill();
        assert!(self.run(), "nats-server did not start again");
    }

    /// The version that it says it is.
    #[must_use]
    pub fn version(&self) -> String {
        let greeting = greeting(self.port).unwrap_or_default();
        greeting["version"].as_str().unwrap_or("unknown").to_owned()
    }

    fn run(&mut self) -> bool {
        let name = format!("pgonce-{}", uuid::Uuid::new_v4().simple());
        let mut command = Command::new(program());
        command
            .args(["-a", "127.0.0.1", "-p", &self.port.to_string(), "-n", &name, "-js", "-sd"])
            .arg(self.dir.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let missing = "nats-server is not on PATH: `scripts/setup.sh nats` installs it; SKIP_BROKERS=1 leaves it out";
        let mut running = Running::start(&mut command, self.dir.path(), missing);
        // Another test's server may have taken the port from ours: it has another name.
        let port = self.port;
        let ready = running
            .becomes_ready(START_MAX, || greeting(port).is_some_and(|greeting| greeting["server_name"] == *name));
        self.running = Some(running);
        if !ready {
            self.kill();
        }
        ready
    }
}

impl Drop for NatsServer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Debian's is where only root's PATH looks.
fn program() -> &'static str {
    let debian = "/usr/sbin/nats-server";
    if Path::new(debian).is_file() { debian } else { "nats-server" }
}

/// What a server says first: `INFO {…}`.
fn greeting(port: u16) -> Option<serde_json::Value> {
    let stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(1))).ok()?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).ok()?;
    serde_json::from_str(line.strip_prefix("INFO ")?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_killed_and_started_again() {
        if crate::brokers_skipped("nats") {
            return;
        }
        let mut server = NatsServer::start();
        assert!(server.version().starts_with('2'), "{}", server.version());
        server.kill();
        assert!(greeting(server.port).is_none(), "a killed one refuses");
        server.restart();
        let port = server.port;
        drop(server);
        assert!(greeting(port).is_none(), "a dropped one too");
    }
}
