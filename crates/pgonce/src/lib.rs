//! One durable effect per intent, in your own PostgreSQL.
//!
//! ```no_run
//! # use pgonce::{Failure, Once, Outcome};
//! # async fn example() -> Result<(), pgonce::Error> {
//! let once = Once::connect("postgres://localhost/shop").await?;
//! let request = serde_json::json!({"sku": "abc", "quantity": 2});
//! let outcome = once
//!     .intent("create_order", "checkout-3c51")
//!     .payload(&request) // canonical fingerprint
//!     .run(async |tx| {
//!         // the one transaction
//!         let id = tx.stable_uuid("order");
//!         tx.execute("INSERT INTO orders (id, request) VALUES ($1, $2)", &[&id, &request]).await?;
//!         Ok(id)
//!     })
//!     .await?;
//! match outcome {
//!     Outcome::Executed(id) => println!("made {id}"),
//!     Outcome::Replayed(id) => println!("was made before: {id}"),
//! }
//! # Ok(()) }
//! ```
//!
//! [`Intent::run`] is the atomic mode; [`Intent::run_leased`] is for work outside the database; both have a form
//! for effects that decide about their stored answer themselves ([`Intent::run_answer`]). The pieces for callers who own the transaction are [`claim`] and the methods of [`Owned`]. The rules are SQL
//! functions in the schema `once`: this crate calls them.

mod batch;
mod call;
mod canonical;
mod claim;
mod direct;
mod error;
mod fingerprint;
mod flight;
pub mod import;
mod inbox;
mod intent;
mod leased;
pub mod ledger;
pub mod migrate;
mod observe;
mod once;
mod outbox;
mod outcome;
mod pool;
mod queue;
mod retry;
mod run;
mod settings;
mod sql;
pub mod sqlstate;
#[cfg(feature = "sqlx")]
pub mod sqlx;
mod tls;
mod tx;

pub use batch::{BatchSettings, Batcher, Kept, Observed, Recorded};
pub use call::{Call, CallVerdict, CallWorker, DoubtfulCall, Heard, OutgoingCall, Provider, Route, call};
pub use claim::{Answer, Claim, ClaimOptions, IntentName, Mode, Owned, OwnedKind, claim};
pub use error::{Error, Failure};
pub use fingerprint::{Fingerprint, fingerprint, fingerprint_bytes, key_hash, stable_uuid};
pub use inbox::{
    Advance, Arrival, Handled, Inbox, InboxWorker, Incoming, MessageTx, Processed, StoredMessage, Verdict,
};
pub use intent::Intent;
pub use leased::Lease;
pub use once::{Once, PoolStatus};
pub use outbox::{Event, Signals, emit, emit_batch};
pub use outcome::{Answered, Decision, Outcome};
pub use queue::{Job, JobTx, Looked, NewJob, Queue, Unique, Worker, enqueue};
pub use retry::RetryPolicy;
pub use settings::Settings;
pub use tokio_postgres::IsolationLevel;
pub use tx::Tx;
