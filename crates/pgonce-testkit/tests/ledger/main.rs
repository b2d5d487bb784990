//! The ledger: sums are equal, whoever posts, however often, and whoever dies.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on should stop, loudly")]

mod batch;
mod book;
mod history;
mod install;
mod rules;
mod storm;
