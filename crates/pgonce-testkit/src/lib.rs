//! What the tests stand on: a private PostgreSQL, a database for every test, faults that really happen, and
//! a checker that judges a recorded history by the protocol's invariants. Later suites reuse it.
//!
//! Nothing here sleeps to let things happen: [`eventually`] polls an observed condition, with a deadline.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on should stop, loudly")]

mod checks;
mod database;
mod faults;
pub mod history;
mod kafka;
mod nats;
pub mod programs;
mod rabbitmq;
mod redis;
mod server;

pub use checks::checksum;
pub use database::{TestDb, cluster, eventually, lock_waiters};
pub use faults::{Cut, FaultProxy};
pub use kafka::KafkaServer;
pub use nats::NatsServer;
pub use rabbitmq::RabbitServer;
pub use redis::RedisServer;
pub use server::{brokers_skipped, free_port};
