//! The gateway over real sockets: every rule of the draft, every way that a service can fail, and what
//! duplicates, tenants and bad input get.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on should stop, loudly")]

mod bad_input;
mod caches;
mod draft;
mod duplicates;
mod failures;
mod frames;
mod peers;
mod regions;
mod reload;
mod responses;
mod rig;
mod seal;
mod storms;
mod strange;
mod tenants;
mod unfinished;
mod wire;
