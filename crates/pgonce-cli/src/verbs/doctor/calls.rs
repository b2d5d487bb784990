//! Calls of providers: what waits for a person, what nobody knows, whom nobody can ask.

use serde_json::Value;
use tokio_postgres::Client;

use super::{Finding, Findings, Level};
use crate::database;
use crate::output::printable;

const OPEN: &str = "
SELECT jsonb_build_object('provider', o.provider, 'state', o.state, 'calls', o.calls, 'minutes', extract(epoch FROM o.oldest_age) / 60)
FROM once.calls_open o ORDER BY o.provider, o.state LIMIT 1000";
const PROVIDERS: &str = "
SELECT jsonb_build_object('provider', p.provider, 'reconcile', p.reconcile, 'resend', p.resend, 'breaker', p.breaker, 'failures', p.failures)
FROM once.providers p ORDER BY p.provider LIMIT 1000";
/// What is under way may take this long.
const MINUTES_MAX: f64 = 10.0;

/// Calls that stand still, and providers that make them.
pub async fn examine(client: &Client) -> Findings {
    let open = database::json_rows(client, OPEN, &[]).await?;
    let providers = database::json_rows(client, PROVIDERS, &[]).await?;
    let findings: Vec<Finding> = open.iter().filter_map(stands).chain(providers.iter().flat_map(provider)).collect();
    if findings.is_empty() {
        return Ok(vec![Finding::ok("calls", "no call of a provider stands still")]);
    }
    Ok(findings)
}

fn stands(row: &Value) -> Option<Finding> {
    let minutes = row["minutes"].as_f64().unwrap_or(0.0);
    let calls = row["calls"].as_i64().unwrap_or(0);
    let warn = |said: &str, why, advice| {
        let what = format!("{}: {calls} calls {said}, the oldest for {minutes:.0} minutes", named(row));
        Some(Finding::new(Level::Warn, "calls", what, why, advice))
    };
    match row["state"].as_str().unwrap_or_default() {
        "escalated" => warn(
            "wait for a person",
            "Nobody knows whether they were done, or two things were said that cannot both be true.",
            "pgonce calls list --unknown, ask the provider, then pgonce calls settle.",
        ),
        _ if minutes <= MINUTES_MAX => None,
        "unknown" => warn(
            "are unknown",
            "They may have been done, or not: nothing goes on until the provider has said which.",
            "Run pgonce reconcile; pgonce calls list --unknown tells what was said last.",
        ),
        _ => warn(
            "are not sent, or not answered",
            "Nobody sends them, or their sender is gone.",
            "Run pgonce reconcile; see once.providers for a pause or an open breaker.",
        ),
    }
}

fn provider(row: &Value) -> Vec<Finding> {
    let mut found = Vec::new();
    if row["reconcile"] == "none" && row["resend"] == false {
        found.push(Finding::new(
            Level::Info,
            "calls",
            format!("{} cannot be asked what became of a call, and does not know our keys", named(row)),
            "A call whose answer is lost waits for a notice, and then for a person.",
            "once.define_provider with a reconcile, or with resend where the provider honours the key.",
        ));
    }
    if row["breaker"] == "open" {
        found.push(Finding::new(
            Level::Warn,
            "calls",
            format!("{}: its breaker is open after {} failures in a row", named(row), row["failures"]),
            "Nothing is sent to it until it answers again.",
            "Look whether the provider is away; the breaker closes by itself.",
        ));
    }
    found
}

fn named(row: &Value) -> String {
    printable(&format!("provider {}", row["provider"].as_str().unwrap_or_default()))
}
