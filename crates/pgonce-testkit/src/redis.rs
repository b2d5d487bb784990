//! A private redis-server, to be killed, stopped and filled with lies.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::server::{Running, free_port, refused};

/// How long a server may take to answer for the first time.
const START_MAX: Duration = Duration::from_secs(10);

/// A redis-server on a loopback port of its own, which keeps nothing on disk unless it is a durable one. Dropping
/// it kills it; a shell that reads our pipe kills it where the test process could not.
#[derive(Debug)]
pub struct RedisServer {
    port: u16,
    durable: bool,
    dir: tempfile::TempDir,
    running: Option<Running>,
}

impl RedisServer {
    /// Starts one and waits until it answers.
    ///
    /// # Panics
    /// Where there is no redis-server: a suite without it would prove nothing, so nothing is skipped.
    #[must_use]
    pub fn start() -> Self {
        Self::start_with(false)
    }

    /// One that has written what it acknowledges to its disk.
    #[must_use]
    pub fn start_durable() -> Self {
        Self::start_with(true)
    }

    fn start_with(durable: bool) -> Self {
        for _ in 0..10 {
            let mut server = Self { port: free_port(), durable, dir: tempfile::tempdir().unwrap(), running: None };
            if server.run() {
                return server;
            }
        }
        panic!("redis-server found no free port");
    }

    /// Where it listens.
    #[must_use]
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port)
    }

    /// SIGKILL, and gone: connections are refused.
    pub fn kill(&mut self) {
        if let Some(running) = self.running.take() {
            running.kill();
            refused(self.port);
        }
    }

    /// The version that it says it is.
    #[must_use]
    pub fn version(&self) -> String {
        information(self.port, "redis_version:").unwrap_or_else(|| "unknown".into())
    }

    /// Starts it again on the same port: empty, or with what a durable one had stored.
    pub fn start_again(&mut self) {
        self.kill();
        assert!(self.run(), "redis-server did not start again");
    }

    /// SIGSTOP: it takes connections and answers nothing.
    pub fn stop_answering(&self) {
        self.signal("-STOP");
    }

    /// SIGCONT, after [`RedisServer::stop_answering`].
    pub fn resume(&self) {
        self.signal("-CONT");
    }

    fn signal(&self, signal: &str) {
        self.running.as_ref().expect("a server that was not killed").signal(signal);
    }

    /// Whether it runs and answers now; false where it ended at once, as it does where its port is taken.
    fn run(&mut self) -> bool {
        let mut command = Command::new("redis-server");
        command
            .args(["--port", &self.port.to_string(), "--bind", "127.0.0.1", "--daemonize", "no", "--save", ""])
            .args(["--appendonly", if self.durable { "yes" } else { "no" }, "--appendfsync", "always", "--dir"])
            .arg(self.dir.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let missing = "redis-server is not on PATH: `scripts/setup.sh redis` installs it";
        let mut running = Running::start(&mut command, self.dir.path(), missing);
        let (port, pid) = (self.port, running.pid());
        let ready = running.becomes_ready(START_MAX, || answering(port) == Some(pid));
        self.running = Some(running);
        if !ready {
            self.kill();
        }
        ready
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The pid of the server that answers on a port: another test's server may have taken it from ours.
fn answering(port: u16) -> Option<u32> {
    information(port, "process_id:")?.parse().ok()
}

fn information(port: u16, field: &str) -> Option<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(1))).ok()?;
    stream.write_all(b"INFO server\r\nQUIT\r\n").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    answer.lines().find_map(|line| Some(line.strip_prefix(field)?.trim().to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_stopped_killed_and_started_again() {
        let mut server = RedisServer::start();
        assert!(answering(server.port).is_some());
        server.stop_answering();
        assert_eq!(answering(server.port), None, "a stopped server does not answer");
        server.resume();
        assert!(answering(server.port).is_some());
        server.kill();
        assert!(TcpStream::connect(("127.0.0.1", server.port)).is_err(), "a killed one refuses");
        server.start_again();
        let port = server.port;
        drop(server);
        assert!(TcpStream::connect(("127.0.0.1", port)).is_err(), "a dropped one too");
    }
}
