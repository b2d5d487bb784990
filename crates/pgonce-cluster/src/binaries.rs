//! Finding PostgreSQL's server programs on this machine.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::{Error, process};

/// The oldest major version that pgonce supports.
pub(crate) const MAJOR_MIN: u32 = 14;

const PROGRAMS: [&str; 3] = ["initdb", "postgres", "pg_ctl"];
const VERSION_LIMIT: Duration = Duration::from_secs(10);

/// Folders of distributions, PGDG, Homebrew and Postgres.app. In each, `*`
/// stands for one folder name and the newest version comes first.
const USUAL_FOLDERS: [&str; 9] = [
    "/usr/lib/postgresql/*/bin",
    "/usr/pgsql-*/bin",
    "/usr/libexec/postgresql*",
    "/usr/local/pgsql/bin",
    "/opt/homebrew/opt/postgresql@*/bin",
    "/usr/local/opt/postgresql@*/bin",
    "/opt/homebrew/bin",
    "/Applications/Postgres.app/Contents/Versions/*/bin",
    "/Library/PostgreSQL/*/bin",
];

/// A version of the PostgreSQL server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// The 15 of 15.4.
    pub major: u32,
    /// The 4 of 15.4; 0 for betas and development versions.
    pub minor: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// A folder that holds `initdb`, `postgres` and `pg_ctl`, version 14 or newer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Binaries {
    dir: PathBuf,
    version: Version,
}

impl Binaries {
    /// Looks at `PGONCE_PG_BIN`, then along `PATH`, then in the usual folders.
    ///
    /// # Errors
    /// [`Error::BadBinaries`] when `PGONCE_PG_BIN` is set to a folder of no
    /// use (it is never passed over silently); [`Error::NotFound`] otherwise.
    pub fn find() -> Result<Self, Error> {
        Self::candidates(|_| true)
    }

    /// Like [`Binaries::find`], for the major version of existing data.
    pub(crate) fn find_major(major: u32) -> Result<Self, Error> {
        Self::candidates(|found| found.version.major == major)
    }

    fn candidates(wanted: impl Fn(&Self) -> bool) -> Result<Self, Error> {
        if let Some(dir) = std::env::var_os("PGONCE_PG_BIN") {
            return Self::in_dir(Path::new(&dir));
        }
        let path = std::env::var_os("PATH").unwrap_or_default();
        let folders = on_path(&path).into_iter().chain(usual_folders());
        first_usable(folders, wanted)
    }

    /// The server programs in one folder.
    ///
    /// # Errors
    /// [`Error::BadBinaries`] when one is missing or the version is too old.
    pub fn in_dir(dir: &Path) -> Result<Self, Error> {
        let bad = |reason: String| Error::BadBinaries { dir: dir.to_owned(), reason };
        for program in PROGRAMS {
            if !dir.join(program).is_file() {
                return Err(bad(format!("there is no {program}")));
            }
        }
        let dir = dir.canonicalize().map_err(Error::io("use", dir))?;
        let said = process::run(Command::new(dir.join("postgres")).arg("--version"), VERSION_LIMIT)
            .map_err(|error| bad(error.to_string()))?;
        let version = parse_version(&said).ok_or_else(|| bad(format!("`postgres --version` says {said:?}")))?;
        if version.major < MAJOR_MIN {
            return Err(bad(format!("version {version} is older than {MAJOR_MIN}")));
        }
        Ok(Self { dir, version })
    }

    /// The version that `postgres --version` told.
    pub fn version(&self) -> Version {
        self.version
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The path of one program, such as `pg_basebackup`; it may not be there.
    pub fn program(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }
}

/// The first folder that holds what is wanted, or why none does.
pub(crate) fn first_usable(
    folders: impl Iterator<Item = PathBuf>,
    wanted: impl Fn(&Binaries) -> bool,
) -> Result<Binaries, Error> {
    let mut seen = HashSet::new();
    let mut looked = vec!["PGONCE_PG_BIN: not set".to_owned()];
    for folder in folders {
        // PATH often names a usual folder too.
        if !seen.insert(folder.clone()) {
            continue;
        }
        match Binaries::in_dir(&folder) {
            Ok(found) if wanted(&found) => return Ok(found),
            Ok(found) => looked.push(format!("{}: version {}", folder.display(), found.version)),
            Err(Error::BadBinaries { reason, .. }) => looked.push(format!("{}: {reason}", folder.display())),
            Err(other) => looked.push(other.to_string()),
        }
    }
    looked.push("PATH: no other folder with `postgres`".to_owned());
    looked.push(format!("nothing else in {}", USUAL_FOLDERS.join(", ")));
    Err(Error::NotFound { looked })
}

/// Folders behind the `postgres` or `initdb` on PATH. Symbolic links are
/// followed: /usr/local/bin may hold a link to `postgres` alone while its
/// neighbours are in the folder that the link points into.
fn on_path(path: &OsStr) -> Vec<PathBuf> {
    let programs = std::env::split_paths(path).flat_map(|dir| [dir.join("postgres"), dir.join("initdb")]);
    let real = programs.filter_map(|program| program.canonicalize().ok());
    real.filter_map(|program| program.parent().map(Path::to_owned)).collect()
}

fn usual_folders() -> impl Iterator<Item = PathBuf> {
    USUAL_FOLDERS.into_iter().flat_map(expand).filter(|dir| dir.join("postgres").is_file())
}

/// Expands the one `*` of a pattern, newest version first.
fn expand(pattern: &str) -> Vec<PathBuf> {
    let Some((before, after)) = pattern.split_once('*') else {
        return vec![PathBuf::from(pattern)];
    };
    let (parent, prefix) = before.rsplit_once('/').unwrap_or(("", before));
    let Ok(entries) = fs::read_dir(format!("{parent}/")) else {
        return Vec::new();
    };
    let mut found: Vec<(u32, PathBuf)> = entries
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let version = name.strip_prefix(prefix)?;
            // A name without a number ("latest") comes after all numbered ones.
            let number = leading_number(version).unwrap_or(0);
            Some((number, PathBuf::from(format!("{parent}/{name}{after}"))))
        })
        .collect();
    found.sort_by(|a, b| b.cmp(a));
    found.into_iter().map(|(_, dir)| dir).collect()
}

fn leading_number(text: &str) -> Option<u32> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    text[..end].parse().ok()
}

/// Reads "postgres (PostgreSQL) 15.16 (Debian 15.16-0+deb12u1)" and "… 19beta1".
fn parse_version(said: &str) -> Option<Version> {
    let (_, text) = said.split_once("(PostgreSQL) ")?;
    let major = leading_number(text)?;
    let after = text.trim_start_matches(|c: char| c.is_ascii_digit());
    let minor = after.strip_prefix('.').and_then(leading_number).unwrap_or(0);
    Some(Version { major, minor })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read() {
        let parsed = |said| parse_version(said).map(|v| (v.major, v.minor));
        assert_eq!(parsed("postgres (PostgreSQL) 15.16 (Debian 15.16-0+deb12u1)\n"), Some((15, 16)));
        assert_eq!(parsed("postgres (PostgreSQL) 19beta1"), Some((19, 0)));
        assert_eq!(parsed("postgres (PostgreSQL) 9.6.24"), Some((9, 6)));
        assert_eq!(parsed("zsh: not found"), None);
    }
}
