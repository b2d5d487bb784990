//! What every case starts from.

use std::time::Duration;

use pgonce::{Answer, ClaimOptions, IntentName, Mode};
use pgonce_testkit::{TestDb, checksum};
use serde_json::Value;
use tokio_postgres::Client;
use uuid::Uuid;

use crate::doors::{Door, Refused, Seen, Told, payload};

pub const HOUR: Duration = Duration::from_secs(3600);
pub const DAY: Duration = Duration::from_secs(86_400);
pub const MODES: [Mode; 2] = [Mode::Atomic, Mode::Leased];

/// A database, an administrator's connection beside the door, and the door.
pub struct World<D> {
    pub db: TestDb,
    pub admin: Client,
    pub door: D,
}

/// An intent of the suite: every key has the same payload unless it says otherwise.
pub fn name(scope: &str, key: &str) -> IntentName {
    IntentName { tenant: String::new(), scope: scope.into(), key: key.into(), fingerprint: payload("the payload") }
}

/// The same intent with another payload.
pub fn other(name: &IntentName) -> IntentName {
    IntentName { fingerprint: payload("another payload"), ..name.clone() }
}

/// One mode; nobody waits for a rival.
pub fn at_once(mode: Mode) -> ClaimOptions {
    ClaimOptions { mode: Some(mode), wait: Some(Duration::ZERO), ..ClaimOptions::default() }
}

pub fn answer(body: &str) -> Answer {
    Answer {
        code: Some(201),
        headers: Some(serde_json::json!({"content-type": "text/plain"})),
        body: Some(body.into()),
        result_type: Some("order".into()),
        result_id: Some("4711".into()),
    }
}

impl<D: Door> World<D> {
    pub async fn new() -> Self {
        let db = TestDb::new().await;
        let admin = db.client().await;
        let door = D::open(&db).await;
        Self { db, admin, door }
    }

    pub async fn define(&self, scope: &str, policy: Value) {
        self.admin.execute("SELECT once.define_scope($1, $2)", &[&scope, &policy]).await.unwrap();
    }

    pub async fn checksum(&self) -> String {
        checksum(&self.admin).await
    }

    /// The row's status and attempts.
    pub async fn row(&self, name: &IntentName) -> Option<(String, i32)> {
        let sql = "SELECT status, attempt_count FROM once.intents WHERE tenant = $1 AND scope = $2 AND key = $3";
        let row = self.admin.query_opt(sql, &[&name.tenant, &name.scope, &name.key]).await.unwrap();
        row.map(|row| (row.get(0), row.get(1)))
    }

    /// One claim in a transaction of its own, committed.
    pub async fn claim(&mut self, name: &IntentName, options: &ClaimOptions) -> Told<Seen> {
        self.door.begin().await;
        let seen = self.door.claim(name, options).await;
        match seen {
            Ok(_) => self.door.commit().await.unwrap(),
            Err(_) => self.door.rollback().await,
        }
        seen
    }

    /// Claims for a lease, and has it.
    pub async fn lease(&mut self, name: &IntentName) -> Uuid {
        let seen = self.claim(name, &at_once(Mode::Leased)).await.unwrap();
        seen.claim_id.unwrap_or_else(|| panic!("{} was not to be had: {seen:?}", name.key))
    }

    /// One completed intent, in the mode asked for.
    pub async fn succeeded(&mut self, name: &IntentName, mode: Mode, answer: &Answer) {
        self.complete(name, mode, async |door, claim| door.succeed(name, claim, answer).await).await;
    }

    /// One failed intent.
    pub async fn failed(&mut self, name: &IntentName, mode: Mode, retryable: bool) {
        self.complete(name, mode, async |door, claim| door.fail(name, claim, retryable, "no_stock", "sold out").await)
            .await;
    }

    async fn complete(&mut self, name: &IntentName, mode: Mode, end: impl AsyncFnOnce(&mut D, Uuid) -> Told<()>) {
        self.door.begin().await;
        let seen = self.door.claim(name, &at_once(mode)).await.unwrap();
        let claim = seen.claim_id.unwrap_or_else(|| panic!("{} was not to be had: {seen:?}", name.key));
        if mode == Mode::Leased {
            self.door.commit().await.unwrap();
            self.door.begin().await;
        }
        end(&mut self.door, claim).await.unwrap();
        self.door.commit().await.unwrap();
    }

    /// A step that must be refused with this code, and change nothing.
    pub async fn refused(&mut self, what: &str, code: &str, step: impl AsyncFnOnce(&mut D) -> Told<()>) {
        let before = self.checksum().await;
        self.door.begin().await;
        let told = step(&mut self.door).await;
        self.door.rollback().await;
        assert_eq!(told, Err(refusal::<D>(code)), "{what}");
        assert_eq!(self.checksum().await, before, "{what} changed something");
    }
}

/// How a door tells this code.
pub fn refusal<D: Door>(code: &str) -> Refused {
    let fence = matches!(code, "P4010" | "P4011" | "P4012");
    Refused(if fence && !D::EXACT { "lost".into() } else { code.into() })
}
