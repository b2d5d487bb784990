//! The cluster itself: start, stop, kill, start again.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use tempfile::TempDir;

use crate::account::make_missing;
use crate::home::{Auth, Home};
use crate::postmaster::{clear_leftovers, free_port, is_free, is_ready};
use crate::process;
use crate::watchdog::Watchdog;
use crate::{Binaries, Error};

const STOP_LIMIT: Duration = Duration::from_secs(60);
const KILL_LIMIT: Duration = Duration::from_secs(10);
/// Another program may take a free port between our look and the server's.
const PORT_TRIES_MAX: u32 = 5;

/// What to start, and where.
#[derive(Debug, Clone)]
pub struct ClusterOptions {
    /// The cluster's own directory; made when missing. See the crate's page
    /// for what lies in it.
    pub dir: PathBuf,
    /// The port on 127.0.0.1. `None` (or 0): that of the last start, or a free one.
    pub port: Option<u16>,
    /// How connections are let in; counts when the data is made, later starts keep it.
    pub auth: Auth,
    /// fsync, full_page_writes and synchronous_commit: all on, or all off.
    pub durable: bool,
    /// Further server settings. They win over this crate's, so leave
    /// `port`, `listen_addresses` and `cluster_name` alone.
    pub settings: Vec<(String, String)>,
    /// Where the Unix socket goes. `None`: a short private folder.
    pub socket_dir: Option<PathBuf>,
    /// How long a start may take, crash recovery included.
    pub start_limit: Duration,
}

impl ClusterOptions {
    /// A durable cluster in `dir`, with a password, on a port that it picks and keeps.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self {
            dir: dir.into(),
            port: None,
            auth: Auth::Scram,
            durable: true,
            settings: Vec::new(),
            socket_dir: None,
            start_limit: Duration::from_secs(60),
        }
    }
}

/// How PostgreSQL shuts down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopMode {
    /// Waits until the last client has left.
    Smart,
    /// Rolls open transactions back, disconnects everybody, writes a checkpoint.
    Fast,
    /// Stops without a checkpoint; the next start recovers from the log.
    Immediate,
}

/// A running (or stopped) private cluster. Dropping it stops the server; a
/// temporary one is removed as well. Should this process die without dropping
/// it, a watchdog does the same.
#[derive(Debug)]
pub struct Cluster {
    home: Home,
    binaries: Binaries,
    options: ClusterOptions,
    port: u16,
    socket_dir: PathBuf,
    server: Option<Child>,
    // Dropped in this order, after `Drop::drop` has stopped the server: the
    // watchdog guards the directory until it is removed.
    temporary: Option<TempDir>,
    watchdog: Watchdog,
}

impl Cluster {
    /// Starts the cluster in `options.dir`, making it on the first start.
    ///
    /// When the data belongs to another major version than `binaries`, those of
    /// the right version are used if this machine has them. A server that a
    /// crashed owner left behind is stopped first.
    ///
    /// # Errors
    /// [`Error::AlreadyRunning`] when another live process runs it; see [`Error`].
    pub fn start(binaries: &Binaries, options: ClusterOptions) -> Result<Self, Error> {
        Self::open(binaries, options, None)
    }

    /// Starts a throw-away cluster: durable like a kept one, but everybody on
    /// this machine may connect. It lives in `PGONCE_TEST_DIR` or the system's
    /// temporary folder.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn temporary() -> Result<Self, Error> {
        Self::temporary_with(&Binaries::find()?, |_| {})
    }

    /// Like [`Cluster::temporary`], with these binaries and changed options.
    /// The directory is not a choice.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn temporary_with(binaries: &Binaries, change: impl FnOnce(&mut ClusterOptions)) -> Result<Self, Error> {
        let parent = std::env::var_os("PGONCE_TEST_DIR").map_or_else(std::env::temp_dir, PathBuf::from);
        make_missing(&parent, 0o755)?;
        let dir = tempfile::Builder::new()
            .prefix("pgonce-")
            .permissions(fs::Permissions::from_mode(0o711))
            .tempdir_in(&parent)
            .map_err(Error::io("make a folder in", &parent))?;
        let mut options = ClusterOptions::new(dir.path());
        options.auth = Auth::Trust;
        change(&mut options);
        options.dir = dir.path().to_owned();
        Self::open(binaries, options, Some(dir))
    }

    fn open(binaries: &Binaries, options: ClusterOptions, temporary: Option<TempDir>) -> Result<Self, Error> {
        let home = Home::open(&options.dir)?;
        let data_version = home.data_version()?;
        let binaries = matching(binaries, data_version, &home.dir)?;
        home.account.check_searchable(binaries.dir())?;
        let watchdog = Watchdog::guard(&home.pgdata(), temporary.as_ref().map(TempDir::path))?;
        clear_leftovers(&home)?;
        if data_version.is_none() {
            home.create_data(&binaries, options.auth, temporary.is_none())?;
        }
        let socket_dir = match &options.socket_dir {
            Some(dir) => dir.clone(),
            None => home.socket_dir()?,
        };
        let mut cluster = Self { home, binaries, options, port: 0, socket_dir, server: None, temporary, watchdog };
        cluster.start_on_a_port()?;
        Ok(cluster)
    }

    fn start_on_a_port(&mut self) -> Result<(), Error> {
        if let Some(port) = self.options.port.filter(|port| *port != 0) {
            self.port = port;
            self.launch()?;
            return self.home.remember_port(port);
        }
        let mut wanted = self.home.remembered_port();
        for attempt in 1.. {
            self.port = match wanted.take() {
                Some(port) if is_free(port) => port,
                _ => free_port()?,
            };
            match self.launch() {
                Err(Error::PortInUse { .. }) if attempt < PORT_TRIES_MAX => {}
                Err(error) => return Err(error),
                Ok(()) => break,
            }
        }
        self.home.remember_port(self.port)
    }

    /// Starts the server on `self.port` and waits until it takes connections.
    /// Starts the server. Killed predecessors may be gone from the process table's names and still be
    /// letting go of their shared memory, which a new server refuses to share: then again, within the limit.
    fn launch(&mut self) -> Result<(), Error> {
        let mut last = Ok(());
        process::wait_until(self.options.start_limit, || {
            last = self.launch_once();
            !matches!(&last, Err(Error::StartFailed { log, .. }) if log.contains("pre-existing shared memory block"))
        });
        last
    }

    fn launch_once(&mut self) -> Result<(), Error> {
        clear_leftovers(&self.home)?;
        let (mut log, log_start) = self.home.open_log()?;
        let streams = log.try_clone().and_then(|out| Ok((out, log.try_clone()?)));
        let (stdout, stderr) = streams.map_err(Error::io("open", &self.home.log_path()))?;
        let mut command = self.server_command();
        let spawned = command
            .stdin(Stdio::null())
            .stdout(stdout)
            .stderr(stderr)
            // Ctrl-C is for the owner, who then stops the server in order.
            .process_group(0)
            .spawn();
        let mut child = spawned.map_err(Error::io("run", &self.binaries.program("postgres")))?;
        self.watchdog.watch(Some(child.id()));

        let pgdata = self.home.pgdata();
        let mut exited = None;
        let settled = process::wait_until(self.options.start_limit, || {
            exited = child.try_wait().ok().flatten();
            exited.is_some() || is_ready(&pgdata, child.id(), self.port)
        });
        if settled && exited.is_none() {
            self.server = Some(child);
            return Ok(());
        }
        if exited.is_none() {
            // The postmaster passes the end on to its children.
            process::signal(child.id(), Signal::QUIT);
            let gone = process::wait_until(KILL_LIMIT, || matches!(child.try_wait(), Ok(Some(_))));
            if !gone {
                process::kill_all(&self.home.cluster_name, KILL_LIMIT);
                let _ = child.wait();
            }
        }
        self.watchdog.watch(None);
        let log = process::tail_of(&mut log, log_start);
        if log.contains("Address already in use") {
            return Err(Error::PortInUse { port: self.port });
        }
        let what = match exited {
            Some(status) => format!("ended while starting ({status})"),
            None => format!("was not ready within {} s", self.options.start_limit.as_secs()),
        };
        Err(Error::StartFailed { what, log_path: self.home.log_path(), log })
    }

    fn server_command(&self) -> Command {
        let switch = if self.options.durable { "on" } else { "off" };
        let port = self.port.to_string();
        // Quoted: the setting is a list, which a comma in the path would split.
        let mut sockets = OsString::from("unix_socket_directories=\"");
        sockets.push(&self.socket_dir);
        sockets.push("\"");
        let own = [
            ("cluster_name", self.home.cluster_name.as_str()),
            ("listen_addresses", "127.0.0.1"),
            ("port", &port),
            ("unix_socket_permissions", "0700"),
            // The log is the file that this process opened, wherever the
            // configuration file points.
            ("log_destination", "stderr"),
            ("logging_collector", "off"),
            ("fsync", switch),
            ("full_page_writes", switch),
            ("synchronous_commit", switch),
        ];
        let given = self.options.settings.iter().map(|(name, value)| (name.as_str(), value.as_str()));

        let mut command = self.home.account.command(&self.binaries.program("postgres"));
        command.arg("-D").arg(self.home.pgdata());
        command.arg("-c").arg(sockets);
        for (name, value) in own.into_iter().chain(given) {
            command.arg("-c").arg(format!("{name}={value}"));
        }
        command
    }

    /// Stops the server, at most within 60 s. One that is stopped stays so.
    ///
    /// # Errors
    /// [`Error::StopTimeout`]; the server then still runs.
    pub fn stop(&mut self, mode: StopMode) -> Result<(), Error> {
        let Some(child) = self.server.as_mut() else {
            return Ok(());
        };
        let signal = match mode {
            StopMode::Smart => Signal::TERM,
            StopMode::Fast => Signal::INT,
            StopMode::Immediate => Signal::QUIT,
        };
        // Not reaped yet, so the pid cannot be another process's. SIGCONT
        // wakes a server that a fault test has paused.
        process::signal(child.id(), signal);
        process::signal(child.id(), Signal::CONT);
        if !process::wait_until(STOP_LIMIT, || matches!(child.try_wait(), Ok(Some(_)))) {
            return Err(Error::StopTimeout { pid: child.id(), limit_s: STOP_LIMIT.as_secs() });
        }
        self.server = None;
        self.watchdog.watch(None);
        Ok(())
    }

    /// SIGKILLs the postmaster and all of its children, and waits until they are gone.
    ///
    /// # Errors
    /// [`Error::StopTimeout`] when the system does not let go of one.
    pub fn kill_9(&mut self) -> Result<(), Error> {
        let Some(mut child) = self.server.take() else {
            return Ok(());
        };
        process::signal(child.id(), Signal::KILL);
        let _ = child.wait();
        self.watchdog.watch(None);
        if process::kill_all(&self.home.cluster_name, KILL_LIMIT) {
            Ok(())
        } else {
            Err(Error::StopTimeout { pid: child.id(), limit_s: KILL_LIMIT.as_secs() })
        }
    }

    /// Starts the server again on the same port and data: after a fast stop
    /// when it runs, with crash recovery when it was killed.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn restart(&mut self) -> Result<(), Error> {
        self.stop(StopMode::Fast)?;
        self.launch()
    }

    /// Whether the server runs: false also when it ended by itself.
    pub fn is_running(&mut self) -> bool {
        self.server.as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(None)))
    }

    /// The superuser's connection URL (127.0.0.1) for a database, password included.
    pub fn url(&self, database: &str) -> String {
        self.home.url(self.port, database)
    }

    /// The port on 127.0.0.1; the same after every restart.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The postmaster's process id; `None` while stopped.
    pub fn pid(&self) -> Option<u32> {
        self.server.as_ref().map(Child::id)
    }

    /// The folder of the Unix socket.
    pub fn socket_dir(&self) -> &Path {
        &self.socket_dir
    }

    /// The cluster's own directory.
    pub fn dir(&self) -> &Path {
        &self.home.dir
    }

    /// PostgreSQL's data directory in it.
    pub fn data_dir(&self) -> PathBuf {
        self.home.pgdata()
    }

    /// The server's log.
    pub fn log_path(&self) -> PathBuf {
        self.home.log_path()
    }

    /// The binaries that run it.
    pub fn binaries(&self) -> &Binaries {
        &self.binaries
    }

    /// A command that runs one of PostgreSQL's programs (`pg_basebackup`,
    /// `pg_ctl`) as the server's account, with a clean environment.
    pub fn command(&self, program: &str) -> Command {
        self.home.account.command(&self.binaries.program(program))
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let mode = if self.temporary.is_some() { StopMode::Immediate } else { StopMode::Fast };
        if let Err(error) = self.stop(mode) {
            tracing::warn!(%error, "killing the server instead");
            if let Err(error) = self.kill_9() {
                tracing::error!(%error, "the server could not be killed");
            }
        }
        // Only ours, and only when it lies outside: the one inside is kept or removed with the rest.
        if self.options.socket_dir.is_none() && !self.socket_dir.starts_with(&self.home.dir) {
            let _ = fs::remove_dir(&self.socket_dir);
        }
    }
}

/// The given binaries, or others of this machine when the data needs those.
fn matching(binaries: &Binaries, data_version: Option<u32>, dir: &Path) -> Result<Binaries, Error> {
    match data_version {
        Some(data) if data != binaries.version().major => Binaries::find_major(data)
            .ok()
            .filter(|found| found.version().major == data)
            .ok_or_else(|| Error::VersionMismatch { dir: dir.to_owned(), data, binaries: binaries.version() }),
        _ => Ok(binaries.clone()),
    }
}
