//! What an import costs against a bare COPY of the same file into the same table, and against the usual loop of upserts.

use std::fs::File;
use std::io::{BufWriter, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use futures_util::SinkExt as _;
use pgonce::Once;
use pgonce::import::{Ending, Format, ImportOptions, OnConflict};
use tokio::sync::watch;

use crate::Arguments;
use crate::measure::{Series, emit, report};
use crate::work::client;

const ROWS: u32 = 500_000;
/// The loops are slow: they get a part of the rows.
const LOOPED: u32 = 20_000;
const TABLE: &str = "DROP TABLE IF EXISTS bench.payment;
    CREATE TABLE bench.payment (reference text PRIMARY KEY, customer text NOT NULL, amount numeric(12, 2) NOT NULL,
        currency text NOT NULL, at timestamptz NOT NULL)";
const UPSERT: &str = "INSERT INTO bench.payment VALUES ($1, $2, $3::text::numeric, $4, $5::text::timestamptz)
    ON CONFLICT (reference) DO NOTHING";
const NAMES: [&str; 7] = [
    "bare COPY",
    "pgonce import",
    "pgonce import, one row in 10,000 is bad",
    "pgonce import, every row is there already",
    "pgonce import with a transformation",
    "upserts row by row, one transaction",
    "upserts row by row, a transaction each",
];

/// Ratios to bare COPY, and what memory does with a file ten times as large.
pub async fn import(arguments: &Arguments, url: &str) -> Result<()> {
    let client = client(url).await?;
    client.batch_execute(TABLE).await?;
    let files = Files::make()?;
    let once = Once::connect(url).await?;
    let mut series = NAMES.map(|name| Series { name: name.to_owned(), rates: Vec::new() });
    for _ in 0..arguments.rounds {
        for (kind, one) in series.iter_mut().enumerate() {
            if kind != 3 {
                client.batch_execute("TRUNCATE bench.payment; CHECKPOINT").await?;
            } else {
                run(&once, &files.good, None).await?;
            }
            let started = Instant::now();
            let rows = match kind {
                0 => copy(&client, &files.good).await?,
                2 => run(&once, &files.bad, None).await?,
                4 => {
                    run(&once, &files.good, Some("reference, upper(customer) AS customer, amount, currency, at"))
                        .await?
                }
                5 => upserts(&client, &files.good, true).await?,
                6 => upserts(&client, &files.good, false).await?,
                _ => run(&once, &files.good, None).await?,
            };
            one.rates.push(f64::from(rows) / started.elapsed().as_secs_f64());
        }
    }
    report(&format!("import, rows/s of a CSV of {ROWS} rows with five columns (ratio to bare COPY)"), &series);
    // The high-water mark is the process's: what the larger file adds to it is what grows.
    let before = peak_kb()?;
    client.batch_execute("TRUNCATE bench.payment").await?;
    run(&once, &files.large, None).await?;
    emit(&format!("memory: a file ten times as large adds {} kB to the peak", peak_kb()?.saturating_sub(before)));
    client.batch_execute("DROP TABLE bench.payment").await?;
    Ok(())
}

async fn run(once: &Once, file: &Path, transform: Option<&str>) -> Result<u32> {
    let mut options = ImportOptions::new("bench.payment", vec!["reference".into()], Format::Csv { delimiter: b',' });
    options.on_conflict = OnConflict::Skip;
    options.transform = transform.map(str::to_owned);
    options.again = true;
    let (_open, stop) = watch::channel(false);
    let report = once.import(File::open(file)?, &options, stop, |_| {}).await?;
    ensure!(report.ending == Ending::Done, "{report:?}");
    Ok(u32::try_from(report.rows)?)
}

async fn copy(client: &tokio_postgres::Client, file: &Path) -> Result<u32> {
    let sink = client.copy_in("COPY bench.payment FROM STDIN WITH (FORMAT csv, HEADER)").await?;
    tokio::pin!(sink);
    let mut file = File::open(file)?;
    let mut chunk = vec![0; 128 << 10];
    loop {
        let read = file.read(&mut chunk)?;
        if read == 0 {
            break;
        }
        sink.send(Bytes::copy_from_slice(&chunk[..read])).await?;
    }
    Ok(u32::try_from(sink.finish().await?)?)
}

async fn upserts(client: &tokio_postgres::Client, file: &Path, together: bool) -> Result<u32> {
    let text = std::fs::read_to_string(file)?;
    let statement = client.prepare(UPSERT).await?;
    if together {
        client.batch_execute("BEGIN").await?;
    }
    for line in text.lines().skip(1).take(LOOPED as usize) {
        let fields: Vec<&str> = line.split(',').collect();
        client.execute(&statement, &[&fields[0], &fields[1], &fields[2], &fields[3], &fields[4]]).await?;
    }
    if together {
        client.batch_execute("COMMIT").await?;
    }
    Ok(LOOPED)
}

fn peak_kb() -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("no VmHWM")?;
    Ok(line.trim().trim_end_matches(" kB").parse()?)
}

/// The files, gone with it.
struct Files {
    good: PathBuf,
    bad: PathBuf,
    large: PathBuf,
}

impl Files {
    fn make() -> Result<Self> {
        let named = |name: &str| std::env::temp_dir().join(format!("pgonce-bench-{}-{name}.csv", std::process::id()));
        let files = Self { good: named("good"), bad: named("bad"), large: named("large") };
        write(&files.good, ROWS, false)?;
        write(&files.bad, ROWS, true)?;
        write(&files.large, ROWS * 10, false)?;
        Ok(files)
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        for file in [&self.good, &self.bad, &self.large] {
            let _ = std::fs::remove_file(file);
        }
    }
}

fn write(path: &Path, rows: u32, is_bad: bool) -> Result<()> {
    let mut file = BufWriter::new(File::create(path)?);
    writeln!(file, "reference,customer,amount,currency,at")?;
    for row in 0..rows {
        let amount =
            if is_bad && row % 10_000 == 5_000 { "bad".to_owned() } else { format!("{}.{:02}", row % 1000, row % 100) };
        let (month, day) = (row % 9 + 1, row % 28 + 1);
        writeln!(
            file,
            "ref-{row:08},customer {},{amount},EUR,2026-{month:02}-{day:02} 10:00:00+00",
            row * 7919 % 100_000
        )?;
    }
    Ok(file.flush()?)
}
