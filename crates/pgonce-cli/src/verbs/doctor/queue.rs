//! Queues: jobs that were given up, jobs that nobody takes, and schedules that do not fire.

use serde_json::Value;
use tokio_postgres::Client;

use super::{Finding, Findings, Level};
use crate::database;

const STATUS: &str = "
SELECT jsonb_build_object('queue', s.queue, 'state', s.state, 'jobs', s.jobs, 'minutes', extract(epoch FROM s.oldest_age) / 60)
FROM once.queue_status s WHERE s.state IN ('ready', 'buried') ORDER BY s.queue, s.state LIMIT 1000";
const DUE: &str = "
SELECT jsonb_build_object('queue', j.queue, 'state', 'due', 'jobs', count(*),
    'minutes', extract(epoch FROM max(once.clock() - coalesce(j.available_at, j.leased_until))) / 60)
FROM once.jobs j WHERE j.state IN ('delayed', 'running') AND coalesce(j.available_at, j.leased_until) < once.clock()
GROUP BY j.queue ORDER BY j.queue LIMIT 1000";
/// What waits for its turn may take this long.
const MINUTES_MAX: f64 = 10.0;

/// Jobs that stand still.
pub async fn standing(client: &Client) -> Findings {
    let mut all = database::json_rows(client, STATUS, &[]).await?;
    all.extend(database::json_rows(client, DUE, &[]).await?);
    let findings: Vec<Finding> = all.iter().filter_map(stands).collect();
    if findings.is_empty() {
        return Ok(vec![Finding::ok("queue", "no job stands still")]);
    }
    Ok(findings)
}

fn stands(row: &Value) -> Option<Finding> {
    let minutes = row["minutes"].as_f64().unwrap_or(0.0);
    let jobs = row["jobs"].as_i64().unwrap_or(0);
    let name = crate::output::printable(row["queue"].as_str().unwrap_or_default());
    let what = |said: &str| format!("queue {name}: {jobs} jobs {said}, the oldest for {minutes:.0} minutes");
    let finding = |said: &str, why, advice| Some(Finding::new(Level::Warn, "queue", what(said), why, advice));
    match row["state"].as_str().unwrap_or_default() {
        "buried" => finding(
            "are buried",
            "Their effects are not there: their attempts are used up, or their handler refused them.",
            "pgonce queue buried, repair what made them fail, then pgonce queue retry; pgonce queue discard where nobody needs them.",
        ),
        _ if minutes <= MINUTES_MAX => None,
        "due" => finding(
            "are due, or their worker's lease is over, and nobody looks after them",
            "Takes do that: no worker asks this queue.",
            "Start pgonce work or a worker for this queue; pgonce queue status.",
        ),
        _ => finding(
            "are ready",
            "No worker takes them, or fewer than are needed.",
            "Start pgonce work or a worker for this queue, or more of them; pgonce queue status.",
        ),
    }
}

const SCHEDULES: &str = "
SELECT jsonb_build_object('schedule', s.schedule, 'error', s.last_error,
    'minutes', extract(epoch FROM once.clock() - coalesce(s.next_at, s.updated_at)) / 60)
FROM once.schedules s WHERE NOT s.paused ORDER BY s.schedule LIMIT 1000";

/// Schedules that have no next time, or whose time has passed.
pub async fn schedules(client: &Client) -> Findings {
    let all = database::json_rows(client, SCHEDULES, &[]).await?;
    let mut findings = Vec::new();
    for row in &all {
        let name = crate::output::printable(row["schedule"].as_str().unwrap_or_default());
        if let Some(error) = row["error"].as_str() {
            findings.push(Finding::new(
                Level::Warn,
                "schedules",
                format!("schedule {name}: {}", crate::output::printable(error)),
                "It enqueues nothing.",
                "Define it anew with once.define_schedule.",
            ));
        } else if row["minutes"].as_f64().unwrap_or(0.0) > MINUTES_MAX {
            findings.push(Finding::new(
                Level::Warn,
                "schedules",
                format!("schedule {name}: its time has passed, and it was not fired"),
                "Workers fire schedules: none runs, or all were told not to.",
                "Start pgonce work or a worker, of any queue.",
            ));
        }
    }
    if findings.is_empty() {
        findings.push(Finding::ok("schedules", format!("{} schedules, none of them late", all.len())));
    }
    Ok(findings)
}
