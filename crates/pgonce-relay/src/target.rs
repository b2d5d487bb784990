//! A sink or a source as the command line names it: a URL, whose query holds our own settings beside the broker's.

use std::time::Duration;

use url::Url;

/// The URL of a sink or a source, taken apart: the settings that are ours, and the URL without them.
#[derive(Clone, PartialEq, Eq)]
pub struct Target {
    /// The scheme says which broker.
    pub scheme: String,
    /// Without our settings, credentials and all: for the broker's client.
    pub url: String,
    /// Without credentials and query: for people, and the default of the name.
    pub shown: String,
    settings: Vec<(String, String)>,
}

/// What is wrong with it. Never repeats the URL: it may hold a password.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct TargetError(pub String);

impl std::fmt::Debug for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Target").field("shown", &self.shown).finish_non_exhaustive()
    }
}

/// What every sink and source understands.
const COMMON: &[&str] = &["name", "topic", "type", "tenant", "envelope", "timeout"];

impl Target {
    /// Reads a URL; `own` are the settings of this broker beside the common ones. A setting that nobody knows is
    /// left to the broker's client where the scheme is postgres, and an error elsewhere.
    ///
    /// # Errors
    /// What cannot be read.
    pub fn parse(text: &str, own: &[&str]) -> Result<Self, TargetError> {
        let mut url = Url::parse(text).map_err(|error| TargetError(format!("the URL cannot be read: {error}")))?;
        let scheme = url.scheme().to_owned();
        let mut settings = Vec::new();
        let mut others = Vec::new();
        for (name, value) in url.query_pairs() {
            if COMMON.contains(&&*name) || own.contains(&&*name) {
                settings.push((name.into_owned(), value.into_owned()));
            } else if matches!(scheme.as_str(), "postgres" | "postgresql" | "http" | "https") {
                others.push((name.into_owned(), value.into_owned()));
            } else {
                return Err(TargetError(format!("{scheme} does not know the setting {name:?}")));
            }
        }
        url.set_query(None);
        let mut shown = url.clone();
        let _ = shown.set_username("");
        let _ = shown.set_password(None);
        if !others.is_empty() {
            url.query_pairs_mut().extend_pairs(&others);
        }
        Ok(Self { scheme, url: url.to_string(), shown: shown.to_string(), settings })
    }

    /// One of our settings, the last where it is given twice.
    #[must_use]
    pub fn setting(&self, name: &str) -> Option<&str> {
        self.settings.iter().rev().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// The name under which its progress is kept.
    #[must_use]
    pub fn name(&self) -> &str {
        self.setting("name").unwrap_or(&self.shown)
    }

    /// How long to wait for an answer.
    ///
    /// # Errors
    /// Where it is not a number of seconds from 1 to 600.
    pub fn timeout(&self) -> Result<Duration, TargetError> {
        let Some(text) = self.setting("timeout") else { return Ok(Duration::from_secs(10)) };
        match text.strip_suffix('s').unwrap_or(text).parse::<u64>() {
            Ok(seconds) if (1..=600).contains(&seconds) => Ok(Duration::from_secs(seconds)),
            _ => Err(TargetError("timeout is a number of seconds, as 10s, up to 600s".into())),
        }
    }

    /// The form in which messages are written.
    ///
    /// # Errors
    /// Where there is no such form.
    pub fn envelope(&self) -> Result<crate::Envelope, TargetError> {
        match self.setting("envelope") {
            None | Some("binary") => Ok(crate::Envelope::Binary),
            Some("structured") => Ok(crate::Envelope::Structured),
            Some("plain") => Ok(crate::Envelope::Plain),
            Some(_) => Err(TargetError("envelope is binary, structured or plain".into())),
        }
    }
}
