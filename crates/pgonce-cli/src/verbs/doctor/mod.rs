//! `pgonce doctor`: what breaks the promise or soon will, why it matters, and what to do.

mod calls;
mod data;
mod imports;
mod inbox;
mod keys;
mod outbox;
mod queue;
mod schema;
mod server;

use std::time::Duration;

use clap::Args;
use serde::Serialize;
use serde_json::json;
use tokio_postgres::Client;

use crate::output::{Out, say};
use crate::{Found, database};

/// `pgonce doctor`
#[derive(Debug, Args)]
pub struct Options {
    /// How long your brokers keep messages: whether consumers know a message for that long
    #[arg(long, value_name = "DURATION", value_parser = database::duration)]
    broker_retention: Option<Duration>,
}

/// How bad it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// As it should be.
    Ok,
    /// A choice to know about.
    Info,
    /// Not broken yet, or not for everybody.
    Warn,
    /// The promise does not hold.
    Fail,
}

/// One thing that was looked at.
#[derive(Debug, Clone, Serialize)]
pub struct Finding {
    level: Level,
    /// What was looked at, for programs.
    check: &'static str,
    what: String,
    #[serde(skip_serializing_if = "str::is_empty")]
    why: &'static str,
    #[serde(rename = "do", skip_serializing_if = "str::is_empty")]
    advice: &'static str,
}

impl Finding {
    fn ok(check: &'static str, what: impl Into<String>) -> Self {
        Self { level: Level::Ok, check, what: what.into(), why: "", advice: "" }
    }

    fn new(
        level: Level,
        check: &'static str,
        what: impl Into<String>,
        why: &'static str,
        advice: &'static str,
    ) -> Self {
        Self { level, check, what: what.into(), why, advice }
    }
}

type Findings = Result<Vec<Finding>, pgonce::Error>;

/// Examines, reports, and fails if anything does.
pub async fn run(options: &Options, url: &str, out: Out) -> anyhow::Result<()> {
    let findings = match database::connect(&without_session_settings(url)).await {
        Ok(client) => examine(&client, options).await,
        Err(error) => vec![Finding::new(
            Level::Fail,
            "reachable",
            crate::output::explain(&error),
            "Nothing can be claimed, so protected writes fail; none is lost or doubled.",
            "Check the address, the server and its pg_hba.conf.",
        )],
    };
    report(&findings, out)?;
    if findings.iter().any(|finding| finding.level == Level::Fail) { Err(Found.into()) } else { Ok(()) }
}

/// A check that cannot be made says so and does not hide the others.
async fn examine(client: &Client, options: &Options) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut add = |check: &'static str, found: Findings| match found {
        Ok(found) => findings.extend(found),
        Err(error) => findings.push(Finding::new(
            Level::Warn,
            check,
            format!("not examined: {error}"),
            "What cannot be looked at may be wrong.",
            "Connect as a member of once_ops or once_reader, or as the owner.",
        )),
    };
    add("server", server::examine(client).await);
    let schema = schema::examine(client).await;
    let usable = schema
        .as_ref()
        .is_ok_and(|found| !found.iter().any(|finding| finding.check == "schema" && finding.level == Level::Fail));
    add("schema", schema);
    add("roles", schema::roles(client).await);
    add("direct", schema::direct(client).await);
    if usable {
        add("drift", schema::drift(client).await);
        add("privileges", schema::privileges(client).await);
        add("unlogged", schema::unlogged(client).await);
        add("ledger", schema::ledger(client).await);
        add("retention", data::retention(client).await);
        add("purge", data::waiting_for_purge(client).await);
        add("stale", data::stale(client).await);
        add("uncertain", data::uncertain(client).await);
        add("bloat", data::bloat(client).await);
        add("outbox_home", outbox::home(client).await);
        add("sinks", outbox::sinks(client).await);
        add("outbox_segments", outbox::segments(client).await);
        add("inbox", inbox::standing(client).await);
        add("dedup", inbox::dedup(client, options.broker_retention).await);
        add("calls", calls::examine(client).await);
        add("imports", imports::standing(client).await);
        add("queue", queue::standing(client).await);
        add("schedules", queue::schedules(client).await);
        add("keys", keys::examine(client).await);
    }
    findings
}

/// The library sets timeouts on its connections; the doctor wants to see the server's own. Behind
/// `pgbouncer=true` it leaves them alone.
fn without_session_settings(url: &str) -> String {
    match (url.contains("://"), url.contains('?')) {
        (false, _) => url.to_owned(),
        (true, true) => format!("{url}&pgbouncer=true"),
        (true, false) => format!("{url}?pgbouncer=true"),
    }
}

fn report(findings: &[Finding], out: Out) -> anyhow::Result<()> {
    let count = |level| findings.iter().filter(|finding| finding.level == level).count();
    if out.json {
        out.value(&json!(findings))?;
    } else {
        for finding in findings {
            let level = match finding.level {
                Level::Ok => "ok",
                Level::Info => "info",
                Level::Warn => "warn",
                Level::Fail => "FAIL",
            };
            out.line(&format!("{level:4}  {:16}  {}", finding.check, finding.what))?;
            for (name, text) in [("why", finding.why), ("do", finding.advice)] {
                if !text.is_empty() {
                    out.line(&format!("{:24}{name}: {text}", ""))?;
                }
            }
        }
    }
    say(&format!(
        "{} ok, {} to know, {} to look at, {} broken",
        count(Level::Ok),
        count(Level::Info),
        count(Level::Warn),
        count(Level::Fail)
    ));
    Ok(())
}
