//! Who runs the server: PostgreSQL refuses to run as root.

use std::fs;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _, chown};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::{Error, process};

const CHECK_LIMIT: Duration = Duration::from_secs(10);

/// The account that runs the server's programs.
#[derive(Debug, Clone)]
pub(crate) struct Account {
    name: String,
    /// Set only when this process is root and has to step down.
    step_down_to: Option<(u32, u32)>,
}

impl Account {
    /// This user or, for root, the owner of the existing data, else the first
    /// of: `postgres`, whoever called sudo, `nobody`.
    pub(crate) fn choose(pgdata: &Path) -> Result<Self, Error> {
        if !rustix::process::geteuid().is_root() {
            return Ok(Self { name: "this user".to_owned(), step_down_to: None });
        }
        // Data that a person made without root stays that person's.
        if let Ok(meta) = fs::metadata(pgdata)
            && meta.uid() != 0
        {
            let ids = (meta.uid(), meta.gid());
            return Ok(Self {
                name: id("-un", &ids.0.to_string()).unwrap_or_else(|| ids.0.to_string()),
                step_down_to: Some(ids),
            });
        }
        let caller = std::env::var("SUDO_USER").ok();
        let names = ["postgres".to_owned()].into_iter().chain(caller).chain(["nobody".to_owned()]);
        for name in names {
            let ids = id("-u", &name).zip(id("-g", &name));
            let ids = ids.and_then(|(uid, gid)| Some((uid.parse().ok()?, gid.parse().ok()?)));
            if let Some((uid, gid)) = ids
                && uid != 0
            {
                if name == "nobody" {
                    tracing::warn!("no user `postgres` here: the server runs as `nobody`");
                }
                return Ok(Self { name, step_down_to: Some((uid, gid)) });
            }
        }
        Err(Error::Command {
            command: "id -u postgres".to_owned(),
            what: "found no account: PostgreSQL refuses to run as root and neither `postgres` nor `nobody` exists"
                .to_owned(),
            output: String::new(),
        })
    }

    /// A command that runs as this account, in `/`, with a clean environment:
    /// root's HOME or anybody's PGPORT, PGDATA and PGOPTIONS must not leak in.
    pub(crate) fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        let system = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin";
        let own = program.parent().unwrap_or(Path::new("/")).display();
        // LC_ALL: messages are read by this crate ("Address already in use").
        command.env_clear().env("PATH", format!("{own}:{system}")).env("LC_ALL", "C").env("HOME", "/").current_dir("/");
        match self.step_down_to {
            // std also drops the supplementary groups when it sets the user.
            Some((uid, gid)) => {
                command.gid(gid).uid(uid);
            }
            None => {
                for kept in ["LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ"] {
                    if let Some(value) = std::env::var_os(kept) {
                        command.env(kept, value);
                    }
                }
            }
        }
        command
    }

    /// Hands over a file or directory that this process has just made; what
    /// was there before keeps its owner.
    pub(crate) fn give(&self, path: &Path) -> Result<(), Error> {
        match self.step_down_to {
            Some((uid, gid)) => chown(path, Some(uid), Some(gid)).map_err(Error::io("hand over", path)),
            None => Ok(()),
        }
    }

    /// Whether files of this owner are the account's.
    pub(crate) fn owns(&self, uid: u32) -> bool {
        let own = self.step_down_to.map_or_else(|| rustix::process::geteuid().as_raw(), |(uid, _)| uid);
        own == uid
    }

    /// Makes the directory of a cluster with its missing parents, open for
    /// passing through (not for listing) when another account has to get in.
    /// Parents that exist are left as they are; the directory itself is ours.
    pub(crate) fn make_home(&self, dir: &Path) -> Result<(), Error> {
        let mode = if self.step_down_to.is_some() { 0o711 } else { 0o700 };
        make_missing(dir, mode)?;
        set_mode(dir, mode)
    }

    /// Makes a directory that only this account may enter.
    pub(crate) fn make_private(&self, dir: &Path) -> Result<(), Error> {
        fs::DirBuilder::new().mode(0o700).create(dir).map_err(Error::io("make", dir))?;
        self.give(dir)
    }

    /// Checks that the account can get into `folder`, naming the topmost
    /// closed one. The kernel answers, so that ACLs and mount options count.
    pub(crate) fn check_searchable(&self, folder: &Path) -> Result<(), Error> {
        if self.step_down_to.is_none() {
            return Ok(());
        }
        let script = r#"for folder; do [ -x "$folder" ] || { printf '\n%s' "$folder"; exit 1; }; done"#;
        let mut command = self.command(Path::new("/bin/sh"));
        command.args(["-c", script, "sh"]);
        let mut folders: Vec<&Path> = folder.ancestors().collect();
        folders.reverse();
        command.args(folders);
        process::run(&mut command, CHECK_LIMIT).map(drop).map_err(|error| match error {
            Error::Command { output, .. } if output.contains('/') => {
                Error::NotSearchable { folder: PathBuf::from(output.trim()), account: self.name.clone() }
            }
            other => other,
        })
    }
}

/// Makes a directory with its missing parents, each with this mode whatever
/// the umask says: root's is often 077, which would shut the server out. What
/// exists already is left as it is.
pub(crate) fn make_missing(dir: &Path, mode: u32) -> Result<(), Error> {
    let missing: Vec<&Path> =
        dir.ancestors().take_while(|folder| !folder.as_os_str().is_empty() && !folder.exists()).collect();
    for folder in missing.into_iter().rev() {
        // Recursive only so that another process may be faster.
        let made = fs::DirBuilder::new().recursive(true).create(folder);
        made.map_err(Error::io("make", folder))?;
        set_mode(folder, mode)?;
    }
    Ok(())
}

fn set_mode(path: &Path, mode: u32) -> Result<(), Error> {
    let permissions = fs::Permissions::from_mode(mode);
    fs::set_permissions(path, permissions).map_err(Error::io("set the mode of", path))
}

/// Asks `id`, which knows accounts from every name service, not only /etc/passwd.
fn id(flag: &str, who: &str) -> Option<String> {
    let answer = process::run(Command::new("id").args([flag, who]), CHECK_LIMIT).ok()?;
    Some(answer.trim().to_owned())
}
