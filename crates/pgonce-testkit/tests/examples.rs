//! The programs in `examples/` hold what they promise: the same SQL from psql, psycopg, node-postgres and pgx.
//!
//! Dependencies are installed under cargo's target directory, once for each version of their lists; the source
//! tree stays as it is. A toolchain that is missing is a failure with the command that installs it, unless
//! `SKIP_EXAMPLES=python,node,go,sql` names it.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on should stop, loudly")]

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use pgonce_cluster::Binaries;
use pgonce_testkit::TestDb;
use tokio::process::Command;

const RUN_LIMIT: Duration = Duration::from_secs(120);
/// Downloads, and a Go standard library that is compiled for the first time.
const INSTALL_LIMIT: Duration = Duration::from_secs(600);

#[tokio::test(flavor = "multi_thread")]
async fn sql() {
    if skipped("sql") {
        return;
    }
    let db = TestDb::new().await;
    let mut psql = Command::new(psql());
    psql.args([db.direct_url(), "-X", "-f"]).arg(source("sql").join("orders.sql"));
    let said = finish(&mut psql, RUN_LIMIT).await;
    assert_eq!(said.lines().last(), Some("all as expected"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn python() {
    if skipped("python") || !available("python", "python3", "apt-get install python3 python3-venv") {
        return;
    }
    let requirements = source("python-psycopg").join("requirements.txt");
    let home = install("python", &[&requirements], async |home| {
        let venv = home.join("venv");
        finish(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&venv), INSTALL_LIMIT).await;
        let mut pip = Command::new(venv.join("bin/pip"));
        pip.args(["install", "--quiet", "--disable-pip-version-check", "-r"]).arg(&requirements);
        finish(&mut pip, INSTALL_LIMIT).await;
    })
    .await;
    let mut program = Command::new(home.join("venv/bin/python"));
    program.env("PYTHONDONTWRITEBYTECODE", "1").arg(source("python-psycopg").join("orders.py"));
    self_test(&mut program).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn node() {
    let hint = "apt-get install nodejs npm";
    if skipped("node") || !available("node", "node", hint) || !available("node", "npm", hint) {
        return;
    }
    let folder = source("node-postgres");
    let lists = [folder.join("package.json"), folder.join("package-lock.json")];
    // Node looks for node_modules beside the program, so the program is copied to where they are.
    let home = install("node", &[&lists[0], &lists[1]], async |home| {
        for list in &lists {
            fs::copy(list, home.join(list.file_name().unwrap())).unwrap();
        }
        let mut npm = Command::new("npm");
        finish(npm.args(["ci", "--no-audit", "--no-fund", "--ignore-scripts"]).current_dir(home), INSTALL_LIMIT).await;
    })
    .await;
    for program in ["orders.js", "selftest.js"] {
        fs::copy(folder.join(program), home.join(program)).unwrap();
    }
    self_test(Command::new("node").arg(home.join("orders.js"))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn go() {
    if skipped("go") || !available("go", "go", "apt-get install golang-go (1.25 or newer; or from go.dev/dl)") {
        return;
    }
    let program = home("go").join("orders");
    // readonly: a go.mod or go.sum that is not complete is an error, and not repaired in the source tree.
    let mut build = Command::new("go");
    build.args(["build", "-mod=readonly", "-buildvcs=false", "-o"]).arg(&program).arg(".");
    finish(build.current_dir(source("go-pgx")), INSTALL_LIMIT).await;
    self_test(&mut Command::new(program)).await;
}

/// Runs `--self-test` against a new database: exit 0, something passed, nothing failed.
async fn self_test(program: &mut Command) {
    let db = TestDb::new().await;
    let said = finish(program.arg("--self-test").env("DATABASE_URL", db.direct_url()), RUN_LIMIT).await;
    let summary = said.lines().last().unwrap_or_default();
    let passed: u32 = summary.split(' ').next().and_then(|count| count.parse().ok()).unwrap_or(0);
    assert!(passed >= 10 && summary.ends_with(" passed, 0 failed"), "{said}");
}

/// Runs to the end, and returns what was said on stdout; fails with everything that was said.
async fn finish(command: &mut Command, limit: Duration) -> String {
    command.stdin(Stdio::null()).kill_on_drop(true);
    let shown = format!("{:?}", command.as_std());
    let output = tokio::time::timeout(limit, command.output())
        .await
        .unwrap_or_else(|_| panic!("not done after {limit:?}: {shown}"))
        .unwrap_or_else(|error| panic!("{error}: {shown}"));
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {shown}\n{stdout}\n{stderr}", output.status);
    stdout
}

/// Installs what the lists name, unless that is there already; one process at a time.
async fn install(language: &str, lists: &[&PathBuf], run: impl AsyncFnOnce(&Path)) -> PathBuf {
    let home = home(language);
    let lock = File::create(home.with_extension("lock")).unwrap();
    let lock = tokio::task::spawn_blocking(move || lock.lock().map(|()| lock)).await.unwrap().unwrap();
    let wanted: String = lists.iter().map(|list| fs::read_to_string(list).unwrap()).collect();
    let installed = home.join("installed");
    if fs::read_to_string(&installed).ok().as_ref() != Some(&wanted) {
        let _ = fs::remove_file(&installed); // an install that breaks off is not taken for a whole one
        run(&home).await;
        fs::write(&installed, wanted).unwrap();
    }
    drop(lock);
    home
}

/// `target/examples/<language>`.
fn home(language: &str) -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    let home = target.join("examples").join(language);
    fs::create_dir_all(&home).unwrap();
    home
}

fn source(folder: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples").join(folder).canonicalize().unwrap()
}

fn skipped(language: &str) -> bool {
    let listed = std::env::var("SKIP_EXAMPLES").is_ok_and(|list| list.split(',').any(|name| name.trim() == language));
    if listed {
        eprintln!("skipped, as SKIP_EXAMPLES says: {language}");
    }
    listed
}

/// True, or a failure that says what to do.
fn available(language: &str, program: &str, install: &str) -> bool {
    let found = on_path(program).is_some();
    assert!(found, "{program} is not on PATH. Install it: {install}. Or leave it out: SKIP_EXAMPLES={language}");
    found
}

fn on_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(program)).find(|file| file.is_file())
}

/// On PATH, or beside the server's programs: not every package brings it.
fn psql() -> PathBuf {
    let beside = || Binaries::find().ok().map(|found| found.program("psql"));
    let distribution = || {
        let versions = fs::read_dir("/usr/lib/postgresql").ok()?;
        versions.flatten().map(|version| version.path().join("bin/psql")).find(|file| file.is_file())
    };
    on_path("psql").or_else(|| beside().filter(|file| file.is_file())).or_else(distribution).expect(
        "psql is not on PATH. Install it: apt-get install postgresql-client. Or leave it out: SKIP_EXAMPLES=sql",
    )
}
