//! Rows that go together, and the thread that reads them ahead.

use std::sync::Arc;

use tokio::sync::mpsc;

use super::copy::Line;
use super::input::Content;
use super::records::{Bad, Format, Records, Unreadable, Wanted};

/// A batch is written when it has so many bytes, whatever the number of its rows.
const BATCH_BYTES: usize = 4 << 20;

/// Rows that are written in one transaction.
#[derive(Debug, Default)]
pub(super) struct Batch {
    /// The first row's number in the file, from 1.
    pub(super) first: u64,
    /// As COPY reads them: the rows that could be read.
    pub(super) data: Vec<u8>,
    /// Where each of these begins, and its place in the batch.
    pub(super) good: Vec<(usize, u32)>,
    /// The others.
    pub(super) bad: Vec<(u32, Bad)>,
    /// Every row as it stands in the file.
    raw: Vec<u8>,
    places: Vec<Place>,
}

/// Where a row is.
#[derive(Debug, Clone, Copy)]
struct Place {
    line: u64,
    /// Behind its last byte, in the batch.
    raw_end: usize,
    /// Where the next one begins, in the file.
    next: Position,
}

/// A place in the unpacked file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Position {
    pub(super) offset: u64,
    pub(super) line: u64,
}

impl Batch {
    /// How many rows.
    pub(super) fn rows(&self) -> u64 {
        self.places.len() as u64
    }

    /// The last row's number.
    pub(super) fn last(&self) -> u64 {
        self.first + self.rows() - 1
    }

    /// A row as it stands in the file, and where.
    pub(super) fn input(&self, place: u32) -> (u64, &[u8]) {
        let place = place as usize;
        let from = place.checked_sub(1).map_or(0, |before| self.places[before].raw_end);
        (self.places[place].line, &self.raw[from..self.places[place].raw_end])
    }

    /// Where the row behind the last one begins.
    pub(super) fn next(&self) -> Position {
        self.places.last().map(|place| place.next).unwrap_or_default()
    }

    /// For the staging table: each line with its place before it.
    pub(super) fn numbered(&self) -> Vec<u8> {
        let mut numbered = Vec::with_capacity(self.data.len() + self.good.len() * 6);
        for (index, (begin, place)) in self.good.iter().enumerate() {
            let end = self.good.get(index + 1).map_or(self.data.len(), |(next, _)| *next);
            numbered.extend_from_slice(place.to_string().as_bytes());
            numbered.push(b'\t');
            numbered.extend_from_slice(&self.data[*begin..end]);
        }
        numbered
    }

    /// Its two halves: for rows that the server cannot even stage.
    pub(super) fn halves(&self) -> (Self, Self) {
        let middle = self.places.len() / 2;
        (self.part(0, middle), self.part(middle, self.places.len()))
    }

    fn part(&self, from: usize, to: usize) -> Self {
        let within = |place: u32| (from..to).contains(&(place as usize));
        let moved = |place: u32| place - u32::try_from(from).unwrap_or_default();
        let mut part = Self { first: self.first + from as u64, ..Self::default() };
        for (index, (begin, place)) in self.good.iter().enumerate().filter(|(_, (_, place))| within(*place)) {
            let end = self.good.get(index + 1).map_or(self.data.len(), |(next, _)| *next);
            part.good.push((part.data.len(), moved(*place)));
            part.data.extend_from_slice(&self.data[*begin..end]);
        }
        part.bad =
            self.bad.iter().filter(|(place, _)| within(*place)).map(|(p, bad)| (moved(*p), bad.clone())).collect();
        for place in from..to {
            part.raw.extend_from_slice(self.input(u32::try_from(place).unwrap_or(u32::MAX)).1);
            part.places.push(Place { raw_end: part.raw.len(), ..self.places[place] });
        }
        part
    }
}

/// What the reading thread needs to know.
#[derive(Debug)]
pub(super) struct Reading {
    pub(super) format: Format,
    pub(super) wanted: Wanted,
    /// Fields of the natural key, where they are taken as they are.
    pub(super) keys: Vec<String>,
    pub(super) batch_rows: usize,
    pub(super) row: u64,
    pub(super) from: Position,
}

/// Reads ahead, one batch at most: memory stays the same, however large the file.
pub(super) fn read_ahead(content: Arc<Content>, reading: Reading) -> mpsc::Receiver<Result<Batch, Unreadable>> {
    let (sender, receiver) = mpsc::channel(1);
    std::thread::spawn(move || {
        let Position { offset, line } = reading.from;
        let records = content.window(offset).map(|window| Records::new(window, reading.format, line));
        let mut records = match records {
            Ok(records) => records,
            Err(error) => {
                let _ = sender.blocking_send(Err(Unreadable { line, reason: error.to_string() }));
                return;
            }
        };
        let mut row = reading.row;
        loop {
            let (batch, broken) = next_batch(&mut records, &reading, row);
            row += batch.rows();
            // Nobody waits for more once the import has ended.
            if batch.rows() > 0 && sender.blocking_send(Ok(batch)).is_err() {
                return;
            }
            match broken {
                Some(Ok(())) => return,
                Some(Err(error)) => {
                    let _ = sender.blocking_send(Err(error));
                    return;
                }
                None => {}
            }
        }
    });
    receiver
}

/// One batch; and, where there is no other after it, why.
fn next_batch(records: &mut Records, reading: &Reading, first: u64) -> (Batch, Option<Result<(), Unreadable>>) {
    let mut batch = Batch { first, ..Batch::default() };
    let mut end = None;
    while batch.places.len() < reading.batch_rows && batch.data.len() < BATCH_BYTES && batch.raw.len() < BATCH_BYTES {
        let found = match records.next() {
            Ok(Some(found)) => found,
            Ok(None) => {
                end = Some(Ok(()));
                break;
            }
            Err(error) => {
                end = Some(Err(error));
                break;
            }
        };
        let place = u32::try_from(batch.places.len()).unwrap_or(u32::MAX);
        let begin = batch.data.len();
        let mut line = Line::begin(&mut batch.data, &reading.keys);
        match records.encode(found, &reading.wanted, &mut line) {
            Ok(()) => {
                line.end();
                batch.good.push((begin, place));
            }
            Err(bad) => {
                batch.data.truncate(begin);
                batch.bad.push((place, bad));
            }
        }
        batch.raw.extend_from_slice(&records.window.bytes()[found.begin..found.end]);
        records.pass(found);
        let next = Position { offset: records.window.offset, line: records.line };
        batch.places.push(Place { line: found.line, raw_end: batch.raw.len(), next });
    }
    (batch, end)
}
