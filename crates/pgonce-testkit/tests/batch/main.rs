//! Leased intents in batches: the set-based functions by plain SQL, and the crate's `Batcher` over them.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on should stop, loudly")]

mod batcher;
mod doubt;
mod equal;
mod faults;
mod inline;
mod resent;
mod rows;
mod sets;
