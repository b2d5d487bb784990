//! A private local PostgreSQL cluster.
//!
//! `pgonce up` keeps one in a directory of its own; the testkit starts
//! throw-away ones. Both need the same things: server binaries wherever this
//! machine has them ([`Binaries`]), a server that runs as an unprivileged user
//! even when root asks for it, and a start that works again after everything
//! was killed with SIGKILL ([`Cluster`]).
//!
//! Everything here blocks; asynchronous callers use `spawn_blocking`.
//!
//! ```no_run
//! use pgonce_cluster::{Binaries, Cluster, ClusterOptions, StopMode};
//!
//! # fn main() -> Result<(), pgonce_cluster::Error> {
//! let binaries = Binaries::find_or_fetch("/var/cache/pgonce".as_ref(), &mut |step| {
//!     eprintln!("{step}");
//! })?;
//! let mut cluster = Cluster::start(&binaries, ClusterOptions::new("/var/lib/pgonce"))?;
//! eprintln!("listening: {}", cluster.url("postgres"));
//! cluster.stop(StopMode::Fast)?;
//! # Ok(())
//! # }
//! ```
//!
//! # What lies in the directory of a cluster
//!
//! | entry | what |
//! |---|---|
//! | `pgonce.lock` | held while a process owns the cluster; marks the directory as ours |
//! | `pgdata/` | PostgreSQL's data directory, owned by the account that runs the server |
//! | `password` | the superuser's password, mode 0600; absent when connections are trusted |
//! | `port` | the port of the last start, used again by the next |
//! | `server.log` | what the server says; the previous one is `server.log.1` |
//! | `run/` | the Unix socket, when the path is short enough for one |

#[cfg(not(unix))]
compile_error!("pgonce-cluster runs PostgreSQL with Unix accounts, sockets and signals");

mod account;
mod binaries;
mod cluster;
mod error;
mod fetch;
mod home;
mod postmaster;
mod process;
mod watchdog;

pub use binaries::{Binaries, Version};
pub use cluster::{Cluster, ClusterOptions, StopMode};
pub use error::Error;
pub use home::Auth;
