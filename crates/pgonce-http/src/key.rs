//! The key, as the request header spells it.

use http::{HeaderMap, HeaderName};
use sfv::{BareItem, Item, List, Parser, Version};

use crate::KeySyntax;

/// The longest key, in bytes; the database refuses longer ones too.
pub const KEY_BYTES_MAX: usize = 255;

/// Why a header is no key. Nothing was run. Never says what the header held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// Two header lines: which of them is meant cannot be known.
    #[error("the header was sent more than once")]
    Repeated,
    /// Several members, which is also what two lines look like after a proxy has joined them.
    #[error("the header holds a list; it takes one string")]
    List,
    /// A structured field, and not a string.
    #[error("the header holds {found}, not a string: write it in double quotes")]
    NotString {
        /// What it is.
        found: &'static str,
    },
    /// Nothing in it.
    #[error("the key is empty")]
    Empty,
    /// Longer than any key may be.
    #[error("the key is longer than {KEY_BYTES_MAX} bytes")]
    TooLong,
    /// Not ASCII.
    #[error("the header holds characters that are not ASCII")]
    NotAscii,
    /// Tabs inside, NULs, DEL and the like.
    #[error("the header holds control characters")]
    Control,
    /// Not a structured field at all.
    #[error(
        "the header is not a structured-field string (RFC 8941): write \"…\", with \\\" and \\\\ as the only escapes"
    )]
    Syntax,
    /// A key that its scope does not take.
    #[error("the key is not of the form that its scope asks for")]
    Refused,
}

/// Reads the key from a request's headers; none where there is no such header. Parameters after the string
/// are syntax that a later draft may use: they are read over, and are no part of the key.
///
/// # Errors
/// Where there is such a header and it does not spell one key.
pub fn parse_key(headers: &HeaderMap, name: &HeaderName, syntax: KeySyntax) -> Result<Option<String>, KeyError> {
    let mut lines = headers.get_all(name).iter();
    let Some(line) = lines.next() else { return Ok(None) };
    if lines.next().is_some() {
        return Err(KeyError::Repeated);
    }
    parse_value(line.as_bytes(), syntax).map(Some)
}

fn parse_value(line: &[u8], syntax: KeySyntax) -> Result<String, KeyError> {
    let value = trim_whitespace(line);
    if value.is_empty() {
        return Err(KeyError::Empty);
    }
    if !value.is_ascii() {
        return Err(KeyError::NotAscii);
    }
    if value.iter().any(u8::is_ascii_control) {
        return Err(KeyError::Control);
    }
    let key = match syntax {
        KeySyntax::Lenient if value[0] != b'"' => bare(value)?,
        _ => quoted(value)?,
    };
    match key.len() {
        0 => Err(KeyError::Empty),
        1..=KEY_BYTES_MAX => Ok(key),
        _ => Err(KeyError::TooLong),
    }
}

/// What HTTP puts around a field value is no part of it (RFC 9110, 5.5).
fn trim_whitespace(line: &[u8]) -> &[u8] {
    let is_content = |byte: &u8| !matches!(byte, b' ' | b'\t');
    let start = line.iter().position(is_content).unwrap_or(line.len());
    let end = line.iter().rposition(is_content).map_or(start, |last| last + 1);
    &line[start..end]
}

fn quoted(value: &[u8]) -> Result<String, KeyError> {
    match Parser::new(value).with_version(Version::Rfc8941).parse::<Item>() {
        Ok(item) => match item.bare_item {
            BareItem::String(text) => Ok(text.into()),
            other => Err(KeyError::NotString { found: kind(&other) }),
        },
        // Told apart only for the message: both are refused.
        Err(_) => match Parser::new(value).with_version(Version::Rfc8941).parse::<List>() {
            Ok(_) => Err(KeyError::List),
            Err(_) => Err(KeyError::Syntax),
        },
    }
}

fn kind(item: &BareItem) -> &'static str {
    match item {
        BareItem::Token(_) => "a token",
        BareItem::Integer(_) => "an integer",
        BareItem::Decimal(_) => "a decimal",
        BareItem::ByteSequence(_) => "a byte sequence",
        BareItem::Boolean(_) => "a boolean",
        _ => "something else",
    }
}

/// A value without quotes. What could be structure (a list, parameters, a half-quoted string) is refused:
/// taking it as characters of a key would make two spellings of one key into two.
fn bare(value: &[u8]) -> Result<String, KeyError> {
    if value.contains(&b',') {
        return Err(KeyError::List);
    }
    if value.iter().any(|byte| !byte.is_ascii_graphic() || matches!(byte, b'"' | b';')) {
        return Err(KeyError::Syntax);
    }
    String::from_utf8(value.to_vec()).map_err(|_| KeyError::NotAscii)
}
