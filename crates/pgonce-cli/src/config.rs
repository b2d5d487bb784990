//! `pgonce.toml`: optional, and every key in it too. What the command line says wins.

use std::path::{Path, PathBuf};

use serde::Deserialize;

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
            parse(&text).map_err(|(line, reason)| WrongUse(format!("{}, line {line}: {reason}", path.display())))
        }
        Err(error) if named.is_none() && error.kind() == std::io::ErrorKind::NotFound => Ok(Config::default()),
        Err(error) => Err(WrongUse(format!("{} cannot be read: {error}", path.display()))),
    }
}

/// The line and the reason, not the line's text: it may hold a password.
fn parse(text: &str) -> Result<Config, (usize, String)> {
    toml::from_str(text).map_err(|error| {
        let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
        (before.matches('\n').count() + 1, error.message().trim().replace('\n', " "))
    })
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
        let (line, reason) = parse("[up]\nprot = 1\n").unwrap_err();
        assert_eq!(line, 2);
        assert!(reason.contains("prot"), "{reason}");
        let (line, reason) = parse("\ndatabase_url = \"postgres://me:secret@h/d\n").unwrap_err();
        assert_eq!(line, 2);
        assert!(!reason.contains("secret"), "{reason}");
    }
}
