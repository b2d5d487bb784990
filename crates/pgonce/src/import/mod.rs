//! Imports of files: every row once, whatever is killed when. The rules are in `sql/functions/import/`.
//!
//! A file is a job, named by its content and by what is asked of it. Rows are written in batches, and each batch commits
//! together with the record of what became of its rows: so an import goes on exactly behind the last batch that
//! committed. See docs/guides/imports.md.

mod batch;
mod copy;
mod dry;
mod errors;
mod input;
mod job;
mod owner;
mod plan;
mod records;
mod stage;
mod write;

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::watch;
use tracing::Instrument as _;

use self::batch::Position;
use self::errors::ErrorFile;
use self::input::Content;
use self::job::{Job, Opened};
use self::plan::{Plan, Target};
use self::records::{Records, Wanted};
use crate::{Error, Once};

pub use self::records::Format;

/// What is done about a row whose natural key is in the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnConflict {
    /// The row that is there stays; of several in the file the first counts.
    Skip,
    /// Its other columns become the file's; of several in the file the last counts.
    Update,
    /// The row of the file fails.
    Fail,
}

/// What is asked of an import. The first part names the job, together with the content; the second may differ from one
/// attempt to the next.
#[derive(Debug, Clone)]
pub struct ImportOptions {
    /// The table, as schema.table.
    pub into: String,
    /// Columns of the table that tell one row from another; a unique index is on exactly these.
    pub natural_key: Vec<String>,
    /// What the file is written in.
    pub format: Format,
    /// Columns of the table, with the fields that they take, where the names differ.
    pub map: Vec<(String, String)>,
    /// Fields of the file that are not taken.
    pub ignore: Vec<String>,
    /// The file's fields: for CSV without a header, and for objects that do not all have the same.
    pub columns: Option<Vec<String>>,
    /// A list of SQL expressions over the file's fields, which are texts, each named as its column.
    pub transform: Option<String>,
    /// What stands for null in CSV; None: a field that is empty and not quoted.
    pub null: Option<String>,
    /// What is done about a row whose key is there.
    pub on_conflict: OnConflict,
    /// Whose import it is.
    pub tenant: String,

    /// The file's name, for people.
    pub name: String,
    /// Who imports, for people.
    pub actor: String,
    /// An import that is done is done once more.
    pub again: bool,
    /// Takes the import from whoever is at it; their batch under way is rolled back or committed, never both.
    pub take_over: bool,
    /// Rows of a transaction, at most.
    pub batch_rows: usize,
    /// More failures than this stop the import; the batch that brings them is rolled back.
    pub failures_max: u64,
    /// How long an importer that vanished keeps others away.
    pub lease: Duration,
    /// How long a database that is away, or out of something, is waited for.
    pub wait_max: Duration,
    /// Where failures are written, with their lines.
    pub errors: Option<PathBuf>,
}

impl ImportOptions {
    /// Everything else at its default.
    #[must_use]
    pub fn new(into: impl Into<String>, natural_key: Vec<String>, format: Format) -> Self {
        Self {
            into: into.into(),
            natural_key,
            format,
            map: Vec::new(),
            ignore: Vec::new(),
            columns: None,
            transform: None,
            null: None,
            on_conflict: OnConflict::Skip,
            tenant: String::new(),
            name: "-".into(),
            actor: "pgonce".into(),
            again: false,
            take_over: false,
            batch_rows: 10_000,
            failures_max: 1000,
            lease: Duration::from_secs(30),
            wait_max: Duration::from_secs(60),
            errors: None,
        }
    }

    /// What names the job beside the content.
    fn named(&self, target: &str) -> serde_json::Value {
        let on_conflict = match self.on_conflict {
            OnConflict::Skip => "skip",
            OnConflict::Update => "update",
            OnConflict::Fail => "fail",
        };
        serde_json::json!({
            "into": target, "natural_key": self.natural_key, "format": self.format.name(), "map": self.map,
            "ignore": self.ignore, "columns": self.columns, "transform": self.transform, "null": self.null,
            "on_conflict": on_conflict,
        })
    }
}

/// How far an import is.
#[derive(Debug, Clone, Copy, Default)]
pub struct Progress {
    /// The file is only being read through, for its hash.
    pub is_hashing: bool,
    /// Bytes of the file that were read.
    pub bytes: u64,
    /// All its bytes; not known yet while it is hashed.
    pub bytes_total: u64,
    /// Rows that are settled.
    pub rows: u64,
    /// Of them failed.
    pub failed: u64,
}

/// How an import ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ending {
    /// Every row is settled.
    Done,
    /// It was, before.
    AlreadyDone,
    /// Nothing was kept: it was a rehearsal.
    Rehearsed,
    /// It was told to stop, and did so between two batches.
    Interrupted,
    /// It cannot go on as it is; what is settled stays. The same import resumes.
    Stopped(String),
    /// Somebody else is at it: who.
    Busy(String),
}

/// A row that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowFailure {
    /// Its number in the file, from 1, the header not counted.
    pub row: u64,
    /// The line that it begins on.
    pub line: u64,
    /// A SQLSTATE.
    pub code: String,
    /// What is wrong with it. PostgreSQL's own words may quote a value.
    pub message: String,
    /// As it stands in the file.
    pub input: Vec<u8>,
}

/// What became of an import.
#[derive(Debug, Clone)]
pub struct Report {
    /// How it ended.
    pub ending: Ending,
    /// The job's number; None of a rehearsal.
    pub job: Option<i64>,
    /// The first row of this attempt: more than 1 where it was resumed.
    pub from_row: u64,
    /// Rows that are settled, of all attempts.
    pub rows: u64,
    /// Rows that are in the table.
    pub applied: u64,
    /// Rows that were not needed.
    pub skipped: u64,
    /// Rows that failed.
    pub failed: u64,
    /// The first failures of this attempt, ten at most; with `Stopped`, those that stopped it.
    pub failures: Vec<RowFailure>,
    /// Where all are.
    pub errors: Option<PathBuf>,
}

impl Once {
    /// Imports a file: from its beginning, from where an earlier attempt ended, or not at all where it is done. The file
    /// is read twice, first for its hash. Memory does not grow with the file.
    ///
    /// `stop` ends it after the batch under way. `progress` is called now and then.
    ///
    /// # Errors
    /// `Error::Invalid` where what is asked cannot be done: nothing was done then. `Error::ImportLost` where somebody
    /// took it over. What the database says, where waiting did not help: the same import resumes.
    pub async fn import(
        &self,
        file: File,
        options: &ImportOptions,
        stop: watch::Receiver<bool>,
        progress: impl FnMut(Progress),
    ) -> Result<Report, Error> {
        let span = tracing::info_span!("pgonce.import", into = %options.into, tenant = %options.tenant, job = tracing::field::Empty);
        // On the heap: it is large, and a caller's future would be large with it.
        Box::pin(self.run_import(file, options, false, stop, progress)).instrument(span).await
    }

    /// Does everything that [`Once::import`] does, in one transaction that is rolled back.
    ///
    /// # Errors
    /// As [`Once::import`].
    pub async fn rehearse_import(
        &self,
        file: File,
        options: &ImportOptions,
        stop: watch::Receiver<bool>,
        progress: impl FnMut(Progress),
    ) -> Result<Report, Error> {
        let span = tracing::info_span!("pgonce.import", into = %options.into, tenant = %options.tenant, dry_run = true);
        Box::pin(self.run_import(file, options, true, stop, progress)).instrument(span).await
    }

    async fn run_import(
        &self,
        file: File,
        options: &ImportOptions,
        is_rehearsal: bool,
        mut stop: watch::Receiver<bool>,
        mut progress: impl FnMut(Progress),
    ) -> Result<Report, Error> {
        check(options)?;
        let connection = self.connection().await?;
        let target = Target::examine(&connection.client, options).await?;
        let Some(content) = hashed(file, &mut stop, &mut progress).await? else {
            return Ok(Report::nothing(Ending::Interrupted));
        };
        let content = Arc::new(content);
        let layout = Layout::read(&content, options, &target)?;
        // In transactions of its own, which a dropped future must not give back to the pool.
        connection.dirty.store(true, Ordering::SeqCst);
        let plan = Plan::make(&connection.client, target, options, &layout.sources, &layout.pairs).await?;
        connection.dirty.store(false, Ordering::SeqCst);
        drop(connection);
        if is_rehearsal {
            return dry::rehearse(self, &content, &layout, &plan, options, stop, progress).await;
        }
        let mut job = match Job::open(self, options, &content, &plan.target.name, &mut stop).await? {
            Opened::Ours(job) => job,
            Opened::Ended(report) => return Ok(report),
        };
        tracing::Span::current().record("job", job.id);
        if job.settled.rows() == 0 {
            job.keep_header(self, &layout.header).await?;
        }
        let mut errors = ErrorFile::open(self, options.errors.as_deref(), &job).await?;
        let mut run = write::Run { once: self, options, plan: &plan, job: &mut job, errors: &mut errors };
        run.finish(content, &layout, stop, progress).await
    }
}

impl Report {
    fn nothing(ending: Ending) -> Self {
        Self {
            ending,
            job: None,
            from_row: 1,
            rows: 0,
            applied: 0,
            skipped: 0,
            failed: 0,
            failures: Vec::new(),
            errors: None,
        }
    }
}

fn check(options: &ImportOptions) -> Result<(), Error> {
    let invalid = |text: &str| Err(Error::Invalid(text.into()));
    if options.natural_key.is_empty() {
        return invalid("an import needs a natural key: what tells a row that is there from a new one");
    }
    let mut keys = options.natural_key.clone();
    keys.sort_unstable();
    keys.dedup();
    if keys.len() < options.natural_key.len() {
        return invalid("a column is in the natural key twice");
    }
    if options.transform.is_some() && !options.map.is_empty() {
        return invalid("a transformation says itself which field goes where: give it, or a map");
    }
    if !(1..=100_000).contains(&options.batch_rows) {
        return invalid("a batch has from 1 to 100,000 rows");
    }
    if !(1..=86_400).contains(&options.lease.as_secs()) {
        return invalid("a lease is from 1 second to 1 day");
    }
    Ok(())
}

/// Reads the file through on a thread of its own; None where it was told to stop meanwhile.
async fn hashed(
    file: File,
    stop: &mut watch::Receiver<bool>,
    progress: &mut impl FnMut(Progress),
) -> Result<Option<Content>, Error> {
    let taken = Arc::new(AtomicU64::new(0));
    let bytes_total = file.metadata().map_or(0, |metadata| metadata.len());
    let (sender, mut receiver) = tokio::sync::oneshot::channel();
    let counted = Arc::clone(&taken);
    // Not a task's thread: one that waits for a pipe for ever must not keep the process from ending.
    std::thread::spawn(move || {
        let _ = sender.send(Content::examine(file, counted));
    });
    let mut tick = tokio::time::interval(Duration::from_millis(200));
    loop {
        tokio::select! {
            content = &mut receiver => {
                return content.map_err(|_| Error::Invalid("the file could not be read".into()))?.map(Some);
            }
            _ = stop.wait_for(|stop| *stop) => return Ok(None),
            _ = tick.tick() => {
                let bytes = taken.load(Ordering::Relaxed);
                progress(Progress { is_hashing: true, bytes, bytes_total, ..Progress::default() });
            }
        }
    }
}

/// Which fields the file has, and where its rows begin.
#[derive(Debug)]
pub(crate) struct Layout {
    /// The fields that are staged, by name.
    sources: Vec<String>,
    /// Columns of the table, with their fields; empty where a transformation says so.
    pairs: Vec<(String, String)>,
    wanted: Wanted,
    begin: Position,
    /// The header as it stands in the file; empty where there is none.
    header: Vec<u8>,
}

impl Layout {
    fn read(content: &Content, options: &ImportOptions, target: &Target) -> Result<Self, Error> {
        let unreadable = |error: records::Unreadable| {
            Error::Invalid(format!("line {}: {}; nothing was imported", error.line, error.reason))
        };
        let window = content.window(0).map_err(|error| Error::Invalid(format!("the file cannot be read: {error}")))?;
        let mut records = Records::new(window, options.format, 1);
        let first = records.next().map_err(unreadable)?;
        let empty = || Error::Invalid("the file is empty: nothing was imported".into());
        let mut begin = Position { offset: 0, line: 1 };
        let mut header = Vec::new();
        let names: Vec<String> = match (&options.columns, options.format) {
            (Some(columns), _) => columns.clone(),
            (None, Format::Csv { .. }) => {
                let found = first.ok_or_else(empty)?;
                let names = records.fields().map(|field| std::str::from_utf8(field).map(str::to_owned));
                let names = names.collect::<Result<_, _>>();
                header = records.window.bytes()[found.begin..found.end].to_vec();
                records.pass(found);
                begin = Position { offset: records.window.offset, line: records.line };
                names.map_err(|_| Error::Invalid("line 1: the header is not UTF-8; nothing was imported".into()))?
            }
            (None, Format::JsonLines) => {
                let found = first.ok_or_else(empty)?;
                records::names(&records.window.bytes()[found.begin..found.end]).map_err(|bad| {
                    Error::Invalid(format!(
                        "line {}: {}; the first record names the fields: mend it, or give --columns; nothing was imported",
                        found.line, bad.message
                    ))
                })?
            }
        };
        Self::of(names, options, target, begin, header)
    }

    fn of(
        names: Vec<String>,
        options: &ImportOptions,
        target: &Target,
        begin: Position,
        header: Vec<u8>,
    ) -> Result<Self, Error> {
        if let Some(twice) = names.iter().enumerate().find(|(place, name)| names[..*place].contains(name)) {
            return Err(Error::Invalid(format!("the field {:?} is in the header twice", twice.1)));
        }
        for name in options.ignore.iter().chain(options.map.iter().map(|(_, from)| from)) {
            if !names.contains(name) {
                let there = names.join(", ");
                return Err(Error::Invalid(format!("the file has no field {name:?}; it has: {there}")));
            }
        }
        let taken: Vec<String> = names.iter().filter(|name| !options.ignore.contains(name)).cloned().collect();
        let pairs = if options.transform.is_some() { Vec::new() } else { pairs(&taken, options, target)? };
        let sources =
            if options.transform.is_some() { taken } else { pairs.iter().map(|(_, from)| from.clone()).collect() };
        let place = |name: &String| names.iter().position(|known| known == name).unwrap_or_default();
        let wanted = Wanted {
            columns: names.len(),
            fields: sources.iter().map(|name| (name.clone(), place(name))).collect(),
            only: options.columns.is_none(),
            ignored: options.ignore.clone(),
            null: options.null.clone(),
        };
        Ok(Self { sources, pairs, wanted, begin, header })
    }

    /// The fields that the natural key takes as they are.
    fn key_fields(&self, options: &ImportOptions) -> Vec<String> {
        let keys = self.pairs.iter().filter(|(to, _)| options.natural_key.contains(to));
        keys.map(|(_, from)| from.clone()).collect()
    }
}

/// Which column takes which field: by the map, else by the name.
fn pairs(taken: &[String], options: &ImportOptions, target: &Target) -> Result<Vec<(String, String)>, Error> {
    let mut pairs = options.map.clone();
    for name in taken.iter().filter(|name| !options.map.iter().any(|(_, from)| from == *name)) {
        if !target.has(name) {
            return Err(Error::Invalid(format!(
                "{} has no column {name:?}, which the file has: say where it goes (--map column={name}), or --ignore {name}",
                target.name
            )));
        }
        pairs.push((name.clone(), name.clone()));
    }
    for (place, (to, from)) in pairs.iter().enumerate() {
        if !target.has(to) {
            return Err(Error::Invalid(format!("{} has no column {to:?}", target.name)));
        }
        if pairs[..place].iter().any(|(before, _)| before == to) {
            return Err(Error::Invalid(format!("two fields go into the column {to:?}")));
        }
        if pairs[..place].iter().any(|(_, before)| before == from) {
            return Err(Error::Invalid(format!("the field {from:?} goes into two columns: use --transform for that")));
        }
    }
    Ok(pairs)
}
