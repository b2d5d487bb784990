//! The docs are run: every SQL block by psql, every `pgonce` line by a shell, as a reader would type them.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests stop loudly")]

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use pgonce_testkit::TestDb;
use pgonce_testkit::programs::psql;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// README and docs/, in order.
fn pages() -> Vec<(String, String)> {
    fn walk(dir: &Path, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, found);
            } else if path.extension().is_some_and(|ending| ending == "md") {
                found.push(path);
            }
        }
    }
    let mut paths = vec![root().join("README.md")];
    walk(&root().join("docs"), &mut paths);
    paths.sort();
    paths.into_iter().map(|path| (path.display().to_string(), std::fs::read_to_string(&path).unwrap())).collect()
}

/// The blocks of one language in a page.
fn blocks(page: &str, language: &str) -> Vec<String> {
    let fence = format!("```{language}\n");
    page.split(&fence).skip(1).map(|rest| rest.split("```").next().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn every_sql_block_runs() {
    let mut count = 0;
    for (name, page) in pages() {
        let sql = blocks(&page, "sql").join("\n");
        if sql.is_empty() {
            continue;
        }
        let db = TestDb::new().await;
        let mut child = Command::new(psql())
            .args(["-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", db.direct_url()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // Roles are the cluster's: a second page, or a second run, must not meet the first one's.
        let sql = sql
            .replace("CREATE ROLE shop LOGIN", &format!("CREATE ROLE {0} LOGIN", db.name()))
            .replace("TO shop", &format!("TO {}", db.name()));
        child.stdin.take().unwrap().write_all(sql.as_bytes()).await.unwrap();
        let output = child.wait_with_output().await.unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{name}: {said}");
        if name.ends_with("README.md") && !name.contains("docs") {
            assert!(said.contains("replay_success") && said.contains(r#"{"order": 1}"#), "{said}");
        }
        count += 1;
    }
    assert!(count >= 2, "the pages lost their SQL");
}

#[tokio::test]
async fn every_pgonce_line_runs() {
    let binary = Path::new(env!("CARGO_BIN_EXE_pgonce"));
    let path = format!("{}:{}", binary.parent().unwrap().display(), std::env::var("PATH").unwrap());
    let mut count = 0;
    for (name, page) in pages() {
        let lines: Vec<String> = blocks(&page, "sh")
            .iter()
            .flat_map(|block| block.lines().map(str::to_owned).collect::<Vec<_>>())
            .filter(|line| line.starts_with("pgonce "))
            .collect();
        if lines.is_empty() {
            continue;
        }
        let db = TestDb::new().await;
        // The intents that the pages speak of: their owners vanished, and their scopes say to hold.
        let client = db.client().await;
        for (scope, key) in [("create_order", "checkout-3c51"), ("SCOPE", "KEY"), ("pay", "invoice-77")] {
            client.query_one("SELECT once.claim($1, $2, sha256('x'), 'leased')", &[&scope, &key]).await.unwrap();
        }
        db.travel(Duration::from_secs(3600)).await;
        client.query("SELECT * FROM once.recover()", &[]).await.unwrap();
        // The clock is one of the functions that doctor compares.
        pgonce::migrate::apply(&mut pgonce::migrate::connect(db.direct_url()).await.unwrap(), false).await.unwrap();
        for line in lines {
            let child = Command::new("sh")
                .args(["-c", &line])
                .env("PATH", &path)
                .env("USER", "operator")
                .env("DATABASE_URL", db.direct_url())
                .current_dir(std::env::temp_dir())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .kill_on_drop(true)
                .spawn()
                .unwrap();
            if line.contains("--watch") {
                // Goes on until stopped: that it begins is what can be seen here.
                drop(child);
                count += 1;
                continue;
            }
            let output =
                tokio::time::timeout(Duration::from_secs(60), child.wait_with_output()).await.expect(&line).unwrap();
            let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{name}: {line}\n{said}");
            count += 1;
        }
    }
    assert!(count >= 15, "the pages lost their commands: {count}");
}
