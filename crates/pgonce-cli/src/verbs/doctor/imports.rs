//! Imports that did not come to their end.

use serde_json::Value;
use tokio_postgres::Client;

use super::{Finding, Findings, Level};
use crate::database;
use crate::output::printable;

const STANDING: &str = "
SELECT jsonb_build_object('id', j.id, 'name', j.name, 'target', j.target, 'rows', j.rows, 'left_behind', j.left_behind,
    'error', coalesce(j.last_error, 'its importer vanished'))
FROM once.imports j WHERE j.state = 'stopped' OR j.left_behind ORDER BY j.id LIMIT 20";

/// Those that stopped, and those whose importer is gone.
pub async fn standing(client: &Client) -> Findings {
    let all = database::json_rows(client, STANDING, &[]).await?;
    if all.is_empty() {
        return Ok(vec![Finding::ok("imports", "no import stands still")]);
    }
    Ok(all.iter().map(stands).collect())
}

fn stands(row: &Value) -> Finding {
    let text = |field: &str| row[field].as_str().unwrap_or_default();
    let state = if row["left_behind"] == true { "was left" } else { "is stopped" };
    let what = format!(
        "import {} of {} into {} {state} after {} rows: {}",
        row["id"],
        text("name"),
        text("target"),
        row["rows"],
        text("error")
    );
    Finding::new(
        Level::Warn,
        "imports",
        printable(&what),
        "The rest of the file is not in the table.",
        "Give the same pgonce import again: it goes on from there. Or pgonce imports abandon.",
    )
}
