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

/// The parameters that tokio-postgres does not know, taken out of the URL or the key-value string.
struct Extras {
    plain: String,
    verify: bool,
    root_file: Option<String>,
    pgbouncer: bool,
}

impl Extras {
    fn split(url: &str) -> Result<Self, Error> {
        let mut extras = Self { plain: url.to_owned(), verify: false, root_file: None, pgbouncer: false };
        let mut kept = Vec::new();
        if !url.starts_with("postgres://") && !url.starts_with("postgresql://") {
            for pair in pairs(url) {
                if !extras.take(pair, |written| Ok(unquoted(written)))? {
                    kept.push(pair);
                }
            }
            extras.plain = kept.join(" ");
            return Ok(extras);
        }
        let Some((base, query)) = url.split_once('?') else { return Ok(extras) };
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            if !extras.take(pair, percent_decoded)? {
                kept.push(pair);
            }
        }
        extras.plain = if kept.is_empty() { base.to_owned() } else { format!("{base}?{}", kept.join("&")) };
        Ok(extras)
    }

    /// Takes a parameter, if it is one of them.
    fn take(&mut self, pair: &str, read: impl Fn(&str) -> Result<String, Error>) -> Result<bool, Error> {
        let (name, written) = pair.split_once('=').unwrap_or((pair, ""));
        let name = name.trim_end();
        if !matches!(name, "sslmode" | "sslrootcert" | "pgbouncer") {
            return Ok(false);
        }
        match (name, read(written.trim_start())?) {
            ("sslmode", mode) if mode == "verify-ca" || mode == "verify-full" => self.verify = true,
            ("sslmode", _) => return Ok(false),
            ("sslrootcert", file) => self.root_file = Some(file),
            (_, value) => self.pgbouncer = value == "true",
        }
        Ok(true)
    }
}

/// The parameters of a key-value string, each as it is written: `name = value`, or `name='a value'` with `\` before what is
/// meant as it is. What is not of that form comes out as it is, for the driver to refuse.
fn pairs(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text.trim_start();
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let value = rest.find('=').map_or(rest.len(), |at| {
            let after = &rest[at + 1..];
            at + 1 + after.len() - after.trim_start().len()
        });
        let (mut quoted, mut escaped) = (false, false);
        let end = rest[value..].find(|character: char| {
            if escaped {
                escaped = false;
                return false;
            }
            match character {
                '\\' => escaped = true,
                '\'' => quoted = !quoted,
                other => return other.is_whitespace() && !quoted,
            }
            false
        });
        let (pair, after) = rest.split_at(end.map_or(rest.len(), |end| value + end));
        rest = after.trim_start();
        Some(pair)
    })
}

/// A value of a key-value string, as it is meant.
fn unquoted(written: &str) -> String {
    let mut meant = String::with_capacity(written.len());
    let mut characters = written.chars();
    while let Some(character) = characters.next() {
        match character {
            '\\' => meant.extend(characters.next()),
            '\'' => {}
            other => meant.push(other),
        }
    }
    meant
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
    fn key_value_strings_are_read_as_well() {
        let extras = Extras::split(
            r"host=/run/a\ b  sslmode = verify-ca password='it''s = \' x' sslrootcert='/my ca.pem' pgbouncer=true dbname=d",
        );
        let Ok(extras) = extras else { panic!("not parsed") };
        assert_eq!(extras.plain, r"host=/run/a\ b password='it''s = \' x' dbname=d");
        assert!(extras.verify && extras.pgbouncer);
        assert_eq!(extras.root_file.as_deref(), Some("/my ca.pem"));
        for kept in ["", "host=h sslmode=prefer", "host", "host= 'open"] {
            let Ok(extras) = Extras::split(kept) else { panic!("{kept} not parsed") };
            assert_eq!((extras.plain.as_str(), extras.verify, extras.pgbouncer), (kept, false, false));
        }
    }

    #[test]
    fn a_bad_url_is_not_quoted() {
        let resolved = Settings::from_url("postgres://me:secret@[bad").resolve();
        assert!(matches!(resolved, Err(error) if !error.to_string().contains("secret")));
    }
}
