//! The programs in `examples/`, with what they need: installed under cargo's target directory, once for each
//! version of their lists; the source tree stays as it is.
//!
//! A toolchain that is missing is a failure with the command that installs it, unless
//! `SKIP_EXAMPLES=python,node,go,sql` names it: then there is no program, and a line that says so.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use pgonce_cluster::Binaries;
use tokio::process::Command;

/// Downloads, and a Go standard library that is compiled for the first time.
const INSTALL_LIMIT: Duration = Duration::from_secs(600);

/// Where programs are installed: `target/examples`.
#[derive(Debug)]
pub struct Programs(PathBuf);

/// A folder of `examples/` that can be run.
#[derive(Debug, Clone)]
pub struct Installed {
    program: PathBuf,
    /// Before the name of a script; none where the program is all.
    scripts: Option<PathBuf>,
}

impl Installed {
    /// The program itself.
    #[must_use]
    pub fn command(&self) -> Command {
        Command::new(&self.program)
    }

    /// A script of the folder.
    #[must_use]
    pub fn script(&self, name: &str) -> Command {
        let mut command = self.command();
        let scripts = self.scripts.as_ref().expect("a folder with scripts");
        command.env("PYTHONDONTWRITEBYTECODE", "1").arg(scripts.join(name));
        command
    }
}

impl Programs {
    /// Call it with `env!("CARGO_TARGET_TMPDIR")`: only a test knows where cargo's target directory is.
    #[must_use]
    pub fn under(target_tmp_dir: &str) -> Self {
        Self(Path::new(target_tmp_dir).parent().unwrap().join("examples"))
    }

    /// Python, with the packages of the folder's `requirements.txt`.
    pub async fn python(&self, folder: &str) -> Option<Installed> {
        if skipped("python") {
            return None;
        }
        require("python", "python3", "apt-get install python3 python3-venv");
        let requirements = source(folder).join("requirements.txt");
        let venv = self.home(folder).join("venv");
        self.install(folder, &[&requirements], async |_| {
            finish(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&venv), INSTALL_LIMIT).await;
            let mut pip = Command::new(venv.join("bin/pip"));
            pip.args(["install", "--quiet", "--disable-pip-version-check", "-r"]).arg(&requirements);
            finish(&mut pip, INSTALL_LIMIT).await;
        })
        .await;
        Some(Installed { program: venv.join("bin/python"), scripts: Some(source(folder)) })
    }

    /// Node, with the packages of the folder's `package-lock.json`. Node looks for them beside the program, so
    /// the programs are copied to where the packages are.
    pub async fn node(&self, folder: &str) -> Option<Installed> {
        if skipped("node") {
            return None;
        }
        for program in ["node", "npm"] {
            require("node", program, "apt-get install nodejs npm");
        }
        let lists = [source(folder).join("package.json"), source(folder).join("package-lock.json")];
        let home = self.home(folder);
        let lock = self
            .install(folder, &[&lists[0], &lists[1]], async |home| {
                for list in &lists {
                    fs::copy(list, home.join(list.file_name().unwrap())).unwrap();
                }
                let mut npm = Command::new("npm");
                npm.args(["ci", "--no-audit", "--no-fund", "--ignore-scripts"]).current_dir(home);
                finish(&mut npm, INSTALL_LIMIT).await;
            })
            .await;
        for script in fs::read_dir(source(folder)).unwrap().map(|entry| entry.unwrap().path()) {
            let copy = home.join(script.file_name().unwrap());
            let wanted = fs::read(&script).unwrap();
            if script.extension().is_some_and(|ending| ending == "js") && fs::read(&copy).ok().as_ref() != Some(&wanted)
            {
                // Renamed into place: another test may start it at this moment.
                fs::write(copy.with_extension("new"), wanted).unwrap();
                fs::rename(copy.with_extension("new"), copy).unwrap();
            }
        }
        drop(lock);
        Some(Installed { program: "node".into(), scripts: Some(home) })
    }

    /// The program that Go makes of the folder.
    pub async fn go(&self, folder: &str) -> Option<Installed> {
        if skipped("go") {
            return None;
        }
        require("go", "go", "apt-get install golang-go (1.25 or newer; or from go.dev/dl)");
        let program = self.home(folder).join("orders");
        // readonly: a go.mod or go.sum that is not complete is an error, and not repaired in the source tree.
        let mut build = Command::new("go");
        build.args(["build", "-mod=readonly", "-buildvcs=false", "-o"]).arg(&program).arg(".");
        finish(build.current_dir(source(folder)), INSTALL_LIMIT).await;
        Some(Installed { program, scripts: None })
    }

    /// Installs what the lists name, unless that is there already; one process at a time, until the lock is let go.
    async fn install(&self, folder: &str, lists: &[&PathBuf], run: impl AsyncFnOnce(&Path)) -> File {
        let home = self.home(folder);
        let lock = File::create(home.with_extension("lock")).unwrap();
        let lock = tokio::task::spawn_blocking(move || lock.lock().map(|()| lock)).await.unwrap().unwrap();
        let wanted: String = lists.iter().map(|list| fs::read_to_string(list).unwrap()).collect();
        let installed = home.join("installed");
        if fs::read_to_string(&installed).ok().as_ref() != Some(&wanted) {
            let _ = fs::remove_file(&installed); // an install that breaks off is not taken for a whole one
            run(&home).await;
            fs::write(&installed, wanted).unwrap();
        }
        lock
    }

    fn home(&self, folder: &str) -> PathBuf {
        let home = self.0.join(folder);
        fs::create_dir_all(&home).unwrap();
        home
    }
}

/// Runs to the end, and returns what was said on stdout; fails with everything that was said.
pub async fn finish(command: &mut Command, limit: Duration) -> String {
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

/// A folder of `examples/`.
#[must_use]
pub fn source(folder: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples").join(folder).canonicalize().unwrap()
}

/// Whether `SKIP_EXAMPLES` names it.
#[must_use]
pub fn skipped(language: &str) -> bool {
    let listed = std::env::var("SKIP_EXAMPLES").is_ok_and(|list| list.split(',').any(|name| name.trim() == language));
    if listed {
        eprintln!("skipped, as SKIP_EXAMPLES says: {language}");
    }
    listed
}

/// psql on PATH, or beside the server's programs: not every package brings it.
#[must_use]
pub fn psql() -> PathBuf {
    let beside = || Binaries::find().ok().map(|found| found.program("psql"));
    let distribution = || {
        let versions = fs::read_dir("/usr/lib/postgresql").ok()?;
        versions.flatten().map(|version| version.path().join("bin/psql")).find(|file| file.is_file())
    };
    on_path("psql").or_else(|| beside().filter(|file| file.is_file())).or_else(distribution).expect(
        "psql is not on PATH. Install it: apt-get install postgresql-client. Or leave it out: SKIP_EXAMPLES=sql",
    )
}

/// Fails with what to do about it.
fn require(language: &str, program: &str, install: &str) {
    let found = on_path(program).is_some();
    assert!(found, "{program} is not on PATH. Install it: {install}. Or leave it out: SKIP_EXAMPLES={language}");
}

fn on_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(program)).find(|file| file.is_file())
}
