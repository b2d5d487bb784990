//! `pgonce migrate`: the schema `once`, applied, shown or tried.

use clap::Args;
use serde_json::json;

use crate::database;
use crate::output::{Out, say};

/// `pgonce migrate`
#[derive(Debug, Args)]
pub struct Options {
    /// Show which migrations the database has, and change nothing
    #[arg(long, conflicts_with = "dry_run")]
    status: bool,
    /// Run everything and roll it back
    #[arg(long)]
    dry_run: bool,
}

/// Applies, shows or tries.
pub async fn run(options: Options, url: &str, out: Out) -> anyhow::Result<()> {
    let mut client = database::connect(url).await?;
    if options.status {
        let all = pgonce::migrate::status(&client).await?;
        let rows = all.iter().map(serde_json::to_value).collect::<Result<Vec<_>, _>>()?;
        out.rows(
            &[
                ("VERSION", "version"),
                ("NAME", "name"),
                ("STATE", "state"),
                ("APPLIED", "applied_at"),
                ("SCHEMA", "schema"),
            ],
            &rows,
        )?;
        if all.iter().any(|migration| migration.state == "pending") {
            say("Something is pending: run pgonce migrate.");
        }
        return Ok(());
    }
    let report = pgonce::migrate::apply(&mut client, options.dry_run).await?;
    if out.json {
        out.value(&json!(report))?;
        return Ok(());
    }
    for name in &report.applied {
        out.line(&format!("{} {name}", if report.dry_run { "would apply" } else { "applied" }))?;
    }
    if report.applied.is_empty() {
        out.line("no migration is pending")?;
    }
    say(&match report.dry_run {
        true => {
            format!("Dry run: all of it worked, with {} functions and views, and was rolled back.", report.functions)
        }
        false => format!("The schema once is up to date; {} functions and views are in place.", report.functions),
    });
    Ok(())
}
