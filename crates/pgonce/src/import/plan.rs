//! What is written where: the target as the catalog knows it, and the statements for it. They are the caller's, with the
//! caller's rights; what pgonce keeps is written by the functions in `sql/functions/import/`.

use tokio_postgres::Client;
use tokio_postgres::types::Type;

use super::{ImportOptions, OnConflict};
use crate::Error;

/// The staging table: of the transaction, and of nobody else.
pub(super) const STAGE: &str = "pg_temp.once_stage";

/// The target.
#[derive(Debug)]
pub(super) struct Target {
    pub(super) name: String,
    columns: Vec<Column>,
    /// Whether COPY can write into it: not where rows are chosen by policies, and not into a view.
    is_plain: bool,
    /// What unqualified names mean to the caller.
    pub(super) search_path: String,
}

#[derive(Debug)]
struct Column {
    name: String,
    kind: String,
}

const TARGET: &str = "
SELECT c.oid, format('%I.%I', n.nspname, c.relname),
       c.relkind IN ('r', 'p') AND NOT row_security_active(c.oid) AND NOT c.relhasrules, current_setting('search_path'), c.relkind::text
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = to_regclass($1)";
const COLUMNS: &str = "
SELECT a.attname::text, format_type(a.atttypid, -1) FROM pg_catalog.pg_attribute a
WHERE a.attrelid = $1 AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum";
/// An index that ON CONFLICT can use for exactly these columns.
const UNIQUE: &str = "
SELECT count(*) FROM pg_catalog.pg_index i
WHERE i.indrelid = $1 AND i.indisunique AND i.indisvalid AND i.indimmediate AND i.indpred IS NULL AND i.indexprs IS NULL
  AND (SELECT array_agg(a.attname::text ORDER BY a.attname::text) FROM pg_catalog.pg_attribute a
       WHERE a.attrelid = i.indrelid AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1]))
      = (SELECT array_agg(k ORDER BY k) FROM unnest($2::text[]) k)";

impl Target {
    /// Looks at the table, its columns and its unique key.
    pub(super) async fn examine(client: &Client, options: &ImportOptions) -> Result<Self, Error> {
        let into = &options.into;
        let found = match client.query_typed_opt(TARGET, &[(into, Type::TEXT)]).await {
            Ok(found) => found,
            // A name that is none.
            Err(error) if error.code().is_some_and(|code| matches!(code.code(), "42602" | "42601" | "0A000")) => None,
            Err(error) => return Err(error.into()),
        };
        let Some(row) = found else {
            return Err(Error::Invalid(format!(
                "there is no table {into}, or it cannot be seen: name it as schema.table"
            )));
        };
        let oid: u32 = row.try_get(0)?;
        let kind: String = row.try_get(4)?;
        if !matches!(kind.as_str(), "r" | "p") {
            return Err(Error::Invalid(format!("{into} is not a table")));
        }
        let columns = client.query_typed(COLUMNS, &[(&oid, Type::OID)]).await?;
        let columns = columns.iter().map(|row| Ok(Column { name: row.try_get(0)?, kind: row.try_get(1)? }));
        let target = Self {
            name: row.try_get(1)?,
            columns: columns.collect::<Result<_, tokio_postgres::Error>>()?,
            is_plain: row.try_get(2)?,
            search_path: row.try_get(3)?,
        };
        for key in &options.natural_key {
            target.column(key)?;
        }
        let unique: i64 = client
            .query_typed_one(UNIQUE, &[(&oid, Type::OID), (&options.natural_key, Type::TEXT_ARRAY)])
            .await?
            .try_get(0)?;
        if unique == 0 {
            let keys = list(&options.natural_key);
            return Err(Error::Invalid(format!(
                "{} has no unique index on exactly ({keys}), which is what tells a row that is there from a new one. \
                 Make one, not partial and not deferrable: CREATE UNIQUE INDEX CONCURRENTLY ON {} ({keys});",
                target.name, target.name
            )));
        }
        Ok(target)
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.columns.iter().any(|column| column.name == name)
    }

    fn column(&self, name: &str) -> Result<&Column, Error> {
        self.columns
            .iter()
            .find(|column| column.name == name)
            .ok_or_else(|| Error::Invalid(format!("{} has no column {name}", self.name)))
    }
}

/// The statements of an import.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) target: Target,
    /// Makes the staging table.
    pub(super) stage: String,
    pub(super) copy_stage: String,
    /// Straight into the target, where that can be done.
    pub(super) copy_direct: Option<String>,
    pub(super) apply: String,
    pub(super) distinct: Option<String>,
    pub(super) repeated: String,
    pub(super) known: String,
    /// What a key that is there already means.
    pub(super) existing: &'static str,
}

impl Plan {
    /// `sources` are the file's fields; `pairs` are target columns with the fields that they take, where no
    /// transformation says so.
    pub(super) async fn make(
        client: &Client,
        target: Target,
        options: &ImportOptions,
        sources: &[String],
        pairs: &[(String, String)],
    ) -> Result<Self, Error> {
        let staged: Vec<String> = sources.iter().map(|name| format!("{} text", ident(name))).collect();
        let stage = format!("CREATE TEMP TABLE once_stage (once_n int NOT NULL, {}) ON COMMIT DROP", staged.join(", "));
        let (columns, inner) = match &options.transform {
            None => {
                let taken: Vec<_> =
                    pairs.iter().map(|(to, from)| format!("s.{} AS {}", ident(from), ident(to))).collect();
                (pairs.iter().map(|(to, _)| to.clone()).collect(), taken.join(", "))
            }
            Some(transform) => (transformed(client, &stage, transform, options.on_conflict).await?, transform.clone()),
        };
        for key in &options.natural_key {
            if !columns.contains(key) {
                return Err(Error::Invalid(format!(
                    "nothing of the file goes into {key}, which the natural key needs"
                )));
            }
        }
        let parts = Parts::new(&target, options, &columns, &inner)?;
        let is_update = options.on_conflict == OnConflict::Update && columns.len() > options.natural_key.len();
        let fields = list(sources);
        let plan = Self {
            copy_stage: format!("COPY {STAGE} (once_n, {fields}) FROM STDIN"),
            copy_direct: (target.is_plain && options.transform.is_none())
                .then(|| format!("COPY {} ({}) FROM STDIN", target.name, list(&columns))),
            apply: parts.apply(false),
            distinct: is_update.then(|| parts.apply(true)),
            repeated: parts.repeated(),
            known: parts.known(),
            existing: match options.on_conflict {
                OnConflict::Skip => "exists",
                OnConflict::Update if is_update => "unchanged",
                OnConflict::Update => "exists",
                OnConflict::Fail => "failed",
            },
            stage,
            target,
        };
        plan.try_out(client).await?;
        Ok(plan)
    }

    /// Has the server plan the statements: what is wrong with them, or not allowed, is said before anything is done.
    async fn try_out(&self, client: &Client) -> Result<(), Error> {
        let explained = |sql: &str| format!("EXPLAIN {}", sql.replace("$1", "0").replace("$2", "0"));
        let known = self.known.replace("$1", "'{}'::int[]");
        let all = format!(
            "BEGIN; {}; {}; {}; {}; EXPLAIN {known}",
            self.stage,
            explained(&self.apply),
            explained(self.distinct.as_deref().unwrap_or("SELECT 1")),
            explained(&self.repeated)
        );
        let tried = client.batch_execute(&all).await;
        client.batch_execute("ROLLBACK").await?;
        tried.map_err(|error| Error::Invalid(format!("the import cannot be done: {}", crate::error::describe(&error))))
    }
}

/// The columns that a transformation makes. With `update` it must make the same of the same row every time.
async fn transformed(
    client: &Client,
    stage: &str,
    transform: &str,
    on_conflict: OnConflict,
) -> Result<Vec<String>, Error> {
    let view = format!("BEGIN; {stage}; CREATE TEMP VIEW once_transform AS SELECT {transform}\n FROM {STAGE} s");
    let look = async {
        client.batch_execute(&view).await?;
        let sql = "SELECT a.attname::text FROM pg_catalog.pg_attribute a
            WHERE a.attrelid = 'pg_temp.once_transform'::regclass AND a.attnum > 0 ORDER BY a.attnum";
        let columns = client.query_typed(sql, &[]).await?;
        // The rule holds the parsed expressions, with the functions by their number.
        let sql = "SELECT coalesce(string_agg(DISTINCT p.proname::text, ', '), CASE WHEN bool_or(r.ev_action::text ~ 'SQLVALUEFUNCTION') THEN 'the current time or user' END)
            FROM pg_catalog.pg_rewrite r
            LEFT JOIN LATERAL regexp_matches(r.ev_action::text, ':(?:funcid|opfuncid) (\\d+)', 'g') f ON true
            LEFT JOIN pg_catalog.pg_proc p ON p.oid = f[1]::oid AND (p.provolatile = 'v'
                OR p.proname IN ('now', 'transaction_timestamp', 'statement_timestamp'))
            WHERE r.ev_class = 'pg_temp.once_transform'::regclass";
        let moving: Option<String> = client.query_typed_one(sql, &[]).await?.try_get(0)?;
        let columns = columns.iter().map(|row| row.try_get(0)).collect::<Result<Vec<String>, _>>()?;
        Ok::<_, tokio_postgres::Error>((columns, moving))
    };
    let looked = look.await;
    client.batch_execute("ROLLBACK").await?;
    let (columns, moving) = looked.map_err(|error| {
        Error::Invalid(format!("the transformation cannot be used: {}", crate::error::describe(&error)))
    })?;
    match moving {
        Some(functions) if on_conflict == OnConflict::Update => Err(Error::Invalid(format!(
            "with --on-conflict update the transformation must make the same of a row every time; it uses {functions}"
        ))),
        _ => Ok(columns),
    }
}

/// The pieces that the statements share.
struct Parts {
    table: String,
    /// Rows of the stage, cast to the target's types: to be completed with which of them.
    source: String,
    columns: String,
    keys: Vec<String>,
    conflict: String,
}

impl Parts {
    fn new(target: &Target, options: &ImportOptions, columns: &[String], inner: &str) -> Result<Self, Error> {
        let mut cast = Vec::new();
        for name in columns {
            // Without the type's length: an explicit cast to varchar(3) cuts, an assignment refuses.
            let Column { name, kind } = target.column(name)?;
            cast.push(format!("x.{0}::{kind} AS {0}", ident(name)));
        }
        let keys: Vec<String> = options.natural_key.iter().map(|key| ident(key)).collect();
        let values: Vec<String> =
            columns.iter().filter(|name| !options.natural_key.contains(name)).map(|name| ident(name)).collect();
        let conflict = if options.on_conflict == OnConflict::Update && !values.is_empty() {
            let prefixed = |prefix: &str| values.iter().map(|v| format!("{prefix}.{v}")).collect::<Vec<_>>().join(", ");
            let set: Vec<_> = values.iter().map(|v| format!("{v} = excluded.{v}")).collect();
            // By their images: also types that have no equality, and a row that says nothing new is not written.
            format!(
                "DO UPDATE SET {} WHERE pg_catalog.record_image_ne(ROW({}), ROW({}))",
                set.join(", "),
                prefixed("t"),
                prefixed("excluded")
            )
        } else {
            "DO NOTHING".to_owned()
        };
        Ok(Self {
            table: target.name.clone(),
            source: format!(
                "SELECT x.once_n, {} FROM (SELECT s.once_n, {inner}\n FROM {STAGE} s WHERE s.once_n",
                cast.join(", ")
            ),
            columns: list(columns),
            keys,
            conflict,
        })
    }

    fn each_key(&self, each: impl Fn(&str) -> String, between: &str) -> String {
        self.keys.iter().map(|key| each(key)).collect::<Vec<_>>().join(between)
    }

    fn apply(&self, distinct: bool) -> String {
        let Self { table, source, columns, conflict, .. } = self;
        let keys = self.keys.join(", ");
        let keyed = self.each_key(|key| format!("src.{key} IS NOT NULL"), " AND ");
        let same = self.each_key(|key| format!("o.{key} = src.{key}"), " AND ");
        let returned = self.each_key(|key| format!("t.{key}"), ", ");
        let first = &self.keys[0];
        let chosen = if distinct {
            format!("SELECT DISTINCT ON ({keys}) src.* FROM src WHERE {keyed} ORDER BY {keys}, once_n DESC")
        } else {
            format!("SELECT src.* FROM src WHERE {keyed}")
        };
        format!(
            "WITH src AS MATERIALIZED ({source} BETWEEN $1 AND $2) x), chosen AS ({chosen}),
             out AS (INSERT INTO {table} AS t ({columns}) SELECT {columns} FROM chosen ORDER BY once_n
                     ON CONFLICT ({keys}) {conflict} RETURNING {returned})
             SELECT (SELECT count(*) FROM chosen) AS eligible, (SELECT count(*) FROM out) AS written,
                 count(o.{first}) AS matched,
                 array_agg(src.once_n) FILTER (WHERE {keyed} AND o.{first} IS NULL) AS absent,
                 array_agg(src.once_n) FILTER (WHERE NOT ({keyed})) AS keyless
             FROM src LEFT JOIN out o ON {same}"
        )
    }

    fn repeated(&self) -> String {
        let Self { source, .. } = self;
        let keys = self.keys.join(", ");
        format!(
            "SELECT array_agg(r.once_n) FROM (
                 SELECT src.once_n, row_number() OVER (PARTITION BY {keys} ORDER BY once_n) AS place
                 FROM ({source} BETWEEN $1 AND $2) x) src) r WHERE r.place > 1"
        )
    }

    fn known(&self) -> String {
        let Self { table, source, .. } = self;
        let same = self.each_key(|key| format!("t.{key} = src.{key}"), " AND ");
        format!(
            "SELECT array_agg(src.once_n) FROM ({source} = ANY ($1)) x) src
             WHERE EXISTS (SELECT FROM {table} t WHERE {same})"
        )
    }
}

/// A name as SQL takes it, whatever it is.
pub(super) fn ident(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

fn list(names: &[String]) -> String {
    names.iter().map(|name| ident(name)).collect::<Vec<_>>().join(", ")
}
