//! What stops the server when its owner dies without being able to.

use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::Error;

/// Reads postmaster pids, one a line, the last one counts (0: none runs). The
/// end of the input means that the owner is gone, however it died: the kernel
/// closes its end of the pipe. Neither polling nor a reused owner pid can fool it.
///
/// The pid is believed only while postmaster.pid names it too. A server that
/// has just been spawned has not written that file yet: hence the first loop.
const SCRIPT: &str = r#"
pgdata=$1 signal=$2 tenths=$3 remove=$4 pid=0
pause() { sleep 0.1 2>/dev/null || sleep 1; }
while read -r line; do pid=$line; done
if [ "$pid" -gt 0 ]; then
  n=0
  while [ "$n" -lt 30 ] && kill -0 "$pid" && [ "$(head -n 1 "$pgdata/postmaster.pid")" != "$pid" ]; do
    pause; n=$((n + 1))
  done
  if [ "$(head -n 1 "$pgdata/postmaster.pid")" = "$pid" ]; then
    kill -s "$signal" "$pid"
    kill -s CONT "$pid"
    n=0
    while [ "$n" -lt "$tenths" ] && kill -0 "$pid"; do pause; n=$((n + 1)); done
    [ -z "$remove" ] || kill -s KILL "$pid"
  fi
fi
[ -z "$remove" ] || rm -rf -- "$remove"
"#;

/// A shell that outlives this process just long enough to stop the server.
#[derive(Debug)]
pub(crate) struct Watchdog {
    shell: Child,
}

impl Watchdog {
    /// Guards the server on `pgdata`. With `remove`, the cluster is a throw-away
    /// one: stopped at once and removed; without, it gets a fast shutdown.
    pub(crate) fn guard(pgdata: &Path, remove: Option<&Path>) -> Result<Self, Error> {
        let (signal, tenths) = if remove.is_some() { ("QUIT", "100") } else { ("INT", "600") };
        let shell = Command::new("/bin/sh")
            .args(["-c", SCRIPT, "pgonce-watchdog"])
            .arg(pgdata)
            .args([signal, tenths])
            .arg(remove.unwrap_or(Path::new("")))
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Ctrl-C goes to the whole foreground group; this must survive it.
            .process_group(0)
            .spawn()
            .map_err(Error::io("run", Path::new("/bin/sh")))?;
        Ok(Self { shell })
    }

    /// Tells which postmaster to stop; `None` once it is known to be gone.
    pub(crate) fn watch(&mut self, pid: Option<u32>) {
        let Some(pipe) = self.shell.stdin.as_mut() else {
            return;
        };
        if let Err(error) = writeln!(pipe, "{}", pid.unwrap_or(0)) {
            tracing::warn!(%error, "the watchdog is gone: a crash would leave the server running");
        }
    }
}

impl Drop for Watchdog {
    /// An orderly end: everything is stopped, nothing is left to guard.
    fn drop(&mut self) {
        let _ = self.shell.kill();
        let _ = self.shell.wait();
    }
}
