//! What telling duplicates apart costs a consumer: an update of as many accounts as there are messages, alone and gated by
//! `once.admit` or `once.admit_batch`, with ids that grow and with random ones.

use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use anyhow::Result;
use tokio_postgres::{Client, Statement};

use crate::Arguments;
use crate::measure::{Series, rate, report};
use crate::work::{Keys, client};

const WORKERS: i32 = 2;
const ACCOUNTS: i32 = 100_000;

const ALONE: &str = "UPDATE bench.account a SET balance = balance + 1 FROM unnest($1::int[]) d (id) WHERE a.id = d.id";
const GATED: &str = "WITH m AS MATERIALIZED (
        SELECT d.id FROM once.admit_batch('bench', 'bench', $2, $3) v
        JOIN unnest($1::int[]) WITH ORDINALITY d (id, place) ON d.place = v.ordinal WHERE v.verdict = 'new')
    UPDATE bench.account a SET balance = balance + 1 FROM m WHERE a.id = m.id";
const ONE_ALONE: &str = "UPDATE bench.account a SET balance = balance + 1 WHERE a.id = $1";
const ONE_GATED: &str = "WITH m AS MATERIALIZED (SELECT once.admit('bench', 'bench', $2, $3) AS verdict)
    UPDATE bench.account a SET balance = balance + 1 FROM m WHERE m.verdict = 'new' AND a.id = $1";

/// Ratios to the update alone, for single messages and for batches.
pub async fn inbox(arguments: &Arguments, url: &str) -> Result<()> {
    let sql = format!(
        "DROP TABLE IF EXISTS bench.account;
         CREATE TABLE bench.account (id int PRIMARY KEY, balance bigint NOT NULL) WITH (fillfactor = 50);
         INSERT INTO bench.account SELECT n, 0 FROM generate_series(0, {ACCOUNTS} - 1) n; ANALYZE bench.account"
    );
    client(url).await?.batch_execute(&sql).await?;
    for batch in [1, 100, 500] {
        let names = ["update alone", "gated, ids that grow", "gated, random ids"];
        let mut series = names.map(|name| Series { name: name.to_owned(), rates: Vec::new() });
        for _ in 0..arguments.rounds {
            for (kind, one) in series.iter_mut().enumerate() {
                let got = rate(WORKERS as usize, arguments.window(), async |worker| {
                    let feed = Arc::new(Feed::new(url, batch, kind, worker).await?);
                    Ok(move || {
                        let feed = Arc::clone(&feed);
                        async move { feed.apply().await }
                    })
                })
                .await?;
                one.rates.push(got * f64::from(batch));
            }
        }
        report(
            &format!("inbox, messages/s in batches of {batch}, {WORKERS} workers (ratio to the update alone)"),
            &series,
        );
    }
    Ok(())
}

/// One worker's messages: accounts of its own, so that workers do not wait for each other's rows.
struct Feed {
    client: Client,
    statement: Statement,
    batch: i32,
    kind: usize,
    worker: i32,
    next: AtomicI32,
    keys: Keys,
}

impl Feed {
    async fn new(url: &str, batch: i32, kind: usize, worker: usize) -> Result<Self> {
        let client = client(url).await?;
        let statement = client
            .prepare(match (batch, kind) {
                (1, 0) => ONE_ALONE,
                (1, _) => ONE_GATED,
                (_, 0) => ALONE,
                _ => GATED,
            })
            .await?;
        let (next, keys) = (AtomicI32::new(0), Keys::new());
        Ok(Self { client, statement, batch, kind, worker: i32::try_from(worker)?, next, keys })
    }

    fn id(&self) -> String {
        if self.kind == 2 { uuid::Uuid::new_v4().to_string() } else { self.keys.fresh() }
    }

    async fn apply(&self) -> Result<()> {
        let start = self.next.fetch_add(self.batch, Ordering::Relaxed);
        let account = |place: i32| ((start + place) * 7 % (ACCOUNTS / WORKERS)) * WORKERS + self.worker;
        if self.batch == 1 {
            let (account, hash) = (account(0), [7_u8; 32]);
            match self.kind {
                0 => self.client.execute(&self.statement, &[&account]).await?,
                _ => self.client.execute(&self.statement, &[&account, &self.id(), &hash.as_slice()]).await?,
            };
            return Ok(());
        }
        // A message comes with its id and its body, whoever looks at them.
        let accounts: Vec<i32> = (0..self.batch).map(account).collect();
        let ids: Vec<String> = accounts.iter().map(|_| self.id()).collect();
        let hashes = vec![[7_u8; 32].to_vec(); accounts.len()];
        match self.kind {
            0 => self.client.execute(&self.statement, &[&accounts]).await?,
            _ => self.client.execute(&self.statement, &[&accounts, &ids, &hashes]).await?,
        };
        Ok(())
    }
}
