//! From one service's row to another's, through a real broker, by the real binary: killed, stopped and cut off at each step.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

#[path = "../common/mod.rs"]
mod common;
mod end_to_end;
mod ends;
mod killed;
mod rig;
mod webhooks;
