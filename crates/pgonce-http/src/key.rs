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
    /// A space at its beginning or end, which does not survive on its way through headers.
    #[error("the key begins or ends with a space")]
    Padded,
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
        // The upstream is told the key in a header of its own, and would look for another one.
        1..=KEY_BYTES_MAX if key.starts_with(' ') || key.ends_with(' ') => Err(KeyError::Padded),
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use http::HeaderValue;
    use proptest::prelude::*;

    use super::KeyError::{Control, Empty, List, NotAscii, NotString, Syntax, TooLong};
    use super::*;

    const NAME: HeaderName = HeaderName::from_static("idempotency-key");

    fn lines(values: &[&[u8]]) -> HeaderMap {
        values.iter().map(|value| (NAME, HeaderValue::from_bytes(value).unwrap())).collect()
    }

    fn both(line: &[u8]) -> [Result<String, KeyError>; 2] {
        [KeySyntax::Strict, KeySyntax::Lenient].map(|syntax| parse_value(line, syntax))
    }

    #[test]
    fn strings_are_read_alike_in_both_modes() {
        let long = format!("\"{}\"", "k".repeat(255));
        let vectors: &[(&str, &str)] = &[
            (r#""abc""#, "abc"),
            (r#"  "abc"  "#, "abc"),
            ("\t\"abc\"\t", "abc"),
            (r#""a b""#, "a b"),
            (r#""a, b; c""#, "a, b; c"),
            (r#""say \"hi\"""#, r#"say "hi""#),
            (r#""b\\s""#, r"b\s"),
            (r#""\"""#, "\""),
            (r#""\\""#, "\\"),
            (r#""8e03978e-40d5-43dd-bc93-6894a57f9324""#, "8e03978e-40d5-43dd-bc93-6894a57f9324"),
            (r#""abc";a"#, "abc"),
            (r#""abc";a=1; b="x";c=?0;d=:YQ==:;e=tok"#, "abc"),
            (&long, &long[1..256]),
        ];
        for (line, key) in vectors {
            assert_eq!(both(line.as_bytes()), [Ok((*key).to_owned()), Ok((*key).to_owned())], "{line}");
        }
    }

    #[test]
    fn what_is_wrong_in_quotes_is_wrong_in_both_modes() {
        let long = format!("\"{}\"", "k".repeat(256));
        let vectors: &[(&[u8], KeyError)] = &[
            (b"", Empty),
            (b" \t ", Empty),
            (b"\"\"", Empty),
            (b"\"\";a=1", Empty),
            (b"\"", Syntax),
            (b"\"abc", Syntax),
            (b"\"abc\\\"", Syntax),
            (b"\"a\\n\"", Syntax),
            (b"\"a\\u0041\"", Syntax),
            (b"\"a\\,\"", Syntax),
            (b"\"abc\"x", Syntax),
            (b"\" \"", KeyError::Padded),
            (b"\" abc\"", KeyError::Padded),
            (b"\"abc \"", KeyError::Padded),
            (b"\"abc\" x", Syntax),
            (b"\"abc\"\"def\"", Syntax),
            (b"\"abc\" \"def\"", Syntax),
            (b"\"abc\" ;a", Syntax),
            (b"\"abc\";", Syntax),
            (b"\"abc\";A=1", Syntax),
            (b"\"abc\";a=", Syntax),
            (b"\"abc\";a=@1", Syntax),
            (b"\"abc\";a=%\"x\"", Syntax),
            (b"\"abc\",", Syntax),
            (b"\"abc\", \"def\"", List),
            (b"\"abc\",\"abc\"", List),
            (b"\"abc\", tok, (1 2)", List),
            (b"\"a\tb\"", Control),
            (b"\"a\x7fb\"", Control),
            (b"\"a\0b\"", Control),
            (b"\"a\x1fb\"", Control),
            ("\"käse\"".as_bytes(), NotAscii),
            (b"\"k\xe4se\"", NotAscii),
            (b"\"abc\";a=\"\xff\"", NotAscii),
            (long.as_bytes(), TooLong),
        ];
        for (line, error) in vectors {
            assert_eq!(both(line), [Err(*error), Err(*error)], "{}", line.escape_ascii());
        }
    }

    #[test]
    fn what_is_no_string_is_refused_strictly_and_may_be_bare_leniently() {
        let not = |found| Err(NotString { found });
        let bare = |line: &str| Ok(line.to_owned());
        let vectors = [
            ("abc", not("a token"), bare("abc")),
            (" abc\t", not("a token"), bare("abc")),
            ("*a/b:c", not("a token"), bare("*a/b:c")),
            ("42", not("an integer"), bare("42")),
            ("-42", not("an integer"), bare("-42")),
            ("4.2", not("a decimal"), bare("4.2")),
            (":YWJj:", not("a byte sequence"), bare(":YWJj:")),
            ("?1", not("a boolean"), bare("?1")),
            ("@1659578233", Err(Syntax), bare("@1659578233")),
            ("8e03978e-40d5-43dd-bc93-6894a57f9324", Err(Syntax), bare("8e03978e-40d5-43dd-bc93-6894a57f9324")),
            ("~[]{}()", Err(Syntax), bare("~[]{}()")),
            (r"a\b", Err(Syntax), bare(r"a\b")),
            ("(abc)", Err(List), bare("(abc)")),
            ("(\"abc\")", Err(List), Err(Syntax)),
            ("(\"a\" \"b\")", Err(List), Err(Syntax)),
            ("()", Err(List), bare("()")),
            ("abc;a=1", not("a token"), Err(Syntax)),
            ("abc def", Err(Syntax), Err(Syntax)),
            ("abc, def", Err(List), Err(List)),
            ("abc,", Err(Syntax), Err(List)),
            ("abc\"", Err(Syntax), Err(Syntax)),
            ("a\"b\"c", Err(Syntax), Err(Syntax)),
            ("%\"x\"", Err(Syntax), Err(Syntax)),
            ("'abc'", Err(Syntax), bare("'abc'")),
            ("a\tb", Err(Control), Err(Control)),
            ("käse", Err(NotAscii), Err(NotAscii)),
        ];
        for (line, strict, lenient) in vectors {
            assert_eq!(both(line.as_bytes()), [strict, lenient], "{line}");
        }
        assert_eq!(parse_value("k".repeat(255).as_bytes(), KeySyntax::Lenient), Ok("k".repeat(255)));
        assert_eq!(parse_value("k".repeat(256).as_bytes(), KeySyntax::Lenient), Err(TooLong));
    }

    #[test]
    fn the_limit_is_on_the_key_and_not_on_its_spelling() {
        let spelt = format!("\"{}\";note={}", "\\\"".repeat(255), "x".repeat(1000));
        assert_eq!(both(spelt.as_bytes()), [Ok("\"".repeat(255)), Ok("\"".repeat(255))]);
    }

    #[test]
    fn one_line_is_a_key_and_none_is_none() {
        for syntax in [KeySyntax::Strict, KeySyntax::Lenient] {
            assert_eq!(parse_key(&HeaderMap::new(), &NAME, syntax), Ok(None));
            assert_eq!(parse_key(&lines(&[b"\"a\""]), &NAME, syntax), Ok(Some("a".to_owned())));
            assert_eq!(parse_key(&lines(&[b"\"a\""]), &HeaderName::from_static("x-key"), syntax), Ok(None));
            assert_eq!(parse_key(&lines(&[b""]), &NAME, syntax), Err(Empty));
            for two in [[b"\"a\"", b"\"a\""], [b"\"a\"", b"\"b\""]] {
                assert_eq!(parse_key(&lines(&[two[0], two[1]]), &NAME, syntax), Err(KeyError::Repeated));
            }
            assert_eq!(parse_key(&lines(&[b"", b"\"a\""]), &NAME, syntax), Err(KeyError::Repeated));
        }
    }

    #[test]
    fn errors_never_repeat_the_header() {
        for line in [&b"hunter2 hunter2"[..], b"\"hunter2\",\"hunter2\"", b"\"hunter2\\x\"", b"\"hunter2\t\""] {
            for outcome in both(line) {
                assert!(!format!("{0} {0:?}", outcome.unwrap_err()).contains("hunter2"));
            }
        }
    }

    proptest! {
        #[test]
        fn any_key_survives_its_quotes(key in "[!-~]([ -~]{0,253}[!-~])?") {
            let quoted = format!("\"{}\"", key.replace('\\', "\\\\").replace('"', "\\\""));
            prop_assert_eq!(both(quoted.as_bytes()), [Ok(key.clone()), Ok(key)]);
        }

        #[test]
        fn quoted_and_bare_spell_the_same_key(key in "[!#-+\\--:<-\\[\\]-~]{1,255}") {
            let quoted = format!("\"{key}\"");
            let bare = parse_value(key.as_bytes(), KeySyntax::Lenient);
            prop_assert_eq!(&bare, &parse_value(quoted.as_bytes(), KeySyntax::Lenient));
            prop_assert_eq!(bare, Ok(key));
        }

        #[test]
        fn no_bytes_panic_and_every_key_is_in_its_limits(line in proptest::collection::vec(any::<u8>(), 0..600)) {
            for key in both(&line).into_iter().flatten() {
                prop_assert!((1..=KEY_BYTES_MAX).contains(&key.len()));
                prop_assert!(key.bytes().all(|byte| (0x20..0x7f).contains(&byte)));
            }
        }
    }
}
