//! Everything that is written: data to stdout, talk to stderr.

use std::io::{self, Write as _};

use serde_json::Value;

/// How data is shown.
#[derive(Debug, Clone, Copy)]
pub struct Out {
    /// For programs, not for people.
    pub json: bool,
}

/// A column of a table: its title and the field that it shows.
pub type Column = (&'static str, &'static str);

const CELL_CHARS_MAX: usize = 80;

impl Out {
    /// One line of data.
    pub fn line(self, text: &str) -> io::Result<()> {
        let mut stdout = io::stdout().lock();
        writeln!(stdout, "{text}")?;
        stdout.flush()
    }

    /// One value, for programs.
    pub fn value(self, value: &Value) -> io::Result<()> {
        self.line(&format!("{value:#}"))
    }

    /// Rows: a table with aligned columns, or an array.
    pub fn rows(self, columns: &[Column], rows: &[Value]) -> io::Result<()> {
        if self.json {
            return self.value(&Value::Array(rows.to_vec()));
        }
        self.line(&table(columns, rows))
    }
}

/// Talk: progress, hints, what was done.
pub fn say(text: &str) {
    // Nobody is left to be told about a closed stderr.
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// An aligned table, without trailing blanks.
pub fn table(columns: &[Column], rows: &[Value]) -> String {
    let mut cells = vec![columns.iter().map(|(title, _)| (*title).to_owned()).collect::<Vec<_>>()];
    cells.extend(rows.iter().map(|row| columns.iter().map(|(_, field)| clipped(&text(field, &row[field]))).collect()));
    let widths: Vec<usize> = (0..columns.len())
        .map(|column| cells.iter().map(|row| row[column].chars().count()).max().unwrap_or(0))
        .collect();
    let lines = cells.iter().map(|row| {
        let padded = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
        padded.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// A field's value as people read it, on one line.
pub fn text(field: &str, value: &Value) -> String {
    match value {
        Value::Null => "-".into(),
        // By the field's name: a key that looks like a time is shown as it is.
        Value::String(text) if field == "at" || field.ends_with("_at") || field.ends_with("_until") => {
            printable(&short_time(text))
        }
        Value::String(text) => printable(text),
        other => other.to_string(),
    }
}

/// Control characters would move the cursor or end the line.
pub fn printable(text: &str) -> String {
    text.chars().flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] }).collect()
}

fn clipped(cell: &str) -> String {
    if cell.chars().count() <= CELL_CHARS_MAX {
        return cell.to_owned();
    }
    cell.chars().take(CELL_CHARS_MAX - 1).chain(['…']).collect()
}

/// PostgreSQL's JSON times to the second, where the text is one.
fn short_time(text: &str) -> String {
    let bytes = text.as_bytes();
    let is_time = bytes.len() >= 25 && bytes[4] == b'-' && bytes[10] == b'T' && bytes[13] == b':' && bytes[19] == b'.';
    match text.rfind(['+', '-']).filter(|zone| is_time && *zone > 19 && text.len() - zone <= 6) {
        Some(zone) => format!("{}{}", &text[..19], text[zone..].replace("+00:00", "Z")),
        None => text.to_owned(),
    }
}

/// An error with its causes; PostgreSQL's DETAIL too, which says which of several reasons it was.
pub fn explain(error: &anyhow::Error) -> String {
    let mut said: Vec<String> = Vec::new();
    for cause in error.chain() {
        let text = cause.to_string();
        // Our own messages carry their source already.
        if !said.iter().any(|before| before.contains(&text)) {
            said.push(text);
        }
        if let Some(pgonce::Error::Database(database)) = cause.downcast_ref::<pgonce::Error>() {
            said.extend(database.as_db_error().and_then(|db| db.detail()).map(str::to_owned));
            break;
        }
    }
    said.join(": ")
}

/// Whether the reader of our output is gone, which is its right.
pub fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_aligned_and_stay_on_their_lines() {
        let rows = [serde_json::json!({"a": "x\ny", "b": null}), serde_json::json!({"a": "long value", "b": 7})];
        assert_eq!(table(&[("A", "a"), ("B", "b")], &rows), "A           B\nx\\ny        -\nlong value  7");
    }

    #[test]
    fn times_are_short_and_other_texts_whole() {
        assert_eq!(short_time("2026-11-15T10:11:12.123456+00:00"), "2026-11-15T10:11:12Z");
        assert_eq!(short_time("2026-11-15T10:11:12.5+05:30"), "2026-11-15T10:11:12+05:30");
        assert_eq!(short_time("order-2026-11-15T10:11:12.5+0"), "order-2026-11-15T10:11:12.5+0");
    }
}
