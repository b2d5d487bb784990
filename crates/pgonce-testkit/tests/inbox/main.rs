//! Inbound messages: one effect a message, whatever is delivered, in whatever order, whoever dies.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on should stop, loudly")]

mod admit;
mod bad_input;
mod batch;
mod desk;
mod operate;
mod process;
mod stored;
mod versions;
mod worker;
