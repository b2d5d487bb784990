//! Jobs: each effect once, none lost, a key's order kept, whoever dies.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on should stop, loudly")]

mod bad_input;
mod desk;
mod fences;
mod hints;
mod keys;
mod kills;
mod leases;
mod life;
mod limits;
mod races;
mod schedules;
mod unique;
mod worker;
