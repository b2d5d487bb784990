//! The directory of a cluster: what lies where, who may touch it, its first filling.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::Write as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rand::RngExt as _;
use rand::distr::Alphanumeric;

use crate::account::Account;
use crate::{Binaries, Error, process};

pub(crate) const SUPERUSER: &str = "postgres";
const PASSWORD_CHARS: usize = 32;
const INITDB_LIMIT: Duration = Duration::from_secs(120);
const LOG_BYTES_MAX: u64 = 16 * 1024 * 1024;
/// macOS's limit for the path of a socket; Linux allows 107.
const SOCKET_PATH_BYTES_MAX: usize = 103;

/// How connections to a new cluster are let in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Auth {
    /// With a random password, kept beside the data and put into the URL.
    #[default]
    Scram,
    /// Everybody on this machine: for throw-away clusters.
    Trust,
}

/// An opened and locked cluster directory.
#[derive(Debug)]
pub(crate) struct Home {
    pub(crate) dir: PathBuf,
    pub(crate) account: Account,
    /// Derived from the path, so that a copy of the directory has another one
    /// and never takes the original's processes for its own.
    pub(crate) cluster_name: String,
    /// Held until drop; the kernel lets go of it when this process dies.
    _lock: File,
}

impl Home {
    /// Makes the directory if need be and locks it.
    pub(crate) fn open(dir: &Path) -> Result<Self, Error> {
        let dir = std::path::absolute(dir).map_err(Error::io("use", dir))?;
        check_ours(&dir)?;
        let account = Account::choose(&dir.join("pgdata"))?;
        account.make_home(&dir)?;
        let dir = dir.canonicalize().map_err(Error::io("use", &dir))?;
        let lock = lock(&dir)?;
        account.check_searchable(&dir)?;
        let cluster_name = format!("pgonce-{:016x}", fnv1a(dir.as_os_str().as_encoded_bytes()));
        Ok(Self { dir, account, cluster_name, _lock: lock })
    }

    pub(crate) fn pgdata(&self) -> PathBuf {
        self.dir.join("pgdata")
    }

    pub(crate) fn log_path(&self) -> PathBuf {
        self.dir.join("server.log")
    }

    /// The major version of the data, `None` when there is no data yet.
    pub(crate) fn data_version(&self) -> Result<Option<u32>, Error> {
        let path = self.pgdata().join("PG_VERSION");
        match fs::read_to_string(&path) {
            Ok(text) => Ok(text.trim().parse().ok()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(Error::io("read", &path)(error)),
        }
    }

    /// Runs initdb beside the final place and renames: a first start that was
    /// killed half-way leaves nothing that the next one takes for data.
    pub(crate) fn create_data(&self, binaries: &Binaries, auth: Auth, sync: bool) -> Result<(), Error> {
        let staged = self.dir.join("pgdata.new");
        match fs::remove_dir_all(&staged) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(Error::io("remove", &staged)(error));
            }
            _ => {}
        }
        self.account.make_private(&staged)?;

        let mut initdb = self.account.command(&binaries.program("initdb"));
        initdb.arg("-D").arg(&staged).args([
            "--username",
            SUPERUSER,
            "--encoding=UTF8",
            "--no-locale",
            "--data-checksums",
            "--no-instructions",
        ]);
        match auth {
            Auth::Scram => {
                let password = self.create_password()?;
                initdb.arg("--auth=scram-sha-256").arg("--pwfile").arg(password);
            }
            Auth::Trust => {
                initdb.arg("--auth=trust");
            }
        }
        if !sync {
            initdb.arg("--no-sync");
        }
        process::run(&mut initdb, INITDB_LIMIT)?;

        let pgdata = self.pgdata();
        fs::rename(&staged, &pgdata).map_err(Error::io("make", &pgdata))?;
        // The rename itself has to survive a power cut.
        let synced = File::open(&self.dir).and_then(|dir| dir.sync_all());
        synced.map_err(Error::io("sync", &self.dir))
    }

    fn create_password(&self) -> Result<PathBuf, Error> {
        let path = self.dir.join("password");
        let password: String = rand::rng().sample_iter(Alphanumeric).take(PASSWORD_CHARS).map(char::from).collect();
        // A leftover of a killed first start would keep its old owner and mode.
        let _ = fs::remove_file(&path);
        OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)
            .and_then(|mut file| writeln!(file, "{password}").and_then(|()| file.sync_all()))
            .map_err(Error::io("write", &path))?;
        // initdb reads it as the account.
        self.account.give(&path)?;
        Ok(path)
    }

    pub(crate) fn remembered_port(&self) -> Option<u16> {
        read_port(&self.dir)
    }

    pub(crate) fn remember_port(&self, port: u16) -> Result<(), Error> {
        let path = self.dir.join("port");
        fs::write(&path, format!("{port}\n")).map_err(Error::io("write", &path))
    }

    pub(crate) fn url(&self, port: u16, database: &str) -> String {
        url(&self.dir, port, database)
    }

    /// Opens the server's log for appending and tells where this start begins.
    pub(crate) fn open_log(&self) -> Result<(File, u64), Error> {
        let path = self.log_path();
        let len = fs::metadata(&path).map_or(0, |meta| meta.len());
        if len > LOG_BYTES_MAX {
            let _ = fs::rename(&path, self.dir.join("server.log.1"));
        }
        let opened = OpenOptions::new().read(true).append(true).create(true).mode(0o600).open(&path);
        opened
            .and_then(|file| {
                let len = file.metadata()?.len();
                Ok((file, len))
            })
            .map_err(Error::io("open", &path))
    }

    /// A private folder for the Unix socket: in the directory, or under /tmp
    /// when that path would be longer than the system allows for a socket.
    /// Every socket file in it is a leftover, because this process holds the lock.
    pub(crate) fn socket_dir(&self) -> Result<PathBuf, Error> {
        let inside = self.dir.join("run");
        let longest = inside.join(".s.PGSQL.65535").as_os_str().len();
        let dir = if longest <= SOCKET_PATH_BYTES_MAX { inside } else { Path::new("/tmp").join(&self.cluster_name) };
        // Not `metadata`: in /tmp somebody may have put a link of this name.
        let Ok(meta) = fs::symlink_metadata(&dir) else {
            self.account.make_private(&dir)?;
            return Ok(dir);
        };
        if !meta.is_dir() || !self.account.owns(meta.uid()) || meta.mode() & 0o077 != 0 {
            return Err(Error::NotYours { dir, owner: meta.uid() });
        }
        for entry in fs::read_dir(&dir).map_err(Error::io("read", &dir))?.flatten() {
            if entry.file_name().as_encoded_bytes().starts_with(b".s.PGSQL.") {
                let _ = fs::remove_file(entry.path());
            }
        }
        Ok(dir)
    }
}

/// Refuses directories that hold other things or belong to another user.
fn check_ours(dir: &Path) -> Result<(), Error> {
    let Ok(meta) = fs::metadata(dir) else {
        return Ok(());
    };
    if meta.uid() != rustix::process::geteuid().as_raw() {
        return Err(Error::NotYours { dir: dir.to_owned(), owner: meta.uid() });
    }
    let mut entries = fs::read_dir(dir).map_err(Error::io("read", dir))?.flatten();
    let empty = entries.all(|entry| entry.file_name() == "lost+found");
    if empty || dir.join("pgonce.lock").exists() { Ok(()) } else { Err(Error::NotOurs { dir: dir.to_owned() }) }
}

fn lock(dir: &Path) -> Result<File, Error> {
    let path = dir.join("pgonce.lock");
    let opened = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path);
    let file = opened.map_err(Error::io("open", &path))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(match read_port(dir) {
            Some(port) => Error::AlreadyRunning { dir: dir.to_owned(), url: url(dir, port, SUPERUSER) },
            None => Error::Busy { dir: dir.to_owned() },
        }),
        Err(TryLockError::Error(error)) => Err(Error::io("lock", &path)(error)),
    }
}

fn read_port(dir: &Path) -> Option<u16> {
    fs::read_to_string(dir.join("port")).ok()?.trim().parse().ok()
}

fn url(dir: &Path, port: u16, database: &str) -> String {
    let password = fs::read_to_string(dir.join("password")).unwrap_or_default();
    let password = match password.trim() {
        "" => String::new(),
        password => format!(":{password}"),
    };
    format!("postgres://{SUPERUSER}{password}@127.0.0.1:{port}/{}", percent_encoded(database))
}

fn percent_encoded(text: &str) -> String {
    let encode = |byte: u8| match byte {
        b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    };
    text.bytes().map(encode).collect()
}

/// FNV-1a: short, and the same in every release, unlike std's hasher.
fn fnv1a(bytes: &[u8]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn database_names_are_encoded_in_urls() {
        assert_eq!(percent_encoded("a b/ü?"), "a%20b%2F%C3%BC%3F");
    }
}
