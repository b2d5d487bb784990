//! `pgonce.toml`: optional, and every key in it too. What the command line says wins.

use std::path::{Path, PathBuf};

use pgonce_http::gateway::config::ConfigError;
use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::WrongUse;

const DEFAULT_FILE: &str = "pgonce.toml";

/// The whole file.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// As `--database-url`.
    pub database_url: Option<String>,
    /// For `pgonce up`.
    #[serde(default)]
    pub up: Up,
    /// For `pgonce gateway`, which reads the file itself, and again on SIGHUP: its mistakes are told by whoever
    /// knows its keys.
    #[allow(dead_code, reason = "it only has to be allowed here")]
    pub gateway: Option<IgnoredAny>,
    /// The file that this was read from, if there is one.
    #[serde(skip)]
    pub path: Option<PathBuf>,
}

/// The section `[up]`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Up {
    /// As `--data-dir`.
    pub data_dir: Option<PathBuf>,
    /// As `--port`.
    pub port: Option<u16>,
}

/// The file that was named, which must be there, or the usual one, which may be.
pub fn load(named: Option<&Path>) -> Result<Config, WrongUse> {
    let path = named.unwrap_or(Path::new(DEFAULT_FILE));
    match std::fs::read_to_string(path) {
        Ok(text) => {
            let told = |error| ConfigError { path: Some(path.into()), ..error };
            let config = parse(&text).map_err(|error| WrongUse(told(error).to_string()))?;
            Ok(Config { path: Some(path.into()), ..config })
        }
        Err(error) if named.is_none() && error.kind() == std::io::ErrorKind::NotFound => Ok(Config::default()),
        Err(error) => Err(WrongUse(format!("{} cannot be read: {error}", path.display()))),
    }
}

/// The error has the line and the reason, not the line's text: it may hold a password.
fn parse(text: &str) -> Result<Config, ConfigError> {
    toml::from_str(text).map_err(|error| ConfigError::from_toml(text, &error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_good_file_is_read() {
        let config = parse("database_url = \"postgres://h/d\"\n[up]\nport = 5499\n").unwrap();
        assert_eq!(config.database_url.as_deref(), Some("postgres://h/d"));
        assert_eq!(config.up.port, Some(5499));
    }

    #[test]
    fn a_mistake_is_named_by_line_without_its_text() {
        let error = parse("[up]\nprot = 1\n").unwrap_err();
        assert_eq!(error.line, Some(2));
        assert!(error.reason.contains("prot"), "{error}");
        for text in ["\ndatabase_url = \"postgres://me:secret@h/d\n", "[up]\nport = \"secret\"\n"] {
            let error = parse(text).unwrap_err();
            assert_eq!(error.line, Some(2));
            assert!(!error.reason.contains("secret"), "{error}");
        }
    }

    #[test]
    fn the_gateways_section_is_the_gateways() {
        assert!(parse("[gateway]\nbogus = 1\n[[gateway.route]]\npath = 1\n").unwrap().gateway.is_some());
        assert!(parse("[getaway]\n").is_err());
    }
}
