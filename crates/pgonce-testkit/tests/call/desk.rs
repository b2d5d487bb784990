//! A database with a provider, and the short words for what tests do with it.

use std::time::Duration;

use pgonce_testkit::TestDb;
use tokio_postgres::Client;
use tokio_postgres::types::ToSql;
use uuid::Uuid;

/// Where the application keeps what settled calls mean to it.
const APP: &str = "CREATE SCHEMA app; GRANT USAGE ON SCHEMA app TO PUBLIC;
    CREATE TABLE app.settled (at bigint GENERATED ALWAYS AS IDENTITY, call_id uuid, verdict text, reference text);
    CREATE TABLE app.broken (yes boolean);
    CREATE FUNCTION app.on_settled(p_id uuid, p_verdict text, p_reference text) RETURNS void LANGUAGE plpgsql SECURITY DEFINER AS $$
    BEGIN
        INSERT INTO app.settled (call_id, verdict, reference) VALUES (p_id, p_verdict, p_reference);
        IF EXISTS (SELECT FROM app.broken) THEN RAISE EXCEPTION 'no' USING ERRCODE = '23514'; END IF;
    END $$";

pub struct Desk {
    pub db: TestDb,
    pub client: Client,
}

/// A call that a worker holds.
#[derive(Debug, Clone, Copy)]
pub struct Taken {
    pub id: Uuid,
    pub claim: Uuid,
}

impl Desk {
    /// With the provider `bank`, whose policy is this.
    pub async fn new(policy: &str) -> Self {
        let db = TestDb::new().await;
        let client = db.client().await;
        client.batch_execute(APP).await.unwrap();
        let desk = Self { db, client };
        desk.define(policy).await;
        desk
    }

    pub async fn define(&self, policy: &str) {
        let policy: serde_json::Value = serde_json::from_str(policy).unwrap();
        self.client.execute("SELECT once.define_provider('bank', $1)", &[&policy]).await.unwrap();
    }

    /// Asks for a charge, for the intent of this key.
    pub async fn call(&self, key: &str) -> Uuid {
        let sql = "SELECT once.call('bank', 'charge', '/charges', '{\"amount\": 7}', p_scope => 'pay', p_key => $1)";
        self.client.query_one(sql, &[&key]).await.unwrap().get(0)
    }

    /// What is due to be sent.
    pub async fn take(&self, limit: i32) -> Vec<Taken> {
        self.taken("SELECT id, claim_id FROM once.call_take('w', $1)", limit).await
    }

    /// What is due to be asked about.
    pub async fn doubts(&self, limit: i32) -> Vec<Taken> {
        self.taken("SELECT id, claim_id FROM once.call_doubts('w', $1)", limit).await
    }

    async fn taken(&self, sql: &str, limit: i32) -> Vec<Taken> {
        let rows = self.client.query(sql, &[&limit]).await.unwrap();
        rows.iter().map(|row| Taken { id: row.get(0), claim: row.get(1) }).collect()
    }

    /// Requested and taken.
    pub async fn sent(&self, key: &str) -> Taken {
        self.call(key).await;
        let taken = self.take(1).await;
        assert_eq!(taken.len(), 1, "the call is due");
        taken[0]
    }

    /// Sent, and nobody knows.
    pub async fn unknown(&self, key: &str) -> Taken {
        let taken = self.sent(key).await;
        assert_eq!(self.heard(taken, "lost", None).await, Ok("unknown".into()));
        taken
    }

    /// One that is being asked about.
    pub async fn doubt(&self) -> Taken {
        let taken = self.doubts(1).await;
        assert_eq!(taken.len(), 1, "an unknown call is due");
        taken[0]
    }

    pub async fn heard(&self, taken: Taken, outcome: &str, code: Option<i32>) -> Result<String, String> {
        self.said("SELECT once.call_heard($1, $2, $3, $4)", &[&taken.id, &taken.claim, &outcome, &code]).await
    }

    pub async fn answered(&self, taken: Taken, code: i32, body: &str) -> Result<String, String> {
        let sql = "SELECT once.call_heard($1, $2, 'answered', $3, p_body => convert_to($4, 'UTF8'))";
        self.said(sql, &[&taken.id, &taken.claim, &code, &body]).await
    }

    pub async fn asked(&self, taken: Taken, code: i32, body: &str) -> Result<String, String> {
        let sql = "SELECT once.call_asked($1, $2, 'answered', $3, p_body => convert_to($4, 'UTF8'))";
        self.said(sql, &[&taken.id, &taken.claim, &code, &body]).await
    }

    pub async fn notice(
        &self,
        id: &str,
        verdict: &str,
        key: Option<Uuid>,
        reference: Option<&str>,
    ) -> Result<String, String> {
        let key = key.map(|key| key.to_string());
        self.said("SELECT once.call_notice('bank', $1, $2, $3, $4)", &[&id, &verdict, &key, &reference]).await
    }

    pub async fn settle(&self, id: Uuid, verdict: &str) -> Result<String, String> {
        self.said("SELECT once.call_settle($1, $2, 'tester', 'a reason')", &[&id, &verdict]).await
    }

    /// One text, or the SQLSTATE.
    pub async fn said(&self, sql: &str, params: &[&(dyn ToSql + Sync)]) -> Result<String, String> {
        said(&self.client, sql, params).await
    }

    pub async fn state(&self, id: Uuid) -> String {
        let row = self.client.query_one("SELECT state FROM once.calls WHERE id = $1", &[&id]).await.unwrap();
        row.get(0)
    }

    pub async fn number(&self, sql: &str) -> i64 {
        self.client.query_one(sql, &[]).await.unwrap_or_else(|error| panic!("{sql}: {error:?}")).get(0)
    }

    /// Which verdicts the application got, in order.
    pub async fn settled(&self) -> Vec<String> {
        let rows = self.client.query("SELECT verdict FROM app.settled ORDER BY at", &[]).await.unwrap();
        rows.iter().map(|row| row.get(0)).collect()
    }

    pub async fn travel(&self, seconds: u64) {
        self.db.travel(Duration::from_secs(seconds)).await;
    }
}

pub async fn said(client: &Client, sql: &str, params: &[&(dyn ToSql + Sync)]) -> Result<String, String> {
    match client.query_one(sql, params).await {
        Ok(row) => Ok(row.get(0)),
        Err(error) => Err(error.code().unwrap_or_else(|| panic!("{sql}: {error:?}")).code().to_owned()),
    }
}

/// A provider that knows our keys and can be asked.
pub const ASKED: &str = r#"{"base_url": "https://bank.example/v1", "resend": true, "reference": "id",
    "timeout": "10s", "grace": "10s", "reconcile_after": "5s", "backoff": "1s", "backoff_max": "1s", "escalate_after": "1h",
    "on_settled": "app.on_settled", "absent": "resend", "absent_after": "60s",
    "reconcile": {"how": "http", "path": "/charges/{key}", "field": "status", "confirmed": ["succeeded"], "failed": ["failed"]}}"#;

/// One that cannot be asked, and does not know our keys.
pub const DUMB: &str = r#"{"base_url": "https://bank.example", "backoff": "1s", "backoff_max": "1s", "reconcile_after": "5s",
    "escalate_after": "1h", "on_settled": "app.on_settled"}"#;
