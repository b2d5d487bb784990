//! A private redis-server, to be killed, stopped and filled with lies.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How long a server may take to answer for the first time.
const START_MAX: Duration = Duration::from_secs(10);

/// A redis-server on a loopback port of its own, which keeps nothing on disk. Dropping it kills it; a shell
/// that reads our pipe kills it where the test process could not.
#[derive(Debug)]
pub struct RedisServer {
    port: u16,
    dir: tempfile::TempDir,
    running: Option<(Child, Child)>,
}

impl RedisServer {
    /// Starts one and waits until it answers.
    ///
    /// # Panics
    /// Where there is no redis-server: a suite without it would prove nothing, so nothing is skipped.
    #[must_use]
    pub fn start() -> Self {
        // The port is free when it is looked for; somebody may take it before the server does.
        for _ in 0..10 {
            let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            let mut server = Self { port, dir: tempfile::tempdir().unwrap(), running: None };
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
        if let Some((mut server, mut guard)) = self.running.take() {
            // The guard first: it must not outlive the pid that it would kill.
            for child in [&mut guard, &mut server] {
                let _ = child.kill();
                child.wait().unwrap();
            }
        }
    }

    /// Starts it again on the same port, empty.
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
        let (server, _) = self.running.as_ref().expect("a server that was not killed");
        assert!(Command::new("kill").args([signal, &server.id().to_string()]).status().unwrap().success());
    }

    /// Whether it runs and answers now; false where it ended at once, as it does where its port is taken.
    fn run(&mut self) -> bool {
        let mut server = Command::new("redis-server")
            .args(["--port", &self.port.to_string(), "--bind", "127.0.0.1", "--daemonize", "no"])
            .args(["--save", "", "--appendonly", "no", "--dir"])
            .arg(self.dir.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .expect("redis-server is not on PATH: `scripts/setup.sh redis` installs it");
        let guard = Command::new("/bin/sh")
            .args(["-c", r#"cat >/dev/null; kill -KILL "$1"; rm -rf -- "$2""#, "redis-guard", &server.id().to_string()])
            .arg(self.dir.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .unwrap();
        let deadline = Instant::now() + START_MAX;
        let answers = loop {
            if server.try_wait().unwrap().is_some() {
                break false;
            }
            if answering(self.port) == Some(server.id()) {
                break true;
            }
            assert!(Instant::now() < deadline, "redis-server does not answer");
            std::thread::sleep(Duration::from_millis(2));
        };
        self.running = Some((server, guard));
        if !answers {
            self.kill();
        }
        answers
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The pid of the server that answers on a port: another test's server may have taken it from ours.
fn answering(port: u16) -> Option<u32> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(1))).ok()?;
    stream.write_all(b"INFO server\r\nQUIT\r\n").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    answer.lines().find_map(|line| line.strip_prefix("process_id:")?.trim().parse().ok())
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
