//! A private Apache Kafka, one KRaft node, to be killed and started again.

use std::fs;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use crate::server::{Running, free_port, refused};

/// It takes two seconds, more on a busy machine.
const START_MAX: Duration = Duration::from_secs(120);

/// The version that `scripts/setup.sh kafka` fetches.
const VERSION: &str = include_str!("../kafka/VERSION");

const MISSING: &str = "Kafka is not there: `scripts/setup.sh kafka` fetches it; KAFKA_BOOTSTRAP=host:port names one \
                       that runs; SKIP_BROKERS=1 leaves it out";

/// One for the tests that kill nothing.
static SHARED: OnceLock<KafkaServer> = OnceLock::new();

/// A Kafka node on loopback ports of its own; what it stores outlives a kill. Dropping it kills it.
#[derive(Debug)]
pub struct KafkaServer {
    port: u16,
    controller_port: u16,
    dir: tempfile::TempDir,
    running: Option<Running>,
}

impl KafkaServer {
    /// Starts one and waits until it serves.
    ///
    /// # Panics
    /// Where there is no Kafka or no Java: a suite without it would prove nothing.
    #[must_use]
    pub fn start() -> Self {
        for _ in 0..3 {
            let mut server = Self {
                port: free_port(),
                controller_port: free_port(),
                dir: tempfile::tempdir().unwrap(),
                running: None,
            };
            server.format();
            if server.run() {
                return server;
            }
        }
        panic!("Kafka found no free port");
    }

    /// The URL of one that nobody kills: what `KAFKA_BOOTSTRAP` names, or the one of this test process.
    #[must_use]
    pub fn shared_url() -> String {
        external().map_or_else(|| SHARED.get_or_init(Self::start).url(), |bootstrap| format!("kafka://{bootstrap}"))
    }

    /// Which one [`KafkaServer::shared_url`] names.
    #[must_use]
    pub fn shared_version() -> String {
        external().map_or_else(|| VERSION.trim().to_owned(), |_| "whatever KAFKA_BOOTSTRAP names".into())
    }

    /// Where it listens.
    #[must_use]
    pub fn url(&self) -> String {
        format!("kafka://127.0.0.1:{}", self.port)
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
        assert!(self.run(), "Kafka did not start again");
    }

    fn config(&self) -> PathBuf {
        self.dir.path().join("server.properties")
    }

    /// Writes its settings and prepares its directory: KRaft wants that done once.
    fn format(&self) {
        let (port, controller) = (self.port, self.controller_port);
        let settings = format!(
            "process.roles=broker,controller\nnode.id=1\ncontroller.quorum.bootstrap.servers=127.0.0.1:{controller}\n\
             listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}\n\
             advertised.listeners=PLAINTEXT://127.0.0.1:{port}\ncontroller.listener.names=CONTROLLER\n\
             listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT\nlog.dirs={}\n\
             offsets.topic.replication.factor=1\noffsets.topic.num.partitions=1\n\
             transaction.state.log.replication.factor=1\ntransaction.state.log.min.isr=1\n\
             group.initial.rebalance.delay.ms=0\nauto.create.topics.enable=false\n",
            self.dir.path().join("data").display()
        );
        fs::write(self.config(), settings).unwrap();
        let id = "AAAAAAAAQACAAAAAAAAAAQ";
        let output = java()
            .args(["kafka.tools.StorageTool", "format", "--standalone", "-t", id, "-c"])
            .arg(self.config())
            .output()
            .expect(MISSING);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    fn run(&mut self) -> bool {
        let log_path = self.dir.path().join("server.log");
        let log = fs::File::create(&log_path).unwrap();
        let mut command = java();
        command.arg("kafka.Kafka").arg(self.config()).stdout(Stdio::null()).stderr(log);
        let mut running = Running::start(&mut command, self.dir.path(), MISSING);
        let port = self.port;
        let ready = running.becomes_ready(START_MAX, || {
            // Its own word, and not the port alone: another test's server may have taken that.
            let says_so = fs::read_to_string(&log_path).is_ok_and(|log| log.contains("Kafka Server started"));
            says_so && TcpStream::connect(("127.0.0.1", port)).is_ok()
        });
        self.running = Some(running);
        if !ready {
            let log = fs::read_to_string(&log_path).unwrap_or_default();
            eprintln!("{}", log.lines().filter(|line| line.contains("ERROR")).collect::<Vec<_>>().join("\n"));
            self.kill();
        }
        ready
    }
}

impl Drop for KafkaServer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The broker that `KAFKA_BOOTSTRAP` names.
fn external() -> Option<String> {
    std::env::var("KAFKA_BOOTSTRAP").ok().filter(|value| !value.is_empty())
}

fn java() -> Command {
    let jars = jars();
    assert!(jars.join("complete").is_file(), "{MISSING}");
    let mut command = Command::new("java");
    // Small and quick to start: it serves one test process.
    command.args(["-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp"]).arg(jars.join("*"));
    command
}

/// Where `scripts/setup.sh kafka` puts it.
fn jars() -> PathBuf {
    let cache = std::env::var_os("XDG_CACHE_HOME").filter(|dir| !dir.is_empty()).map(PathBuf::from);
    let home = || Path::new(&std::env::var_os("HOME").expect("HOME")).join(".cache");
    cache.unwrap_or_else(home).join("pgonce").join(format!("kafka-{}", VERSION.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_killed_and_started_again() {
        if crate::brokers_skipped("kafka") {
            return;
        }
        let mut server = KafkaServer::start();
        let port = server.port;
        server.kill();
        assert!(TcpStream::connect(("127.0.0.1", port)).is_err(), "a killed one refuses");
        server.restart();
        drop(server);
        assert!(TcpStream::connect(("127.0.0.1", port)).is_err(), "a dropped one too");
    }
}
