//! Processes: run one with a time limit, find those of a cluster, signal them.

use std::fs::{self, File};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::Error;

/// How often a condition is looked at while waiting for it.
const POLL_EVERY: Duration = Duration::from_millis(10);

/// Waits until `condition` holds, at most `limit`; tells whether it did.
pub(crate) fn wait_until(limit: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + limit;
    loop {
        if condition() {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        thread::sleep(POLL_EVERY);
    }
}

/// Runs a command to its end and returns what it wrote on both streams.
///
/// The output goes through a file: a pipe would have to be drained by a thread
/// to keep the time limit.
pub(crate) fn run(command: &mut Command, limit: Duration) -> Result<String, Error> {
    let shown = show(command);
    let failed = |what: String, output: String| Error::Command { command: shown.clone(), what, output };
    let io_failed = |error: std::io::Error| failed(format!("could not be run: {error}"), String::new());

    let mut output = tempfile::tempfile().map_err(io_failed)?;
    let mut child = command
        .stdin(Stdio::null())
        .stdout(output.try_clone().map_err(io_failed)?)
        .stderr(output.try_clone().map_err(io_failed)?)
        .spawn()
        .map_err(io_failed)?;

    let mut ended = None;
    let in_time = wait_until(limit, || {
        ended = child.try_wait().transpose();
        ended.is_some()
    });
    if !in_time {
        // It may have ended by itself in between: nothing is lost then.
        let _ = child.kill();
        let _ = child.wait();
    }
    let text = tail_of(&mut output, 0);
    match ended {
        Some(Ok(status)) if status.success() => Ok(text),
        Some(Ok(status)) => Err(failed(format!("failed ({status})"), text)),
        Some(Err(error)) => Err(io_failed(error)),
        None => Err(failed(format!("took longer than {} s", limit.as_secs()), text)),
    }
}

/// The command as a person would type it.
pub(crate) fn show(command: &Command) -> String {
    std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|word| word.to_string_lossy().into_owned())
        .collect::<Vec<_>>()
        .join(" ")
}

/// The end of the text that a file holds from `from` on, at most 4 KiB.
pub(crate) fn tail_of(file: &mut File, from: u64) -> String {
    const TAIL_BYTES_MAX: u64 = 4096;
    let mut bytes = Vec::new();
    let len = file.metadata().map_or(0, |meta| meta.len());
    let start = len.saturating_sub(TAIL_BYTES_MAX).max(from);
    // A log that cannot be read is shown as empty: the error it belongs to matters more.
    let _ = file.seek(SeekFrom::Start(start));
    let _ = file.read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).trim_end().to_owned()
}

/// Sends a signal. A process that is already gone is fine.
pub(crate) fn signal(pid: u32, signal: Signal) {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    if let Some(pid) = pid
        && let Err(error) = kill_process(pid, signal)
    {
        tracing::debug!(?pid, ?signal, %error, "signal not delivered");
    }
}

/// The command line of a live process, its words joined by spaces.
///
/// `None` for a process that is gone and for a zombie: `kill(pid, 0)` would
/// take the latter for alive, for ever in a container whose first process
/// does not reap.
pub(crate) fn command_line(pid: u32) -> Option<String> {
    if Path::new("/proc/self/cmdline").exists() {
        let bytes = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        return words(&bytes);
    }
    listed_by_ps().into_iter().find_map(|(listed, line)| (listed == pid).then_some(line))
}

/// Every live process with its command line, as far as this user may see.
fn all() -> Vec<(u32, String)> {
    let Ok(entries) = fs::read_dir("/proc") else {
        return listed_by_ps();
    };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter_map(|pid| Some((pid, command_line(pid)?))).collect()
}

fn words(bytes: &[u8]) -> Option<String> {
    let line = String::from_utf8_lossy(bytes).replace('\0', " ");
    let line = line.trim_end();
    (!line.is_empty()).then(|| line.to_owned())
}

/// Where there is no /proc (macOS, the BSDs).
fn listed_by_ps() -> Vec<(u32, String)> {
    let Ok(output) = Command::new("ps").args(["-A", "-ww", "-o", "pid=,stat=,command="]).output() else {
        return Vec::new();
    };
    let text = String::from_utf8_lossy(&output.stdout);
    let parse = |line: &str| {
        let (pid, rest) = line.trim_start().split_once(' ')?;
        let (state, command) = rest.trim_start().split_once(' ')?;
        let alive = !state.starts_with('Z');
        alive.then_some((pid.parse().ok()?, command.trim().to_owned()))
    };
    text.lines().filter_map(parse).collect()
}

/// What a process is to the cluster called `cluster_name`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kin {
    /// The postmaster, started by this crate.
    Postmaster,
    /// One of the postmaster's children.
    Backend,
    /// Some PostgreSQL process that may well serve the same data.
    UnknownServer,
    /// Surely something else.
    Stranger,
}

/// Judges by the command line, which every user may read: a process's working
/// directory is closed even to root in a container without CAP_SYS_PTRACE.
///
/// The postmaster has `cluster_name` among its arguments; its children show it
/// first in their titles ("postgres: NAME: checkpointer"). A child that has not
/// set its title yet still shows the postmaster's line and counts as one.
pub(crate) fn kin(line: &str, cluster_name: &str) -> Kin {
    let program = line.split(' ').next().unwrap_or_default();
    let name = program.trim_end_matches(':').rsplit('/').next().unwrap_or_default();
    if !matches!(name, "postgres" | "postmaster") {
        Kin::Stranger
    } else if line.starts_with(&format!("postgres: {cluster_name}: ")) {
        Kin::Backend
    } else if line.split(' ').any(|word| word.strip_prefix("cluster_name=") == Some(cluster_name)) {
        Kin::Postmaster
    } else if line.contains(" cluster_name=pgonce-") || line.starts_with("postgres: ") {
        // The postmaster of another cluster of ours, or somebody's backend:
        // neither is what a postmaster.pid of this cluster can mean.
        Kin::Stranger
    } else {
        Kin::UnknownServer
    }
}

/// All live processes of the cluster, the postmaster first.
pub(crate) fn of_cluster(cluster_name: &str) -> Vec<(u32, Kin)> {
    let mut found: Vec<(u32, Kin)> = all()
        .into_iter()
        .map(|(pid, line)| (pid, kin(&line, cluster_name)))
        .filter(|(_, kin)| matches!(kin, Kin::Postmaster | Kin::Backend))
        .collect();
    found.sort_by_key(|(pid, kin)| (*kin != Kin::Postmaster, *pid));
    found
}

/// SIGKILLs the postmaster and its children; tells whether all are gone.
///
/// In a loop, because a postmaster forks until its own SIGKILL arrives. It
/// comes first in the list: its death ends the forking.
pub(crate) fn kill_all(cluster_name: &str, limit: Duration) -> bool {
    wait_until(limit, || {
        let left = of_cluster(cluster_name);
        for (pid, _) in &left {
            signal(*pid, Signal::KILL);
        }
        left.is_empty()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kin_is_told_by_the_command_line() {
        let cases = [
            ("/usr/lib/postgresql/15/bin/postgres -D /d/pgdata -c cluster_name=pgonce-1a -c port=1", Kin::Postmaster),
            ("postgres: pgonce-1a: checkpointer ", Kin::Backend),
            ("postgres: pgonce-1a: postgres postgres 127.0.0.1(4711) idle", Kin::Backend),
            ("postgres: pgonce-1ab: walwriter", Kin::Stranger),
            ("/usr/bin/postgres -D /e/pgdata -c cluster_name=pgonce-1ab", Kin::Stranger),
            ("postgres: 15/main: checkpointer", Kin::Stranger),
            ("/usr/bin/postgres -D pgdata", Kin::UnknownServer),
            ("vim postgres -c cluster_name=pgonce-1a", Kin::Stranger),
        ];
        for (line, expected) in cases {
            assert_eq!(kin(line, "pgonce-1a"), expected, "{line}");
        }
    }
}
