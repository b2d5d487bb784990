//! The crate's `run` and `run_leased`: outcomes, decisions, failures, retries, cancellation, small pools.
//! All of it twice: through the functions, and through the direct statements.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests stop loudly")]
#![allow(clippy::duplicate_mod, reason = "one suite, two doors")]

#[path = "decisions.rs"]
mod decisions_direct;
#[path = "decisions.rs"]
mod decisions_functions;
#[path = "suite.rs"]
mod direct;
mod flights;
#[path = "suite.rs"]
mod functions;
mod tls;
