//! `pgonce import`: a file's rows into a table, each once.

use std::fs::File;
use std::io::{self, IsTerminal as _, Seek as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use pgonce::import::{Ending, Format, ImportOptions, OnConflict, Progress, Report, RowFailure};
use pgonce::{Once, Settings};
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::output::{Out, printable, say};
use crate::verbs::up::stop_watch;
use crate::{Found, WrongUse, database};

/// `pgonce import`
///
/// A file is a job, by its content: started again after a crash it goes on behind the last batch that committed; when it
/// is done it says so. Rows are told apart by the natural key, also between files.
#[derive(Debug, Args)]
pub struct Options {
    /// CSV, TSV or JSON lines, plain or packed with gzip or zstd; - is standard input
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// The table
    #[arg(long, value_name = "SCHEMA.TABLE")]
    into: String,
    /// The columns that tell one row from another; a unique index is on exactly these
    #[arg(long, value_name = "COLUMN,…", required = true, value_delimiter = ',')]
    natural_key: Vec<String>,
    /// Where a field goes whose name is not its column's
    #[arg(long, value_name = "COLUMN=FIELD,…", value_delimiter = ',', value_parser = pair)]
    map: Vec<(String, String)>,
    /// Fields that are not taken
    #[arg(long, value_name = "FIELD,…", value_delimiter = ',')]
    ignore: Vec<String>,
    /// The file's fields, where it has no header, or its objects are not all alike
    #[arg(long, value_name = "FIELD,…", value_delimiter = ',')]
    columns: Option<Vec<String>>,
    /// SQL expressions over the fields, which are texts, each named as its column
    #[arg(long, value_name = "SQL")]
    transform: Option<String>,
    /// What is done about a row whose key is in the table
    #[arg(long, default_value = "skip")]
    on_conflict: Conflict,
    /// What the file is written in; by its name, if not given
    #[arg(long)]
    format: Option<Written>,
    /// Between the fields of CSV
    #[arg(long, value_name = "CHARACTER", value_parser = delimiter)]
    delimiter: Option<u8>,
    /// What stands for null in CSV; a field that is empty and not quoted, if not given
    #[arg(long, value_name = "TEXT")]
    null: Option<String>,
    /// Do everything in one transaction, and roll it back
    #[arg(long)]
    dry_run: bool,
    /// More failures than this stop the import; the batch that brings them is rolled back
    #[arg(long, value_name = "N", default_value_t = 1000)]
    max_failures: u64,
    /// Where failures are written, with their lines; FILE.errors.jsonl, if not given
    #[arg(long, value_name = "FILE")]
    errors: Option<PathBuf>,
    /// Rows a transaction
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    batch: u32,
    /// How long an importer that vanished on another machine keeps this one waiting
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = database::duration)]
    lease: Duration,
    /// How long a database that is away, or out of disk, is waited for
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = database::duration)]
    wait_max: Duration,
    /// Take the import from whoever is at it
    #[arg(long)]
    take_over: bool,
    /// Import a file once more that is done
    #[arg(long)]
    again: bool,
    /// Whose import it is
    #[arg(long, default_value = "")]
    tenant: String,
    /// Who imports
    #[arg(long, env = "USER", hide_env = true)]
    actor: Option<String>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Conflict {
    /// What is there stays
    Skip,
    /// The other columns become the file's
    Update,
    /// The row fails
    Fail,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Written {
    Csv,
    Tsv,
    Jsonl,
}

fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((column, field)) if !column.is_empty() && !field.is_empty() => Ok((column.to_owned(), field.to_owned())),
        _ => Err("expected COLUMN=FIELD".into()),
    }
}

fn delimiter(text: &str) -> Result<u8, String> {
    match text.as_bytes() {
        b"\\t" => Ok(b'\t'),
        [byte] if byte.is_ascii() && !matches!(byte, b'"' | b'\r' | b'\n' | 0) => Ok(*byte),
        _ => Err("expected one character, or \\t".into()),
    }
}

/// Imports a file, or goes on with it.
pub async fn run(options: Options, url: &str, out: Out) -> anyhow::Result<()> {
    let stop = stop_watch()?;
    let asked = asked(&options)?;
    let mut settings = Settings::from_url(url);
    settings.pool_max = 4;
    let once = Once::with_settings(settings)
        .await
        .with_context(|| format!("cannot use the database {}", database::redacted(url)))?;
    let Some(file) = open(&options.file, stop.clone()).await? else { return interrupted() };
    let mut told = stop.clone();
    tokio::spawn(async move {
        if told.wait_for(|stop| *stop).await.is_ok() {
            say("Stopping, when the batch under way is settled.");
        }
    });
    let started = Instant::now();
    let mut shown = Shown::new();
    let report = match options.dry_run {
        true => once.rehearse_import(file, &asked, stop, |progress| shown.show(progress)).await,
        false => once.import(file, &asked, stop, |progress| shown.show(progress)).await,
    };
    shown.bar.finish_and_clear();
    let report = report.map_err(|error| match error {
        pgonce::Error::Invalid(text) => WrongUse(text).into(),
        error => anyhow::Error::new(error).context(
            "the import did not come to its end; what is settled stays, and the same command goes on from there",
        ),
    })?;
    tell(&report, started.elapsed(), out)
}

fn asked(options: &Options) -> Result<ImportOptions, WrongUse> {
    let mut asked = ImportOptions::new(&options.into, options.natural_key.clone(), format(options)?);
    asked.map.clone_from(&options.map);
    asked.ignore.clone_from(&options.ignore);
    asked.columns.clone_from(&options.columns);
    asked.transform.clone_from(&options.transform);
    asked.null.clone_from(&options.null);
    asked.on_conflict = match options.on_conflict {
        Conflict::Skip => OnConflict::Skip,
        Conflict::Update => OnConflict::Update,
        Conflict::Fail => OnConflict::Fail,
    };
    asked.tenant.clone_from(&options.tenant);
    asked.name = options.file.display().to_string();
    asked.actor = options.actor.clone().filter(|actor| !actor.trim().is_empty()).unwrap_or_else(|| "pgonce".into());
    asked.again = options.again;
    asked.take_over = options.take_over;
    asked.batch_rows = options.batch as usize;
    asked.failures_max = options.max_failures;
    asked.lease = options.lease;
    asked.wait_max = options.wait_max;
    let beside = || (!is_stdin(&options.file)).then(|| with_ending(&options.file, ".errors.jsonl"));
    asked.errors = options.errors.clone().or_else(beside).filter(|_| !options.dry_run);
    Ok(asked)
}

fn is_stdin(file: &Path) -> bool {
    file.as_os_str() == "-"
}

fn with_ending(file: &Path, ending: &str) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(ending);
    name.into()
}

/// What the file is written in: as told, or by its name.
fn format(options: &Options) -> Result<Format, WrongUse> {
    let name = options.file.to_string_lossy().to_lowercase();
    let name = name.strip_suffix(".gz").or_else(|| name.strip_suffix(".zst")).unwrap_or(&name);
    let written = options.format.or(match name.rsplit_once('.').map(|(_, ending)| ending) {
        Some("tsv" | "tab") => Some(Written::Tsv),
        Some("jsonl" | "ndjson" | "json") => Some(Written::Jsonl),
        Some("csv" | "txt") => Some(Written::Csv),
        _ => None,
    });
    match (written, options.delimiter) {
        (None, _) => Err(WrongUse("what is the file written in? Give --format csv, tsv or jsonl".into())),
        (Some(Written::Jsonl), Some(_)) => Err(WrongUse("--delimiter is for CSV".into())),
        (Some(Written::Jsonl), None) => Ok(Format::JsonLines),
        (Some(Written::Tsv), given) => Ok(Format::Csv { delimiter: given.unwrap_or(b'\t') }),
        (Some(Written::Csv), given) => Ok(Format::Csv { delimiter: given.unwrap_or(b',') }),
    }
}

/// The file; standard input is first kept in a temporary one, since it is read twice. None: told to stop meanwhile.
async fn open(file: &Path, mut stop: watch::Receiver<bool>) -> anyhow::Result<Option<File>> {
    if !is_stdin(file) {
        return File::open(file).map(Some).map_err(|error| WrongUse(format!("{}: {error}", file.display())).into());
    }
    let (sender, kept) = tokio::sync::oneshot::channel();
    // A thread of its own: a pipe that says nothing must not keep the process from ending.
    std::thread::spawn(move || {
        let _ = sender.send(keep(&mut io::stdin().lock()));
    });
    tokio::select! {
        kept = kept => Ok(Some(kept?.context("standard input cannot be kept in a temporary file")?)),
        _ = stop.wait_for(|stop| *stop) => Ok(None),
    }
}

fn keep(input: &mut impl io::Read) -> io::Result<File> {
    let mut kept = tempfile::tempfile()?;
    let mut chunk = vec![0; 256 << 10];
    loop {
        match input.read(&mut chunk) {
            Ok(0) => break,
            Ok(read) => kept.write_all(&chunk[..read])?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    kept.rewind()?;
    Ok(kept)
}

fn interrupted() -> anyhow::Result<()> {
    say("Stopped before anything was imported.");
    Err(Found.into())
}

/// Progress: a bar on a terminal, else a line now and then.
struct Shown {
    bar: ProgressBar,
    is_terminal: bool,
    said: Instant,
    from: Option<u64>,
}

impl Shown {
    const LINE_EVERY: Duration = Duration::from_secs(10);

    fn new() -> Self {
        let bar = ProgressBar::new(0);
        let template = "{msg} {bar:30} {bytes}/{total_bytes}, {bytes_per_sec}, {eta} left";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        Self { bar, is_terminal: io::stderr().is_terminal(), said: Instant::now(), from: None }
    }

    fn show(&mut self, progress: Progress) {
        let Progress { is_hashing, bytes, bytes_total, rows, failed } = progress;
        if !is_hashing && self.from.is_none() {
            self.from = Some(rows);
            self.bar.reset();
        }
        self.bar.set_length(bytes_total);
        self.bar.set_position(bytes);
        self.bar.set_message(match is_hashing {
            true => "reading".to_owned(),
            false => format!("{rows} rows, {failed} failed"),
        });
        if !self.is_terminal && self.said.elapsed() >= Self::LINE_EVERY {
            self.said = Instant::now();
            let percent = (bytes * 100).checked_div(bytes_total).unwrap_or(0);
            let what =
                if is_hashing { "read, for its hash".to_owned() } else { format!("{rows} rows, {failed} failed") };
            say(&format!("{percent}% of the file: {what}"));
        }
    }
}

fn tell(report: &Report, took: Duration, out: Out) -> anyhow::Result<()> {
    let Report { ending, job, from_row, rows, applied, skipped, failed, failures, errors } = report;
    let (state, reason) = match ending {
        Ending::Done => ("done", None),
        Ending::AlreadyDone => ("already_done", None),
        Ending::Rehearsed => ("dry_run", None),
        Ending::Interrupted => ("interrupted", None),
        Ending::Stopped(reason) => ("stopped", Some(reason.as_str())),
        Ending::Busy(owner) => ("busy", Some(owner.as_str())),
    };
    let number = job.map(|job| job.to_string()).unwrap_or_default();
    let counts = format!("{rows} rows: {applied} applied, {skipped} skipped, {failed} failed");
    if out.json {
        out.value(&json!({
            "state": state, "reason": reason, "job": job, "from_row": from_row, "rows": rows, "applied": applied,
            "skipped": skipped, "failed": failed, "failures": failures.iter().map(told).collect::<Vec<Value>>(),
            "errors": errors, "seconds": took.as_secs_f64(),
        }))?;
    } else {
        out.line(&counts)?;
    }
    for RowFailure { row, line, code, message, .. } in failures {
        say(&printable(&format!("row {row}, line {line}: {message} [{code}]")));
    }
    let left = failed.saturating_sub(failures.len() as u64);
    if left > 0 && matches!(ending, Ending::Done | Ending::Rehearsed | Ending::Interrupted) {
        say(&format!("{left} more failed."));
    }
    if let Some(errors) = errors {
        say(&format!("What failed is in {}, with its lines.", errors.display()));
    }
    match ending {
        Ending::Done => say(&format!("Done: import {number}, {:.1} s.", took.as_secs_f64())),
        Ending::AlreadyDone => say(&format!(
            "Already done: import {number} brought this file before. pgonce imports show {number}; --again imports it once more."
        )),
        Ending::Rehearsed => say("A dry run: nothing was kept."),
        Ending::Interrupted => say("Stopped between two batches; the same command goes on from there."),
        Ending::Stopped(reason) => say(&printable(&format!("Stopped: {reason}. The same command goes on from there."))),
        Ending::Busy(owner) => say(&printable(&format!(
            "Somebody else imports this file: {owner}. Wait for it, or take it over with --take-over."
        ))),
    }
    match ending {
        Ending::Done | Ending::AlreadyDone | Ending::Rehearsed => Ok(()),
        _ => Err(Found.into()),
    }
}

fn told(failure: &RowFailure) -> Value {
    let RowFailure { row, line, code, message, .. } = failure;
    json!({"row": row, "line": line, "code": code, "message": message})
}
