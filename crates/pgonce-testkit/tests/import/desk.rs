//! A database with a table, and files to import.

use std::fs::File;
use std::io::Write as _;

use pgonce::import::{Format, ImportOptions, Progress, Report};
use pgonce::{Error, Once};
use pgonce_testkit::TestDb;
use tempfile::TempDir;
use tokio::sync::watch;
use tokio_postgres::Client;

pub const CSV: Format = Format::Csv { delimiter: b',' };

/// What most of the tests import into.
pub const ORDERS: &str = "CREATE TABLE public.orders (reference text PRIMARY KEY, amount numeric(12, 2) CHECK (amount >= 0), note varchar(10))";

pub struct Desk {
    pub db: TestDb,
    pub once: Once,
    pub client: Client,
    pub dir: TempDir,
}

impl Desk {
    pub async fn new(sql: &str) -> Self {
        let db = TestDb::new().await;
        let client = db.client().await;
        client.batch_execute(sql).await.unwrap();
        Self { once: db.once().await, client, db, dir: TempDir::new().unwrap() }
    }

    /// With the usual options: into public.orders, by its reference, in small batches.
    pub fn options() -> ImportOptions {
        let mut options = ImportOptions::new("public.orders", vec!["reference".into()], CSV);
        options.batch_rows = 10;
        options
    }

    pub fn file(content: impl AsRef<[u8]>) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(content.as_ref()).unwrap();
        file
    }

    pub async fn import(&self, content: impl AsRef<[u8]>, options: &ImportOptions) -> Result<Report, Error> {
        self.once.import(Self::file(content), options, unstopped(), |_| {}).await
    }

    /// As usual, but for what is changed.
    pub async fn with(&self, content: impl AsRef<[u8]>, change: impl FnOnce(&mut ImportOptions)) -> Report {
        let mut options = Self::options();
        change(&mut options);
        self.import(content, &options).await.unwrap()
    }

    /// Stops it when so many rows are settled.
    pub async fn stopped_at(&self, content: impl AsRef<[u8]>, options: &ImportOptions, rows: u64) -> Report {
        let (stopping, stop) = watch::channel(false);
        let progress = |progress: Progress| {
            if progress.rows >= rows {
                stopping.send_replace(true);
            }
        };
        self.once.import(Self::file(content), options, stop, progress).await.unwrap()
    }

    /// The first column of the first row, as text.
    pub async fn text(&self, sql: &str) -> String {
        let sql = format!("SELECT coalesce(({sql})::text, '-')");
        self.client.query_one(&sql, &[]).await.unwrap().get(0)
    }

    /// The table, a row a line.
    pub async fn orders(&self) -> String {
        self.text("SELECT string_agg(concat_ws(' ', reference, amount, coalesce(note, 'NULL')), '; ' ORDER BY reference) FROM orders").await
    }

    /// What became of a row.
    pub async fn result(&self, job: Option<i64>, row: i64) -> String {
        let sql = format!("SELECT concat_ws(' ', outcome, reason) FROM once.import_result({}, {row})", job.unwrap());
        self.text(&sql).await
    }

    /// What became of every row of every import: equal texts mean equal imports.
    pub async fn results(&self) -> String {
        self.text(
            "SELECT string_agg(concat_ws(' ', r.n, o.outcome, o.reason, o.message, o.line), E'\\n' ORDER BY j.id, r.n)
             FROM once.imports j, generate_series(1, j.rows) r (n), once.import_result(j.id, r.n) o",
        )
        .await
    }
}

/// Nobody says stop.
pub fn unstopped() -> watch::Receiver<bool> {
    let (sender, receiver) = watch::channel(false);
    // For as long as the test lives.
    std::mem::forget(sender);
    receiver
}

pub fn counts(report: &Report) -> (u64, u64, u64) {
    (report.applied, report.skipped, report.failed)
}

/// A CSV of so many orders.
pub fn orders(rows: std::ops::Range<u32>) -> String {
    let mut csv = "reference,amount,note\n".to_owned();
    for row in rows {
        csv.push_str(&format!("r{row:05},{row}.50,n{row}\n"));
    }
    csv
}
