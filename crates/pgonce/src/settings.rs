//! Everything that a connection to the database can be told, with its defaults, in one place.

use std::str::FromStr;
use std::time::Duration;

use tokio_postgres_rustls::MakeRustlsConnect;

use crate::retry::RetryPolicy;
use crate::{Error, tls};

/// Settings of a [`crate::Once`]. `Settings::from_url` takes a PostgreSQL URL or key-value string; beside
/// what tokio-postgres knows it understands `sslmode=verify-ca|verify-full`, `sslrootcert=FILE` and
/// `pgbouncer=true`.
#[derive(Debug, Clone)]
pub struct Settings {
    pub(crate) url: String,
    /// Connections at most.
    pub pool_max: usize,
    /// How long a call waits for a connection before it gives up with `Error::Overloaded`.
    pub pool_wait: Duration,
    /// How long connecting may take.
    pub connect_timeout: Duration,
    /// `statement_timeout` of each connection.
    pub statement_timeout: Duration,
    /// `lock_timeout` of each connection. Waiting for a rival of the same intent has its own limit, `wait_max`.
    pub lock_timeout: Duration,
    /// `idle_in_transaction_session_timeout`: how long a transaction of a client that vanished may hold its claim.
    pub idle_in_transaction_timeout: Duration,
    /// How `run` tries again.
    pub retry: RetryPolicy,
    /// A pooler in transaction mode is between: no named prepared statements, no session settings.
    pub pgbouncer: bool,
    /// Whether the straight path goes without function calls (`sql/direct/`), which needs the role
    /// `once_direct`. None: where the login may.
    pub direct: Option<bool>,
    /// How often counts of answers are flushed into the database (for the suppression rate); zero: never.
    pub tally_every: Duration,
    /// What operators see as the claimer of a leased intent.
    pub claimed_by: Option<String>,
}

impl Settings {
    /// Settings for a PostgreSQL URL, everything else at its default.
    #[must_use]
    pub fn from_url(url: &str) -> Self {
        Self {
            url: url.to_owned(),
            pool_max: 16,
            pool_wait: Duration::from_secs(5),
            connect_timeout: Duration::from_secs(10),
            statement_timeout: Duration::from_secs(60),
            lock_timeout: Duration::from_secs(30),
            idle_in_transaction_timeout: Duration::from_secs(60),
            retry: RetryPolicy::default(),
            pgbouncer: false,
            direct: None,
            tally_every: Duration::from_secs(10),
            claimed_by: None,
        }
    }

    /// What the driver is told, how TLS is done, and whether a pooler is between.
    pub(crate) fn resolve(&self) -> Result<(tokio_postgres::Config, MakeRustlsConnect, bool), Error> {
        let Extras { plain, verify, root_file, pgbouncer } = Extras::split(&self.url)?;
        let pgbouncer = pgbouncer || self.pgbouncer;
        let mut config = tokio_postgres::Config::from_str(&plain)
            // The driver's message may quote the string, and the string may hold a password.
            .map_err(|_| {
                Error::Invalid(
                    "the database URL cannot be read; expected postgres://user:password@host:port/database".into(),
                )
            })?;
        if verify {
            config.ssl_mode(tokio_postgres::config::SslMode::Require);
        }
        config.connect_timeout(self.connect_timeout);
        if config.get_application_name().is_none() {
            config.application_name("pgonce");
        }
        if !pgbouncer {
            let ours = format!(
                "-c statement_timeout={} -c lock_timeout={} -c idle_in_transaction_session_timeout={}",
                self.statement_timeout.as_millis(),
                self.lock_timeout.as_millis(),
                self.idle_in_transaction_timeout.as_millis()
            );
            let all = match config.get_options() {
                Some(theirs) => format!("{ours} {theirs}"),
                None => ours,
            };
            config.options(all);
        }
        let verify = verify || config.get_ssl_mode() == tokio_postgres::config::SslMode::Require;
        Ok((config, tls::connector(verify, root_file.as_deref())?, pgbouncer))
    }
}

/// The parameters that tokio-postgres does not know, taken out of the URL.
struct Extras {
    plain: String,
    verify: bool,
    root_file: Option<String>,
    pgbouncer: bool,
}

impl Extras {
    fn split(url: &str) -> Result<Self, Error> {
        let mut extras = Self { plain: url.to_owned(), verify: false, root_file: None, pgbouncer: false };
        let Some((base, query)) = url.split_once('?') else { return Ok(extras) };
        let mut kept = Vec::new();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            match pair.split_once('=').unwrap_or((pair, "")) {
                ("sslmode", "verify-ca" | "verify-full") => extras.verify = true,
                ("sslrootcert", file) => extras.root_file = Some(percent_decoded(file)?),
                ("pgbouncer", value) => extras.pgbouncer = value == "true",
                _ => kept.push(pair),
            }
        }
        extras.plain = if kept.is_empty() { base.to_owned() } else { format!("{base}?{}", kept.join("&")) };
        Ok(extras)
    }
}

fn percent_decoded(text: &str) -> Result<String, Error> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let digits: Vec<u8> = rest.by_ref().take(2).collect();
        let value = std::str::from_utf8(&digits).ok().and_then(|digits| u8::from_str_radix(digits, 16).ok());
        bytes.push(value.ok_or_else(|| Error::Invalid("bad % escape in the database URL".into()))?);
    }
    String::from_utf8(bytes).map_err(|_| Error::Invalid("the database URL is not UTF-8".into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extra_parameters_are_taken_out() {
        let extras = Extras::split(
            "postgres://h/db?sslmode=verify-full&sslrootcert=%2Fca.pem&pgbouncer=true&application_name=x",
        );
        let Ok(extras) = extras else { panic!("not parsed") };
        assert_eq!(extras.plain, "postgres://h/db?application_name=x");
        assert!(extras.verify && extras.pgbouncer);
        assert_eq!(extras.root_file.as_deref(), Some("/ca.pem"));
    }

    #[test]
    fn a_bad_url_is_not_quoted() {
        let resolved = Settings::from_url("postgres://me:secret@[bad").resolve();
        assert!(matches!(resolved, Err(error) if !error.to_string().contains("secret")));
    }
}
