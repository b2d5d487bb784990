//! What the tests of this folder share: a database with a ledger, and short calls of its functions.

use pgonce_testkit::TestDb;
use tokio_postgres::Client;

/// The isolation levels, as SQL writes them.
pub const LEVELS: [&str; 3] = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"];

/// A database with the ledger in it, and the accounts `a0` to `a5` in EUR.
pub async fn book() -> TestDb {
    let db = TestDb::new().await;
    let mut client = pgonce::migrate::connect(db.direct_url()).await.unwrap();
    pgonce::migrate::install_ledger(&mut client, false).await.unwrap();
    let sql = "SELECT once_ledger.open_account('a' || n, 'EUR') FROM generate_series(0, 5) n";
    client.query(sql, &[]).await.unwrap();
    db
}

pub fn code(error: &tokio_postgres::Error) -> String {
    error.code().map_or_else(|| error.to_string(), |code| code.code().to_owned())
}

/// What posting answers, or its SQLSTATE.
pub async fn post(
    client: &Client,
    operation: &str,
    accounts: &[&str],
    amounts: &[i64],
    currencies: &[&str],
) -> Result<(String, Vec<i64>), String> {
    let sql = "SELECT kind, balances FROM once_ledger.post('test', $1, $2, $3, $4)";
    let row = client.query_one(sql, &[&operation, &accounts, &amounts, &currencies]).await;
    row.map(|row| (row.get(0), row.get(1))).map_err(|error| code(&error))
}

/// Moves an amount between two accounts in EUR: the kind, or the SQLSTATE.
pub async fn transfer(client: &Client, operation: &str, from: &str, to: &str, amount: i64) -> Result<String, String> {
    post(client, operation, &[to, from], &[amount, -amount], &["EUR"]).await.map(|(kind, _)| kind)
}

/// The one text that a statement returns, or its SQLSTATE.
pub async fn text(client: &Client, sql: &str) -> Result<String, String> {
    client.query_one(sql, &[]).await.map(|row| row.get(0)).map_err(|error| code(&error))
}

pub async fn number(client: &Client, sql: &str) -> i64 {
    client.query_one(sql, &[]).await.unwrap().get(0)
}

pub async fn balance(client: &Client, account: &str) -> i64 {
    let sql = "SELECT balance FROM once_ledger.accounts WHERE tenant = '' AND account = $1";
    client.query_one(sql, &[&account]).await.unwrap().get(0)
}

/// What verify finds: its findings' names.
pub async fn verify(client: &Client) -> Vec<String> {
    let rows = client.query("SELECT finding FROM once_ledger.verify() ORDER BY 1", &[]).await.unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

/// Verify finds nothing, and, by another way than verify's, all balances together are zero.
pub async fn is_sound(client: &Client) {
    assert_eq!(verify(client).await, Vec::<String>::new());
    let sql = "SELECT count(*) FROM (SELECT a.currency FROM once_ledger.account a GROUP BY a.currency HAVING sum(a.balance) <> 0) s";
    assert_eq!(number(client, sql).await, 0, "balances of a currency do not add up to zero");
    let sql = "SELECT count(*) FROM once_ledger.account a
        WHERE a.balance <> (SELECT coalesce(sum(e.amount), 0) FROM once_ledger.entry e WHERE e.account_id = a.id)";
    assert_eq!(number(client, sql).await, 0, "a balance is not the sum of its entries");
}
