//! The schema `once`: there, of this version, unchanged, closed to everybody else.

use std::collections::HashMap;

use serde_json::Value;
use tokio_postgres::Client;

use super::{Finding, Findings, Level};
use crate::database;

/// Present, and at which version.
pub async fn examine(client: &Client) -> Findings {
    let all = pgonce::migrate::status(client).await?;
    let of = |state: &str| all.iter().filter(|migration| migration.state == state).count();
    let applied = all.iter().filter(|migration| migration.schema == "once" && migration.applied_at.is_some());
    let version = applied.map(|migration| migration.version).max();
    let Some(version) = version else {
        return Ok(vec![Finding::new(
            Level::Fail,
            "schema",
            "the schema once is not in this database",
            "There is nothing to claim with.",
            "pgonce migrate",
        )]);
    };
    let mut findings = Vec::new();
    if of("changed") > 0 {
        findings.push(Finding::new(
            Level::Fail,
            "migrations",
            format!("{} migrations were applied with another text than this binary has", of("changed")),
            "The tables are not those that the functions were tested with.",
            "Use the binary that applied them, or restore the schema from a backup.",
        ));
    }
    if of("pending") > 0 {
        findings.push(Finding::new(
            Level::Fail,
            "migrations",
            format!("the schema once is at version {version}, {} migrations are pending", of("pending")),
            "This binary refuses to work with it.",
            "pgonce migrate",
        ));
    }
    if of("newer") > 0 {
        findings.push(Finding::new(
            Level::Warn,
            "migrations",
            format!("the schema once is at version {version}, newer than this binary"),
            "It works unless one of the new migrations is breaking; drift below is then expected.",
            "Use the newer binary.",
        ));
    }
    if findings.is_empty() {
        findings.push(Finding::ok("schema", format!("the schema once is at version {version}, as this binary")));
    }
    Ok(findings)
}

/// The five roles that everybody needs; `once_direct` is a choice.
pub async fn roles(client: &Client) -> Findings {
    let sql = "SELECT to_jsonb(r.rolname) FROM pg_catalog.pg_roles r WHERE r.rolname LIKE 'once\\_%'";
    let there = database::json_rows(client, sql, &[]).await?;
    let needed = ["once_owner", "once_app", "once_ops", "once_reader", "once_relay"];
    let missing: Vec<&str> =
        needed.into_iter().filter(|role| !there.iter().any(|found| found.as_str() == Some(role))).collect();
    Ok(vec![match missing.as_slice() {
        [] => Finding::ok("roles", "once_owner, once_app, once_ops, once_reader and once_relay exist"),
        missing => Finding::new(
            Level::Warn,
            "roles",
            format!("missing: {}", missing.join(", ")),
            "Applications or relays then need the owner's rights, with which they can change the tables past the protocol.",
            "An administrator runs the lines at the top of sql/roles.sql; then pgonce migrate.",
        ),
    }])
}

/// Who may use the direct statements, and so write the intent table past the functions.
pub async fn direct(client: &Client) -> Findings {
    let sql = "SELECT to_jsonb(r.rolname) FROM pg_catalog.pg_roles r
               WHERE r.rolcanlogin AND NOT r.rolsuper AND to_regclass('once.intent') IS NOT NULL
                 AND has_table_privilege(r.oid, 'once.intent', 'INSERT') ORDER BY r.rolname LIMIT 100";
    let who = database::json_rows(client, sql, &[]).await?;
    let names: Vec<&str> = who.iter().filter_map(Value::as_str).collect();
    Ok(vec![if names.is_empty() {
        Finding::ok("direct", "no login writes the intent table past the functions (role once_direct)")
    } else {
        Finding::new(
            Level::Info,
            "direct",
            format!("may write the intent table directly: {}", names.join(", ")),
            "The straight path is cheaper without function calls; a faulty program with these rights could write rows that no claim stands behind.",
            "REVOKE once_direct FROM the login where the functions are fast enough.",
        )
    }])
}

const FUNCTIONS: &str = "
SELECT jsonb_build_object('name', CASE n.nspname WHEN 'once' THEN '' ELSE n.nspname || '.' END || p.proname, 'signature', p.oid::regprocedure::text, 'body', p.prosrc)
FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
WHERE n.nspname IN ('once', 'once_ledger') ORDER BY 1";
/// Its trigger's function is part of a migration: it must be there before the functions are.
const OF_MIGRATIONS: [&str; 1] = ["once_ledger.immutable"];

/// Functions that are not what this binary would install.
pub async fn drift(client: &Client) -> Findings {
    let installed = database::json_rows(client, FUNCTIONS, &[]).await?;
    let has_ledger = installed.iter().any(|function| function["name"] == OF_MIGRATIONS[0]);
    let mut expected: HashMap<String, String> = pgonce::migrate::function_bodies().into_iter().collect();
    if has_ledger {
        let of_ledger = pgonce::migrate::ledger_function_bodies().into_iter();
        expected.extend(of_ledger.map(|(name, body)| (format!("once_ledger.{name}"), body)));
    }
    let total = expected.len();
    let (mut changed, mut extra) = (Vec::new(), Vec::new());
    for function in &installed {
        let name = function["name"].as_str().unwrap_or_default();
        match expected.remove(name) {
            None if OF_MIGRATIONS.contains(&name) => {}
            None => extra.push(function["signature"].as_str().unwrap_or(name)),
            Some(body) if function["body"] != body.as_str() => changed.push(name),
            Some(_) => {}
        }
    }
    let mut missing: Vec<&str> = expected.keys().map(String::as_str).collect();
    missing.sort_unstable();
    let mut findings = Vec::new();
    for (what, names) in [("changed", &changed), ("missing", &missing)] {
        if !names.is_empty() {
            findings.push(Finding::new(
                Level::Fail,
                "drift",
                format!("functions {what}: {}", some_of(names)),
                "The protocol is these functions; others than the tested ones promise nothing.",
                "pgonce migrate puts them in place again.",
            ));
        }
    }
    if !extra.is_empty() {
        findings.push(Finding::new(
            Level::Warn,
            "drift",
            format!("functions in our schemas that are not pgonce's: {}", some_of(&extra)),
            "A call may find them in place of the intended one.",
            "Move them to a schema of your own, or drop them.",
        ));
    }
    if findings.is_empty() {
        findings.push(Finding::ok("drift", format!("all {total} functions are this binary's")));
    }
    Ok(findings)
}

fn some_of(names: &[&str]) -> String {
    let shown = names.iter().take(8).copied().collect::<Vec<_>>().join(", ");
    if names.len() > 8 { format!("{shown} and {} more", names.len() - 8) } else { shown }
}

const EXPOSED: &str = "
SELECT jsonb_build_object('name', p.proname, 'unpinned', p.prosecdef
        AND NOT EXISTS (SELECT 1 FROM unnest(p.proconfig) c WHERE c LIKE 'search\\_path=%'),
    'public', has_function_privilege('public', p.oid, 'EXECUTE'))
FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
WHERE n.nspname IN ('once', 'once_ledger') ORDER BY p.proname";

/// SECURITY DEFINER functions with a pinned search_path, and nothing for PUBLIC.
pub async fn privileges(client: &Client) -> Findings {
    let functions = database::json_rows(client, EXPOSED, &[]).await?;
    let with = |flag: &str| -> Vec<&str> {
        functions
            .iter()
            .filter(|function| function[flag] == true)
            .filter_map(|function| function["name"].as_str())
            .collect()
    };
    let mut findings = Vec::new();
    let unpinned = with("unpinned");
    if !unpinned.is_empty() {
        findings.push(Finding::new(
            Level::Fail,
            "privileges",
            format!("SECURITY DEFINER without a pinned search_path: {}", some_of(&unpinned)),
            "Whoever may call them can make them run other code with the owner's rights.",
            "pgonce migrate",
        ));
    }
    let public = with("public");
    if !public.is_empty() {
        findings.push(Finding::new(
            Level::Fail,
            "privileges",
            format!("PUBLIC may execute: {}", some_of(&public)),
            "Every login of the database could claim, settle or purge.",
            "pgonce migrate, then GRANT once_app TO the roles of your applications.",
        ));
    }
    if findings.is_empty() {
        findings.push(Finding::ok("privileges", "SECURITY DEFINER functions are pinned, PUBLIC has nothing"));
    }
    Ok(findings)
}

const NOT_LOGGED: &str = "
SELECT to_jsonb(c.relname) FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname IN ('once', 'once_ledger') AND c.relkind IN ('r', 'p', 'S') AND c.relpersistence <> 'p' ORDER BY c.relname";

/// Tables that a crash would empty.
pub async fn unlogged(client: &Client) -> Findings {
    let tables = database::json_rows(client, NOT_LOGGED, &[]).await?;
    let names: Vec<&str> = tables.iter().filter_map(Value::as_str).collect();
    Ok(vec![if names.is_empty() {
        Finding::ok("unlogged", "all tables of the schema once are logged")
    } else {
        Finding::new(
            Level::Fail,
            "unlogged",
            format!("UNLOGGED: {}", some_of(&names)),
            "A crash empties them, and a standby never has them: every retry after that is a second effect.",
            "ALTER TABLE once.… SET LOGGED",
        )
    }])
}

const GUARDS: &str = "
SELECT to_jsonb(c.relname) FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = 'once_ledger' AND c.relname IN ('posting', 'entry', 'account', 'currency')
  AND NOT EXISTS (SELECT FROM pg_catalog.pg_trigger t
                  WHERE t.tgrelid = c.oid AND t.tgname = 'immutable' AND t.tgenabled = 'A')
ORDER BY c.relname";

/// Whether the ledger's history is still guarded, where there is a ledger.
pub async fn ledger(client: &Client) -> Findings {
    let tables = database::json_rows(client, GUARDS, &[]).await?;
    let names: Vec<&str> = tables.iter().filter_map(Value::as_str).collect();
    Ok(vec![if names.is_empty() {
        Finding::ok("ledger", "no guard of a ledger's history is off")
    } else {
        Finding::new(
            Level::Fail,
            "ledger",
            format!("the guard against changes is off for: {}", some_of(&names)),
            "Entries can be changed in silence: balances may not be what was posted.",
            "ALTER TABLE once_ledger.… ENABLE ALWAYS TRIGGER immutable, then pgonce ledger verify.",
        )
    }])
}
