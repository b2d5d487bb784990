//! What a posting costs: the bare two inserts and one update of a home-made ledger, and `once_ledger.post`, which also
//! deduplicates, balances, locks in order, and knows currencies and overdrafts.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::Result;
use tokio_postgres::{Client, Statement};

use crate::Arguments;
use crate::measure::{Series, rate, report};
use crate::work::{Keys, client};

const ACCOUNTS: u64 = 1000;

const SCHEMA: &str = "
    DROP TABLE IF EXISTS bench.ledger_account, bench.ledger_posting, bench.ledger_entry;
    CREATE TABLE bench.ledger_account (id bigint PRIMARY KEY, balance bigint NOT NULL) WITH (fillfactor = 50);
    CREATE TABLE bench.ledger_posting (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        at timestamptz NOT NULL DEFAULT clock_timestamp(), source text NOT NULL, operation text NOT NULL);
    CREATE TABLE bench.ledger_entry (posting_id bigint NOT NULL, line smallint NOT NULL, account_id bigint NOT NULL,
        amount bigint NOT NULL, PRIMARY KEY (posting_id, line));
    CREATE INDEX ON bench.ledger_entry (account_id, posting_id);
    INSERT INTO bench.ledger_account SELECT n, 0 FROM generate_series(0, 999) n;
    CREATE OR REPLACE FUNCTION bench.post(p_operation text, p_debit bigint, p_credit bigint, p_amount bigint) RETURNS bigint
    LANGUAGE plpgsql AS $$
    DECLARE
        v_id bigint;
    BEGIN
        INSERT INTO bench.ledger_posting (source, operation) VALUES ('bench', p_operation) RETURNING id INTO v_id;
        INSERT INTO bench.ledger_entry VALUES (v_id, 1, p_debit, p_amount), (v_id, 2, p_credit, -p_amount);
        UPDATE bench.ledger_account SET balance = balance + CASE id WHEN p_debit THEN p_amount ELSE -p_amount END
            WHERE id IN (p_debit, p_credit);
        RETURN v_id;
    END $$;
    SELECT count(once_ledger.open_account('account ' || lpad(n::text, 4, '0'), 'EUR')) FROM generate_series(0, 999) n;
    ANALYZE bench.ledger_account";

const NAMES: [&str; 4] = [
    "bare, a statement a round trip",
    "bare, one function call",
    "once_ledger.post",
    "once_ledger.post, 30% duplicates",
];

/// Postings per second at 1, 8 and 32 connections. Debits and credits are of different halves of the accounts, so that the
/// bare contender, which locks in no order, does not deadlock.
pub async fn ledger(arguments: &Arguments, url: &str) -> Result<()> {
    pgonce::migrate::install_ledger(&mut pgonce::migrate::connect(url).await?, false).await?;
    client(url).await?.batch_execute(SCHEMA).await?;
    for writers in [1, 8, 32] {
        let mut series = NAMES.map(|name| Series { name: name.to_owned(), rates: Vec::new() });
        for _ in 0..arguments.rounds {
            for (kind, one) in series.iter_mut().enumerate() {
                let got = rate(writers, arguments.window(), async |_| {
                    let writer = Arc::new(Writer::new(url, kind).await?);
                    Ok(move || {
                        let writer = Arc::clone(&writer);
                        async move { writer.post().await }
                    })
                })
                .await?;
                one.rates.push(got);
            }
        }
        report(&format!("ledger, postings/s, {writers} writers (ratio to the bare transaction)"), &series);
    }
    Ok(())
}

struct Writer {
    client: Client,
    kind: usize,
    statements: Vec<Statement>,
    next: AtomicU64,
    keys: Keys,
}

impl Writer {
    async fn new(url: &str, kind: usize) -> Result<Self> {
        let client = client(url).await?;
        let texts: &[&str] = match kind {
            0 => &[
                "INSERT INTO bench.ledger_posting (source, operation) VALUES ('bench', $1) RETURNING id",
                "INSERT INTO bench.ledger_entry VALUES ($1, 1, $2, $4::bigint), ($1, 2, $3, -$4::bigint)",
                "UPDATE bench.ledger_account SET balance = balance + CASE id WHEN $1 THEN $3::bigint ELSE -$3::bigint END WHERE id IN ($1, $2)",
            ],
            1 => &["SELECT bench.post($1, $2, $3, $4)"],
            _ => &["SELECT posting_id, kind, accounts, balances FROM once_ledger.post('bench', $1, $2, $3, '{EUR}')"],
        };
        let mut statements = Vec::new();
        for text in texts {
            statements.push(client.prepare(text).await?);
        }
        Ok(Self { client, kind, statements, next: AtomicU64::new(0), keys: Keys::new() })
    }

    async fn post(&self) -> Result<()> {
        let n = self.next.fetch_add(1, Ordering::Relaxed);
        let spread = n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
        let (debit, credit) = ((spread % (ACCOUNTS / 2)) as i64, (ACCOUNTS / 2 + spread / 7 % (ACCOUNTS / 2)) as i64);
        match self.kind {
            0 => {
                self.client.batch_execute("BEGIN").await?;
                let id: i64 = self.client.query_one(&self.statements[0], &[&self.keys.fresh()]).await?.try_get(0)?;
                self.client.execute(&self.statements[1], &[&id, &debit, &credit, &500_i64]).await?;
                self.client.execute(&self.statements[2], &[&debit, &credit, &500_i64]).await?;
                self.client.batch_execute("COMMIT").await?;
            }
            1 => {
                let parameters: [&(dyn tokio_postgres::types::ToSql + Sync); 4] =
                    [&self.keys.fresh(), &debit, &credit, &500_i64];
                self.client.query_one(&self.statements[0], &parameters).await?;
            }
            kind => {
                let accounts = [format!("account {debit:04}"), format!("account {credit:04}")];
                let amounts = [500_i64, -500];
                let operation = self.keys.fresh();
                let parameters: [&(dyn tokio_postgres::types::ToSql + Sync); 3] =
                    [&operation, &accounts.as_slice(), &amounts.as_slice()];
                self.client.query_one(&self.statements[0], &parameters).await?;
                if kind == 3 && n % 7 < 3 {
                    // Three of ten calls say again what was just said.
                    self.client.query_one(&self.statements[0], &parameters).await?;
                }
            }
        }
        Ok(())
    }
}
