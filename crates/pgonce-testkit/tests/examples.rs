//! The programs in `examples/` hold what they promise: the same SQL from psql, psycopg, node-postgres and pgx.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on should stop, loudly")]

use std::time::Duration;

use pgonce_testkit::TestDb;
use pgonce_testkit::programs::{Programs, finish, psql, skipped, source};
use tokio::process::Command;

const RUN_LIMIT: Duration = Duration::from_secs(120);

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
    if let Some(python) = programs().python("python-psycopg").await {
        self_test(&mut python.script("orders.py")).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn node() {
    if let Some(node) = programs().node("node-postgres").await {
        self_test(&mut node.script("orders.js")).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn go() {
    if let Some(program) = programs().go("go-pgx").await {
        self_test(&mut program.command()).await;
    }
}

fn programs() -> Programs {
    Programs::under(env!("CARGO_TARGET_TMPDIR"))
}

/// Runs `--self-test` against a new database: exit 0, something passed, nothing failed.
async fn self_test(program: &mut Command) {
    let db = TestDb::new().await;
    let said = finish(program.arg("--self-test").env("DATABASE_URL", db.direct_url()), RUN_LIMIT).await;
    let summary = said.lines().last().unwrap_or_default();
    let passed: u32 = summary.split(' ').next().and_then(|count| count.parse().ok()).unwrap_or(0);
    assert!(passed >= 10 && summary.ends_with(" passed, 0 failed"), "{said}");
}
