//! `pgonce purge`: removes what is past its window, in batches, archiving intents first where asked to.

use std::fs::{self, File, OpenOptions};
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use flate2::Compression;
use flate2::write::GzEncoder;
use futures_util::TryStreamExt as _;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use tokio_postgres::types::Type;
use tokio_postgres::{Client, Transaction};

use crate::database;
use crate::output::{Out, say};
use crate::verbs::up::stop_signal;

/// `pgonce purge`
#[derive(Debug, Args)]
pub struct Options {
    /// Rows a transaction
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(i64).range(1..=100_000))]
    pub batch: i64,
    /// Keep the intents that go: `history` for the partitioned table once.intent_history, or a directory for .jsonl.gz files
    #[arg(long, value_name = "history|DIR")]
    pub archive: Option<Archive>,
    /// Stop after so many rows, of intents, of the inbox and of ended jobs together
    #[arg(long, value_name = "TOTAL", value_parser = clap::value_parser!(i64).range(1..))]
    pub limit: Option<i64>,
}

/// Where purged rows are kept.
#[derive(Debug, Clone)]
pub enum Archive {
    /// In `once.intent_history`.
    History,
    /// In files of this directory.
    Files(PathBuf),
}

impl std::str::FromStr for Archive {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "" => Err("name a directory, or history for the table".into()),
            "history" => Ok(Self::History),
            dir => Ok(Self::Files(dir.into())),
        }
    }
}

/// What is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// Intents: what can be archived.
    Intents,
    /// The inbox, jobs and the outbox, too.
    Everything,
}

/// What is purged one after another.
#[derive(Debug, Clone, Copy)]
enum Kind {
    Intents,
    Inbox,
    Jobs,
    Calls,
    Imports,
}

/// What went.
#[derive(Debug, Default)]
struct Gone {
    intents: i64,
    inbox: i64,
    calls: i64,
    imports: i64,
    jobs: i64,
    /// `None` where that was not looked at.
    segments: Option<i64>,
    files: Vec<PathBuf>,
    interrupted: bool,
}

/// Purges until nothing is left, the limit is reached, or somebody stops it between two batches.
pub async fn run(options: Options, extent: Extent, url: &str, out: Out) -> anyhow::Result<()> {
    let mut client = database::connect(url).await?;
    if let Some(Archive::Files(dir)) = &options.archive {
        fs::create_dir_all(dir).with_context(|| format!("{} cannot be made", dir.display()))?;
    }
    let stop = stop_signal()?;
    tokio::pin!(stop);
    let spinner = spinner();
    let mut gone = Gone::default();
    let others = [Kind::Inbox, Kind::Jobs, Kind::Calls, Kind::Imports];
    let mut kinds = others.into_iter().filter(|_| extent == Extent::Everything);
    let mut kind = Kind::Intents;
    loop {
        let total = gone.intents + gone.inbox + gone.jobs + gone.calls + gone.imports;
        let batch = options.batch.min(options.limit.unwrap_or(i64::MAX) - total);
        let size = i32::try_from(batch).unwrap_or(i32::MAX);
        let (rows, counted) = match kind {
            Kind::Intents => {
                let rows = one_batch(&mut client, size, options.archive.as_ref(), &mut gone.files).await;
                (rows, &mut gone.intents)
            }
            Kind::Inbox => (batch_of(&client, "SELECT to_jsonb(once.purge_inbox($1))", size).await, &mut gone.inbox),
            Kind::Jobs => (batch_of(&client, "SELECT to_jsonb(once.purge_jobs($1))", size).await, &mut gone.jobs),
            Kind::Calls => (batch_of(&client, "SELECT to_jsonb(once.purge_calls($1))", size).await, &mut gone.calls),
            Kind::Imports => {
                (batch_of(&client, "SELECT to_jsonb(once.purge_imports($1))", size).await, &mut gone.imports)
            }
        };
        let rows = rows.with_context(|| format!("stopped after {total} rows, which are purged"))?;
        *counted += rows;
        spinner.set_position(u64::try_from(total + rows).unwrap_or(0));
        if options.limit.is_some_and(|limit| total + rows >= limit) {
            break;
        }
        if rows == 0 {
            let Some(next) = kinds.next() else { break };
            kind = next;
        }
        // Polled once, without waiting.
        gone.interrupted = tokio::select! { biased; () = &mut stop => true, () = std::future::ready(()) => false };
        if gone.interrupted {
            break;
        }
    }
    spinner.finish_and_clear();
    let rotated = match extent {
        Extent::Everything if !gone.interrupted => rotate(&client).await.map(Some),
        _ => Ok(None),
    };
    gone.segments = rotated.as_ref().ok().copied().flatten();
    report(&gone, extent, out)?;
    rotated.map(drop).context("the rows are purged; the outbox's segments were not looked at")
}

fn report(gone: &Gone, extent: Extent, out: Out) -> anyhow::Result<()> {
    if gone.interrupted {
        say("Stopped between two batches; the rest waits for the next purge.");
    }
    if out.json {
        let mut all = json!({"purged": gone.intents, "interrupted": gone.interrupted, "files": gone.files});
        if extent == Extent::Everything {
            all["inbox_purged"] = gone.inbox.into();
            all["calls_purged"] = gone.calls.into();
            all["imports_purged"] = gone.imports.into();
            all["jobs_purged"] = gone.jobs.into();
            all["segments_emptied"] = gone.segments.into();
        }
        return Ok(out.value(&all)?);
    }
    for file in &gone.files {
        out.line(&format!("wrote {}", file.display()))?;
    }
    out.line(&format!("purged {} rows", gone.intents))?;
    if gone.inbox > 0 {
        out.line(&format!("purged {} records of the inbox", gone.inbox))?;
    }
    if gone.calls > 0 {
        out.line(&format!("purged {} calls", gone.calls))?;
    }
    if gone.imports > 0 {
        out.line(&format!("purged {} records of imports", gone.imports))?;
    }
    if gone.jobs > 0 {
        out.line(&format!("purged {} records of ended jobs", gone.jobs))?;
    }
    if let Some(segments @ 1..) = gone.segments {
        out.line(&format!("emptied {segments} segments of the outbox"))?;
    }
    Ok(())
}

/// A batch of what is over, of one or of two kinds: dedup records and processed messages, ended jobs and windows, calls and
/// notices.
async fn batch_of(client: &Client, sql: &str, size: i32) -> anyhow::Result<i64> {
    // It takes so many of each kind: half of it keeps a limit. At least one, or it would never end.
    let each = (size / 2).max(1);
    Ok(database::json_row(client, sql, &[(&each, Type::INT4)]).await?.as_i64().unwrap_or(0))
}

/// Empties the outbox's segments that every sink is past.
async fn rotate(client: &Client) -> anyhow::Result<i64> {
    let emptied = database::json_row(client, "SELECT to_jsonb(once.rotate_outbox())", &[]).await?;
    Ok(emptied.as_i64().unwrap_or(0))
}

fn spinner() -> ProgressBar {
    let spinner = ProgressBar::new_spinner();
    if let Ok(style) = ProgressStyle::with_template("{spinner} purging: {human_pos} rows, {per_sec}, {elapsed}") {
        spinner.set_style(style);
    }
    spinner.enable_steady_tick(Duration::from_millis(100));
    spinner
}

async fn one_batch(
    client: &mut Client,
    size: i32,
    archive: Option<&Archive>,
    files: &mut Vec<PathBuf>,
) -> anyhow::Result<i64> {
    if let Some(Archive::Files(dir)) = archive {
        let (rows, file) = to_file(client, size, dir).await?;
        files.extend(file);
        return Ok(rows);
    }
    let sql = "SELECT to_jsonb(once.purge($1, $2))";
    let params: [database::Param<'_>; 2] = [(&size, Type::INT4), (&archive.is_some(), Type::BOOL)];
    Ok(database::json_row(client, sql, &params).await?.as_i64().unwrap_or(0))
}

/// One batch into one file. The file is complete and durable before the rows' deletion commits: a crash in
/// between leaves a file whose rows are still in the table, which is a harmless duplicate, and never loses a row.
async fn to_file(client: &mut Client, size: i32, dir: &Path) -> anyhow::Result<(i64, Option<PathBuf>)> {
    let transaction = client.transaction().await.map_err(pgonce::Error::from)?;
    let mut draft = Draft::create(dir, &timestamp(&transaction).await?)?;
    let rows = match write_rows(&transaction, size, &mut draft).await {
        Ok(0) => {
            draft.discard();
            // Nothing was changed: its end need not be confirmed.
            return Ok((0, None));
        }
        Ok(rows) => rows,
        Err(error) => {
            draft.discard();
            return Err(error.context("nothing of this batch was purged"));
        }
    };
    let file = draft.publish(dir).context("nothing of this batch was purged")?;
    transaction.commit().await.map_err(pgonce::Error::from).with_context(|| {
        format!(
            "the commit failed: the rows of {} may still be in the table, and the next purge then writes them again (harmless: keep the file)",
            file.display()
        )
    })?;
    Ok((rows, Some(file)))
}

async fn write_rows(transaction: &Transaction<'_>, size: i32, draft: &mut Draft) -> anyhow::Result<i64> {
    let sql = "SELECT r::text FROM once.purge_rows($1) r";
    let rows = transaction.query_typed_raw(sql, [(size, Type::INT4)]).await.map_err(pgonce::Error::from)?;
    tokio::pin!(rows);
    let mut count = 0;
    while let Some(row) = rows.try_next().await.map_err(pgonce::Error::from)? {
        let record: &str = row.try_get(0).map_err(pgonce::Error::from)?;
        writeln!(draft.writer, "{record}")
            .with_context(|| format!("{} cannot be written", draft.temporary.display()))?;
        count += 1;
    }
    Ok(count)
}

/// The database's clock, as everywhere.
async fn timestamp(transaction: &Transaction<'_>) -> Result<String, pgonce::Error> {
    let sql = "SELECT to_jsonb(to_char(once.clock() AT TIME ZONE 'UTC', 'YYYYMMDD\"T\"HH24MISS\"Z\"'))";
    Ok(database::json_row(transaction, sql, &[]).await?.as_str().unwrap_or("unknown").to_owned())
}

/// A file being written under a temporary name.
struct Draft {
    writer: GzEncoder<BufWriter<File>>,
    temporary: PathBuf,
    published: PathBuf,
}

impl Draft {
    /// The first free number. Whoever has made the temporary name owns the final one: two purges into one
    /// directory never write the same file.
    fn create(dir: &Path, timestamp: &str) -> anyhow::Result<Self> {
        for number in 1..100_000 {
            let published = dir.join(format!("intents-{timestamp}-{number}.jsonl.gz"));
            let temporary = dir.join(format!("intents-{timestamp}-{number}.jsonl.gz.tmp"));
            let file = match OpenOptions::new().write(true).create_new(true).open(&temporary) {
                Ok(file) => file,
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => continue,
                Err(error) => return Err(error).with_context(|| format!("{} cannot be made", temporary.display())),
            };
            if published.exists() {
                let _ = fs::remove_file(&temporary);
                continue;
            }
            let writer = GzEncoder::new(BufWriter::new(file), Compression::default());
            return Ok(Self { writer, temporary, published });
        }
        anyhow::bail!("{} has no free file name for {timestamp}", dir.display())
    }

    fn discard(self) {
        let _ = fs::remove_file(&self.temporary);
    }

    /// Complete, on disk, under its final name, and that name on disk too.
    fn publish(self, dir: &Path) -> anyhow::Result<PathBuf> {
        let Self { writer, temporary, published } = self;
        let write = || -> std::io::Result<()> {
            writer.finish()?.into_inner().map_err(std::io::IntoInnerError::into_error)?.sync_all()?;
            fs::rename(&temporary, &published)?;
            File::open(dir)?.sync_all()
        };
        write().with_context(|| format!("{} cannot be written", published.display()))?;
        Ok(published)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_never_shared() {
        let dir = tempfile::tempdir().unwrap();
        let first = Draft::create(dir.path(), "T").unwrap();
        let second = Draft::create(dir.path(), "T").unwrap();
        assert_ne!(first.published, second.published);
        first.publish(dir.path()).unwrap();
        let third = Draft::create(dir.path(), "T").unwrap();
        assert!(third.published.ends_with("intents-T-3.jsonl.gz"));
        third.discard();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "one published, one draft");
    }
}
