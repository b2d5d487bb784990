//! The outbox: whether its log is at home, whether somebody takes what is in it, and whether it can be emptied.

use serde_json::Value;
use tokio_postgres::Client;

use super::{Finding, Findings, Level};
use crate::database;

/// `once.check_home`'s question, asked without settling anything.
const HOME: &str = "
SELECT jsonb_build_object('home', h.system_identifier = c.system_identifier AND h.database_oid = d.oid,
    'refused', EXISTS (SELECT FROM once.sink)
        OR h.system_identifier <> c.system_identifier AND EXISTS (SELECT FROM once.outbox))
FROM once.outbox_home h, pg_control_system() c, pg_database d WHERE d.datname = current_database()";

/// Whether the cursors fit the transaction numbers of this database.
pub async fn home(client: &Client) -> Findings {
    let home = match database::json_row(client, HOME, &[]).await {
        Err(error) if error.sqlstate() == Some("42501") => {
            return Ok(vec![Finding::new(
                Level::Info,
                "outbox_home",
                "not examined: only the owner may look where the outbox was made",
                "After a dump is restored, relays refuse to work (P4070) until the outbox is adopted.",
                "Run the doctor as the owner of the schema once.",
            )]);
        }
        other => other?,
    };
    Ok(vec![if home["home"] == true || home["refused"] != true {
        Finding::ok("outbox_home", "the outbox was made in this database, or holds nothing that could be passed over")
    } else {
        Finding::new(
            Level::Fail,
            "outbox_home",
            "the outbox was made in another database than this one (P4070)",
            "It was restored, copied or upgraded: its cursors do not fit the transaction numbers here, and relays refuse to work.",
            "pgonce outbox adopt --reason \"restored from …\". What cannot be proven delivered is then sent again.",
        )
    }])
}

const SINKS: &str = "
SELECT to_jsonb(s) - 'topics' - 'types' - 'tenants' FROM once.sinks s ORDER BY s.sink LIMIT 1000";
const LAG_SECONDS_MAX: f64 = 600.0;

/// Messages that nobody takes.
pub async fn sinks(client: &Client) -> Findings {
    let sinks = database::json_rows(client, SINKS, &[]).await?;
    if sinks.is_empty() {
        let sql = "SELECT to_jsonb(EXISTS (SELECT FROM once.outbox_log))";
        return Ok(vec![if database::json_row(client, sql, &[]).await? == true {
            Finding::new(
                Level::Warn,
                "sinks",
                "there are messages in the outbox, and no sink",
                "They are kept for ever: a sink may still come that wants them from the beginning.",
                "pgonce relay --sink URL; where nobody wants them, stop emitting.",
            )
        } else {
            Finding::ok("sinks", "no sink, and no message")
        }]);
    }
    let findings: Vec<Finding> = sinks.iter().flat_map(sink).collect();
    if findings.is_empty() {
        return Ok(vec![Finding::ok(
            "sinks",
            format!("{} sinks: none is behind, none holds anything back", sinks.len()),
        )]);
    }
    Ok(findings)
}

/// What is wrong with one.
fn sink(sink: &Value) -> Vec<Finding> {
    let name = crate::output::printable(sink["sink"].as_str().unwrap_or_default());
    let number = |field: &str| sink[field].as_i64().unwrap_or(0);
    let (lag, parked) = (number("lag_messages"), number("parked"));
    let seconds = sink["lag_seconds"].as_f64().unwrap_or(0.0);
    let late = format!("{lag} messages wait, the oldest for {:.0} minutes", seconds / 60.0);
    let mut findings = Vec::new();
    if let Some(reason) = sink["disabled"].as_str() {
        findings.push(Finding::new(
            Level::Warn,
            "sinks",
            format!("{name} is disabled ({}); {late}", crate::output::printable(reason)),
            "Nothing goes there, and the log is kept for it.",
            "pgonce outbox resume-sink, or forget-sink where it is not used any more.",
        ));
    } else if number("relays") == 0 && lag > 0 {
        findings.push(Finding::new(
            Level::Warn,
            "sinks",
            format!("nobody relays to {name}: {late}"),
            "Its messages stay here, and the log is kept for it.",
            "Start pgonce relay with this sink; or pgonce outbox forget-sink where it is not used any more.",
        ));
    } else if seconds > LAG_SECONDS_MAX {
        findings.push(Finding::new(
            Level::Warn,
            "sinks",
            format!("{name} is behind: {late}"),
            "The relays do not keep up, the sink does not answer, or one long transaction holds back what came after it.",
            "pgonce outbox status, the relays' logs, and pg_stat_activity for old transactions.",
        ));
    }
    if parked > 0 {
        findings.push(Finding::new(
            Level::Warn,
            "parked",
            format!("{name}: {parked} messages are parked, {} wait behind them", number("behind")),
            "The sink refused them, or every attempt failed; their keys stand still until somebody decides.",
            "pgonce outbox parked, then pgonce outbox resume or discard.",
        ));
    }
    findings
}

/// By the size of the heap, which truncation takes: counting rows would read the log.
const SEGMENTS: &str = "
SELECT to_jsonb(count(*)) FROM once.outbox_segments s
WHERE pg_relation_size(to_regclass('once.' || quote_ident(s.segment))) > 0";
const SEGMENTS_MAX: i64 = 16;

/// Whether the log has a free segment to turn to.
pub async fn segments(client: &Client) -> Findings {
    let used = database::json_row(client, SEGMENTS, &[]).await?.as_i64().unwrap_or(0);
    Ok(vec![if used < SEGMENTS_MAX {
        Finding::ok("outbox_segments", format!("{used} of {SEGMENTS_MAX} segments of the outbox are in use"))
    } else {
        Finding::new(
            Level::Warn,
            "outbox_segments",
            "all 16 segments of the outbox are in use: it cannot turn to the next one",
            "Nothing is lost, but the current segment grows without bound until the oldest is emptied.",
            "pgonce outbox status: the sink that is furthest behind, or a replay that was not finished, holds them; then pgonce purge.",
        )
    }])
}
