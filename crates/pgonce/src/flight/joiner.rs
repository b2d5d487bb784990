//! Which bytes are a flight that can be joined, what is sent for it, and what the driver is told. Without a socket.
//!
//! | | the driver sends | the server gets | where the server skips |
//! |---|---|---|---|
//! | begin | `Query BEGIN` · `Bind Execute Sync` | `Bind Execute` of BEGIN, `Bind Execute Sync` | all of it again, as it was |
//! | commit | `Bind Execute Sync` · `Query COMMIT` | `Bind Execute`, `Bind Execute` of COMMIT, `Sync` | `Query COMMIT`, which rolls back |
//!
//! BEGIN and COMMIT are prepared once a connection, under names that say what they are.

use bytes::{Buf as _, BufMut as _, BytesMut};

/// Longer flights pass as they are: they would be copied.
const JOINED_BYTES_MAX: usize = 64 * 1024;
/// What BEGIN is called by: with its isolation levels. More texts than these are somebody else's.
const STATEMENTS_MAX: usize = 8;

/// The state of one connection.
#[derive(Debug, Default)]
pub(super) struct Joiner {
    /// Answers whose end has not been seen, to requests that passed as they are: they come before a flight's.
    awaited: usize,
    /// Nothing is joined any more: what was sent makes the count of answers uncertain, or what was prepared is gone.
    off: bool,
    /// Texts that are prepared.
    prepared: Vec<Vec<u8>>,
    flight: Option<Joined>,
    scan: Scan,
}

/// A joined flight that is under way.
#[derive(Debug)]
struct Joined {
    kind: Kind,
    at: At,
    /// What is sent if the server skips it.
    held: BytesMut,
    /// An error that the driver learns of only if the server says nothing more.
    kept: BytesMut,
    /// A text that is prepared in it: known from when the server says so, because it may skip that, too.
    preparing: Option<Vec<u8>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Begin,
    Commit,
}

/// Whose answers come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    First,
    Second,
    /// The first failed: the server skips until the Sync.
    Skipping,
}

impl Joiner {
    pub(super) fn is_under_way(&self) -> bool {
        self.flight.is_some()
    }

    /// What the driver sends now: whole messages. True: it is a flight that can be joined, and what is to be sent was added
    /// to `out`. False: it passes as it is.
    pub(super) fn join(&mut self, bytes: &[u8], out: &mut BytesMut) -> bool {
        if self.off {
            return false;
        }
        if bytes.len() <= JOINED_BYTES_MAX
            && let Some(four) = four(bytes)
        {
            let kinds = four.map(|message| message[0]);
            let [first, second, third, fourth] = four;
            if kinds == *b"QBES"
                && is_begin(text(first))
                && let Some(preparing) = self.control(text(first), out)
            {
                out.extend_from_slice(&bytes[first.len()..]);
                self.flight = Some(Joined::new(Kind::Begin, bytes, preparing));
                return true;
            }
            if kinds == *b"BESQ" && text(fourth) == b"COMMIT" {
                out.extend_from_slice(first);
                out.extend_from_slice(second);
                if let Some(preparing) = self.control(text(fourth), out) {
                    out.extend_from_slice(third);
                    self.flight = Some(Joined::new(Kind::Commit, fourth, preparing));
                    return true;
                }
                out.clear();
            }
        }
        self.expect(bytes);
        false
    }

    /// Adds a statement that begins or ends a transaction, and says what of it is prepared with it: nothing, where it is
    /// already. None: too many texts.
    fn control(&self, text: &[u8], out: &mut BytesMut) -> Option<Option<Vec<u8>>> {
        let known = self.prepared.iter().any(|prepared| prepared == text);
        if !known && self.prepared.len() >= STATEMENTS_MAX {
            return None;
        }
        let name = [b"pgonce ", text, b"\0"].concat();
        if !known {
            put(out, b'P', &[&name, text, b"\0\0\0"]);
        }
        put(out, b'B', &[b"\0", &name, &[0; 6]]); // no formats, no parameters, no results
        put(out, b'E', &[&[0; 5]]); // the unnamed portal, all rows
        Some((!known).then(|| text.to_vec()))
    }

    /// Counts the answers to what passes as it is.
    fn expect(&mut self, bytes: &[u8]) {
        let mut rest = bytes;
        while let Some(message) = next(&mut rest) {
            match message[0] {
                b'Q' | b'S' | b'F' => self.awaited += 1,
                b'd' | b'c' | b'f' => self.off = true, // COPY: the server passes over some Syncs
                _ => {}
            }
        }
        self.off |= !rest.is_empty();
    }

    /// Counts answers that pass as they are.
    pub(super) fn pass(&mut self, bytes: &[u8]) {
        if !self.off {
            let (_, ended) = self.scan.ended(bytes, usize::MAX);
            self.off = ended > self.awaited;
            self.awaited = self.awaited.saturating_sub(ended);
        }
    }

    /// Takes whole messages of a joined flight's answer out of `incoming`, and adds what the driver is told to `answers`, and
    /// what is to be sent to `out`. Stops at the flight's end.
    pub(super) fn answer(&mut self, incoming: &mut BytesMut, answers: &mut BytesMut, out: &mut BytesMut) {
        // What belongs to earlier requests, or began before the flight: a notification, of which a part was read.
        if self.awaited > 0 || self.scan.is_inside() {
            let (bytes, ended) = self.scan.ended(incoming, self.awaited);
            answers.extend_from_slice(&incoming[..bytes]);
            incoming.advance(bytes);
            self.awaited = self.awaited.saturating_sub(ended);
            if self.awaited > 0 || self.scan.is_inside() {
                return;
            }
        }
        while let Some(flight) = &mut self.flight {
            let Some(length) = length_of(incoming) else { return };
            let message = &incoming[..length];
            let kind = message[0];
            let ours = matches!((flight.kind, flight.at), (Kind::Begin, At::First) | (Kind::Commit, At::Second));
            match (flight.at, kind) {
                _ if ours && kind == b'1' => self.prepared.extend(flight.preparing.take()),
                _ if ours && kind == b'2' => {} // the driver did not prepare or bind it
                (At::First, b'C' | b'I') => {
                    answers.extend_from_slice(message);
                    put(answers, b'Z', &[b"T"]);
                    flight.at = At::Second;
                }
                (At::First, b'E') => {
                    flight.at = At::Skipping;
                    if flight.kind == Kind::Begin {
                        flight.kept = message.into();
                    } else {
                        answers.extend_from_slice(message);
                    }
                }
                (At::Skipping, b'Z') => {
                    if flight.kind == Kind::Begin {
                        // Nothing was begun: somebody has dropped what is prepared, or worse. The driver's own way shows which.
                        self.off = true;
                        self.awaited = 2;
                    } else {
                        answers.extend_from_slice(message);
                        self.awaited = 1;
                    }
                    out.extend_from_slice(&flight.held);
                    self.flight = None;
                }
                (_, b'Z') => {
                    answers.extend_from_slice(message);
                    self.flight = None;
                }
                _ => answers.extend_from_slice(message),
            }
            incoming.advance(length);
        }
    }

    /// The server is gone: the driver is told what was kept from it.
    pub(super) fn end(&mut self, answers: &mut BytesMut) {
        if let Some(flight) = self.flight.take() {
            answers.extend_from_slice(&flight.kept);
        }
        self.off = true;
    }
}

impl Joined {
    fn new(kind: Kind, held: &[u8], preparing: Option<Vec<u8>>) -> Self {
        Self { kind, at: At::First, held: held.into(), kept: BytesMut::new(), preparing }
    }
}

/// The messages, each with its type and length, if they are exactly four.
fn four(bytes: &[u8]) -> Option<[&[u8]; 4]> {
    let mut rest = bytes;
    let all = [next(&mut rest)?, next(&mut rest)?, next(&mut rest)?, next(&mut rest)?];
    rest.is_empty().then_some(all)
}

fn next<'a>(rest: &mut &'a [u8]) -> Option<&'a [u8]> {
    let (message, after) = rest.split_at_checked(length_of(rest)?)?;
    *rest = after;
    Some(message)
}

/// The length of the first message, if all of it is there.
fn length_of(bytes: &[u8]) -> Option<usize> {
    let body = u32::from_be_bytes(bytes.get(1..5)?.try_into().ok()?);
    let all = usize::try_from(body).ok()?.checked_add(1)?;
    (bytes.len() >= all && all >= 5).then_some(all)
}

/// The text of a Query, without its end.
fn text(query: &[u8]) -> &[u8] {
    let body = query.get(5..).unwrap_or_default();
    body.strip_suffix(b"\0").unwrap_or(body)
}

/// One statement that begins a transaction, and nothing else.
fn is_begin(text: &[u8]) -> bool {
    text.starts_with(b"BEGIN") && !text.contains(&b';')
}

fn put(out: &mut BytesMut, kind: u8, parts: &[&[u8]]) {
    let body: usize = parts.iter().map(|part| part.len()).sum();
    out.put_u8(kind);
    out.put_u32(u32::try_from(body + 4).unwrap_or_default()); // texts of our own: short
    for part in parts {
        out.extend_from_slice(part);
    }
}

/// Finds the ends of answers, messages ReadyForQuery, in bytes that come in any pieces.
#[derive(Debug, Default)]
struct Scan {
    header: BytesMut,
    /// Of the present message's body, where its header is whole.
    left: usize,
    ends: bool,
}

impl Scan {
    /// Whether a message has begun whose end has not come.
    fn is_inside(&self) -> bool {
        self.left > 0 || !self.header.is_empty()
    }

    /// How many bytes were looked at, and how many answers end in them: at most so many, and then no byte more than the
    /// message has that has begun.
    fn ended(&mut self, bytes: &[u8], most: usize) -> (usize, usize) {
        let (mut rest, mut ended) = (bytes, 0);
        while !rest.is_empty() && (ended < most || self.is_inside()) {
            if self.left == 0 {
                let some = rest.len().min(5 - self.header.len());
                self.header.extend_from_slice(&rest[..some]);
                rest.advance(some);
                if self.header.len() < 5 {
                    break;
                }
                self.ends = self.header.get_u8() == b'Z';
                self.left = usize::try_from(self.header.get_u32()).unwrap_or(usize::MAX).saturating_sub(4);
            }
            let some = self.left.min(rest.len());
            rest.advance(some);
            self.left -= some;
            ended += usize::from(self.left == 0 && std::mem::take(&mut self.ends));
        }
        (bytes.len() - rest.len(), ended)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop, loudly")]

    use super::*;

    fn message(kind: u8, body: &[u8]) -> Vec<u8> {
        let mut out = BytesMut::new();
        put(&mut out, kind, &[body]);
        out.to_vec()
    }

    fn call() -> Vec<u8> {
        [message(b'B', b"\0s1\0\0\0\0\0\0\0"), message(b'E', &[0; 5]), message(b'S', b"")].concat()
    }

    fn begin() -> Vec<u8> {
        [message(b'Q', b"BEGIN\0"), call()].concat()
    }

    fn commit() -> Vec<u8> {
        [call(), message(b'Q', b"COMMIT\0")].concat()
    }

    fn kinds(bytes: &[u8]) -> String {
        let (mut rest, mut kinds) = (bytes, String::new());
        while let Some(message) = next(&mut rest) {
            kinds.push(char::from(message[0]));
        }
        assert!(rest.is_empty(), "whole messages");
        kinds
    }

    /// What the server gets, what the driver is told where the server answers with these messages a byte at a time, and what
    /// is sent then.
    fn exchange(joiner: &mut Joiner, sent: &[u8], answer: &str) -> (String, String, String) {
        let mut out = BytesMut::new();
        if !joiner.join(sent, &mut out) {
            out.extend_from_slice(sent);
        }
        let got = kinds(&out.split());
        let (mut incoming, mut answers) = (BytesMut::new(), BytesMut::new());
        for kind in answer.bytes() {
            for byte in message(kind, if kind == b'Z' { b"I" } else { b"body" }) {
                if joiner.is_under_way() {
                    incoming.extend_from_slice(&[byte]);
                    joiner.answer(&mut incoming, &mut answers, &mut out);
                } else {
                    joiner.pass(&[byte]);
                    answers.extend_from_slice(&[byte]);
                }
            }
        }
        assert!(incoming.is_empty(), "nothing is left over");
        (got, kinds(&answers), kinds(&out))
    }

    fn told(got: &str, answers: &str, then: &str) -> (String, String, String) {
        (got.to_owned(), answers.to_owned(), then.to_owned())
    }

    #[test]
    fn a_flight_is_one_sync_and_the_driver_has_both_answers() {
        let mut joiner = Joiner::default();
        assert_eq!(exchange(&mut joiner, &begin(), "12C2DCZ"), told("PBEBES", "CZ2DCZ", ""));
        assert_eq!(exchange(&mut joiner, &begin(), "2NC2DCZ"), told("BEBES", "NCZ2DCZ", ""), "prepared once");
        assert_eq!(exchange(&mut joiner, &commit(), "2C12CZ"), told("BEPBES", "2CZCZ", ""));
        assert_eq!(
            exchange(&mut joiner, &commit(), "2DC2NCZ"),
            told("BEBES", "2DCZNCZ", ""),
            "a warning stays before its COMMIT"
        );
        assert_eq!(exchange(&mut joiner, &commit(), "2C2EZ"), told("BEBES", "2CZEZ", ""), "COMMIT itself fails");
        assert_eq!(exchange(&mut joiner, &begin(), "2C2EZ"), told("BEBES", "CZ2EZ", ""), "the claim fails");
    }

    #[test]
    fn what_the_server_skips_is_sent_as_it_was() {
        let mut joiner = Joiner::default();
        assert_eq!(exchange(&mut joiner, &commit(), "EZ"), told("BEPBES", "EZ", "Q"), "the COMMIT that rolls back");
        assert_eq!(exchange(&mut joiner, b"", "CZ"), told("", "CZ", ""), "its answer passes");
        assert_eq!(exchange(&mut joiner, &begin(), "EZ"), told("PBEBES", "", "QBES"), "nobody is told of a try");
        assert_eq!(exchange(&mut joiner, b"", "CZ2DCZ"), told("", "CZ2DCZ", ""));
        assert_eq!(exchange(&mut joiner, &begin(), "CZ2DCZ"), told("QBES", "CZ2DCZ", ""), "and no other");
    }

    /// The server skips a Parse, too: then the text is not prepared.
    #[test]
    fn what_was_skipped_is_not_prepared() {
        let mut joiner = Joiner::default();
        assert_eq!(exchange(&mut joiner, &commit(), "EZ"), told("BEPBES", "EZ", "Q"));
        assert_eq!(exchange(&mut joiner, b"", "CZ"), told("", "CZ", ""));
        assert_eq!(exchange(&mut joiner, &commit(), "2C12CZ"), told("BEPBES", "2CZCZ", ""), "once more");
        assert_eq!(exchange(&mut joiner, &commit(), "2C2CZ"), told("BEBES", "2CZCZ", ""));
    }

    /// A notification of which a part was read before the flight, and the rest comes with its answer.
    #[test]
    fn a_message_that_had_begun_is_not_the_flights() {
        let notification = message(b'A', b"CZECZE: what looks like answers is none");
        for read in 1..notification.len() {
            let (mut joiner, mut out, mut answers) = (Joiner::default(), BytesMut::new(), BytesMut::new());
            joiner.pass(&notification[..read]);
            assert!(joiner.join(&begin(), &mut out));
            let rest =
                [&notification[read..], &message(b'1', b""), &message(b'2', b""), &message(b'C', b"BEGIN\0")].concat();
            let mut incoming = BytesMut::from(rest.as_slice());
            joiner.answer(&mut incoming, &mut answers, &mut out);
            assert_eq!(answers[..notification.len() - read], notification[read..], "after {read} bytes");
            assert_eq!(kinds(&answers[notification.len() - read..]), "CZ");
            assert!(joiner.is_under_way() && incoming.is_empty());
        }
    }

    #[test]
    fn earlier_answers_come_first() {
        let mut joiner = Joiner::default();
        assert_eq!(exchange(&mut joiner, &[call(), call()].concat(), "2"), told("BESBES", "2", ""));
        assert_eq!(exchange(&mut joiner, &commit(), "CZ2CZ2C12CZ"), told("BEPBES", "CZ2CZ2CZCZ", ""));
    }

    #[test]
    fn a_server_that_goes_away_is_heard_to_the_end() {
        let mut joiner = Joiner::default();
        let (_, answers, _) = exchange(&mut joiner, &begin(), "E");
        assert_eq!(answers, "");
        let mut last = BytesMut::new();
        joiner.end(&mut last);
        assert_eq!(kinds(&last), "E");
        assert!(!joiner.is_under_way());
    }

    #[test]
    fn anything_else_passes() {
        let query = |text: &[u8]| message(b'Q', &[text, b"\0"].concat());
        for sent in [
            [query(b"BEGIN; SET LOCAL x = 1"), call()].concat(),
            [query(b"ROLLBACK"), call()].concat(),
            [call(), query(b"COMMIT AND CHAIN")].concat(),
            [begin(), call()].concat(),
            [call(), commit()].concat(),
            query(b"BEGIN"),
            begin()[..begin().len() - 1].to_vec(),
            [query(b"BEGIN"), message(b'B', &vec![0; JOINED_BYTES_MAX]), message(b'E', b""), message(b'S', b"")]
                .concat(),
        ] {
            let (mut joiner, mut out) = (Joiner::default(), BytesMut::new());
            assert!(!joiner.join(&sent, &mut out));
            assert!(out.is_empty() && !joiner.is_under_way());
        }
        // After COPY nobody knows how many Syncs count.
        let mut joiner = Joiner::default();
        joiner.join(
            &[call(), message(b'd', b"row"), message(b'c', b""), message(b'S', b"")].concat(),
            &mut BytesMut::new(),
        );
        assert!(!joiner.join(&begin(), &mut BytesMut::new()));
    }

    #[test]
    fn texts_are_limited() {
        let mut joiner = Joiner::default();
        for n in 0..STATEMENTS_MAX + 2 {
            let sent = [message(b'Q', format!("BEGIN {n}\0").as_bytes()), call()].concat();
            let (got, ..) = exchange(&mut joiner, &sent, if n < STATEMENTS_MAX { "12C2CZ" } else { "CZ2CZ" });
            assert_eq!(got, if n < STATEMENTS_MAX { "PBEBES" } else { "QBES" });
        }
    }
}
