//! Imports: every row once, and a bad one alone.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on should stop, loudly")]

mod bad_input;
mod bad_rows;
mod conflicts;
mod desk;
mod formats;
mod job;
mod rivals;
