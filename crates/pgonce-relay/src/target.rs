//! A sink or a source as the command line names it: a URL, whose query holds our own settings beside the broker's.

use std::ops::RangeInclusive;
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
    /// All hosts, with their ports where given: `kafka://one:9092,two:9092`. The URLs above name the first only.
    pub hosts: Vec<String>,
    /// User and password as the URL spells them, with the `@`.
    login: String,
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
        let (text, login, hosts) = take_hosts(text);
        let mut url = Url::parse(&text).map_err(|error| TargetError(format!("the URL cannot be read: {error}")))?;
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
        Ok(Self { scheme, url: url.to_string(), shown: shown.to_string(), hosts, login, settings })
    }

    /// The URL of one of its hosts, with the credentials and without a path.
    #[must_use]
    pub fn with_host(&self, host: &str) -> String {
        format!("{}://{}{host}", self.scheme, self.login)
    }

    /// User and password, decoded; none where the URL names no user.
    #[must_use]
    pub fn login(&self) -> Option<(String, String)> {
        let url = Url::parse(&self.url).ok().filter(|url| !url.username().is_empty())?;
        let decoded = |text: &str| percent_encoding::percent_decode_str(text).decode_utf8_lossy().into_owned();
        Some((decoded(url.username()), decoded(url.password().unwrap_or_default())))
    }

    /// The path, without slashes around it.
    #[must_use]
    pub fn path(&self) -> String {
        let url = Url::parse(&self.url).ok();
        let path = url.as_ref().map(|url| url.path().trim_matches('/')).unwrap_or_default();
        percent_encoding::percent_decode_str(path).decode_utf8_lossy().into_owned()
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
    /// Where it is not from 1 to 600 seconds.
    pub fn timeout(&self) -> Result<Duration, TargetError> {
        let limits = Duration::from_secs(1)..=Duration::from_secs(600);
        Ok(self.duration("timeout", limits)?.unwrap_or(Duration::from_secs(10)))
    }

    /// A setting that is a duration: `500ms`, `30s`, `5m`, `24h`, `30d`; a bare number is of seconds.
    ///
    /// # Errors
    /// Where it is none, or out of its limits.
    pub fn duration(&self, name: &str, limits: RangeInclusive<Duration>) -> Result<Option<Duration>, TargetError> {
        let Some(text) = self.setting(name) else { return Ok(None) };
        match read_duration(text) {
            Some(duration) if limits.contains(&duration) => Ok(Some(duration)),
            _ => Err(TargetError(format!(
                "{name} is a duration as 10s, from {:?} to {:?}",
                limits.start(),
                limits.end()
            ))),
        }
    }

    /// A setting that is a number.
    ///
    /// # Errors
    /// Where it is none, or out of its limits.
    pub fn number(&self, name: &str, limits: RangeInclusive<u64>) -> Result<Option<u64>, TargetError> {
        let Some(text) = self.setting(name) else { return Ok(None) };
        match text.parse() {
            Ok(number) if limits.contains(&number) => Ok(Some(number)),
            _ => Err(TargetError(format!("{name} is a number from {} to {}", limits.start(), limits.end()))),
        }
    }

    /// A setting that is `true` or `false`, and false where it is not given.
    ///
    /// # Errors
    /// Where it is neither.
    pub fn flag(&self, name: &str) -> Result<bool, TargetError> {
        match self.setting(name) {
            None | Some("false") => Ok(false),
            Some("true") => Ok(true),
            Some(_) => Err(TargetError(format!("{name} is true or false"))),
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

/// Takes a URL apart that may name several hosts, which the crate `url` does not read: the URL with the first of
/// them, what stands before them, and all of them.
fn take_hosts(text: &str) -> (String, String, Vec<String>) {
    let Some((scheme, rest)) = text.split_once("://") else { return (text.to_owned(), String::new(), Vec::new()) };
    let (authority, tail) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    let (login, hosts) = authority.split_at(authority.rfind('@').map_or(0, |at| at + 1));
    let hosts: Vec<String> = hosts.split(',').filter(|host| !host.is_empty()).map(str::to_owned).collect();
    let first = hosts.first().map(String::as_str).unwrap_or_default();
    (format!("{scheme}://{login}{first}{tail}"), login.to_owned(), hosts)
}

fn read_duration(text: &str) -> Option<Duration> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().ok()?;
    let seconds = match unit {
        "ms" => return Some(Duration::from_millis(number)),
        "" | "s" => 1,
        "m" => 60,
        "h" => 3_600,
        "d" => 86_400,
        _ => return None,
    };
    number.checked_mul(seconds).map(Duration::from_secs)
}

#[cfg(test)]
#[allow(clippy::expect_used, reason = "a test that cannot go on should stop, loudly")]
mod tests {
    use super::*;

    fn parse(text: &str) -> Target {
        Target::parse(text, &["dedup", "maxlen", "tls"]).expect(text)
    }

    #[test]
    fn our_settings_are_taken_out_and_the_rest_is_left() {
        let target = parse("https://user:p%40ss@host/in?token=a%26b&timeout=5s&envelope=plain&timeout=7s");
        assert_eq!(target.url, "https://user:p%40ss@host/in?token=a%26b");
        assert_eq!(target.shown, "https://host/in");
        assert_eq!(target.timeout(), Ok(Duration::from_secs(7)));
        assert_eq!(target.envelope(), Ok(crate::Envelope::Plain));
        assert_eq!(target.login(), Some(("user".into(), "p@ss".into())));
        assert_eq!(target.name(), "https://host/in");
        assert_eq!(parse("nats://host?name=audit").name(), "audit");
    }

    #[test]
    fn several_hosts_are_read() {
        let target = parse("kafka://u:p@one:9092,two,[::1]:9094/x?tls=true");
        assert_eq!(target.hosts, ["one:9092", "two", "[::1]:9094"]);
        assert_eq!(target.with_host("two"), "kafka://u:p@two");
        assert_eq!(target.shown, "kafka://one:9092/x");
        assert_eq!(target.path(), "x");
        assert_eq!(target.flag("tls"), Ok(true));
        assert_eq!(parse("amqp://host/%2F").path(), "/");
        assert_eq!(parse("nats://host").login(), None);
    }

    #[test]
    fn nothing_shows_a_password() {
        let target = parse("redis://user:secret@host/0");
        assert!(!format!("{target:?} {}", target.name()).contains("secret"));
        for wrong in ["redis://user:secret@host:port", "redis://user:secret@host?maxlne=1", "redis://user:secret@"] {
            if let Err(error) = Target::parse(wrong, &[]) {
                assert!(!error.to_string().contains("secret"), "{error}");
            }
        }
        assert!(Target::parse("redis://host?maxlne=1", &["maxlen"]).is_err(), "a setting that nobody knows");
    }

    #[test]
    fn values_have_limits() {
        let hour = Duration::from_secs(3_600);
        for (text, read) in [("1500ms", Some(1_500)), ("2", Some(2_000)), ("1h", Some(3_600_000)), ("2h", None)] {
            let target = parse(&format!("redis://host?dedup={text}"));
            assert_eq!(
                target.duration("dedup", Duration::ZERO..=hour).ok().flatten(),
                read.map(Duration::from_millis),
                "{text}"
            );
        }
        for wrong in ["", "s", "-1s", "1.5s", "1w", "99999999999999999999s", "18446744073709551615d"] {
            assert!(parse(&format!("redis://host?dedup={wrong}")).duration("dedup", Duration::ZERO..=hour).is_err());
        }
        assert_eq!(parse("redis://host?maxlen=10").number("maxlen", 1..=10), Ok(Some(10)));
        assert!(parse("redis://host?maxlen=11").number("maxlen", 1..=10).is_err());
        assert!(parse("redis://host?timeout=0s").timeout().is_err());
        assert!(parse("redis://host?tls=yes").flag("tls").is_err());
        assert!(parse("redis://host?envelope=xml").envelope().is_err());
    }
}
