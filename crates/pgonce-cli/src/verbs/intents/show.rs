//! `pgonce intents show`: all that is known about one intent.

use clap::Args;
use serde_json::{Map, Value, json};
use tokio_postgres::Client;
use tokio_postgres::types::Type;

use crate::Found;
use crate::database::{self, Param};
use crate::output::{self, Out, say};

/// `pgonce intents show`
#[derive(Debug, Args)]
pub struct Options {
    /// The intent's key
    key: String,
    /// Its scope, where several have the key
    #[arg(long)]
    scope: Option<String>,
    /// Its tenant, where several have the key
    #[arg(long)]
    tenant: Option<String>,
    /// The response to its end
    #[arg(long)]
    full: bool,
}

/// The primary key starts with tenant and scope. Where they are not given, this walks from one pair to the
/// next in the index and asks for the key in each, in place of reading the whole table.
const FIND: &str = "
WITH RECURSIVE pair AS (
    (SELECT i.tenant, i.scope FROM once.intents i ORDER BY i.tenant, i.scope LIMIT 1)
    UNION ALL
    SELECT n.tenant, n.scope FROM pair p, LATERAL (
        SELECT i.tenant, i.scope FROM once.intents i WHERE (i.tenant, i.scope) > (p.tenant, p.scope)
        ORDER BY i.tenant, i.scope LIMIT 1) n
)
SELECT to_jsonb(i) FROM pair p
JOIN LATERAL (SELECT * FROM once.intents i WHERE i.tenant = p.tenant AND i.scope = p.scope AND i.key = $1) i ON true
WHERE ($2::text IS NULL OR p.scope = $2) AND ($3::text IS NULL OR p.tenant = $3)
LIMIT 100";
const FIND_NAMED: &str = "SELECT to_jsonb(i) FROM once.intents i WHERE i.key = $1 AND i.scope = $2 AND i.tenant = $3";
const FIND_ARCHIVED: &str = "
SELECT jsonb_build_object('archived_at', h.archived_at) || h.record FROM once.history h
WHERE h.key = $1 AND ($2::text IS NULL OR h.scope = $2) AND ($3::text IS NULL OR h.tenant = $3)
ORDER BY h.archived_at DESC LIMIT 20";
const AUDIT: &str = "SELECT to_jsonb(a) - 'tenant' - 'scope' - 'key' FROM once.audit_trail a
WHERE a.key = $1 AND a.scope = $2 AND a.tenant = $3 ORDER BY a.id DESC LIMIT 200";

/// Finds the intent and shows it.
pub async fn run(options: Options, client: &Client, out: Out) -> anyhow::Result<()> {
    let params: [Param<'_>; 3] =
        [(&options.key, Type::TEXT), (&options.scope, Type::TEXT), (&options.tenant, Type::TEXT)];
    let named = options.scope.is_some() && options.tenant.is_some();
    let found = database::json_rows(client, if named { FIND_NAMED } else { FIND }, &params).await?;
    match <[Value; 1]>::try_from(found) {
        Ok([intent]) => show(&options, intent, client, out).await,
        Err(none) if none.is_empty() => show_archived(&options, &params, client, out).await,
        Err(several) => {
            out.rows(
                &[("TENANT", "tenant"), ("SCOPE", "scope"), ("STATUS", "status"), ("CREATED", "created_at")],
                &several,
            )?;
            let same_scope = several.iter().all(|intent| intent["scope"] == several[0]["scope"]);
            say(&format!(
                "The key is in {} places: say which with {}.",
                several.len(),
                if same_scope { "--tenant" } else { "--scope" }
            ));
            Err(Found.into())
        }
    }
}

async fn show(options: &Options, mut intent: Value, client: &Client, out: Out) -> anyhow::Result<()> {
    let named = |field: &str| intent[field].as_str().unwrap_or_default().to_owned();
    let (scope, tenant) = (named("scope"), named("tenant"));
    let params: [Param<'_>; 3] = [(&options.key, Type::TEXT), (&scope, Type::TEXT), (&tenant, Type::TEXT)];
    let mut audit = database::json_rows(client, AUDIT, &params).await?;
    audit.reverse();
    readable(&mut intent);
    if out.json {
        intent["audit"] = Value::Array(audit);
        return Ok(out.value(&intent)?);
    }
    out.line(&fields(&intent, options.full))?;
    if !audit.is_empty() {
        out.line("\naudit trail, oldest first")?;
        let columns = [
            ("AT", "at"),
            ("ACTOR", "actor"),
            ("ACTION", "action"),
            ("FROM", "from_status"),
            ("TO", "to_status"),
            ("REASON", "reason"),
        ];
        out.line(&output::table(&columns, &audit))?;
    }
    Ok(())
}

async fn show_archived(options: &Options, params: &[Param<'_>], client: &Client, out: Out) -> anyhow::Result<()> {
    let mut archived = database::json_rows(client, FIND_ARCHIVED, params).await?;
    archived.iter_mut().for_each(readable);
    if out.json {
        out.value(&json!({"found": false, "archived": archived}))?;
    } else {
        for record in &archived {
            out.line(&fields(record, options.full))?;
        }
    }
    say(if archived.is_empty() {
        "There is no such intent, in the table or in the history: it was never claimed, or was purged without an archive. An attempt with this key would run."
    } else {
        "The intent is past its window and only in the history: an attempt with this key would run again."
    });
    Err(Found.into())
}

/// bytea comes as \x…: the body as text where it is one, everything else as plain hex.
fn readable(record: &mut Value) {
    let Some(fields) = record.as_object_mut() else { return };
    if let Some(fingerprint) = fields.get("fingerprint").and_then(Value::as_str) {
        let hex = fingerprint.trim_start_matches("\\x").to_owned();
        fields.insert("fingerprint".into(), hex.into());
    }
    let Some(hex) = fields.get("response_body").and_then(Value::as_str).and_then(|body| body.strip_prefix("\\x"))
    else {
        return;
    };
    let body = match unhex(hex).map(String::from_utf8) {
        Some(Ok(text)) => json!({"encoding": "utf-8", "bytes": hex.len() / 2, "text": text}),
        _ => json!({"encoding": "hex", "bytes": hex.len() / 2, "text": hex}),
    };
    fields.insert("response_body".into(), body);
}

fn unhex(hex: &str) -> Option<Vec<u8>> {
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(hex.get(at..at + 2)?, 16).ok()).collect()
}

/// The order in which a person reads them; what is not named here comes after.
const ORDER: [&str; 10] = [
    "tenant",
    "scope",
    "key",
    "status",
    "attempt_count",
    "result_type",
    "result_id",
    "response_code",
    "failure_code",
    "failure_message",
];
const BODY_CHARS_MAX: usize = 1000;

fn fields(record: &Value, full: bool) -> String {
    let empty = Map::new();
    let record = record.as_object().unwrap_or(&empty);
    let rest = record.keys().map(String::as_str).filter(|name| !ORDER.contains(name) && *name != "response_body");
    let names = ORDER.into_iter().filter(|name| record.contains_key(*name)).chain(rest);
    let mut lines: Vec<String> =
        names.map(|name| format!("{name:17} {}", output::text(name, &record[name])).trim_end().to_owned()).collect();
    if let Some(body) = record.get("response_body").filter(|body| body.is_object()) {
        let text = body["text"].as_str().unwrap_or_default();
        let shown: String = if full { text.to_owned() } else { text.chars().take(BODY_CHARS_MAX).collect() };
        let cut = if shown.len() < text.len() { ", cut: --full shows all" } else { "" };
        let (bytes, encoding) = (&body["bytes"], body["encoding"].as_str().unwrap_or_default());
        lines.push(format!("response_body     {bytes} bytes, {encoding}{cut}"));
        lines.extend(shown.lines().map(|line| format!("    {}", output::printable(line))));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_are_text_where_they_are_text() {
        let mut record = json!({"response_body": "\\xc328"});
        readable(&mut record);
        assert_eq!(record["response_body"]["text"], "c328", "not UTF-8: hex");
        let mut record = json!({"response_body": "\\xc3bc7b"});
        readable(&mut record);
        assert_eq!(record["response_body"]["encoding"], "utf-8");
        assert_eq!(record["response_body"]["text"], "ü{");
    }

    #[test]
    fn long_bodies_are_cut_unless_asked_for() {
        let record =
            json!({"key": "k", "response_body": {"encoding": "utf-8", "bytes": 3000, "text": "ä".repeat(1500)}});
        assert!(fields(&record, false).contains("--full"));
        assert!(fields(&record, true).contains(&"ä".repeat(1500)));
    }
}
