//! Calls of a provider that is a process of its own, with books of its own: it times out after charging, charges late,
//! answers twice, lies, throttles, breaks off and is killed; so are the senders. In the end its books equal ours.

#![cfg(feature = "failpoints")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests stop loudly")]

mod chaos;
#[path = "../common/mod.rs"]
mod common;
mod killed;
mod provider;
mod rig;
mod verbs;
