//! Canonical JSON (RFC 8785) of what payloads mostly are, in one pass.
//!
//! A fingerprint is taken of every call, so it is worth being quick. Text, whole numbers, booleans, arrays and
//! objects are written here; whatever needs more thought (fractions, huge numbers, nulls, which may be a NaN in
//! disguise, keys that are escaped or beyond the basic plane) goes to the crate that knows all of it.

use std::io::{self, Write as _};

use serde::Serialize;
use serde_json::ser::{CharEscape, Formatter, Serializer};

/// The canonical form of a value.
///
/// # Errors
/// Where the value cannot be written as JSON.
pub(crate) fn to_vec<T: Serialize + ?Sized>(value: &T) -> Result<Vec<u8>, serde_json::Error> {
    match plain(value) {
        Some(written) => Ok(written),
        None => serde_json_canonicalizer::to_vec(&value),
    }
}

/// None: it needs more than is written here, or cannot be written at all.
fn plain<T: Serialize + ?Sized>(value: &T) -> Option<Vec<u8>> {
    let mut canonical = Canonical::default();
    value.serialize(&mut Serializer::with_formatter(io::sink(), &mut canonical)).ok()?;
    // A `Serialize` may swallow an error and go on.
    (!canonical.gave_up).then_some(canonical.out)
}

/// A formatter that keeps its own output, so that an object's members can be brought into order at its end.
#[derive(Default)]
struct Canonical {
    out: Vec<u8>,
    /// The members of all objects that are open, outermost first.
    members: Vec<Member>,
    /// Where the members of each open object begin.
    objects: Vec<usize>,
    in_key: bool,
    gave_up: bool,
}

/// `"key":value` in the output: where it begins, and where its key ends.
#[derive(Clone, Copy)]
struct Member {
    at: usize,
    key_end: usize,
}

/// The largest whole number below which every one is itself as a double.
const WHOLE_MAX: u64 = 1 << 53;
/// From this lead byte on (U+E000), the order of bytes is not that of UTF-16 any more.
const LEAD_MAX: u8 = 0xEE;

impl Canonical {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.out.extend_from_slice(bytes);
        Ok(())
    }

    fn whole(&mut self, value: u64, negative: bool) -> io::Result<()> {
        if value > WHOLE_MAX {
            return self.give_up();
        }
        write!(self.out, "{}{value}", if negative { "-" } else { "" })
    }

    fn give_up(&mut self) -> io::Result<()> {
        self.gave_up = true;
        Err(io::Error::other("not plain"))
    }

    /// The key with its quotes.
    fn key(&self, member: Member) -> &[u8] {
        &self.out[member.at..member.key_end]
    }

    /// Closes an object: its members in the order of their keys.
    fn close(&mut self) -> io::Result<()> {
        let first = self.objects.pop().unwrap_or_default();
        let open = &self.members[first..];
        let follows = |one: Member, other: Member| inner(self.key(one)) < inner(self.key(other));
        if !open.windows(2).all(|pair| follows(pair[0], pair[1])) {
            // Each ends where the next begins, but for the comma.
            let ends = open.iter().skip(1).map(|next| next.at - 1).chain([self.out.len()]);
            let mut sorted: Vec<(Member, usize)> = open.iter().copied().zip(ends).collect();
            sorted.sort_by(|(one, _), (other, _)| inner(self.key(*one)).cmp(inner(self.key(*other))));
            if !sorted.windows(2).all(|pair| follows(pair[0].0, pair[1].0)) {
                return self.give_up(); // a key twice
            }
            let begin = open[0].at;
            let members: Vec<&[u8]> = sorted.iter().map(|(member, end)| &self.out[member.at..*end]).collect();
            let ordered = members.join(&b',');
            self.out.truncate(begin);
            self.out.extend_from_slice(&ordered);
        }
        self.members.truncate(first);
        self.write(b"}")
    }
}

/// A key without its quotes: the closing one would come before some characters and after others.
fn inner(key: &[u8]) -> &[u8] {
    key.get(1..key.len().saturating_sub(1)).unwrap_or_default()
}

macro_rules! whole_numbers {
    ($($name:ident: $kind:ty),*) => {
        $(fn $name<W: ?Sized + io::Write>(&mut self, _: &mut W, value: $kind) -> io::Result<()> {
            self.whole(u64::from(value), false)
        })*
    };
}

macro_rules! signed_numbers {
    ($($name:ident: $kind:ty),*) => {
        $(fn $name<W: ?Sized + io::Write>(&mut self, _: &mut W, value: $kind) -> io::Result<()> {
            self.whole(u64::from(value.unsigned_abs()), value < 0)
        })*
    };
}

macro_rules! beyond {
    ($($name:ident: $kind:ty),*) => {
        $(fn $name<W: ?Sized + io::Write>(&mut self, _: &mut W, _: $kind) -> io::Result<()> {
            self.give_up()
        })*
    };
}

macro_rules! always {
    ($($name:ident: $bytes:literal),*) => {
        $(fn $name<W: ?Sized + io::Write>(&mut self, _: &mut W) -> io::Result<()> {
            self.write($bytes)
        })*
    };
}

impl Formatter for &mut Canonical {
    whole_numbers!(write_u8: u8, write_u16: u16, write_u32: u32, write_u64: u64);
    signed_numbers!(write_i8: i8, write_i16: i16, write_i32: i32, write_i64: i64);
    beyond!(write_u128: u128, write_i128: i128, write_f32: f32, write_f64: f64, write_number_str: &str,
        write_raw_fragment: &str);
    always!(begin_string: b"\"", end_string: b"\"", begin_array: b"[", end_array: b"]", begin_object_value: b":");

    fn write_null<W: ?Sized + io::Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.give_up()
    }

    fn write_bool<W: ?Sized + io::Write>(&mut self, _: &mut W, value: bool) -> io::Result<()> {
        self.write(if value { b"true" } else { b"false" })
    }

    fn write_string_fragment<W: ?Sized + io::Write>(&mut self, _: &mut W, fragment: &str) -> io::Result<()> {
        if self.in_key && fragment.bytes().any(|byte| byte >= LEAD_MAX) {
            return self.give_up();
        }
        self.write(fragment.as_bytes())
    }

    fn write_char_escape<W: ?Sized + io::Write>(&mut self, _: &mut W, escape: CharEscape) -> io::Result<()> {
        if self.in_key {
            return self.give_up();
        }
        match escape {
            CharEscape::Quote => self.write(b"\\\""),
            CharEscape::ReverseSolidus => self.write(b"\\\\"),
            CharEscape::Backspace => self.write(b"\\b"),
            CharEscape::FormFeed => self.write(b"\\f"),
            CharEscape::LineFeed => self.write(b"\\n"),
            CharEscape::CarriageReturn => self.write(b"\\r"),
            CharEscape::Tab => self.write(b"\\t"),
            CharEscape::AsciiControl(byte) => write!(self.out, "\\u{byte:04x}"),
            CharEscape::Solidus => self.give_up(),
        }
    }

    fn begin_array_value<W: ?Sized + io::Write>(&mut self, _: &mut W, first: bool) -> io::Result<()> {
        self.write(if first { b"" } else { b"," })
    }

    fn begin_object<W: ?Sized + io::Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.objects.push(self.members.len());
        self.write(b"{")
    }

    fn end_object<W: ?Sized + io::Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.close()
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, _: &mut W, first: bool) -> io::Result<()> {
        self.write(if first { b"" } else { b"," })?;
        let at = self.out.len();
        self.members.push(Member { at, key_end: at });
        self.in_key = true;
        Ok(())
    }

    fn end_object_key<W: ?Sized + io::Write>(&mut self, _: &mut W) -> io::Result<()> {
        let end = self.out.len();
        if let Some(member) = self.members.last_mut() {
            member.key_end = end;
        }
        self.in_key = false;
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn text() -> impl Strategy<Value = String> {
        prop_oneof![
            "[a-d]{0,3}",
            "\\PC{0,4}",
            any::<String>(),
            "[a\"\\\\/\u{0}-\u{1f}\u{7f}\u{d7ff}\u{e000}\u{10000}]{0,3}"
        ]
    }

    fn values(nulls: bool) -> impl Strategy<Value = Value> {
        let null = if nulls { 1 } else { 0 };
        let leaf = prop_oneof![
            null => Just(Value::Null),
            null => any::<f64>().prop_map(Value::from),
            4 => any::<bool>().prop_map(Value::from),
            4 => any::<i64>().prop_map(Value::from),
            4 => (0_i64..2000).prop_map(|value| Value::from(value - 1000)),
            4 => text().prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 40, 6, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
                prop::collection::hash_map(text(), inner, 0..6).prop_map(|map| map.into_iter().collect::<Value>()),
            ]
        })
    }

    /// Members in no order at all, as a struct's fields may be.
    #[derive(Debug, Clone, Serialize)]
    struct Unsorted {
        zeta: HashMap<String, Value>,
        #[serde(rename = "alpha")]
        other: (u8, i16, char),
        #[serde(rename = "al")]
        deeper: Option<Box<Unsorted>>,
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(3000))]

        /// What is written here is what the crate writes; the crate is held equal to SQL by the testkit.
        #[test]
        fn as_the_crate_writes_it(value in values(true), plainer in values(false)) {
            for value in [value, plainer] {
                prop_assert_eq!(to_vec(&value).unwrap(), serde_json_canonicalizer::to_vec(&value).unwrap());
            }
        }

        #[test]
        fn also_where_members_have_no_order(map in prop::collection::hash_map(text(), values(false), 0..6), code in any::<i16>()) {
            let one = Unsorted { zeta: map.clone(), other: (7, code, 'é'), deeper: None };
            let two = Unsorted { zeta: map, other: (0, 0, '"'), deeper: Some(Box::new(one.clone())) };
            for value in [one, two] {
                prop_assert_eq!(to_vec(&value).unwrap(), serde_json_canonicalizer::to_vec(&value).unwrap());
            }
        }
    }

    #[test]
    fn what_payloads_mostly_are_needs_no_help() {
        #[derive(Serialize)]
        struct Order<'a> {
            total: i64,
            currency: &'a str,
            lines: Vec<Line>,
        }
        #[derive(Serialize)]
        struct Line {
            sku: String,
            quantity: u32,
            gift: bool,
        }
        let lines = vec![Line { sku: "a\"b\n".into(), quantity: 2, gift: false }];
        let written = plain(&Order { total: -129_900, currency: "€", lines }).unwrap();
        assert_eq!(
            String::from_utf8(written).unwrap(),
            r#"{"currency":"€","lines":[{"gift":false,"quantity":2,"sku":"a\"b\n"}],"total":-129900}"#
        );
        assert_eq!(plain(&json!({"b": {}, "a": []})).unwrap(), br#"{"a":[],"b":{}}"#);
        assert_eq!(plain(&HashMap::from([(10, 1), (9, 2)])).unwrap(), br#"{"10":1,"9":2}"#);
    }

    #[test]
    fn what_needs_more_thought_goes_to_the_crate() {
        assert!(plain(&f64::NAN).is_none() && to_vec(&f64::NAN).is_err(), "serde_json would write null");
        assert!(plain(&json!([1.5])).is_none() && plain(&json!(null)).is_none());
        assert_eq!(to_vec(&(1_u64 << 60)).unwrap(), b"1152921504606847000");
        assert_eq!(plain(&(1_i64 << 53)).unwrap(), b"9007199254740992");
        assert!(plain(&-((1_i64 << 53) + 1)).is_none());
        assert!(plain(&json!({"\u{e000}": 1})).is_none() && plain(&json!({"\"": 1})).is_none());
    }
}
