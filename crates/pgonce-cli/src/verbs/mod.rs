//! One module a verb.

pub mod archive;
pub mod calls;
pub mod consume;
pub mod demo;
pub mod doctor;
pub mod gateway;
pub mod import;
pub mod imports;
pub mod inbox;
pub mod intents;
pub mod ledger;
pub mod migrate;
pub mod outbox;
pub mod purge;
pub mod queue;
pub mod reconcile;
pub mod relay;
pub mod shop;
pub mod up;
pub mod work;
