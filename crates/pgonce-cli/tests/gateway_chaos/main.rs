//! Everything around the real `pgonce gateway` is killed, stopped and lied to: gateways, the service behind them,
//! PostgreSQL, its backends, Redis. Clients come again with the same key until they are told something definite.
//! What each attempt was told is recorded, and held against what the database says in the end.
//!
//! The service knows nothing of pgonce: its effect is in a transaction of its own, never in one with the outcome.

#![cfg(feature = "failpoints")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests stop loudly")]

mod book;
mod http;
mod killed;
mod rig;
mod service;
mod storms;
