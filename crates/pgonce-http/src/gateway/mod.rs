//! A reverse proxy that gives any service safe retries: `pgonce gateway`.

#![allow(dead_code, reason = "what serves is not here yet")]

mod admission;
mod breaker;
pub mod config;
mod regions;
mod tls;

use tokio::sync::mpsc;

use config::{ConfigError, ConfigSource};
pub use tls::TlsError;

/// Why the gateway does not serve.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// It is told something that cannot be.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Certificates or keys do not fit.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// It cannot yet.
    #[error("this version has no gateway")]
    Absent,
}

/// Serves until `stop` resolves, then ends what runs. Each message of `reload` reads the configuration again.
///
/// # Errors
/// Where it cannot start. Once it serves, a configuration that is wrong is told and not used.
pub async fn run(
    database: pgonce::Settings,
    source: ConfigSource,
    stop: impl Future<Output = ()>,
    reload: mpsc::Receiver<()>,
) -> Result<(), Error> {
    source.load()?;
    drop((database, stop, reload));
    Err(Error::Absent)
}
