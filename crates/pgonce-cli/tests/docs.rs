//! The docs are run: every SQL block by psql, every `pgonce` line by a shell, as a reader would type them. And what
//! the code knows by name (functions, views, SQLSTATEs, metrics) the reference knows, too.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests stop loudly")]

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use pgonce_testkit::TestDb;
use pgonce_testkit::programs::psql;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, Command};

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

/// The SQL blocks and the `pgonce` lines of a page, in their order.
fn steps(page: &str) -> Vec<(&'static str, String)> {
    let mut steps = Vec::new();
    for (place, block) in page.split("```").enumerate().filter(|(place, _)| place % 2 == 1) {
        let (language, text) = block.split_once('\n').unwrap_or_else(|| panic!("block {place} has one line"));
        match language {
            "sql" => steps.push(("sql", text.to_owned())),
            "sh" => steps.extend(lines(text).map(|line| ("sh", line))),
            _ => {}
        }
    }
    steps
}

fn lines(block: &str) -> impl Iterator<Item = String> {
    block.lines().filter(|line| line.starts_with("pgonce ")).map(str::to_owned)
}

async fn run_sql(db: &TestDb, sql: &str, name: &str) -> String {
    if sql.contains("once_ledger.") {
        install_ledger(db).await;
    }
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
    said
}

async fn install_ledger(db: &TestDb) {
    let mut client = pgonce::migrate::connect(db.direct_url()).await.unwrap();
    pgonce::migrate::install_ledger(&mut client, false).await.unwrap();
}

/// What the lines about the ledger speak of.
async fn prepare_ledger(db: &TestDb) {
    install_ledger(db).await;
    let sql = "SELECT once_ledger.post('billing', 'invoice-78', '{cash,sales}', '{300,-300}', '{EUR}', p_open => true)";
    db.client().await.batch_execute(sql).await.unwrap();
}

fn start(db: &TestDb, line: &str) -> Child {
    let binary = Path::new(env!("CARGO_BIN_EXE_pgonce"));
    let path = format!("{}:{}", binary.parent().unwrap().display(), std::env::var("PATH").unwrap());
    Command::new("sh")
        .args(["-c", &format!("exec {line}")])
        .env("PATH", &path)
        .env("USER", "operator")
        .env("DATABASE_URL", db.direct_url())
        .env("PGONCE_WEBHOOK_SECRET", "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
        .env("STRIPE_SECRET", "a secret")
        .current_dir(std::env::temp_dir())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap()
}

/// Runs a line to its end. What goes on until it is stopped is stopped when it says that it is ready.
async fn run_line(db: &TestDb, line: &str, name: &str) -> String {
    let mut child = start(db, line);
    let mut before = String::new();
    if serves(line) {
        let mut talk = BufReader::new(child.stderr.take().unwrap());
        while !before.lines().any(|said| said.starts_with("ready ")) {
            let read = tokio::time::timeout(Duration::from_secs(60), talk.read_line(&mut before)).await.expect(line);
            assert!(read.unwrap() > 0, "{name}: {line}\n{before}");
        }
        let id = child.id().unwrap().to_string();
        assert!(Command::new("kill").args(["-TERM", &id]).status().await.unwrap().success());
        // Read on: a process whose talk nobody reads may wait for that, and not end.
        tokio::time::timeout(Duration::from_secs(60), talk.read_to_string(&mut before)).await.expect(line).unwrap();
    }
    let output = tokio::time::timeout(Duration::from_secs(60), child.wait_with_output()).await.expect(line).unwrap();
    let said = before + &String::from_utf8_lossy(&output.stdout) + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name}: {line}\n{said}");
    said
}

/// Whether a line goes on until it is stopped, and says when it serves.
fn serves(line: &str) -> bool {
    let works = line.starts_with("pgonce relay ") || line.starts_with("pgonce work ");
    line.starts_with("pgonce consume ")
        || (line.starts_with("pgonce reconcile") && !line.contains("--until-settled"))
        || (works && !line.contains("--until-empty"))
}

/// What the lines about the outbox speak of: a sink that is disabled and has a parked message, and a replay that was
/// left. Anew before each of them: they decide about it.
async fn prepare_outbox(db: &TestDb) {
    let sql = "SELECT once.open_sink('billing'), once.open_sink('stdout:'), once.disable_sink('billing', '410');
        DELETE FROM once.held;
        INSERT INTO once.held (sink, position, lane, message_id, tenant, lane_key, state, message)
        VALUES ('billing', 17, 0, gen_random_uuid(), '', 'order-1', 'parked', '{}');
        INSERT INTO once.outbox_replay (id, sink, actor, reason, selection, upto)
        OVERRIDING SYSTEM VALUE VALUES (7, 'stdout:', 'operator', 'a test', '{}', -1)
        ON CONFLICT (id) DO UPDATE SET finished_at = NULL, leased_until = NULL";
    db.client().await.batch_execute(sql).await.unwrap();
}

/// The call that the lines about calls speak of: a person has to decide about it, each time anew.
async fn prepare_call(db: &TestDb) {
    let sql = "SELECT once.define_provider('books', '{}'); DELETE FROM once.call;
        INSERT INTO once.call (id, state, ordinal, requested_at, next_at, unknown_since, provider, operation, tenant, method, path, request_hash)
        VALUES ('5b3f0e2a-6c1d-8e4f-9a7b-2d8c6e1f0a93', 'escalated', 0, now(), now(), now(), 'books', 'charge', '', 'POST', '/charges', '')";
    db.client().await.batch_execute(sql).await.unwrap();
}

/// The file that the guide to imports shows, where its lines find it.
fn prepare_import() {
    let page = std::fs::read_to_string(root().join("docs/guides/imports.md")).unwrap();
    let draft = std::env::temp_dir().join(format!("payments-{}.csv", uuid::Uuid::new_v4()));
    std::fs::write(&draft, &blocks(&page, "csv")[0]).unwrap();
    // Another test may be reading it: it is there whole, or the one that was there before.
    std::fs::rename(&draft, std::env::temp_dir().join("payments.csv")).unwrap();
}

#[tokio::test]
async fn every_sql_block_runs() {
    let mut count = 0;
    for (name, page) in pages() {
        let sql = blocks(&page, "sql").join("\n");
        if sql.is_empty() {
            continue;
        }
        let said = run_sql(&TestDb::new().await, &sql, &name).await;
        if name.ends_with("README.md") && !name.contains("docs") {
            assert!(said.contains("replay_success") && said.contains(r#"{"order": 1}"#), "{said}");
        }
        count += 1;
    }
    assert!(count >= 2, "the pages lost their SQL");
}

#[tokio::test]
async fn every_pgonce_line_runs() {
    let mut count = 0;
    for (name, page) in pages() {
        let lines: Vec<String> =
            blocks(&page, "sh").iter().flat_map(|block| lines(block).collect::<Vec<_>>()).collect();
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
        // The handlers that the pages name: a consumer looks for them when it starts.
        let handlers = "CREATE SCHEMA app;
            CREATE FUNCTION app.on_order(jsonb) RETURNS text LANGUAGE sql AS 'SELECT NULL::text';
            CREATE FUNCTION app.on_payment(jsonb) RETURNS text LANGUAGE sql AS 'SELECT NULL::text';
            CREATE FUNCTION app.send_email(jsonb) RETURNS text LANGUAGE sql AS 'SELECT NULL::text';
            CREATE FUNCTION public.send_mail(jsonb) RETURNS text LANGUAGE sql AS 'SELECT NULL::text'";
        client.batch_execute(handlers).await.unwrap();
        // The clock is one of the functions that doctor compares.
        pgonce::migrate::apply(&mut pgonce::migrate::connect(db.direct_url()).await.unwrap(), false).await.unwrap();
        for line in lines {
            count += 1;
            if line.contains("--watch") {
                // Goes on until stopped: that it begins is what can be seen here.
                drop(start(&db, &line));
                continue;
            }
            if line.starts_with("pgonce outbox ") {
                prepare_outbox(&db).await;
            }
            if line.starts_with("pgonce ledger ") && !line.contains(" install") {
                prepare_ledger(&db).await;
            }
            if line.starts_with("pgonce calls ") {
                prepare_call(&db).await;
            }
            if line.starts_with("pgonce import ") {
                prepare_import();
                let sql = "CREATE TABLE IF NOT EXISTS payments (reference text PRIMARY KEY, amount numeric(12, 2), paid_on date, note text)";
                client.batch_execute(sql).await.unwrap();
            }
            // Nothing is in the outbox here: no page sends anything to the hosts that it names.
            run_line(&db, &line, &name).await;
        }
    }
    assert!(count >= 40, "the pages lost their commands: {count}");
}

/// A page that shows a way is walked in one database: what its SQL emits, the next line sends.
#[tokio::test]
async fn pages_are_walked_from_top_to_bottom() {
    for (ending, last, found) in [
        (
            "README.md",
            "pgonce relay",
            r#""type":"order.changed","datacontenttype":"application/json","data":{"order": 1, "amount": 2499}"#,
        ),
        ("guides/outbox.md", "pgonce relay", r#""type":"parcel.packed""#),
        ("guides/ledger.md", "pgonce ledger verify", "6 accounts are the sums of their 10 entries"),
        ("guides/consumers.md", "pgonce inbox status", "processed"),
        ("guides/calls.md", "pgonce calls list", "ch_77"),
        ("guides/queue.md", "pgonce work", "ready working on emails"),
        ("guides/imports.md", "pgonce imports show 1 --row 4", "exists"),
    ] {
        prepare_import();
        let path = root().join(if ending == "README.md" { ending.to_owned() } else { format!("docs/{ending}") });
        let db = TestDb::new().await;
        let mut is_found = false;
        for (language, text) in steps(&std::fs::read_to_string(path).unwrap()) {
            if language == "sql" {
                run_sql(&db, &text, ending).await;
            } else if text.starts_with(last)
                || text.starts_with("pgonce import ")
                || (text.starts_with("pgonce consume") && text.contains("nats:"))
            {
                let said = run_line(&db, &text, ending).await;
                if text.starts_with(last) {
                    assert!(said.contains(found), "{ending}: {text}\n{said}");
                    is_found = true;
                    break;
                }
            }
        }
        assert!(is_found, "{ending} has no {last}");
    }
}

/// The files under a folder that end so, as one text.
fn texts(folder: &str, ending: &str) -> String {
    fn walk(dir: &Path, ending: &str, all: &mut String) {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, ending, all);
            } else if path.to_string_lossy().ends_with(ending) {
                all.push_str(&std::fs::read_to_string(path).unwrap());
            }
        }
    }
    let mut all = String::new();
    walk(&root().join(folder), ending, &mut all);
    all
}

/// What stands between two marks, wherever it does.
fn between<'a>(text: &'a str, from: &'a str, to: char) -> impl Iterator<Item = &'a str> {
    text.split(from).skip(1).map(move |rest| rest.split(to).next().unwrap())
}

#[test]
fn the_reference_knows_every_function_and_view_that_is_granted() {
    let grants = std::fs::read_to_string(root().join("sql/grants.sql")).unwrap();
    let page = std::fs::read_to_string(root().join("docs/reference/sql.md")).unwrap();
    let mut count = 0;
    let grants = grants + &std::fs::read_to_string(root().join("sql/ledger/grants.sql")).unwrap();
    for name in between(&grants, "text[] := ARRAY[", ']').flat_map(|list| list.split('\'').skip(1).step_by(2)) {
        assert!(page.contains(&format!("`{name}(")) || page.contains(&format!("`{name}`")), "{name}");
        count += 1;
    }
    assert!(count >= 80, "the lists could not be read: {count}");
}

#[test]
fn the_reference_knows_every_sqlstate_and_metric() {
    let page = std::fs::read_to_string(root().join("docs/reference/errors.md")).unwrap();
    // P4100 leaves a block of its own function, and is caught there.
    for code in between(&texts("sql", ".sql"), "ERRCODE = '", '\'').filter(|code| *code != "P4100") {
        assert!(page.contains(&format!("| {code} |")), "{code}");
    }
    let page = std::fs::read_to_string(root().join("docs/reference/metrics.md")).unwrap();
    let code = texts("crates/pgonce/src", ".rs")
        + &texts("crates/pgonce-http/src", ".rs")
        + &texts("crates/pgonce-relay/src", ".rs");
    for name in between(&code, "\"pgonce_", '"').filter(|name| !name.is_empty() && !name.contains([' ', ':'])) {
        assert!(page.contains(&format!("`pgonce_{name}`")), "pgonce_{name}");
    }
}
