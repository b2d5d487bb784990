//! Records of a file: where each begins and ends, and its fields.

use std::borrow::Cow;
use std::io;

use csv_core::ReadRecordResult;
use serde::de::{DeserializeSeed, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::copy::Line;
use super::input::Window;

/// What the records are written in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Fields between delimiters, quoted where they need it (RFC 4180); the first record names the columns.
    Csv {
        /// Between fields: a comma, a semicolon, a tab.
        delimiter: u8,
    },
    /// One JSON object a line.
    JsonLines,
}

impl Format {
    pub(super) fn name(self) -> String {
        match self {
            Self::Csv { delimiter: b',' } => "csv".into(),
            Self::Csv { delimiter: b'\t' } => "tsv".into(),
            Self::Csv { delimiter } => format!("csv {}", char::from(delimiter)),
            Self::JsonLines => "jsonl".into(),
        }
    }
}

/// Why a record cannot be used; its code is the SQLSTATE that PostgreSQL has for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Bad {
    pub(super) code: Cow<'static, str>,
    pub(super) message: String,
}

impl Bad {
    pub(super) fn new(code: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        Self { code: code.into(), message: message.into() }
    }
}

/// Where the file cannot be read on.
#[derive(Debug)]
pub(super) struct Unreadable {
    pub(super) line: u64,
    pub(super) reason: String,
}

/// A record in the window.
#[derive(Debug, Clone, Copy)]
pub(super) struct Found {
    /// The first byte of the record itself: line ends may be before it.
    pub(super) begin: usize,
    /// Behind its last byte.
    pub(super) end: usize,
    /// What is passed to come to the next one.
    pub(super) passed: usize,
    pub(super) line: u64,
}

/// Goes through a window record by record.
#[derive(Debug)]
pub(super) struct Records {
    pub(super) window: Window,
    format: Format,
    csv: Box<csv_core::Reader>,
    text: Vec<u8>,
    ends: Vec<usize>,
    fields: usize,
    /// Of the next record.
    pub(super) line: u64,
}

impl Records {
    pub(super) fn new(window: Window, format: Format, line: u64) -> Self {
        let mut builder = csv_core::ReaderBuilder::new();
        if let Format::Csv { delimiter } = format {
            builder.delimiter(delimiter);
        }
        let csv = Box::new(builder.build());
        Self { window, format, csv, text: vec![0; 4096], ends: vec![0; 64], fields: 0, line }
    }

    /// The next record, which stays in the window until it is passed; None at the end.
    pub(super) fn next(&mut self) -> Result<Option<Found>, Unreadable> {
        let line = self.line;
        if self.window.offset == 0 {
            self.begin().map_err(|error| unreadable(line, &error))?;
        }
        let found = match self.format {
            Format::Csv { .. } => self.next_csv(),
            Format::JsonLines => self.next_line(),
        };
        match found {
            Ok(Some((end, passed))) => {
                let bytes = &self.window.bytes()[..end];
                let begin = bytes.iter().take_while(|byte| matches!(byte, b'\r' | b'\n')).count();
                let line = line + count_lines(&bytes[..begin]);
                let end = begin + bytes[begin..].trim_ascii_end_of_line();
                if let Format::Csv { delimiter } = self.format
                    && passed == self.window.bytes().len()
                    && ends_in_quotes(&bytes[begin..], delimiter)
                {
                    return Err(Unreadable { line, reason: "a quote is opened and never closed".into() });
                }
                Ok(Some(Found { begin, end, passed, line }))
            }
            Ok(None) => Ok(None),
            Err(error) => Err(unreadable(line, &error)),
        }
    }

    /// Goes on behind it.
    pub(super) fn pass(&mut self, found: Found) {
        self.line += count_lines(&self.window.bytes()[..found.passed]);
        self.window.pass(found.passed);
    }

    /// A mark at the beginning says what the file is encoded in.
    fn begin(&mut self) -> io::Result<()> {
        while self.window.bytes().len() < 3 && self.window.more()? {}
        match self.window.bytes() {
            [0xef, 0xbb, 0xbf, ..] => self.window.pass(3),
            [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "the file is UTF-16: convert it to UTF-8 first",
                ));
            }
            _ => {}
        }
        Ok(())
    }

    fn next_csv(&mut self) -> io::Result<Option<(usize, usize)>> {
        let (mut read, mut written, mut ended) = (0, 0, 0);
        loop {
            // An empty input means the end, and closes the last record: it is given only when there is no more.
            if read == self.window.bytes().len() {
                self.window.more()?;
            }
            let (result, more_read, more_written, more_ended) =
                self.csv.read_record(&self.window.bytes()[read..], &mut self.text[written..], &mut self.ends[ended..]);
            read += more_read;
            written += more_written;
            ended += more_ended;
            match result {
                ReadRecordResult::InputEmpty => {}
                ReadRecordResult::OutputFull => self.text.resize(self.text.len() * 2, 0),
                ReadRecordResult::OutputEndsFull => self.ends.resize(self.ends.len() * 2, 0),
                ReadRecordResult::Record => {
                    self.fields = ended;
                    return Ok(Some((read, read)));
                }
                ReadRecordResult::End => return Ok(None),
            }
        }
    }

    fn next_line(&mut self) -> io::Result<Option<(usize, usize)>> {
        let (mut begin, mut looked) = (0, 0);
        loop {
            let bytes = self.window.bytes();
            if let Some(end) = bytes[looked..].iter().position(|byte| *byte == b'\n').map(|place| place + looked) {
                if !bytes[begin..end].trim_ascii().is_empty() {
                    return Ok(Some((end, end + 1)));
                }
                (begin, looked) = (end + 1, end + 1);
                continue;
            }
            looked = bytes.len();
            if !self.window.more()? {
                let bytes = self.window.bytes();
                let is_blank = bytes[begin..].trim_ascii().is_empty();
                return Ok((!is_blank).then_some((bytes.len(), bytes.len())));
            }
        }
    }

    /// The fields of the CSV record that was found last, as bytes.
    pub(super) fn fields(&self) -> impl Iterator<Item = &[u8]> {
        let mut from = 0;
        self.ends[..self.fields].iter().map(move |end| {
            let field = &self.text[from..*end];
            from = *end;
            field
        })
    }

    /// Writes the wanted fields of a record, in their order, as a line of COPY.
    pub(super) fn encode(&self, found: Found, wanted: &Wanted, line: &mut Line<'_>) -> Result<(), Bad> {
        let raw = &self.window.bytes()[found.begin..found.end];
        match self.format {
            Format::Csv { delimiter } => self.encode_csv(raw, delimiter, wanted, line),
            Format::JsonLines => encode_json(raw, wanted, line),
        }
    }

    fn encode_csv(&self, raw: &[u8], delimiter: u8, wanted: &Wanted, line: &mut Line<'_>) -> Result<(), Bad> {
        if self.fields != wanted.columns {
            let message = format!("{} fields, where the header has {}", self.fields, wanted.columns);
            return Err(Bad::new("22P04", message));
        }
        let text = std::str::from_utf8(&self.text[..self.ends[self.fields.max(1) - 1]])
            .map_err(|_| Bad::new("22021", "not UTF-8"))?;
        for (name, place) in &wanted.fields {
            let from = place.checked_sub(1).map_or(0, |before| self.ends[before]);
            let field = &text[from..self.ends[*place]];
            let is_null = match &wanted.null {
                Some(null) => field == null,
                // As COPY has it: nothing is null, and "" is an empty text.
                None => field.is_empty() && !is_quoted(raw, *place, delimiter),
            };
            line.field(name, (!is_null).then_some(field))?;
        }
        Ok(())
    }
}

/// What is taken of a record.
#[derive(Debug, Clone)]
pub(super) struct Wanted {
    /// How many fields a CSV record has.
    pub(super) columns: usize,
    /// Names, and for CSV their places.
    pub(super) fields: Vec<(String, usize)>,
    /// Whether other fields of an object are an error.
    pub(super) only: bool,
    /// Names that an object may have, and that are not taken.
    pub(super) ignored: Vec<String>,
    /// What stands for null in CSV; None: a field that is empty and not quoted.
    pub(super) null: Option<String>,
}

fn unreadable(line: u64, error: &io::Error) -> Unreadable {
    let reason = match error.kind() {
        io::ErrorKind::UnexpectedEof => "it ends in the middle: cut off, or not packed to its end".to_owned(),
        _ => error.to_string(),
    };
    Unreadable { line, reason }
}

fn count_lines(bytes: &[u8]) -> u64 {
    bytes.iter().filter(|byte| **byte == b'\n').count() as u64
}

trait EndOfLine {
    fn trim_ascii_end_of_line(&self) -> usize;
}

impl EndOfLine for [u8] {
    /// How long it is without the line end behind it.
    fn trim_ascii_end_of_line(&self) -> usize {
        self.len() - self.iter().rev().take_while(|byte| matches!(byte, b'\r' | b'\n')).count()
    }
}

/// Walks a CSV record as the parser does, for what it does not tell: calls back at the beginning of each field with
/// whether it is quoted, until told to stop; returns whether the record ends inside quotes.
fn walk(raw: &[u8], delimiter: u8, mut field: impl FnMut(bool) -> bool) -> bool {
    let mut rest = raw;
    loop {
        let quoted = rest.first() == Some(&b'"');
        if !field(quoted) {
            return false;
        }
        if quoted {
            rest = &rest[1..];
            loop {
                let Some(quote) = rest.iter().position(|byte| *byte == b'"') else { return true };
                rest = &rest[quote + 1..];
                match rest.strip_prefix(b"\"") {
                    Some(behind) => rest = behind,
                    None => break,
                }
            }
        }
        match rest.iter().position(|byte| *byte == delimiter) {
            Some(end) => rest = &rest[end + 1..],
            None => return false,
        }
    }
}

fn is_quoted(raw: &[u8], place: usize, delimiter: u8) -> bool {
    let (mut at, mut found) = (0, false);
    walk(raw, delimiter, |quoted| {
        found = quoted;
        at += 1;
        at <= place
    });
    found
}

fn ends_in_quotes(raw: &[u8], delimiter: u8) -> bool {
    walk(raw, delimiter, |_| true)
}

/// The names of a JSON object's fields, in their order.
pub(super) fn names(raw: &[u8]) -> Result<Vec<String>, Bad> {
    let object: Vec<(String, IgnoredAny)> = object(raw)?;
    Ok(object.into_iter().map(|(name, _)| name).collect())
}

fn encode_json(raw: &[u8], wanted: &Wanted, line: &mut Line<'_>) -> Result<(), Bad> {
    let object: Vec<(Cow<'_, str>, &RawValue)> = object(raw)?;
    for (position, (name, _)) in object.iter().enumerate() {
        if object[..position].iter().any(|(before, _)| before == name) {
            return Err(Bad::new("22030", format!("the field {name:?} is there twice")));
        }
        let known = |name: &str| {
            wanted.fields.iter().any(|(known, _)| known == name) || wanted.ignored.iter().any(|i| i == name)
        };
        if wanted.only && !known(name) {
            let message =
                format!("the field {name:?} is not one of the first record's: name the fields with --columns");
            return Err(Bad::new("22P04", message));
        }
    }
    for (name, _) in &wanted.fields {
        let value = object.iter().find(|(found, _)| found == name).map(|(_, value)| value.get());
        match value {
            None | Some("null") => line.field(name, None)?,
            Some(text) if text.starts_with('"') => {
                let text: Cow<'_, str> = serde_json::from_str::<Unquoted<'_>>(text)
                    .map_err(|_| Bad::new("22P02", format!("the field {name:?} is no text")))?
                    .0;
                line.field(name, Some(&text))?;
            }
            // Numbers as they are written: every digit arrives.
            Some(text) => line.field(name, Some(text))?,
        }
    }
    Ok(())
}

#[derive(serde::Deserialize)]
struct Unquoted<'a>(#[serde(borrow)] Cow<'a, str>);

fn object<'a, K, V>(raw: &'a [u8]) -> Result<Vec<(K, V)>, Bad>
where
    K: serde::Deserialize<'a>,
    V: serde::Deserialize<'a>,
{
    let text = std::str::from_utf8(raw).map_err(|_| Bad::new("22021", "not UTF-8"))?;
    let mut reader = serde_json::Deserializer::from_str(text);
    let fields = Object(std::marker::PhantomData).deserialize(&mut reader);
    fields.and_then(|fields| reader.end().map(|()| fields)).map_err(|error| {
        // Its own words, without the value that they may quote.
        let place = error.column();
        Bad::new("22P02", format!("not a JSON object (column {place})"))
    })
}

struct Object<K, V>(std::marker::PhantomData<(K, V)>);

impl<'de, K: serde::Deserialize<'de>, V: serde::Deserialize<'de>> DeserializeSeed<'de> for Object<K, V> {
    type Value = Vec<(K, V)>;

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de, K: serde::Deserialize<'de>, V: serde::Deserialize<'de>> Visitor<'de> for Object<K, V> {
    type Value = Vec<(K, V)>;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut fields = Vec::new();
        while let Some(field) = map.next_entry()? {
            fields.push(field);
        }
        Ok(fields)
    }
}
