//! The outbox in SQL: what is emitted, what a difference of snapshots sees, who holds a lane, what may go.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod emits;
mod home;
mod lanes;
mod log;
mod posts;
mod segments;

use pgonce_testkit::TestDb;
use tokio_postgres::Client;

/// All lanes of a sink.
const LANES: &str = "'{0,1,2,3,4,5,6,7}'";

async fn text(client: &Client, sql: &str) -> String {
    client.query_one(sql, &[]).await.unwrap_or_else(|error| panic!("{sql}: {error:?}")).get(0)
}

async fn number(client: &Client, sql: &str) -> i64 {
    client.query_one(sql, &[]).await.unwrap_or_else(|error| panic!("{sql}: {error:?}")).get(0)
}

async fn refused(client: &Client, sql: &str) -> String {
    let error = client.batch_execute(sql).await.expect_err(sql);
    error.code().unwrap_or_else(|| panic!("{sql}: {error:?}")).code().to_owned()
}

/// A sink that reads as the relay does, and remembers its cursor here.
struct Reader {
    client: Client,
    delivered: String,
}

impl Reader {
    async fn new(db: &TestDb) -> Self {
        let client = db.client().await;
        client.batch_execute("SELECT once.open_sink('s')").await.unwrap();
        Self { client, delivered: "1:1:".into() }
    }

    /// What came since the last time, as the payload's `n`, in the order in which it is sent.
    async fn next(&mut self) -> Vec<i64> {
        let sql = format!(
            "SELECT d.target, (o.payload ->> 'n')::bigint FROM once.outbox_difference('s', {LANES}, '{}', NULL, -1, 1000000)
                 WITH ORDINALITY d (target, position, xid, lane, place)
             LEFT JOIN once.outbox o ON o.position = d.position ORDER BY d.place",
            self.delivered
        );
        let rows = self.client.query(&sql, &[]).await.unwrap();
        self.delivered = rows[0].get(0);
        rows.iter().filter_map(|row| row.get::<_, Option<i64>>(1)).collect()
    }
}
