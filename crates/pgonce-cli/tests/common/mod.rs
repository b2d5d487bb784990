//! The real binary, run and read.

#![allow(clippy::unwrap_used, clippy::expect_used, dead_code, reason = "helpers of several test files")]

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

/// What a run of the binary left.
#[derive(Debug)]
pub struct Ran {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Ran {
    /// Asserts that it is done.
    #[track_caller]
    pub fn done(self) -> Self {
        assert_eq!(self.code, 0, "{self:#?}");
        self
    }

    /// Asserts that it failed.
    #[track_caller]
    pub fn failed(self) -> Self {
        assert_eq!(self.code, 1, "{self:#?}");
        self
    }

    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:#?}"))
    }
}

impl From<Output> for Ran {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

/// The binary, without anything of this shell's that it would heed.
pub fn command(dir: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pgonce"));
    command.current_dir(dir).env_remove("DATABASE_URL").env_remove("RUST_LOG").env("USER", "tester");
    command
}

/// Runs it on a database.
pub fn pgonce(url: &str, args: &[&str]) -> Ran {
    let dir = temp_dir();
    command(dir.path()).env("DATABASE_URL", url).args(args).output().unwrap().into()
}

/// A folder that the server's account can get into, when this is root.
pub fn temp_dir() -> TempDir {
    let open = std::fs::Permissions::from_mode(0o711);
    tempfile::Builder::new().prefix("pgonce-cli-").permissions(open).tempdir().unwrap()
}
