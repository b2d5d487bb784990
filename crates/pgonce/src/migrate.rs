//! The schema `once`, and `once_ledger` where it was asked for: applied, checked and described. All of `sql/` is in
//! the binary.

use include_dir::{Dir, include_dir};
use serde::Serialize;
use sha2::{Digest, Sha256};
use tokio_postgres::{Client, GenericClient, Transaction};

use crate::Error;
use crate::settings::Settings;

static SQL: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/../../sql");

/// A schema and the folder of `sql/` that it is made from.
#[derive(Debug, Clone, Copy)]
struct Part {
    schema: &'static str,
    folder: &'static str,
    /// Run first: who owns it, and the table of its migrations.
    begin: &'static str,
}

const ONCE: Part = Part { schema: "once", folder: "", begin: "roles.sql" };
const LEDGER: Part = Part { schema: "once_ledger", folder: "ledger/", begin: "ledger/schema.sql" };

/// One numbered step of the schema.
#[derive(Debug, Clone, Serialize)]
pub struct Migration {
    /// Its number.
    pub version: i32,
    /// Its name.
    pub name: String,
    /// Whether binaries that do not know it must not work with the schema.
    pub breaking: bool,
    /// The hash of its text.
    pub checksum: String,
    #[serde(skip)]
    text: &'static str,
}

/// A migration and whether the database has it.
#[derive(Debug, Clone, Serialize)]
pub struct MigrationStatus {
    /// Its schema: `once`, or `once_ledger` where that is installed.
    pub schema: &'static str,
    /// Its number.
    pub version: i32,
    /// Its name.
    pub name: String,
    /// When it was applied, if it was.
    pub applied_at: Option<String>,
    /// `applied`, `pending`, `changed` (its text is not what was applied) or `newer` (this binary does not know it).
    pub state: &'static str,
}

/// What `apply` did, or would do.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Numbers and names of the migrations applied.
    pub applied: Vec<String>,
    /// How many functions and views were put in place.
    pub functions: usize,
    /// Whether it was a dry run: everything ran and was rolled back.
    pub dry_run: bool,
}

/// The migrations of the schema `once` in this binary, oldest first. A file that begins with `-- breaking` is breaking.
#[must_use]
pub fn migrations() -> Vec<Migration> {
    migrations_of(ONCE)
}

fn migrations_of(part: Part) -> Vec<Migration> {
    let mut all: Vec<Migration> = files(part, "migrations")
        .into_iter()
        .filter_map(|(path, text)| {
            let stem = path.rsplit('/').next()?.strip_suffix(".sql")?;
            let (number, name) = stem.split_once('_')?;
            Some(Migration {
                version: number.parse().ok()?,
                name: name.to_owned(),
                breaking: text.starts_with("-- breaking"),
                checksum: hex(text),
                text,
            })
        })
        .collect();
    all.sort_by_key(|migration| migration.version);
    all
}

/// The functions of the schema `once` in this binary: name, and the body that `pg_proc.prosrc` must equal.
#[must_use]
pub fn function_bodies() -> Vec<(String, String)> {
    bodies_of(ONCE)
}

/// The same of the schema `once_ledger`.
#[must_use]
pub fn ledger_function_bodies() -> Vec<(String, String)> {
    bodies_of(LEDGER)
}

fn bodies_of(part: Part) -> Vec<(String, String)> {
    files(part, "functions")
        .into_iter()
        .filter_map(|(path, text)| {
            let name = path.rsplit('/').next()?.strip_suffix(".sql")?.to_owned();
            let body = match text.split_once("$$") {
                Some((_, rest)) => rest.rsplit_once("$$")?.0,
                None => text.split_once("AS '")?.1.rsplit_once('\'')?.0,
            };
            Some((name, body.to_owned()))
        })
        .collect()
}

fn files(part: Part, folder: &str) -> Vec<(String, &'static str)> {
    fn walk(dir: &'static Dir<'static>, found: &mut Vec<(String, &'static str)>) {
        for file in dir.files() {
            if let (Some(path), Some(text)) = (file.path().to_str(), file.contents_utf8()) {
                found.push((path.to_owned(), text));
            }
        }
        for inner in dir.dirs() {
            walk(inner, found);
        }
    }
    let mut found = Vec::new();
    if let Some(dir) = SQL.get_dir(format!("{}{folder}", part.folder)) {
        walk(dir, &mut found);
    }
    found.sort();
    found
}

fn file(path: &str) -> &'static str {
    SQL.get_file(path).and_then(include_dir::File::contents_utf8).unwrap_or_default()
}

fn hex(text: &str) -> String {
    let digest: [u8; 32] = Sha256::digest(text.as_bytes()).into();
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A single connection with the settings of `url`, outside any pool: for migrations and operators.
///
/// # Errors
/// Where the URL cannot be read or the database cannot be reached.
pub async fn connect(url: &str) -> Result<Client, Error> {
    let (config, tls, _) = Settings::from_url(url).resolve()?;
    let (client, connection) = config.connect(tls).await?;
    tokio::spawn(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%error, "connection ended");
        }
    });
    Ok(client)
}

/// Brings the schema to this binary's version, in one transaction, under a lock, so that any number may
/// start at once. Migrations that are applied stay; functions, views and grants are put in place anew. The ledger comes
/// along where it is installed.
///
/// # Errors
/// `Error::Schema` where the database is newer than this binary, or an applied migration was changed.
pub async fn apply(client: &mut Client, dry_run: bool) -> Result<Report, Error> {
    bring_all(client, dry_run, false).await
}

/// The same, and installs the ledger.
///
/// # Errors
/// As [`apply`].
pub async fn install_ledger(client: &mut Client, dry_run: bool) -> Result<Report, Error> {
    bring_all(client, dry_run, true).await
}

async fn bring_all(client: &mut Client, dry_run: bool, with_ledger: bool) -> Result<Report, Error> {
    let transaction = client.transaction().await?;
    // Also against another pgonce's DDL: held to the end of this transaction.
    transaction.batch_execute("SET LOCAL lock_timeout = '60s'; SELECT pg_advisory_xact_lock(7306, 1)").await?;
    let mut report = Report { applied: Vec::new(), functions: 0, dry_run };
    bring(&transaction, ONCE, &mut report).await?;
    if with_ledger || is_installed(&transaction, LEDGER).await? {
        bring(&transaction, LEDGER, &mut report).await?;
    }
    if dry_run {
        transaction.rollback().await?;
    } else {
        transaction.commit().await?;
    }
    Ok(report)
}

async fn is_installed(client: &impl GenericClient, part: Part) -> Result<bool, Error> {
    // By the catalog: to_regclass would refuse a role that may not use the schema.
    let sql =
        "SELECT EXISTS (SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
        WHERE n.nspname = $1 AND c.relname = 'migration')";
    Ok(client.query_one(sql, &[&part.schema]).await?.try_get(0)?)
}

async fn bring(transaction: &Transaction<'_>, part: Part, report: &mut Report) -> Result<(), Error> {
    let schema = part.schema;
    transaction.batch_execute(file(part.begin)).await?;
    let known = migrations_of(part);
    let newest = known.last().map_or(0, |migration| migration.version);
    let sql = format!("SELECT version, checksum FROM {schema}.migration ORDER BY version");
    let rows = transaction.query(&sql, &[]).await?;
    for row in &rows {
        let (version, checksum): (i32, String) = (row.try_get(0)?, row.try_get(1)?);
        if version > newest {
            return Err(Error::Schema(format!(
                "the schema {schema} is at version {version}, newer than this pgonce knows ({newest}): its functions would be replaced by older ones. Use the newer binary."
            )));
        }
        if known.iter().any(|migration| migration.version == version && migration.checksum != checksum) {
            return Err(Error::Schema(format!(
                "migration {version} of {schema} was applied with another text than this binary has: this is not a schema it can go on from"
            )));
        }
    }
    for migration in &known {
        if rows.iter().any(|row| row.get::<_, i32>(0) == migration.version) {
            continue;
        }
        transaction.batch_execute(migration.text).await?;
        let sql = format!("INSERT INTO {schema}.migration (version, name, checksum, breaking) VALUES ($1, $2, $3, $4)");
        let Migration { version, name, checksum, breaking, .. } = migration;
        transaction.execute(&sql, &[version, name, checksum, breaking]).await?;
        report.applied.push(format!("{}{version:04}_{name}", part.folder));
    }
    // Functions call each other: their bodies are checked when they run, by the tests.
    transaction.batch_execute("SET LOCAL check_function_bodies = off").await?;
    for (_, text) in files(part, "functions").into_iter().chain(files(part, "views")) {
        transaction.batch_execute(text).await?;
        report.functions += 1;
    }
    transaction.batch_execute(file(&format!("{}grants.sql", part.folder))).await?;
    Ok(())
}

/// Which migrations the database has.
///
/// # Errors
/// Where the database cannot be asked.
pub async fn status(client: &Client) -> Result<Vec<MigrationStatus>, Error> {
    let mut all = status_of(client, ONCE).await?;
    if is_installed(client, LEDGER).await? {
        all.extend(status_of(client, LEDGER).await?);
    }
    Ok(all)
}

async fn status_of(client: &Client, part: Part) -> Result<Vec<MigrationStatus>, Error> {
    let (schema, known) = (part.schema, migrations_of(part));
    let rows = if is_installed(client, part).await? {
        let sql = format!("SELECT version, name, checksum, applied_at::text FROM {schema}.migrations ORDER BY version");
        client.query(&sql, &[]).await?
    } else {
        Vec::new()
    };
    let mut all = Vec::new();
    for row in rows {
        let (version, name, checksum, applied_at): (i32, String, String, String) =
            (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?, row.try_get(3)?);
        let state = match known.iter().find(|migration| migration.version == version) {
            None => "newer",
            Some(migration) if migration.checksum != checksum => "changed",
            Some(_) => "applied",
        };
        all.push(MigrationStatus { schema, version, name, applied_at: Some(applied_at), state });
    }
    for migration in known {
        if !all.iter().any(|status| status.version == migration.version) {
            let Migration { version, name, .. } = migration;
            all.push(MigrationStatus { schema, version, name, applied_at: None, state: "pending" });
        }
    }
    Ok(all)
}

/// Whether this binary may work with the database's schema.
///
/// # Errors
/// `Error::Schema` where it is missing, older than needed, or newer and breaking.
pub(crate) async fn check(client: &Client) -> Result<(), Error> {
    let newest = migrations().last().map_or(0, |migration| migration.version);
    let rows = match client.query_typed("SELECT once.schema_version()", &[]).await {
        Ok(rows) => rows,
        Err(error) if matches!(error.code().map(tokio_postgres::error::SqlState::code), Some("3F000" | "42883")) => {
            return Err(Error::Schema("the schema once is not there: run pgonce migrate".into()));
        }
        Err(error) => return Err(error.into()),
    };
    let state: serde_json::Value = rows.first().map_or(Ok(serde_json::Value::Null), |row| row.try_get(0))?;
    let version = state["version"].as_i64().unwrap_or(0);
    let breaking = state["breaking"].as_i64().unwrap_or(0);
    if version < i64::from(newest) {
        return Err(Error::Schema(format!(
            "the schema once is at version {version}, this pgonce needs {newest}: run pgonce migrate"
        )));
    }
    if breaking > i64::from(newest) {
        return Err(Error::Schema(format!(
            "the schema once has the breaking change {breaking}, which this pgonce ({newest}) does not know: use a newer one"
        )));
    }
    Ok(())
}
