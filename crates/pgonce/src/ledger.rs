//! Money-like effects: groups of entries that balance, posted once, in the transaction of everything else.
//!
//! The ledger is a schema of its own, `once_ledger`, which `pgonce ledger install` makes. The rules are its functions.
//!
//! ```no_run
//! # use pgonce::{Once, ledger::Posting};
//! # async fn example(once: Once) -> Result<(), pgonce::Error> {
//! once.intent("pay_invoice", "invoice-77")
//!     .run(async |tx| {
//!         let posting = Posting::new("billing", "invoice-77").debit("cash", 12_50, "EUR").credit("sales", 12_50, "EUR");
//!         let posted = tx.post(&posting).await?;
//!         Ok(posted.id)
//!     })
//!     .await?;
//! # Ok(()) }
//! ```

use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{GenericClient, Row};

use crate::Error;
use crate::sql::{self, Call};

/// A group of entries, named by the operation that it books: source and operation are unique for a tenant.
#[derive(Debug, Clone)]
pub struct Posting {
    source: String,
    operation: String,
    accounts: Vec<String>,
    amounts: Vec<i64>,
    currencies: Vec<String>,
    description: Option<String>,
    opens: bool,
}

impl Posting {
    /// Which system books, and which of its operations: the same in every attempt.
    pub fn new(source: impl Into<String>, operation: impl Into<String>) -> Self {
        Self {
            source: source.into(),
            operation: operation.into(),
            accounts: Vec::new(),
            amounts: Vec::new(),
            currencies: Vec::new(),
            description: None,
            opens: false,
        }
    }

    /// Adds to the account's balance, in minor units (cents).
    #[must_use]
    pub fn debit(self, account: impl Into<String>, amount: i64, currency: impl Into<String>) -> Self {
        self.entry(account, amount, currency)
    }

    /// Takes from the account's balance, in minor units (cents).
    #[must_use]
    pub fn credit(self, account: impl Into<String>, amount: i64, currency: impl Into<String>) -> Self {
        // The smallest number stays what it is, and is refused: it has no opposite.
        self.entry(account, amount.wrapping_neg(), currency)
    }

    fn entry(mut self, account: impl Into<String>, amount: i64, currency: impl Into<String>) -> Self {
        self.accounts.push(account.into());
        self.amounts.push(amount);
        self.currencies.push(currency.into());
        self
    }

    /// What it is, for people.
    #[must_use]
    pub fn description(mut self, text: impl Into<String>) -> Self {
        self.description = Some(text.into());
        self
    }

    /// Opens accounts that are not there, in the currencies of their entries and without a limit.
    #[must_use]
    pub fn open_accounts(mut self) -> Self {
        self.opens = true;
        self
    }

    /// The entries in the order of their accounts, with one currency in place of several equal ones: the form that the
    /// database has the shortest way for. It sorts by itself whatever comes otherwise.
    fn wire(&self) -> Wire<'_> {
        let mut order: Vec<usize> = (0..self.accounts.len()).collect();
        order.sort_by(|a, b| self.accounts[*a].as_bytes().cmp(self.accounts[*b].as_bytes()));
        let mut currencies: Vec<&str> = order.iter().map(|place| self.currencies[*place].as_str()).collect();
        if currencies.windows(2).all(|pair| pair[0] == pair[1]) {
            currencies.truncate(1);
        }
        Wire {
            posting: self,
            accounts: order.iter().map(|place| self.accounts[*place].as_str()).collect(),
            amounts: order.iter().map(|place| self.amounts[*place]).collect(),
            currencies,
        }
    }
}

struct Wire<'a> {
    posting: &'a Posting,
    accounts: Vec<&'a str>,
    amounts: Vec<i64>,
    currencies: Vec<&'a str>,
}

impl Wire<'_> {
    fn parameters<'b>(&'b self, tenant: &'b (impl ToSql + Sync)) -> [(&'b (dyn ToSql + Sync), Type); 8] {
        [
            (&self.posting.source, Type::TEXT),
            (&self.posting.operation, Type::TEXT),
            (&self.accounts, Type::TEXT_ARRAY),
            (&self.amounts, Type::INT8_ARRAY),
            (&self.currencies, Type::TEXT_ARRAY),
            (&self.posting.description, Type::TEXT),
            (&self.posting.opens, Type::BOOL),
            (tenant, Type::TEXT),
        ]
    }
}

/// Whether a posting was made by this call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PostedKind {
    /// Its entries are there if this transaction commits.
    Posted,
    /// The operation was posted before, with the same entries: nothing was written.
    Already,
}

/// A posting that is in the ledger.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Posted {
    /// The group's number.
    pub id: i64,
    /// Whether this call made it.
    pub kind: PostedKind,
    /// The balances that its accounts had after it, by name.
    pub balances: Vec<(String, i64)>,
}

impl Posted {
    pub(crate) fn read(row: &Row) -> Result<Self, Error> {
        let (accounts, balances): (Vec<String>, Vec<i64>) = (row.try_get(2)?, row.try_get(3)?);
        let kind = match row.try_get(1)? {
            "posted" => PostedKind::Posted,
            "already" => PostedKind::Already,
            other => return Err(Error::Schema(format!("once_ledger.post answered {other:?}"))),
        };
        Ok(Self { id: row.try_get(0)?, kind, balances: accounts.into_iter().zip(balances).collect() })
    }
}

/// Posts in the caller's own transaction.
///
/// # Errors
/// What the database says: P4090 to P4094, see docs/reference/errors.md. Nothing was posted.
pub async fn post(transaction: &impl GenericClient, tenant: &str, posting: &Posting) -> Result<Posted, Error> {
    let wire = posting.wire();
    let row = transaction.query_typed_one(sql::text(Call::LedgerPost, true), &wire.parameters(&tenant)).await?;
    Posted::read(&row)
}

/// The same on a connection that keeps its statements.
pub(crate) async fn post_on(
    connection: &crate::pool::Connection,
    tenant: &str,
    posting: &Posting,
) -> Result<Posted, Error> {
    let wire = posting.wire();
    Posted::read(&connection.call(Call::LedgerPost, &wire.parameters(&tenant)).await?)
}

/// Takes a posting back by a new one with the opposite entries: once, under an operation of its own.
///
/// # Errors
/// P4095 where the original is not there, or was taken back by another operation; P4093 where an overdraft forbids it.
pub async fn reverse(
    transaction: &impl GenericClient,
    tenant: &str,
    (source, operation): (&str, &str),
    (original_source, original_operation): (&str, &str),
    description: Option<&str>,
) -> Result<Posted, Error> {
    let parameters: [(&(dyn ToSql + Sync), Type); 6] = [
        (&source, Type::TEXT),
        (&operation, Type::TEXT),
        (&original_source, Type::TEXT),
        (&original_operation, Type::TEXT),
        (&description, Type::TEXT),
        (&tenant, Type::TEXT),
    ];
    Posted::read(&transaction.query_typed_one(sql::text(Call::LedgerReverse, true), &parameters).await?)
}

/// An account to open.
#[derive(Debug, Clone, Copy)]
pub struct Account<'a> {
    /// Its name, unique for a tenant.
    pub name: &'a str,
    /// Its currency, for ever.
    pub currency: &'a str,
    /// How far beyond zero it may go, on the other side than its own; none: any.
    pub overdraft: Option<i64>,
    /// Whether it grows by credits (what is owed, what was earned), not by debits (what is owned, what was spent).
    pub credit: bool,
}

/// Opens an account, or finds it there: its number.
///
/// # Errors
/// P4090 where it cannot be opened, P4092 where it is there with another currency or side.
pub async fn open_account(client: &impl GenericClient, tenant: &str, account: Account<'_>) -> Result<i64, Error> {
    let side = if account.credit { "credit" } else { "debit" };
    let parameters: [(&(dyn ToSql + Sync), Type); 5] = [
        (&account.name, Type::TEXT),
        (&account.currency, Type::TEXT),
        (&account.overdraft, Type::INT8),
        (&side, Type::TEXT),
        (&tenant, Type::TEXT),
    ];
    Ok(client.query_typed_one(sql::text(Call::LedgerOpen, true), &parameters).await?.try_get(0)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_travel_in_the_order_of_their_accounts() {
        let posting = Posting::new("s", "o").debit("z", 5, "EUR").credit("a", 5, "EUR");
        let wire = posting.wire();
        assert_eq!((wire.accounts, wire.amounts, wire.currencies), (vec!["a", "z"], vec![-5, 5], vec!["EUR"]));
        let posting = posting.debit("m", 1, "USD").credit("m", i64::MIN, "USD");
        let wire = posting.wire();
        assert_eq!(wire.currencies, ["EUR", "USD", "USD", "EUR"]);
        assert_eq!(wire.amounts, [-5, 1, i64::MIN, 5]);
    }
}
