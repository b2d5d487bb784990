//! The values of CloudEvents attributes in headers of HTTP and NATS, which take printable ASCII only: percent-encoded, as the
//! HTTP binding says (3.1.3.2), so that any text can travel.

use std::borrow::Cow;

use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, utf8_percent_encode};

/// What the binding wants escaped beside everything that is not ASCII.
const ESCAPED: &AsciiSet = &CONTROLS.add(b' ').add(b'"').add(b'%');

/// The value of a header: an attribute's is encoded, others go as they are.
pub(crate) fn write<'a>(name: &str, value: &'a str) -> Cow<'a, str> {
    if is_attribute(name) { encode(value) } else { Cow::Borrowed(value) }
}

/// An attribute's value.
pub(crate) fn encode(value: &str) -> Cow<'_, str> {
    utf8_percent_encode(value, ESCAPED).into()
}

/// The other way round.
pub(crate) fn read(name: &str, value: &str) -> String {
    if is_attribute(name) { decode(value) } else { value.to_owned() }
}

/// An attribute's value as it was. What is not UTF-8 when it is decoded was never encoded.
fn decode(value: &str) -> String {
    let unquoted = unquote(value);
    match percent_decode_str(&unquoted).decode_utf8() {
        Ok(text) => text.into_owned(),
        Err(_) => unquoted.into_owned(),
    }
}

/// The binding lets a sender put a value between quotes, with backslashes before what is special there.
fn unquote(value: &str) -> Cow<'_, str> {
    let Some(inner) = value.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')) else {
        return Cow::Borrowed(value);
    };
    let (mut text, mut escaped) = (String::with_capacity(inner.len()), false);
    for c in inner.chars() {
        escaped = c == '\\' && !escaped;
        if !escaped {
            text.push(c);
        }
    }
    Cow::Owned(text)
}

fn is_attribute(name: &str) -> bool {
    let starts = |prefix: &str| name.get(..prefix.len()).is_some_and(|start| start.eq_ignore_ascii_case(prefix));
    starts("ce-") || starts("pgonce-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_text_travels() {
        // The specification's own example among them.
        assert_eq!(encode("Euro € 😀"), "Euro%20%E2%82%AC%20%F0%9F%98%80");
        for text in ["", "plain", "100%", "%41", "a \"quoted\" one", "Größe ☃", "\u{7f}\t", "back\\slash"] {
            let encoded = encode(text);
            assert!(encoded.bytes().all(|byte| (0x21..0x7f).contains(&byte)), "{encoded}");
            assert_eq!(read("ce-subject", &encoded), text);
        }
        assert_eq!(write("traceparent", "100%"), "100%", "no attribute");
        assert_eq!(write("CE-Subject", "100%"), "100%25");
    }

    #[test]
    fn what_others_write_is_read() {
        for (value, text) in [
            ("\"quoted \\\"one\\\" \\\\\"", "quoted \"one\" \\"),
            ("Größe", "Größe"),
            ("100%", "100%"),
            ("%zz", "%zz"),
            ("%ff", "%ff"),
            ("\"", "\""),
        ] {
            assert_eq!(read("ce-subject", value), text, "{value}");
        }
    }
}
