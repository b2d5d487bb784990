//! The small values of the file: durations, sizes, names, secrets. Each checks itself while it is read, which is
//! how a mistake gets its line. No message repeats what the file says: it may be a password in the wrong place.

use std::fmt;
use std::marker::PhantomData;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use http::{HeaderName, Method, Uri};
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, Visitor};

/// A value that is written as a text.
pub(super) trait FromText: Sized {
    /// What to write, for whoever wrote something else.
    const EXPECTED: &'static str;

    /// None: not that.
    fn from_text(text: &str) -> Option<Self>;
}

/// A [`FromText`] in the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Text<T>(pub T);

impl<'de, T: FromText> Deserialize<'de> for Text<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct V<T>(PhantomData<T>);
        impl<T: FromText> Visitor<'_> for V<T> {
            type Value = Text<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(T::EXPECTED)
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Text<T>, E> {
                T::from_text(text).map(Text).ok_or_else(|| E::custom(format!("expected {}", T::EXPECTED)))
            }
        }
        deserializer.deserialize_str(V(PhantomData))
    }
}

/// A text read as `T`, with the same message as in the file: for the command line.
pub(super) fn read<T: FromText>(text: &str) -> Result<T, String> {
    T::from_text(text).ok_or_else(|| format!("expected {}", T::EXPECTED))
}

impl FromText for Duration {
    const EXPECTED: &'static str = "a duration, as 500ms, 30s, 5m, 24h or 30d";

    fn from_text(text: &str) -> Option<Self> {
        let split = text.find(|c: char| !c.is_ascii_digit())?;
        let (number, unit) = text.split_at(split);
        let millis = match unit {
            "ms" => 1,
            "s" => 1_000,
            "m" => 60_000,
            "h" => 3_600_000,
            "d" => 86_400_000,
            _ => return None,
        };
        let millis = number.parse::<u64>().ok()?.checked_mul(millis)?;
        // What PostgreSQL counts as 100 years, and a policy may have: longer ones are mistakes.
        (1..=36_000 * 86_400_000).contains(&millis).then(|| Self::from_millis(millis))
    }
}

/// How long something is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// So long.
    For(Duration),
    /// For ever.
    Permanent,
    /// Not at all.
    None,
}

impl Keep {
    /// As `once.define_scope` reads it.
    pub(super) fn to_sql(self) -> String {
        match self {
            Self::For(duration) => format!("{}ms", duration.as_millis()),
            Self::Permanent => "permanent".into(),
            Self::None => "none".into(),
        }
    }
}

impl FromText for Keep {
    const EXPECTED: &'static str = "a duration, as 24h or 30d, or permanent, or none";

    fn from_text(text: &str) -> Option<Self> {
        match text {
            "permanent" => Some(Self::Permanent),
            "none" => Some(Self::None),
            duration => Duration::from_text(duration).map(Self::For),
        }
    }
}

impl FromText for SocketAddr {
    const EXPECTED: &'static str = "an address and a port, as 127.0.0.1:8080 or [::]:8080";

    fn from_text(text: &str) -> Option<Self> {
        text.parse().ok()
    }
}

impl FromText for HeaderName {
    const EXPECTED: &'static str = "the name of a header";

    fn from_text(text: &str) -> Option<Self> {
        Self::from_bytes(text.as_bytes()).ok()
    }
}

impl FromText for Method {
    const EXPECTED: &'static str = "a method in capitals, as POST";

    fn from_text(text: &str) -> Option<Self> {
        // Methods are case-sensitive: "post" would be another one, which nobody sends.
        let is_method = !text.is_empty() && text.bytes().all(|c| c.is_ascii_uppercase() || c == b'-');
        is_method.then(|| Self::from_bytes(text.as_bytes()).ok()).flatten()
    }
}

/// Where a service is: scheme, host and port, nothing more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Origin(pub Uri);

impl FromText for Origin {
    const EXPECTED: &'static str =
        "a URL of scheme, host and port alone, as http://127.0.0.1:3000 or https://orders.internal";

    fn from_text(text: &str) -> Option<Self> {
        let uri: Uri = text.parse().ok()?;
        let authority = uri.authority()?;
        let has_host = !authority.host().is_empty() && !authority.as_str().contains('@');
        // `http` reads "host:" and "host:99999" as hosts without a port.
        let port = authority.as_str().get(authority.host().len()..)?;
        let has_good_port = port.is_empty() || authority.port_u16().is_some_and(|port| port > 0);
        let is_alone = matches!(uri.path(), "" | "/") && uri.query().is_none() && !text.contains('#');
        (matches!(uri.scheme_str(), Some("http" | "https")) && has_host && has_good_port && is_alone)
            .then_some(Self(uri))
    }
}

/// The URL of a Redis or Valkey; it may hold a password, and is never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct RedisUrl(String);

impl RedisUrl {
    /// The whole of it, password and all.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for RedisUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RedisUrl(…)")
    }
}

impl std::str::FromStr for RedisUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        read(text)
    }
}

impl FromText for RedisUrl {
    const EXPECTED: &'static str = "a URL of Redis or Valkey, as redis://127.0.0.1:6379 or rediss://:password@host/0";

    fn from_text(text: &str) -> Option<Self> {
        // Reads the URL, and does not connect.
        ::redis::Client::open(text).ok().map(|_| Self(text.to_owned()))
    }
}

/// A number of bytes, written as an integer or as `"64KiB"`, `"1MiB"`, `"2GiB"`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Size(pub usize);

impl FromText for Size {
    const EXPECTED: &'static str = "a number of bytes, as 1048576 or 1MiB";

    fn from_text(text: &str) -> Option<Self> {
        let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = text.split_at(split);
        let unit: usize = match unit {
            "" | "B" => 1,
            "KiB" => 1024,
            "MiB" => 1024 * 1024,
            "GiB" => 1024 * 1024 * 1024,
            _ => return None,
        };
        number.parse::<usize>().ok()?.checked_mul(unit).map(Self)
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct V;
        impl Visitor<'_> for V {
            type Value = Size;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(Size::EXPECTED)
            }

            fn visit_i64<E: serde::de::Error>(self, bytes: i64) -> Result<Size, E> {
                usize::try_from(bytes).map(Size).map_err(|_| E::custom(format!("expected {}", Size::EXPECTED)))
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Size, E> {
                Size::from_text(text).ok_or_else(|| E::custom(format!("expected {}", Size::EXPECTED)))
            }
        }
        deserializer.deserialize_any(V)
    }
}

/// A whole number from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Count(pub usize);

impl<'de> Deserialize<'de> for Count {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match i32::deserialize(deserializer)? {
            number @ 1.. => Ok(Self(usize::try_from(number).unwrap_or(usize::MAX))),
            _ => Err(D::Error::custom("expected a whole number from 1")),
        }
    }
}

/// Bytes that must not be seen: a key, a shared secret.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// Of these bytes.
    #[must_use]
    pub fn new(bytes: impl Into<Vec<u8>>) -> Self {
        Self(bytes.into())
    }

    /// The bytes.
    #[must_use]
    pub fn expose(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// Where a secret is; never the secret itself, which has no place in this file.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct SecretRef {
    pub env: Option<String>,
    pub file: Option<PathBuf>,
}

impl SecretRef {
    /// Reads it, without the line break at its end, which editors and `echo` put there.
    pub fn read(&self) -> Result<Secret, String> {
        let mut bytes = match (&self.env, &self.file) {
            (Some(name), None) => match std::env::var_os(name) {
                Some(value) => value.into_encoded_bytes(),
                None => return Err(format!("the environment has no variable {name}")),
            },
            (None, Some(file)) => read_small(file)?,
            _ => return Err("say where the secret is: env = \"NAME\" or file = \"PATH\", one of them".into()),
        };
        while bytes.last().is_some_and(|byte| matches!(byte, b'\n' | b'\r')) {
            bytes.pop();
        }
        if bytes.is_empty() { Err("the secret is empty".into()) } else { Ok(Secret(bytes)) }
    }
}

/// Larger files are no keys.
const SECRET_BYTES_MAX: u64 = 64 * 1024;

fn read_small(file: &std::path::Path) -> Result<Vec<u8>, String> {
    let unreadable = |error: std::io::Error| format!("{} cannot be read: {error}", file.display());
    let mut bytes = Vec::new();
    let opened = std::fs::File::open(file).map_err(unreadable)?;
    std::io::Read::read_to_end(&mut std::io::Read::take(opened, SECRET_BYTES_MAX + 1), &mut bytes)
        .map_err(unreadable)?;
    match u64::try_from(bytes.len()) {
        Ok(length) if length <= SECRET_BYTES_MAX => Ok(bytes),
        _ => Err(format!("{} is too large for a secret (over 64 KiB)", file.display())),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on should stop, loudly")]
mod tests {
    use super::*;

    #[test]
    fn durations_and_sizes() {
        assert_eq!(read("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(read("30d"), Ok(Duration::from_secs(30 * 86_400)));
        for bad in ["", "5", "0s", "s", "5 s", "-1s", "1.5s", "5w", "99999999999999999999d", "36001d"] {
            assert!(read::<Duration>(bad).is_err(), "{bad}");
        }
        assert_eq!(read("permanent"), Ok(Keep::Permanent));
        assert_eq!(read::<Keep>("2h").map(Keep::to_sql), Ok("7200000ms".into()));
        assert_eq!(read("1MiB"), Ok(Size(1 << 20)));
        assert_eq!(read("17"), Ok(Size(17)));
        for bad in ["", "MiB", "1 MiB", "1MB", "-1", "99999999999GiB"] {
            assert!(read::<Size>(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn addresses_and_origins() {
        assert!(read::<SocketAddr>("[::]:80").is_ok());
        for bad in ["127.0.0.1", "localhost:80", ":80", "127.0.0.1:99999"] {
            assert!(read::<SocketAddr>(bad).is_err(), "{bad}");
        }
        for good in ["http://h", "https://h:8443", "http://[::1]:3000/", "http://127.0.0.1:1"] {
            assert!(read::<Origin>(good).is_ok(), "{good}");
        }
        let bad = [
            "h",
            "h:80",
            "ftp://h",
            "http://",
            "http://u:p@h",
            "http://h/base",
            "http://h?x",
            "http://h:99999",
            "http://h:",
        ];
        for bad in bad {
            assert!(read::<Origin>(bad).is_err(), "{bad}");
        }
        for good in ["redis://h", "rediss://:p@h:1/0", "valkey://h", "unix:///run/redis.sock"] {
            assert!(read::<RedisUrl>(good).is_ok(), "{good}");
        }
        for bad in ["", "h:6379", "http://h", "redis://", "redis://h:99999", "redis://h/x"] {
            assert!(read::<RedisUrl>(bad).is_err(), "{bad}");
        }
        assert_eq!(format!("{:?}", read::<RedisUrl>("redis://:secret@h")), "Ok(RedisUrl(…))");
    }

    #[test]
    fn names() {
        assert_eq!(read("PATCH"), Ok(Method::PATCH));
        assert!(read::<Method>("post").is_err() && read::<Method>("").is_err() && read::<Method>("A B").is_err());
        assert!(read::<HeaderName>("X-Tenant").is_ok() && read::<HeaderName>("X Tenant").is_err());
    }

    #[test]
    fn secrets_come_from_elsewhere_and_do_not_show() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("secret");
        std::fs::write(&file, "hush\n").unwrap();
        let secret = SecretRef { env: None, file: Some(file.clone()) }.read().unwrap();
        assert_eq!(secret.expose(), b"hush");
        assert_eq!(format!("{secret:?}"), "Secret(…)");
        std::fs::write(&file, "\n").unwrap();
        assert!(SecretRef { env: None, file: Some(file.clone()) }.read().is_err());
        std::fs::write(&file, vec![b'x'; 70_000]).unwrap();
        assert!(SecretRef { env: None, file: Some(file) }.read().is_err());
        assert!(SecretRef { env: Some("PATH".into()), file: None }.read().is_ok());
        assert!(SecretRef { env: Some("NO_SUCH_VARIABLE".into()), file: None }.read().is_err());
        assert!(SecretRef::default().read().is_err());
    }
}
