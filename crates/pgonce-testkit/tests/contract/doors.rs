//! The three doors to the protocol, and what they have in common.

use std::collections::HashMap;
use std::time::Duration;

use pgonce::{Answer, Claim, ClaimOptions, Fingerprint, IntentName, Mode, Owned, OwnedKind};
use pgonce_testkit::TestDb;
use serde_json::Value;
use sqlx::{PgPool, Postgres, Transaction};
use tokio_postgres::{Client, SimpleQueryMessage, SimpleQueryRow};
use uuid::Uuid;

/// What a claim was told, as far as every door can tell it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Seen {
    pub kind: String,
    pub claim_id: Option<Uuid>,
    /// Where the intent is the caller's.
    pub attempt: Option<u32>,
    /// Of a replay or a final failure.
    pub answer: Option<Answer>,
    /// Of a final failure: code and message.
    pub failure: Option<(String, Option<String>)>,
}

/// A refusal, by its SQLSTATE. `lost` where the door does not tell P4010, P4011 and P4012 apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused(pub String);

pub type Told<T> = Result<T, Refused>;

/// One way to call the protocol, over one connection.
pub trait Door: Sized {
    /// Whether it tells which of the three fence codes was raised.
    const EXACT: bool;
    async fn open(db: &TestDb) -> Self;
    async fn begin(&mut self);
    async fn commit(&mut self) -> Told<()>;
    async fn rollback(&mut self);
    /// A statement of the caller's own, in the open transaction.
    async fn execute(&mut self, sql: &'static str) -> Told<()>;
    async fn claim(&mut self, name: &IntentName, options: &ClaimOptions) -> Told<Seen>;
    async fn succeed(&mut self, name: &IntentName, claim: Uuid, answer: &Answer) -> Told<()>;
    async fn fail(&mut self, name: &IntentName, claim: Uuid, retryable: bool, code: &str, message: &str) -> Told<()>;
    async fn renew(&mut self, name: &IntentName, claim: Uuid, lease: Duration) -> Told<()>;
    async fn release(&mut self, name: &IntentName, claim: Uuid) -> Told<()>;
}

impl Seen {
    /// What the crate's enum says.
    fn of(name: &IntentName, claim: Claim, kept: &mut Kept) -> Self {
        let kind = |kind: &str| Self { kind: kind.into(), ..Self::default() };
        match claim {
            Claim::Owned(owned) => {
                let why = match owned.kind {
                    OwnedKind::New => "new_claim",
                    OwnedKind::AfterFailure => "retryable_failure",
                    OwnedKind::Takeover => "processing_stale",
                };
                let seen = Self { claim_id: Some(owned.claim_id), attempt: Some(owned.attempt), ..kind(why) };
                kept.keep(name, owned);
                seen
            }
            Claim::Replay(answer) => Self { answer: Some(answer), ..kind("replay_success") },
            Claim::InProgress { retry_after } => {
                assert!(retry_after > Duration::ZERO, "a caller is told when to come again");
                kind("processing_active")
            }
            Claim::FailedBefore { code, message, answer } => {
                Self { answer: Some(answer), failure: Some((code, message)), ..kind("final_failure") }
            }
            Claim::Uncertain => kind("uncertain"),
            Claim::ResultExpired => kind("result_expired"),
            other => panic!("a kind that the suite does not know: {other:?}"),
        }
    }
}

/// An `Owned` that the crate would not give: for a claim id of somebody else, or one that is spent. The
/// crate has no way to make one, so it is claimed in a database where the name is free, and changed.
async fn forge(name: &IntentName, claim: Uuid) -> Owned {
    static ELSEWHERE: tokio::sync::OnceCell<TestDb> = tokio::sync::OnceCell::const_new();
    let client = ELSEWHERE.get_or_init(TestDb::new).await.client().await;
    client.batch_execute("BEGIN").await.unwrap();
    let Claim::Owned(mut owned) = pgonce::claim(&client, name.clone(), &ClaimOptions::default()).await.unwrap() else {
        panic!("the name is free there");
    };
    client.batch_execute("ROLLBACK").await.unwrap();
    owned.claim_id = claim;
    owned
}

/// What a door was given, by the name it was given for.
#[derive(Default)]
struct Kept(HashMap<(String, String, String, Uuid), Owned>);

impl Kept {
    fn slot(name: &IntentName, claim: Uuid) -> (String, String, String, Uuid) {
        (name.tenant.clone(), name.scope.clone(), name.key.clone(), claim)
    }

    fn keep(&mut self, name: &IntentName, owned: Owned) {
        self.0.insert(Self::slot(name, owned.claim_id), owned);
    }

    async fn take(&mut self, name: &IntentName, claim: Uuid) -> Owned {
        match self.0.remove(&Self::slot(name, claim)) {
            Some(owned) => owned,
            None => forge(name, claim).await,
        }
    }
}

/// Plain SQL text, as psql sends it.
pub struct Text(Client);

fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

fn nullable(text: Option<String>, kind: &str) -> String {
    text.map_or_else(|| "NULL".into(), |text| format!("{}::{kind}", quoted(&text)))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold("\\x".to_owned(), |text, byte| format!("{text}{byte:02x}"))
}

fn unhex(text: &str) -> Vec<u8> {
    let digits = text.strip_prefix("\\x").unwrap();
    (0..digits.len()).step_by(2).map(|at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap()).collect()
}

fn micros(duration: Duration) -> String {
    format!("{} milliseconds", duration.as_millis())
}

impl Text {
    async fn run(&self, sql: &str) -> Told<Vec<SimpleQueryRow>> {
        match self.0.simple_query(sql).await {
            Ok(messages) => Ok(messages
                .into_iter()
                .filter_map(|message| match message {
                    SimpleQueryMessage::Row(row) => Some(row),
                    _ => None,
                })
                .collect()),
            Err(error) => Err(Refused(error.code().expect("a server error").code().to_owned())),
        }
    }

    /// The call `once.function(p_scope => …, p_key => …, …, p_tenant => …)`.
    async fn call(&self, function: &str, name: &IntentName, more: &[(&str, String)]) -> Told<Vec<SimpleQueryRow>> {
        let mut arguments =
            vec![format!("p_scope => {}", quoted(&name.scope)), format!("p_key => {}", quoted(&name.key))];
        arguments.extend(more.iter().map(|(parameter, value)| format!("{parameter} => {value}")));
        arguments.push(format!("p_tenant => {}", quoted(&name.tenant)));
        self.run(&format!("SELECT * FROM once.{function}({})", arguments.join(", "))).await
    }
}

impl Door for Text {
    const EXACT: bool = true;

    async fn open(db: &TestDb) -> Self {
        Self(db.client().await)
    }

    async fn begin(&mut self) {
        self.run("BEGIN").await.unwrap();
    }

    async fn commit(&mut self) -> Told<()> {
        self.run("SELECT 1; COMMIT").await.map(|_| ())
    }

    async fn rollback(&mut self) {
        self.run("ROLLBACK").await.unwrap();
    }

    async fn execute(&mut self, sql: &'static str) -> Told<()> {
        self.run(sql).await.map(|_| ())
    }

    async fn claim(&mut self, name: &IntentName, options: &ClaimOptions) -> Told<Seen> {
        let mut more = vec![("p_fingerprint", quoted(&hex(&name.fingerprint.0)))];
        if let Some(mode) = options.mode {
            more.push(("p_mode", quoted(if mode == Mode::Atomic { "atomic" } else { "leased" })));
        }
        if let Some(by) = &options.claimed_by {
            more.push(("p_claimed_by", quoted(by)));
        }
        more.extend(options.lease.map(|lease| ("p_lease", quoted(&micros(lease)))));
        more.extend(options.wait.map(|wait| ("p_wait", quoted(&micros(wait)))));
        let rows = self.call("claim", name, &more).await?;
        let [row] = rows.as_slice() else { panic!("claim answers one row") };
        let text = |column: &str| row.get(column).map(str::to_owned);
        let claim_id = text("claim_id").map(|id| id.parse().unwrap());
        let kind = text("kind").unwrap();
        let told = matches!(kind.as_str(), "replay_success" | "final_failure");
        assert_eq!(kind == "processing_active", row.get("retry_after_ms").is_some(), "{kind}: when to come again");
        Ok(Seen {
            attempt: claim_id.and(row.get("attempt_count")).map(|count| count.parse().unwrap()),
            answer: told.then(|| Answer {
                code: row.get("response_code").map(|code| code.parse().unwrap()),
                headers: row.get("response_headers").map(|headers| serde_json::from_str(headers).unwrap()),
                body: row.get("response_body").map(unhex),
                result_type: text("result_type"),
                result_id: text("result_id"),
            }),
            failure: (kind == "final_failure").then(|| (text("failure_code").unwrap(), text("failure_message"))),
            kind,
            claim_id,
        })
    }

    async fn succeed(&mut self, name: &IntentName, claim: Uuid, answer: &Answer) -> Told<()> {
        let more = [
            ("p_claim_id", quoted(&claim.to_string())),
            ("p_response_body", nullable(answer.body.as_deref().map(hex), "bytea")),
            ("p_response_code", nullable(answer.code.map(|code| code.to_string()), "int")),
            ("p_response_headers", nullable(answer.headers.as_ref().map(Value::to_string), "jsonb")),
            ("p_result_type", nullable(answer.result_type.clone(), "text")),
            ("p_result_id", nullable(answer.result_id.clone(), "text")),
        ];
        self.call("succeed", name, &more).await.map(|_| ())
    }

    async fn fail(&mut self, name: &IntentName, claim: Uuid, retryable: bool, code: &str, message: &str) -> Told<()> {
        let more = [
            ("p_claim_id", quoted(&claim.to_string())),
            ("p_retryable", retryable.to_string()),
            ("p_code", quoted(code)),
            ("p_message", quoted(message)),
        ];
        self.call("fail", name, &more).await.map(|_| ())
    }

    async fn renew(&mut self, name: &IntentName, claim: Uuid, lease: Duration) -> Told<()> {
        let more = [("p_claim_id", quoted(&claim.to_string())), ("p_lease", quoted(&micros(lease)))];
        self.call("renew", name, &more).await.map(|_| ())
    }

    async fn release(&mut self, name: &IntentName, claim: Uuid) -> Told<()> {
        self.call("release", name, &[("p_claim_id", quoted(&claim.to_string()))]).await.map(|_| ())
    }
}

/// The crate's pieces, in a transaction of the caller's.
pub struct Pieces {
    client: Client,
    kept: Kept,
}

impl From<pgonce::Error> for Refused {
    fn from(error: pgonce::Error) -> Self {
        match error {
            pgonce::Error::LeaseLost => Self("lost".into()),
            other => Self(other.sqlstate().unwrap_or_else(|| panic!("no SQLSTATE: {other:?}")).to_owned()),
        }
    }
}

impl Door for Pieces {
    const EXACT: bool = false;

    async fn open(db: &TestDb) -> Self {
        Self { client: db.client().await, kept: Kept::default() }
    }

    async fn begin(&mut self) {
        self.client.batch_execute("BEGIN").await.unwrap();
    }

    async fn commit(&mut self) -> Told<()> {
        // The pieces leave the transaction to the caller: who then has to look at it, as `run` does.
        Ok(self.client.batch_execute("SELECT 1; COMMIT").await.map_err(pgonce::Error::from)?)
    }

    async fn rollback(&mut self) {
        self.client.batch_execute("ROLLBACK").await.unwrap();
    }

    async fn execute(&mut self, sql: &'static str) -> Told<()> {
        Ok(self.client.batch_execute(sql).await.map_err(pgonce::Error::from)?)
    }

    async fn claim(&mut self, name: &IntentName, options: &ClaimOptions) -> Told<Seen> {
        let claim = pgonce::claim(&self.client, name.clone(), options).await?;
        Ok(Seen::of(name, claim, &mut self.kept))
    }

    async fn succeed(&mut self, name: &IntentName, claim: Uuid, answer: &Answer) -> Told<()> {
        Ok(self.kept.take(name, claim).await.succeed(&self.client, answer).await?)
    }

    async fn fail(&mut self, name: &IntentName, claim: Uuid, retryable: bool, code: &str, message: &str) -> Told<()> {
        Ok(self.kept.take(name, claim).await.fail(&self.client, retryable, code, message).await?)
    }

    async fn renew(&mut self, name: &IntentName, claim: Uuid, lease: Duration) -> Told<()> {
        let owned = self.kept.take(name, claim).await;
        Ok(owned.renew(&self.client, lease).await?)
    }

    async fn release(&mut self, name: &IntentName, claim: Uuid) -> Told<()> {
        Ok(self.kept.take(name, claim).await.release(&self.client).await?)
    }
}

/// The sqlx adapter.
pub struct Sqlx {
    pool: PgPool,
    open: Option<Transaction<'static, Postgres>>,
    kept: Kept,
}

impl From<pgonce::sqlx::Error> for Refused {
    fn from(error: pgonce::sqlx::Error) -> Self {
        use pgonce::sqlx::Error;
        Self(match error {
            Error::LeaseLost => "lost".into(),
            Error::Conflict => "P4002".into(),
            Error::RolledBack => "25P02".into(),
            Error::Database(sqlx::Error::Database(error)) => error.code().expect("a server error").into_owned(),
            other => panic!("no SQLSTATE: {other:?}"),
        })
    }
}

/// The open transaction's connection, or one of the pool's: `on!(self, connection => …)`.
macro_rules! on {
    ($self:ident, $connection:ident => $call:expr) => {{
        let mut alone;
        let $connection = match &mut $self.open {
            Some(transaction) => &mut **transaction,
            None => {
                alone = $self.pool.acquire().await.unwrap();
                &mut *alone
            }
        };
        Ok($call.await?)
    }};
}

impl Door for Sqlx {
    const EXACT: bool = false;

    async fn open(db: &TestDb) -> Self {
        let pool = sqlx::postgres::PgPoolOptions::new().max_connections(1).connect(db.direct_url()).await.unwrap();
        Self { pool, open: None, kept: Kept::default() }
    }

    async fn begin(&mut self) {
        self.open = Some(self.pool.begin().await.unwrap());
    }

    async fn commit(&mut self) -> Told<()> {
        Ok(pgonce::sqlx::commit(self.open.take().expect("a transaction")).await?)
    }

    async fn rollback(&mut self) {
        self.open.take().expect("a transaction").rollback().await.unwrap();
    }

    async fn execute(&mut self, sql: &'static str) -> Told<()> {
        let transaction = self.open.as_mut().expect("a transaction");
        sqlx::raw_sql(sql).execute(&mut **transaction).await.map_err(pgonce::sqlx::Error::from)?;
        Ok(())
    }

    async fn claim(&mut self, name: &IntentName, options: &ClaimOptions) -> Told<Seen> {
        let claim: Told<Claim> = on!(self, connection => pgonce::sqlx::claim(connection, name.clone(), options));
        Ok(Seen::of(name, claim?, &mut self.kept))
    }

    async fn succeed(&mut self, name: &IntentName, claim: Uuid, answer: &Answer) -> Told<()> {
        let owned = self.kept.take(name, claim).await;
        on!(self, connection => pgonce::sqlx::succeed(connection, owned, answer))
    }

    async fn fail(&mut self, name: &IntentName, claim: Uuid, retryable: bool, code: &str, message: &str) -> Told<()> {
        let owned = self.kept.take(name, claim).await;
        on!(self, connection => pgonce::sqlx::fail(connection, owned, retryable, code, message))
    }

    async fn renew(&mut self, name: &IntentName, claim: Uuid, lease: Duration) -> Told<()> {
        let owned = self.kept.take(name, claim).await;
        on!(self, connection => pgonce::sqlx::renew(connection, &owned, lease))
    }

    async fn release(&mut self, name: &IntentName, claim: Uuid) -> Told<()> {
        let owned = self.kept.take(name, claim).await;
        on!(self, connection => pgonce::sqlx::release(connection, owned))
    }
}

/// A payload's fingerprint.
pub fn payload(text: &str) -> Fingerprint {
    pgonce::fingerprint_bytes(text.as_bytes(), "", "")
}
