//! The error file: a JSON object a line for each failure, with the row as it stands in the file. It says what the table
//! says: written anew from there when an import begins or goes on, then added to after each commit.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};

use tokio_postgres::types::{ToSql, Type};

use super::RowFailure;
use super::job::Job;
use crate::sql::Call;
use crate::{Error, Once};

const PAGE: i32 = 500;

#[derive(Debug)]
pub(super) struct ErrorFile {
    path: Option<PathBuf>,
    file: Option<BufWriter<File>>,
}

impl ErrorFile {
    /// Writes what failed so far. A file of that name is replaced, or removed where nothing failed yet.
    pub(super) async fn open(once: &Once, path: Option<&Path>, job: &Job) -> Result<Self, Error> {
        let mut this = Self { path: path.map(Path::to_owned), file: None };
        let Some(path) = path else { return Ok(this) };
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(told(path, &error)),
            _ => {}
        }
        if job.settled.failed == 0 {
            return Ok(this);
        }
        let mut after = 0_i64;
        loop {
            let parameters: [(&(dyn ToSql + Sync), Type); 4] =
                [(&job.id, Type::INT8), (&job.claim, Type::UUID), (&after, Type::INT8), (&PAGE, Type::INT4)];
            let rows = once.connection().await?.rows(Call::ImportFailures, &parameters).await?;
            let Some(last) = rows.last() else { break };
            after = last.try_get(0)?;
            for row in &rows {
                let (number, line): (i64, i64) = (row.try_get(0)?, row.try_get(1)?);
                this.add(&[RowFailure {
                    row: u64::try_from(number).unwrap_or_default(),
                    line: u64::try_from(line).unwrap_or_default(),
                    code: row.try_get(2)?,
                    message: row.try_get(3)?,
                    input: row.try_get(4)?,
                }])?;
            }
        }
        Ok(this)
    }

    /// Adds failures that have committed.
    pub(super) fn add(&mut self, failures: &[RowFailure]) -> Result<(), Error> {
        let Some(path) = self.path.as_deref().filter(|_| !failures.is_empty()) else { return Ok(()) };
        let open = &mut self.file;
        let mut write = || -> std::io::Result<()> {
            let file = match open {
                Some(file) => file,
                None => open.insert(BufWriter::new(File::create(path)?)),
            };
            for failure in failures {
                let RowFailure { row, line, code, message, input } = failure;
                let mut object = serde_json::json!({"row": row, "line": line, "code": code, "message": message});
                match std::str::from_utf8(input) {
                    Ok(text) => object["input"] = text.into(),
                    // No text: as it is, byte by byte.
                    Err(_) => object["input_bytes"] = input.clone().into(),
                }
                writeln!(file, "{object}")?;
            }
            file.flush()
        };
        write().map_err(|error| told(path, &error))
    }
}

fn told(path: &Path, error: &std::io::Error) -> Error {
    Error::Invalid(format!("the error file {} cannot be written: {error}", path.display()))
}
