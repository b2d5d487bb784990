//! The inbox: messages that stand still, and dedup records that are gone before the last redelivery can come.

use std::time::Duration;

use pgonce_relay::relay::RelaySettings;
use serde_json::Value;
use tokio_postgres::Client;

use super::{Finding, Findings, Level};
use crate::database;

const STANDING: &str = "
SELECT jsonb_build_object('tenant', s.tenant, 'consumer', s.consumer, 'state', s.state, 'messages', s.messages,
    'minutes', extract(epoch FROM s.oldest_age) / 60)
FROM once.inbox_status s WHERE s.state <> 'processed' ORDER BY s.consumer, s.tenant, s.state LIMIT 1000";
/// What is on its way, or waits for its turn, may take this long.
const MINUTES_MAX: f64 = 10.0;

/// Messages that failed for good, wait for a version, or that nobody takes.
pub async fn standing(client: &Client) -> Findings {
    let all = database::json_rows(client, STANDING, &[]).await?;
    let findings: Vec<Finding> = all.iter().filter_map(stands).collect();
    if findings.is_empty() {
        return Ok(vec![Finding::ok("inbox", "no stored message stands still")]);
    }
    Ok(findings)
}

fn stands(row: &Value) -> Option<Finding> {
    let minutes = row["minutes"].as_f64().unwrap_or(0.0);
    let (state, messages) = (row["state"].as_str().unwrap_or_default(), row["messages"].as_i64().unwrap_or(0));
    let what = |said: &str| format!("{}: {messages} messages {said}, the oldest for {minutes:.0} minutes", named(row));
    let finding = |said: &str, why, advice| Some(Finding::new(Level::Warn, "inbox", what(said), why, advice));
    match state {
        "failed_final" => finding(
            "have failed for good",
            "Their effects are not there, and messages of the same key may stand behind them.",
            "pgonce inbox parked, repair what made them fail, then pgonce inbox replay.",
        ),
        _ if minutes <= MINUTES_MAX => None,
        "waiting" => finding(
            "wait for a version before them",
            "The missing message was lost, or its producer never sent it; after gap_max they fail for good.",
            "pgonce inbox parked; have the producer send it again (pgonce outbox replay there), or once.baseline.",
        ),
        _ => finding(
            &format!("are {state}"),
            "Nobody handles them, or every attempt fails.",
            "Start pgonce consume or a worker for this consumer; pgonce inbox status.",
        ),
    }
}

fn named(row: &Value) -> String {
    let name = row["consumer"].as_str().unwrap_or("(default)");
    match row["tenant"].as_str() {
        None | Some("") => crate::output::printable(&format!("consumer {name}")),
        Some(tenant) => crate::output::printable(&format!("consumer {name} of tenant {tenant}")),
    }
}

const CONSUMERS: &str = "
SELECT jsonb_build_object('consumer', c.consumer, 'tenant', c.tenant, 'retention', c.retention,
    'seconds', CASE WHEN c.retention <> 'permanent' THEN extract(epoch FROM c.retention::interval) END)
FROM once.consumers c ORDER BY c.consumer NULLS FIRST, c.tenant LIMIT 10000";
const KEPT: &str = "SELECT to_jsonb(extract(epoch FROM h.retention)) FROM once.outbox_home h";
const OLDEST: &str = "
SELECT jsonb_build_object(
    'sink', (SELECT extract(epoch FROM once.clock() - min(p.held_at)) FROM once.outbox_parked p),
    'inbox', (SELECT extract(epoch FROM once.clock() - min(p.received_at)) FROM once.inbox_parked p))";

/// How late a message may come again, and why it would.
struct Horizon {
    seconds: f64,
    /// Which redelivery would be taken for new.
    what: &'static str,
}

/// Whether consumers know a message as long as it may come again.
pub async fn dedup(client: &Client, broker_retention: Option<Duration>) -> Findings {
    let consumers = database::json_rows(client, CONSUMERS, &[]).await?;
    let (horizons, unknown) = horizons(client, broker_retention).await?;
    let mut findings: Vec<Finding> = unknown.into_iter().collect();
    let mut short = 0;
    for consumer in &consumers {
        let Some(seconds) = consumer["seconds"].as_f64() else { continue };
        let retention = consumer["retention"].as_str().unwrap_or_default();
        for horizon in horizons.iter().filter(|horizon| seconds <= horizon.seconds) {
            short += 1;
            findings.push(Finding::new(
                Level::Warn,
                "dedup",
                format!(
                    "{} forgets a message after {retention}; {}, up to {} old, would be taken for new",
                    named(consumer),
                    horizon.what,
                    spoken(horizon.seconds)
                ),
                "What is not known any more is applied again: a second effect.",
                "once.define_consumer with a longer retention, or a shorter life of what may come again.",
            ));
        }
    }
    if short == 0 {
        let longest = horizons.iter().map(|horizon| horizon.seconds).fold(0.0, f64::max);
        let what = format!("{} rules: all know a message for longer than {}", consumers.len(), spoken(longest));
        findings.push(Finding::ok("dedup", what));
    }
    Ok(findings)
}

/// Everything that may bring a message a second time; and what could not be asked.
async fn horizons(
    client: &Client,
    broker_retention: Option<Duration>,
) -> Result<(Vec<Horizon>, Option<Finding>), pgonce::Error> {
    let mut unknown = None;
    let kept = match database::json_row(client, KEPT, &[]).await {
        Err(error) if error.sqlstate() == Some("42501") => {
            unknown = Some(Finding::new(
                Level::Info,
                "dedup",
                "not compared with the outbox's retention: only the owner may read it",
                "A replay of a message that its consumer has forgotten is a second effect.",
                "Run the doctor as the owner of the schema once.",
            ));
            None
        }
        other => other?.as_f64(),
    };
    let oldest = database::json_row(client, OLDEST, &[]).await?;
    let all = [
        (kept, "a message of this outbox that is replayed (pgonce outbox replay)"),
        (Some(retry_seconds()), "a message that the relay tries again, by its default settings"),
        (oldest["sink"].as_f64(), "the oldest message that a sink holds back, when it is resumed"),
        (oldest["inbox"].as_f64(), "the oldest stored message that is parked, when its producer sends it again"),
        (
            broker_retention.map(|retention| retention.as_secs_f64()),
            "a message that the broker still has and delivers again",
        ),
    ];
    let known = |(seconds, what): (Option<f64>, &'static str)| seconds.map(|seconds| Horizon { seconds, what });
    Ok((all.into_iter().filter_map(known).collect(), unknown))
}

/// From a message's first attempt to its last: pauses double from 400 ms on, up to the longest.
fn retry_seconds() -> f64 {
    let defaults = RelaySettings::new("");
    let pause =
        |attempt: u32| Duration::from_millis(200).saturating_mul(1 << attempt.min(16)).min(defaults.backoff_max);
    (1..defaults.attempts_max).map(|attempt| pause(attempt).as_secs_f64()).sum()
}

/// As people say it.
fn spoken(seconds: f64) -> String {
    match seconds {
        172_800.0.. => format!("{:.0} days", seconds / 86_400.0),
        7_200.0.. => format!("{:.0} hours", seconds / 3_600.0),
        120.0.. => format!("{:.0} minutes", seconds / 60.0),
        _ => format!("{seconds:.0} seconds"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_relay_gives_up_after_minutes() {
        assert_eq!(retry_seconds(), 204.4);
        assert_eq!(spoken(retry_seconds()), "3 minutes");
        assert_eq!(spoken(86_400.0), "24 hours");
    }
}
