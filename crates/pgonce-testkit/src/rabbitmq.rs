//! A private RabbitMQ, to be killed and started again.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use crate::server::{Running, free_port, refused};

/// It takes five seconds, more on a busy machine.
const START_MAX: Duration = Duration::from_secs(120);

/// A message that is larger closes its channel.
const MESSAGE_BYTES_MAX: usize = 1_000_000;

/// One for the tests that kill nothing.
static SHARED: OnceLock<RabbitServer> = OnceLock::new();

/// A RabbitMQ node on loopback ports of its own; what it stores outlives a kill. Dropping it kills it.
///
/// Its epmd is a process of ours too: the one that Erlang starts by itself would stay for ever.
#[derive(Debug)]
pub struct RabbitServer {
    port: u16,
    dist_port: u16,
    epmd_port: u16,
    name: String,
    dir: tempfile::TempDir,
    epmd: Option<Running>,
    running: Option<Running>,
}

impl RabbitServer {
    /// Starts one and waits until it answers.
    ///
    /// # Panics
    /// Where there is no RabbitMQ: a suite without it would prove nothing.
    #[must_use]
    pub fn start() -> Self {
        for _ in 0..3 {
            let mut server = Self {
                port: free_port(),
                dist_port: free_port(),
                epmd_port: free_port(),
                name: format!("pgonce-{}@localhost", uuid::Uuid::new_v4().simple()),
                dir: tempfile::tempdir().unwrap(),
                epmd: None,
                running: None,
            };
            std::fs::write(server.dir.path().join("plugins"), "[].\n").unwrap();
            let config = format!("max_message_size = {MESSAGE_BYTES_MAX}\nlog.console = false\n");
            std::fs::write(server.dir.path().join("rabbitmq.conf"), config).unwrap();
            if server.run_epmd() && server.run() {
                return server;
            }
        }
        panic!("RabbitMQ found no free port");
    }

    /// The one of this test process: nobody kills it.
    #[must_use]
    pub fn shared() -> &'static Self {
        SHARED.get_or_init(Self::start)
    }

    /// Where it listens: its default virtual host.
    #[must_use]
    pub fn url(&self) -> String {
        format!("amqp://guest:guest@127.0.0.1:{}/%2f", self.port)
    }

    /// SIGKILL, and gone: connections are refused.
    pub fn kill(&mut self) {
        if let Some(running) = self.running.take() {
            running.kill();
            refused(self.port);
            refused(self.dist_port);
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
        assert!(self.run(), "RabbitMQ did not start again: see {}", self.dir.path().display());
    }

    /// The version that it says it is.
    #[must_use]
    pub fn version(&self) -> String {
        let greeting = greeting(self.port).unwrap_or_default();
        property(&greeting, "version").unwrap_or_else(|| "unknown".into())
    }

    fn run_epmd(&mut self) -> bool {
        let mut command = Command::new("epmd");
        command.args(["-address", "127.0.0.1", "-port", &self.epmd_port.to_string()]);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let mut epmd = Running::start(&mut command, self.dir.path(), MISSING);
        let port = self.epmd_port;
        let ready = epmd.becomes_ready(Duration::from_secs(10), || TcpStream::connect(("127.0.0.1", port)).is_ok());
        self.epmd = Some(epmd);
        ready
    }

    fn run(&mut self) -> bool {
        let dir = self.dir.path();
        let log = std::fs::File::create(dir.join("server.log")).unwrap();
        let mut command = Command::new(program());
        command
            .env("HOME", dir)
            .env("RABBITMQ_NODENAME", &self.name)
            .env("RABBITMQ_MNESIA_BASE", dir.join("mnesia"))
            .env("RABBITMQ_LOG_BASE", dir.join("log"))
            .env("RABBITMQ_CONFIG_FILE", dir.join("rabbitmq.conf"))
            .env("RABBITMQ_CONF_ENV_FILE", dir.join("none"))
            .env("RABBITMQ_ENABLED_PLUGINS_FILE", dir.join("plugins"))
            .env("RABBITMQ_PID_FILE", dir.join("pid"))
            .env("RABBITMQ_NODE_IP_ADDRESS", "127.0.0.1")
            .env("RABBITMQ_NODE_PORT", self.port.to_string())
            .env("RABBITMQ_DIST_PORT", self.dist_port.to_string())
            .env("RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS", "-kernel inet_dist_use_interface {127,0,0,1}")
            .env("ERL_EPMD_ADDRESS", "127.0.0.1")
            .env("ERL_EPMD_PORT", self.epmd_port.to_string())
            .stdout(log.try_clone().unwrap())
            .stderr(log);
        let mut running = Running::start(&mut command, dir, MISSING);
        // Another test's server may have taken the port from ours: its cluster has another name, whose second half
        // is the machine's.
        let (port, name) = (self.port, format!("{}@", self.name.split('@').next().unwrap_or_default()));
        let ready = running.becomes_ready(START_MAX, || {
            greeting(port)
                .and_then(|greeting| property(&greeting, "cluster_name"))
                .is_some_and(|found| found.starts_with(&name))
        });
        self.running = Some(running);
        if !ready {
            eprintln!("{}", std::fs::read_to_string(self.dir.path().join("server.log")).unwrap_or_default());
            self.kill();
        }
        ready
    }
}

impl Drop for RabbitServer {
    fn drop(&mut self) {
        self.kill();
        if let Some(epmd) = self.epmd.take() {
            epmd.kill();
        }
    }
}

const MISSING: &str = "RabbitMQ is not there: `scripts/setup.sh rabbitmq` installs it; SKIP_BROKERS=1 leaves it out";

/// Debian's wrapper on PATH wants to be root and become another user; the script behind it does not.
fn program() -> &'static str {
    let script = "/usr/lib/rabbitmq/bin/rabbitmq-server";
    if Path::new(script).is_file() { script } else { "rabbitmq-server" }
}

/// What a server says first: the frame of Connection.Start, which holds its properties.
fn greeting(port: u16) -> Option<Vec<u8>> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(2))).ok()?;
    stream.write_all(b"AMQP\x00\x00\x09\x01").ok()?;
    let mut header = [0; 7];
    stream.read_exact(&mut header).ok()?;
    let length = u32::from_be_bytes(header[3..7].try_into().ok()?) as usize;
    let mut frame = vec![0; length.min(65_536)];
    stream.read_exact(&mut frame).ok()?;
    Some(frame)
}

/// A text of the properties: its name, `S`, four bytes of length, the text.
fn property(greeting: &[u8], name: &str) -> Option<String> {
    let field: Vec<u8> = [&[u8::try_from(name.len()).ok()?], name.as_bytes(), b"S"].concat();
    let start = greeting.windows(field.len()).position(|window| window == field)? + field.len();
    let length = u32::from_be_bytes(greeting.get(start..start + 4)?.try_into().ok()?) as usize;
    String::from_utf8(greeting.get(start + 4..start + 4 + length)?.to_vec()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_killed_and_started_again() {
        if crate::brokers_skipped("rabbitmq") {
            return;
        }
        let mut server = RabbitServer::start();
        assert_ne!(server.version(), "unknown");
        server.kill();
        assert!(greeting(server.port).is_none(), "a killed one refuses");
        server.restart();
        let ports = [server.port, server.dist_port, server.epmd_port];
        drop(server);
        for port in ports {
            assert!(TcpStream::connect(("127.0.0.1", port)).is_err(), "a dropped one too");
        }
    }
}
