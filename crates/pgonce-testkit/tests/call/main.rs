//! Calls of providers, in SQL: the state machine, the fence, notices in any order, limits, and who may do what.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on should stop, loudly")]

mod bad_input;
mod desk;
mod limits;
mod notices;
mod requests;
mod settled;
mod states;
