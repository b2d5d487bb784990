//! What pins a request: two requests with one key are the same intent only if this is the same.
//!
//! It is `once.fingerprint_bytes(body part, operation, version)`, so that SQL can compute it. The operation is the
//! method and, after a space, the path and the query with its `?`, each where it is included: `POST /orders?dry=1`.
//! The version is one line for each chosen header: `name:length:value` and a newline, names sorted, the values of
//! one name in the order in which they came; empty where no header is chosen. The length is that of the value, in
//! bytes; bytes from 0x80 are the Latin-1 characters of the same number.

use std::collections::BTreeSet;
use std::fmt::{self, Write as _};

use http::{HeaderMap, HeaderName, Method, Uri};
use pgonce::{Fingerprint, fingerprint_bytes};
use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use crate::{BodyPart, FingerprintParts, latin1};

/// The fingerprint of a request whose body has arrived whole.
#[must_use]
pub fn request_fingerprint(
    parts: &FingerprintParts,
    method: &Method,
    uri: &Uri,
    headers: &HeaderMap,
    body: &[u8],
) -> Fingerprint {
    let (operation, version) = (operation(parts, method, uri), header_lines(&parts.headers, headers));
    let pin = |body: &[u8]| fingerprint_bytes(body, &operation, &version);
    // What has no canonical form is pinned by its bytes. No such body has the bytes of another's canonical form:
    // canonical forms have a canonical form, which is themselves.
    match &parts.body {
        BodyPart::Raw => pin(body),
        BodyPart::None => pin(b""),
        BodyPart::Json => match document(body).and_then(|whole| canonical(&whole)) {
            Some(text) => pin(&text),
            None => pin(body),
        },
        BodyPart::Fields(pointers) => match document(body).and_then(|whole| canonical(&fields(&whole, pointers)?)) {
            Some(text) => pin(&text),
            None => pin(body),
        },
    }
}

/// Whether a text is a JSON pointer (RFC 6901), as [`BodyPart::Fields`] takes them. With one that is not, every
/// body counts as raw.
#[must_use]
pub fn is_pointer(text: &str) -> bool {
    let escapes_known = text.split('~').skip(1).all(|rest| rest.starts_with(['0', '1']));
    escapes_known && (text.is_empty() || text.starts_with('/'))
}

fn operation(parts: &FingerprintParts, method: &Method, uri: &Uri) -> String {
    let mut text = method.as_str().to_owned();
    let query = uri.query().filter(|_| parts.query);
    if parts.path || query.is_some() {
        text.push(' ');
    }
    if parts.path {
        text.push_str(uri.path());
    }
    if let Some(query) = query {
        text.push('?');
        text.push_str(query);
    }
    text
}

fn header_lines(chosen: &[HeaderName], headers: &HeaderMap) -> String {
    // Sorted and once each, so that the order in a configuration file changes nothing.
    let names: BTreeSet<&str> = chosen.iter().map(HeaderName::as_str).collect();
    let mut text = String::new();
    for name in names {
        for value in headers.get_all(name) {
            // Writing to a String cannot fail. The length keeps a value from posing as another line.
            let _ = writeln!(text, "{name}:{}:{}", value.len(), latin1::decode(value.as_bytes()));
        }
    }
    text
}

/// The fields that are there, by pointer: one that is absent is not the same as one that is null.
fn fields(whole: &Value, pointers: &[String]) -> Option<Value> {
    if !pointers.iter().all(|pointer| is_pointer(pointer)) {
        return None;
    }
    let found = pointers.iter().filter_map(|pointer| Some((pointer.clone(), whole.pointer(pointer)?.clone())));
    Some(Value::Object(found.collect()))
}

fn canonical(value: &Value) -> Option<Vec<u8>> {
    serde_json_canonicalizer::to_vec(value).ok()
}

/// The JSON document, unless its canonical form would also be another's: where a member name comes twice in an
/// object, or a number is not what the canonical form would say.
fn document(body: &[u8]) -> Option<Value> {
    let Distinct(whole) = serde_json::from_slice(body).ok()?;
    numbers(body).all(is_kept).then_some(whole)
}

/// The number literals of a text that is JSON.
fn numbers(json: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let mut in_string = false;
        while let Some(byte) = json.get(at) {
            match byte {
                b'\\' if in_string => at += 1,
                b'"' => in_string = !in_string,
                b'-' | b'0'..=b'9' if !in_string => {
                    let rest = &json[at..];
                    let is_number = |byte: &u8| matches!(byte, b'0'..=b'9' | b'-' | b'+' | b'.' | b'e' | b'E');
                    let length = rest.iter().position(|byte| !is_number(byte)).unwrap_or(rest.len());
                    at += length;
                    return Some(&rest[..length]);
                }
                _ => {}
            }
            at += 1;
        }
        None
    })
}

/// Whether the canonical form of a number (that of the nearest double) has the very value that was written.
fn is_kept(literal: &[u8]) -> bool {
    // Up to 15 digits, every decimal in this range is the shortest one of its double.
    const DIGITS_SAFE: usize = 15;
    const EXPONENT_SAFE: i64 = 290;
    let Some((digits, exponent)) = decimal(literal) else { return false };
    if digits.len() <= DIGITS_SAFE && exponent.abs() <= EXPONENT_SAFE {
        return true;
    }
    let nearest = std::str::from_utf8(literal).ok().and_then(|text| text.parse::<f64>().ok());
    let written = nearest.and_then(|double| serde_json_canonicalizer::to_vec(&double).ok());
    written.and_then(|text| decimal(&text)).is_some_and(|kept| kept == (digits, exponent))
}

/// A literal's digits, without zeros at either end, and the power of ten that they are counted in. Zero has no
/// digits. None where the exponent is beyond counting.
fn decimal(literal: &[u8]) -> Option<(Vec<u8>, i64)> {
    let (mantissa, exponent) = match literal.iter().position(|byte| matches!(byte, b'e' | b'E')) {
        Some(e) => (&literal[..e], std::str::from_utf8(&literal[e + 1..]).ok()?.parse::<i64>().ok()?),
        None => (literal, 0),
    };
    let fraction = mantissa.iter().position(|byte| *byte == b'.').map_or(0, |dot| mantissa.len() - dot - 1);
    let mut digits: Vec<u8> =
        mantissa.iter().copied().filter(u8::is_ascii_digit).skip_while(|digit| *digit == b'0').collect();
    let mut exponent = exponent.checked_sub(i64::try_from(fraction).ok()?)?;
    while digits.last() == Some(&b'0') {
        digits.pop();
        exponent = exponent.checked_add(1)?;
    }
    Some(if digits.is_empty() { (digits, 0) } else { (digits, exponent) })
}

/// A JSON value in which no object has a member twice: serde_json keeps the last and drops the others.
struct Distinct(Value);

impl<'de> Deserialize<'de> for Distinct {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(DistinctVisitor).map(Self)
    }
}

struct DistinctVisitor;

impl<'de> Visitor<'de> for DistinctVisitor {
    type Value = Value;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("JSON without repeated members")
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        Number::from_f64(value).map(Value::Number).ok_or_else(|| E::custom("not a finite number"))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(Distinct(item)) = access.next_element()? {
            items.push(item);
        }
        Ok(Value::Array(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut members = Map::new();
        while let Some((name, Distinct(value))) = access.next_entry::<String, Distinct>()? {
            if members.insert(name, value).is_some() {
                return Err(A::Error::custom("a member comes twice"));
            }
        }
        Ok(Value::Object(members))
    }
}
