//! The tower layer over real sockets and a real PostgreSQL.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests stop loudly")]

mod client;
mod duplicates;
mod example;
mod faults;
mod leased;
mod outcomes;
mod plain;
mod refusals;
mod shop;
