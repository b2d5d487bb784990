//! Settings of the server, the database and the roles that durability rests on.

use serde_json::Value;
use tokio_postgres::Client;

use super::{Finding, Findings, Level};
use crate::database;

const SETTINGS: &str = "SELECT jsonb_build_object(
    'version', current_setting('server_version'), 'version_num', current_setting('server_version_num')::int,
    'standby', pg_is_in_recovery(),
    'fsync', current_setting('fsync'), 'full_page_writes', current_setting('full_page_writes'),
    'synchronous_commit', current_setting('synchronous_commit'),
    'synchronous_standby_names', current_setting('synchronous_standby_names'),
    'idle_in_transaction_session_timeout', current_setting('idle_in_transaction_session_timeout'),
    'lock_timeout', current_setting('lock_timeout'))";
/// What overrides the server's settings for a database, a role, or a role in a database.
const OVERRIDES: &str = "
SELECT jsonb_build_object(
    'where', concat_ws(' in ', 'role ' || r.rolname, 'database ' || d.datname),
    'name', split_part(c, '=', 1), 'value', split_part(c, '=', 2))
FROM pg_catalog.pg_db_role_setting s
CROSS JOIN LATERAL unnest(s.setconfig) c
LEFT JOIN pg_catalog.pg_roles r ON r.oid = s.setrole
LEFT JOIN pg_catalog.pg_database d ON d.oid = s.setdatabase
WHERE s.setdatabase IN (0, (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database()))
  AND split_part(c, '=', 1) = 'synchronous_commit'
ORDER BY 1";

const LOSES: &str =
    "A crash of the server can forget outcomes that were acknowledged: the retry then has a second effect.";

/// Version, durability, failover, timeouts.
pub async fn examine(client: &Client) -> Findings {
    let settings = database::json_row(client, SETTINGS, &[]).await?;
    let overrides = database::json_rows(client, OVERRIDES, &[]).await?;
    let mut findings = vec![version(&settings)];
    if settings["standby"] == true {
        findings.push(Finding::new(
            Level::Fail,
            "standby",
            "the server is a standby: read-only",
            "Nothing can be claimed here.",
            "Connect to the primary, for example with target_session_attrs=read-write.",
        ));
    }
    findings.push(switch(&settings, "fsync"));
    findings.push(switch(&settings, "full_page_writes"));
    findings.extend(synchronous_commit(&settings, &overrides));
    findings.push(failover(&settings));
    findings.extend(timeouts(&settings));
    Ok(findings)
}

fn text<'a>(value: &'a Value, name: &str) -> &'a str {
    value[name].as_str().unwrap_or_default()
}

fn version(settings: &Value) -> Finding {
    let version = text(settings, "version");
    if settings["version_num"].as_i64() >= Some(140_000) {
        return Finding::ok("server", format!("PostgreSQL {version} answers"));
    }
    Finding::new(
        Level::Fail,
        "server",
        format!("PostgreSQL {version} is older than 14"),
        "The schema once is made and tested for 14 to 18.",
        "Upgrade the server.",
    )
}

fn switch(settings: &Value, name: &'static str) -> Finding {
    match text(settings, name) {
        "on" => Finding::ok(name, format!("{name} is on")),
        value => Finding::new(
            Level::Fail,
            name,
            format!("{name} is {value}"),
            LOSES,
            "Set it to on in postgresql.conf and reload; if the server has crashed meanwhile, restore from a backup.",
        ),
    }
}

fn synchronous_commit(settings: &Value, overrides: &[Value]) -> Vec<Finding> {
    let has_standby = !text(settings, "synchronous_standby_names").is_empty();
    let here = ("this session", text(settings, "synchronous_commit"));
    let others = overrides.iter().map(|one| (text(one, "where"), text(one, "value")));
    let judged = std::iter::once(here).chain(others).filter_map(|(place, value)| {
        let level = match value {
            "off" | "false" | "no" | "0" => Level::Fail,
            // Flushed here, which is all there is to wait for without a synchronous standby.
            "local" if has_standby => Level::Fail,
            "local" => Level::Warn,
            _ => return None,
        };
        let place = if place.is_empty() { "everybody" } else { place };
        Some(Finding::new(
            level,
            "sync_commit",
            format!("synchronous_commit is {value} for {place}"),
            LOSES,
            "ALTER DATABASE … RESET synchronous_commit (or ALTER ROLE …, or postgresql.conf); sessions must reconnect.",
        ))
    });
    let judged: Vec<Finding> = judged.collect();
    if judged.is_empty() {
        vec![Finding::ok("sync_commit", format!("synchronous_commit is {}", here.1))]
    } else {
        judged
    }
}

fn failover(settings: &Value) -> Finding {
    match text(settings, "synchronous_standby_names") {
        "" => Finding::new(
            Level::Info,
            "failover",
            "no synchronous standby is named",
            "One server alone keeps its promise. A failover to an asynchronous standby loses the last acknowledged keys, and their retries run again.",
            "Before relying on failover, set synchronous_standby_names.",
        ),
        names => Finding::ok("failover", format!("synchronous standbys: {names}")),
    }
}

fn timeouts(settings: &Value) -> Vec<Finding> {
    let unlimited = |name: &str| text(settings, name) == "0";
    let mut findings = Vec::new();
    findings.push(if unlimited("idle_in_transaction_session_timeout") {
        Finding::new(
            Level::Info,
            "idle_timeout",
            "idle_in_transaction_session_timeout is not set",
            "A client that vanishes inside its transaction holds its intent until TCP notices. The Rust crate sets 60 s for its own connections.",
            "ALTER DATABASE … SET idle_in_transaction_session_timeout = '60s', for other clients.",
        )
    } else {
        Finding::ok("idle_timeout", format!("idle_in_transaction_session_timeout is {}", text(settings, "idle_in_transaction_session_timeout")))
    });
    findings.push(if unlimited("lock_timeout") {
        Finding::new(
            Level::Info,
            "lock_timeout",
            "lock_timeout is not set",
            "Waiting for a rival of the same intent has its own limit (wait_max); other lock waits of an effect have none. The Rust crate sets 30 s.",
            "ALTER DATABASE … SET lock_timeout = '30s', for other clients.",
        )
    } else {
        Finding::ok("lock_timeout", format!("lock_timeout is {}", text(settings, "lock_timeout")))
    });
    findings
}
