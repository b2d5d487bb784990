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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use http::HeaderValue;
    use proptest::prelude::*;

    use super::*;

    fn of_body(part: BodyPart, body: &[u8]) -> Fingerprint {
        let parts = FingerprintParts { body: part, ..FingerprintParts::default() };
        request_fingerprint(&parts, &Method::POST, &Uri::from_static("/orders"), &HeaderMap::new(), body)
    }

    fn json(body: &str) -> Fingerprint {
        of_body(BodyPart::Json, body.as_bytes())
    }

    fn of_fields(pointers: &[&str], body: &str) -> Fingerprint {
        let pointers = pointers.iter().map(|pointer| (*pointer).to_owned()).collect();
        of_body(BodyPart::Fields(pointers), body.as_bytes())
    }

    fn of_headers(chosen: &[&'static str], sent: &[(&'static str, &[u8])]) -> Fingerprint {
        let chosen = chosen.iter().map(|name| HeaderName::from_static(name)).collect();
        let parts = FingerprintParts { headers: chosen, ..FingerprintParts::default() };
        let sent = sent.iter();
        let headers = sent
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_bytes(value).unwrap()))
            .collect();
        request_fingerprint(&parts, &Method::POST, &Uri::from_static("/"), &headers, b"")
    }

    #[test]
    fn json_that_says_the_same_is_the_same() {
        let same: &[&[&str]] = &[
            &[r#"{"a":1,"b":[true,null]}"#, " { \"b\" : [ true , null ] ,\n\t\"a\" : 1 }\r\n"],
            &["0", "-0", "0.0", "-0.0", "0e5", "0E-5"],
            &["1", "1.0", "1e0", "10e-1", "0.1e1", "1E+0"],
            &["100000", "1e5", "1.0E5"],
            &["1e21", "1000000000000000000000", "1E+21"],
            &["9007199254740992", "9007199254740992.0", "9.007199254740992e15"],
            &[r#"{"a":"\" 9007199254740993","b":1}"#, r#"{"b":1,"a":"\u0022 9007199254740993"}"#],
            &[r#""é/""#, r#""\u00e9\/""#],
            &[r#"{"\u0061":"\ud83d\ude00"}"#, r#"{"a":"😀"}"#],
        ];
        for group in same {
            for body in &group[1..] {
                assert_eq!(json(group[0]), json(body), "{} and {body}", group[0]);
            }
        }
    }

    #[test]
    fn json_that_says_something_else_is_never_the_same() {
        // Each is a payload of its own, though a parser that keeps doubles and the last member would fold some.
        let all = [
            "9007199254740992",
            "9007199254740993",
            "9007199254740994",
            "9007199254740993.0",
            "-9007199254740993",
            "-9007199254740992",
            "1152921504606846976",
            "1152921504606847000",
            "1152921504606846977",
            "18446744073709551615",
            "18446744073709551616",
            "18446744073709552000",
            "0.1",
            "0.10000000000000001",
            "0.1000000000000000055511151231257827",
            "1133255519828160.2",
            "1133255519828160.25",
            "1133255519828160.3",
            "0.30000000000000004",
            "0.3",
            "1e400",
            "2e400",
            "-1e400",
            "1e-400",
            "2e-400",
            "0",
            "5e-324",
            "4e-324",
            "1.7976931348623157e308",
            "1.7976931348623158e308",
            "1e99999999999999999999",
            "1e-99999999999999999999",
            r#"{"a":1}"#,
            r#"{"a":2}"#,
            r#"{"a":1,"a":2}"#,
            r#"{"a":2,"a":2}"#,
            r#"{"a":2,"a":1}"#,
            r#"{"\u0061":1,"a":2}"#,
            r#"{"x":{"a":1,"a":2}}"#,
            r#"{"x":{"a":2}}"#,
            r#"[{"a":1,"a":2}]"#,
            r#"[{"a":2}]"#,
            r#"{"a":"\"","b":9007199254740993}"#,
            r#"{"a":"\"","b":9007199254740992}"#,
            r#"{"a":"\\","b":9007199254740993}"#,
            r#"{"a":"\\","b":9007199254740992}"#,
            r#"{"a":null}"#,
            "{}",
            "[]",
            "null",
            "\"\"",
            "",
            " ",
            "\"1\"",
            "1",
            "true",
            "[1,2]",
            "[2,1]",
            r#""\ud800""#,
            r#""\ud801""#,
            "\"e\u{301}\"",
            "\"é\"",
            "{\"a\":1",
            "{\"a\":1}}",
            "\u{feff}{\"a\":1}",
            "NaN",
        ];
        for (at, one) in all.iter().enumerate() {
            for other in &all[at + 1..] {
                assert_ne!(json(one), json(other), "{one} and {other}");
            }
        }
    }

    #[test]
    fn a_body_that_is_not_json_counts_as_raw() {
        for body in [&b"a=1&b=2"[..], b"", b"\x1f\x8b\x08\x00", b"{\"a\":\"\xff\"}", b"{\"a\":1,\"a\":2}", b"1e400"] {
            assert_eq!(of_body(BodyPart::Json, body), of_body(BodyPart::Raw, body));
            assert_eq!(of_body(BodyPart::Fields(vec!["/a".into()]), body), of_body(BodyPart::Raw, body));
        }
        let deep = "[".repeat(5000) + &"]".repeat(5000);
        assert_eq!(json(&deep), of_body(BodyPart::Raw, deep.as_bytes()));
    }

    #[test]
    fn raw_is_every_byte_and_none_is_no_byte() {
        assert_ne!(of_body(BodyPart::Raw, b"{\"a\":1}"), of_body(BodyPart::Raw, b"{\"a\": 1}"));
        assert_eq!(of_body(BodyPart::None, b"one"), of_body(BodyPart::None, b"two"));
    }

    #[test]
    fn sql_can_compute_it() {
        assert_eq!(json(r#"{"b":2, "a":1e0}"#), fingerprint_bytes(br#"{"a":1,"b":2}"#, "POST /orders", ""));
        assert_eq!(
            json(r#"{"b":2, "a":1e0}"#),
            pgonce::fingerprint(&serde_json::json!({"a": 1, "b": 2}), "POST /orders", "").unwrap()
        );
        assert_eq!(
            of_fields(&["/a/b"], r#"{"a":{"b":[1]},"c":2}"#),
            fingerprint_bytes(br#"{"/a/b":[1]}"#, "POST /orders", "")
        );
        assert_eq!(
            of_headers(&["x-b", "x-a"], &[("x-b", b"two"), ("x-a", b"\xe9"), ("x-c", b"no")]),
            fingerprint_bytes(b"", "POST /", "x-a:1:é\nx-b:3:two\n")
        );
    }

    #[test]
    fn fields_are_all_that_counts_of_a_document() {
        let fields = ["/amount", "/to/iban", "/lines/0"];
        let base = of_fields(&fields, r#"{"amount":1,"to":{"iban":"x"},"lines":[5]}"#);
        assert_eq!(base, of_fields(&fields, r#"{"at":"now","lines":[5,6],"to":{"iban":"x","n":0},"amount":1.0}"#));
        assert_eq!(
            base,
            of_fields(&["/lines/0", "/to/iban", "/amount"], r#"{"amount":1,"to":{"iban":"x"},"lines":[5]}"#)
        );
        let others = [
            r#"{"amount":2,"to":{"iban":"x"},"lines":[5]}"#,
            r#"{"amount":"1","to":{"iban":"x"},"lines":[5]}"#,
            r#"{"amount":1,"to":{"iban":"y"},"lines":[5]}"#,
            r#"{"amount":1,"to":{"iban":"x"},"lines":[6]}"#,
            r#"{"amount":1,"to":{"iban":"x"},"lines":[]}"#,
            r#"{"amount":1,"to":{"iban":null},"lines":[5]}"#,
            r#"{"amount":1,"to":{},"lines":[5]}"#,
            r#"{"amount":1,"amount":1,"to":{"iban":"x"},"lines":[5]}"#,
            r#"{"amount":1.0000000000000000001,"to":{"iban":"x"},"lines":[5]}"#,
            r#"{"to":{"iban":"x"},"lines":[5]}"#,
        ];
        for (at, other) in others.iter().enumerate() {
            assert_ne!(base, of_fields(&fields, other), "{other}");
            for next in &others[at + 1..] {
                assert_ne!(of_fields(&fields, other), of_fields(&fields, next), "{other} and {next}");
            }
        }
        // Two fields cannot change places.
        assert_ne!(of_fields(&["/a", "/b"], r#"{"a":1}"#), of_fields(&["/a", "/b"], r#"{"b":1}"#));
        // Escaped names.
        assert_ne!(of_fields(&["/a~1b"], r#"{"a/b":1}"#), of_fields(&["/a~1b"], r#"{"a/b":2}"#));
    }

    #[test]
    fn a_pointer_that_points_nowhere_by_mistake_pins_everything() {
        assert!(["", "/", "/a", "/a~0b~1c", "/0"].into_iter().all(is_pointer));
        assert!(!["a", "$.a", "#/a", "/a~", "/a~2"].into_iter().any(is_pointer));
        assert_ne!(of_fields(&["amount"], r#"{"amount":1}"#), of_fields(&["amount"], r#"{"amount":2}"#));
    }

    #[test]
    fn method_path_and_query_count_where_they_are_included() {
        let print = |path, query, method, uri: &'static str| {
            let parts = FingerprintParts { path, query, ..FingerprintParts::default() };
            request_fingerprint(&parts, &method, &Uri::from_static(uri), &HeaderMap::new(), b"x")
        };
        let (post, patch) = (Method::POST, Method::PATCH);
        let base = print(true, true, post.clone(), "/a?b=1");
        assert_eq!(base, fingerprint_bytes(b"x", "POST /a?b=1", ""));
        // As HTTP/2 and proxies write it: the host is the tenant's or the route's business.
        assert_eq!(base, print(true, true, post.clone(), "https://shop.example/a?b=1"));
        for (method, uri) in
            [(patch.clone(), "/a?b=1"), (post.clone(), "/a"), (post.clone(), "/a?b=2"), (post.clone(), "/b?b=1")]
        {
            assert_ne!(base, print(true, true, method, uri), "{uri}");
        }
        assert_ne!(print(true, true, post.clone(), "/a?"), print(true, true, post.clone(), "/a"));
        assert_eq!(print(true, false, post.clone(), "/a?b=1"), print(true, false, post.clone(), "/a?c=2"));
        assert_eq!(print(false, true, post.clone(), "/a?b=1"), print(false, true, post.clone(), "/z?b=1"));
        assert_ne!(print(false, true, post.clone(), "/a?b=1"), print(false, true, post.clone(), "/a?b=2"));
        assert_eq!(print(false, false, post.clone(), "/a?b=1"), fingerprint_bytes(b"x", "POST", ""));
        assert_ne!(print(false, false, post, "/a"), print(false, false, patch, "/a"));
    }

    #[test]
    fn chosen_headers_count_and_their_order_among_each_other_does_not() {
        let chosen = ["x-a", "x-b"];
        let base = of_headers(&chosen, &[("x-a", b"1"), ("x-b", b"2")]);
        assert_eq!(base, of_headers(&chosen, &[("x-b", b"2"), ("x-other", b"9"), ("x-a", b"1")]));
        assert_eq!(base, of_headers(&["x-b", "x-a", "x-b"], &[("x-a", b"1"), ("x-b", b"2")]));
        let others: &[&[(&'static str, &[u8])]] = &[
            &[],
            &[("x-a", b"1")],
            &[("x-a", b"2"), ("x-b", b"1")],
            &[("x-a", b""), ("x-b", b"2")],
            &[("x-a", b"1"), ("x-a", b"2")],
            &[("x-a", b"2"), ("x-a", b"1")],
            &[("x-a", b"1, 2")],
            &[("x-a", b"1"), ("x-b", b"\xe9")],
            &[("x-a", b"1"), ("x-b", "é".as_bytes())],
            &[("x-a", b"1 x-b:1:2")],
        ];
        for (at, other) in others.iter().enumerate() {
            assert_ne!(base, of_headers(&chosen, other), "{other:?}");
            for next in &others[at + 1..] {
                assert_ne!(of_headers(&chosen, other), of_headers(&chosen, next), "{other:?} and {next:?}");
            }
        }
    }

    fn any_json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            ".{0,8}".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 32, 6, |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
                proptest::collection::btree_map(".{0,4}", inner, 0..6)
                    .prop_map(|members| Value::Object(members.into_iter().collect())),
            ]
        })
    }

    proptest! {
        /// Spelling does not matter, and the canonical form is a fixed point: no body that counts as raw has it.
        #[test]
        fn canonical_forms_are_their_own(value in any_json()) {
            let body = serde_json::to_vec(&value).unwrap();
            let pretty = serde_json::to_vec_pretty(&value).unwrap();
            if let Some(whole) = document(&body) {
                let text = canonical(&whole).unwrap();
                prop_assert_eq!(of_body(BodyPart::Json, &body), of_body(BodyPart::Json, &pretty));
                prop_assert_eq!(canonical(&document(&text).unwrap()).unwrap(), text);
            }
        }

        /// Every double, in the way that JavaScript and Python write it, has a canonical form. Rust may write
        /// another one, where two shortest decimals are equally near: that counts as raw.
        #[test]
        fn the_shortest_form_of_a_double_is_kept(double in proptest::num::f64::NORMAL | proptest::num::f64::SUBNORMAL) {
            let literal = serde_json_canonicalizer::to_vec(&double).unwrap();
            prop_assert!(is_kept(&literal));
            prop_assert_eq!(std::str::from_utf8(&literal).unwrap().parse::<f64>().unwrap(), double);
        }

        /// Two integers of any size are one fingerprint only if they are one number.
        #[test]
        fn near_integers_stay_apart(base in any::<i128>(), step in 1_i128..4) {
            let next = base.wrapping_add(step);
            prop_assert_ne!(json(&base.to_string()), json(&next.to_string()));
        }

        #[test]
        fn two_decimals_stay_apart(whole in any::<u64>(), fraction in "[0-9]{0,25}[1-9]") {
            let one = format!("{whole}.{fraction}");
            let other = format!("{whole}.{fraction}1");
            prop_assert_ne!(json(&one), json(&other));
        }
    }
}
