//! Which route a path belongs to, also when somebody spells the path so that it looks like another one.
//!
//! A pattern is matched against the path as it came, percent-encoded. That is not enough: an upstream that
//! normalises paths takes `/public/../payments`, `/%70ayments`, `/payments/` and `/x;/../payments` for
//! `/payments`. So a path that can be read in several ways is matched in all of them, and of the routes that are
//! found the strictest counts. A path with dot segments, which no honest client sends, could be any path: it gets
//! the strictest of all routes. Letter case is not touched: for an upstream that ignores it, write `*` routes.

use std::borrow::Cow;

/// A path, or many: `/orders` (which is also `/orders/`), `/orders/{id}/pay`, `/orders/*` (also `/orders` itself),
/// `/order*`, `*`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathPattern {
    text: String,
    segments: Vec<Segment>,
    tail: Tail,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Segment {
    Literal(Literal),
    /// `{name}`: any segment that is not empty.
    Param,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Tail {
    /// Nothing follows.
    End,
    /// Anything follows, or nothing.
    Any,
    /// One more segment begins so; then anything.
    Begins(Literal),
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Literal {
    encoded: Vec<u8>,
    decoded: Vec<u8>,
}

impl Literal {
    fn spelled(&self, spelling: Spelling) -> &[u8] {
        match spelling {
            Spelling::Encoded => &self.encoded,
            Spelling::Decoded => &self.decoded,
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum Spelling {
    Encoded,
    Decoded,
}

/// The first segment of the gateway's own endpoints.
pub const OWN_SEGMENT: &str = "_pgonce";

impl PathPattern {
    /// Reads a pattern; the error says what is wrong with it.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (body, has_star) = text.strip_suffix('*').map_or((text, false), |body| (body, true));
        if body.is_empty() && has_star {
            return Ok(Self { text: text.to_owned(), segments: Vec::new(), tail: Tail::Any });
        }
        let Some(body) = body.strip_prefix('/') else { return Err("a path begins with /, or is * alone".into()) };
        if body.contains('*') {
            return Err("* may only be the last character of a path".into());
        }
        let mut parts: Vec<&str> = body.split('/').collect();
        // "/" has no segment; what follows the last slash of "/orders/*" is the star's.
        let last = parts.pop().unwrap_or_default();
        if last.is_empty() && !has_star && !parts.is_empty() {
            return Err("write the path without the slash at its end: it matches with and without".into());
        }
        let mut segments = parts.into_iter().map(segment).collect::<Result<Vec<_>, _>>()?;
        let tail = match (last, has_star) {
            ("", true) => Tail::Any,
            ("", false) => Tail::End,
            (last, false) => {
                segments.push(segment(last)?);
                Tail::End
            }
            (last, true) => match segment(last)? {
                Segment::Literal(literal) => Tail::Begins(literal),
                Segment::Param => return Err("write {name}/*, not {name}*".into()),
            },
        };
        let own = |first: &Segment| matches!(first, Segment::Literal(first) if first.decoded == OWN_SEGMENT.as_bytes());
        if segments.first().is_some_and(own) {
            return Err("paths under /_pgonce/ are the gateway's own".into());
        }
        Ok(Self { text: text.to_owned(), segments, tail })
    }

    /// As it was written.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Whether every path matches.
    #[must_use]
    pub fn is_everything(&self) -> bool {
        self.segments.is_empty() && self.tail == Tail::Any
    }

    fn matches<'a>(&self, mut path: impl Iterator<Item = &'a [u8]>, spelling: Spelling) -> bool {
        for segment in &self.segments {
            let Some(given) = path.next() else { return false };
            let fits = match segment {
                Segment::Literal(literal) => literal.spelled(spelling) == given,
                Segment::Param => !given.is_empty(),
            };
            if !fits {
                return false;
            }
        }
        match &self.tail {
            Tail::End => path.next().is_none(),
            Tail::Any => true,
            Tail::Begins(start) => path.next().is_some_and(|given| given.starts_with(start.spelled(spelling))),
        }
    }
}

fn segment(text: &str) -> Result<Segment, String> {
    if text.is_empty() {
        return Err("a path has no empty segments".into());
    }
    if let Some(name) = text.strip_prefix('{').and_then(|rest| rest.strip_suffix('}')) {
        let is_name = !name.is_empty() && name.bytes().all(|c| c.is_ascii_alphanumeric() || c == b'_');
        return if is_name { Ok(Segment::Param) } else { Err("{name} is of letters, digits and _".into()) };
    }
    if text.contains(['{', '}']) {
        return Err("{name} stands for a whole segment".into());
    }
    if !text.bytes().all(|c| c.is_ascii_alphanumeric() || b"-._~!$&'()+,=:@%".contains(&c)) {
        return Err("a path is of letters, digits and -._~!$&'()+,=:@; write other characters percent-encoded".into());
    }
    let decoded = decoded(text.as_bytes());
    let has_bad_escape =
        text.split('%').skip(1).any(|rest| !rest.is_char_boundary(2) || hex(rest.as_bytes()).is_none());
    if has_bad_escape || decoded.iter().any(|c| matches!(c, b'/' | b'\\' | b';' | b'%' | 0)) {
        return Err("a path cannot have this escape".into());
    }
    if matches!(&*decoded, b"." | b"..") {
        return Err("a path has no dot segments".into());
    }
    Ok(Segment::Literal(Literal { encoded: text.into(), decoded: decoded.into_owned() }))
}

/// The place of the route for a path: the first that matches. Where the path can be read in several ways, the
/// strictest of those that match, by `strictness`; the reading as it came is preferred among equals. `None`
/// where nothing matches the path as it came, or in a stricter way.
pub(super) fn choose<'p>(
    patterns: impl Iterator<Item = &'p PathPattern> + Clone,
    strictness: impl Fn(usize) -> u8,
    path: &str,
) -> Option<usize> {
    let find = |segments: &[&[u8]]| {
        patterns.clone().position(|pattern| pattern.matches(segments.iter().copied(), Spelling::Decoded))
    };
    let as_it_came = patterns.clone().position(|pattern| pattern.matches(encoded_segments(path), Spelling::Encoded));
    if is_plain(path) {
        return as_it_came;
    }
    let readings = Readings::of(path);
    let others: Vec<usize> = if readings.has_dots {
        (0..patterns.clone().count()).collect()
    } else {
        readings
            .paths
            .iter()
            .filter_map(|path| find(&path.iter().map(|segment| &**segment).collect::<Vec<_>>()))
            .collect()
    };
    // Later ones must be stricter to win.
    as_it_came.into_iter().chain(others).reduce(
        |best, other| {
            if strictness(other) > strictness(best) { other } else { best }
        },
    )
}

/// What the path has between its slashes, as it came.
fn encoded_segments(path: &str) -> impl Iterator<Item = &[u8]> {
    let rest = path.strip_prefix('/').unwrap_or(path);
    rest.split('/').map(str::as_bytes).filter(move |_| !rest.is_empty())
}

/// Whether there is only one way to read it. Almost every path is so, and costs one pass.
fn is_plain(path: &str) -> bool {
    let bytes = path.as_bytes();
    let has_doubt = bytes.iter().any(|c| matches!(c, b'%' | b'\\' | b';'));
    let is_odd = |pair: &[u8]| pair[0] == b'/' && matches!(pair[1], b'/' | b'.');
    !has_doubt && !bytes.windows(2).any(is_odd) && (bytes.len() <= 1 || !path.ends_with('/'))
}

/// Other ways to read a path.
struct Readings {
    /// In each, a segment per item, decoded, none empty.
    paths: Vec<Vec<Vec<u8>>>,
    has_dots: bool,
}

impl Readings {
    fn of(path: &str) -> Self {
        let mut readings = Self { paths: Vec::new(), has_dots: false };
        // Split first, then decoded: an escaped slash stays in its segment.
        let segments = path.split('/').map(|segment| decoded(segment.as_bytes()).into_owned());
        readings.add(segments.collect());
        // Decoded first, then split. Twice and three times, for a proxy behind that decodes and forwards.
        let mut text = Cow::Borrowed(path.as_bytes());
        for _ in 0..3 {
            text = Cow::Owned(decoded(&text).into_owned());
            readings.add(text.split(|c| matches!(c, b'/' | b'\\')).map(<[u8]>::to_vec).collect());
            if !text.contains(&b'%') {
                break;
            }
        }
        readings
    }

    fn add(&mut self, mut segments: Vec<Vec<u8>>) {
        for segment in &mut segments {
            // "..;x" is ".." for servers that know path parameters; so is "name;x" "name".
            segment.truncate(segment.iter().position(|c| *c == b';').unwrap_or(segment.len()));
        }
        self.has_dots |= segments.iter().any(|segment| matches!(&**segment, b"." | b".."));
        segments.retain(|segment| !segment.is_empty());
        self.paths.push(segments);
    }
}

/// Percent-decoded once; what is no escape stays.
fn decoded(text: &[u8]) -> Cow<'_, [u8]> {
    if !text.contains(&b'%') {
        return Cow::Borrowed(text);
    }
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((first, after)) = rest.split_first() {
        match hex(after).filter(|_| *first == b'%') {
            Some(byte) => {
                bytes.push(byte);
                rest = &after[2..];
            }
            None => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    Cow::Owned(bytes)
}

/// The byte that the first two characters spell.
fn hex(text: &[u8]) -> Option<u8> {
    let digits = text.get(..2)?;
    let digit = |c: u8| char::from(c).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    Some(digit(digits[0])? * 16 + digit(digits[1])?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on should stop, loudly")]
mod tests {
    use super::*;

    fn is_match(pattern: &str, path: &str) -> bool {
        let pattern = PathPattern::parse(pattern).unwrap();
        choose(std::iter::once(&pattern), |_| 1, path).is_some()
    }

    #[test]
    fn patterns_match_what_they_say() {
        for (pattern, yes, no) in [
            ("*", vec!["/", "/a", "/a/b", "*", ""], vec![]),
            ("/*", vec!["/", "/a/b"], vec![]),
            ("/", vec!["/"], vec!["/a"]),
            ("/orders", vec!["/orders", "/orders/"], vec!["/orders/1", "/orderss", "/Orders", "/", "/a/orders"]),
            ("/orders/*", vec!["/orders", "/orders/", "/orders/1", "/orders/1/2"], vec!["/ordersx", "/order"]),
            ("/order*", vec!["/order", "/orders", "/orders/1"], vec!["/orde", "/", "/x/order"]),
            ("/o/{id}", vec!["/o/1", "/o/a%2Fb", "/o/1/"], vec!["/o", "/o/", "/o/1/2"]),
            ("/o/{id}/pay", vec!["/o/1/pay"], vec!["/o/1", "/o//pay", "/o/1/pay/2"]),
            ("/o/{id}/*", vec!["/o/1", "/o/1/x/y"], vec!["/o", "/p/1"]),
            ("/caf%C3%A9", vec!["/caf%C3%A9", "/caf%c3%a9"], vec!["/cafe"]),
        ] {
            for path in yes {
                assert!(is_match(pattern, path), "{pattern} {path}");
            }
            for path in no {
                assert!(!is_match(pattern, path), "{pattern} {path}");
            }
        }
    }

    #[test]
    fn patterns_that_would_surprise_are_refused() {
        let bad = [
            "",
            "orders",
            "/orders/",
            "/a//b",
            "/a/../b",
            "/a/%2e%2E/b",
            "/a*b",
            "/a/*/b",
            "**",
            "/a%2Fb",
            "/a%zz",
            "/a%2",
            "/a;b",
            "/a\\b",
            "/a?b",
            "/a#b",
            "/é",
            "/a b",
            "/x{id}",
            "/{}",
            "/{a-b}",
            "/{id}*",
            "/_pgonce",
            "/_pgonce/*",
            "/%5fpgonce/health",
            "/a%25",
            "/a%é",
        ];
        for text in bad {
            assert!(PathPattern::parse(text).is_err(), "{text}");
        }
    }

    /// Routes as a careless file has them; 0 is off, 1 optional, 2 required.
    fn chosen(path: &str) -> &'static str {
        const ROUTES: [(&str, u8); 6] = [
            ("/public/*", 0),
            ("/payments/*", 2),
            ("/orders", 2),
            ("/files/{name}", 0),
            ("/refunds/{id}", 2),
            ("*", 1),
        ];
        let patterns: Vec<_> = ROUTES.iter().map(|(text, _)| PathPattern::parse(text).unwrap()).collect();
        choose(patterns.iter(), |place| ROUTES[place].1, path).map_or("none", |place| ROUTES[place].0)
    }

    #[test]
    fn no_spelling_leads_to_a_laxer_route() {
        for path in [
            "/public/../payments/1",
            "/public/%2e%2e/payments",
            "/public/.%2E/payments",
            "/public/..%2fpayments",
            "/public/..%5Cpayments",
            "/public/..\\payments",
            "/public/..;/payments",
            "/public/..;a=b/payments",
            "/public/%252e%252e%252fpayments",
            "/public/%25252e%25252e/payments",
            "/public%2f..%2fpayments",
            "/x%2fy/../payments",
            "/public/./x",
            "/%70ayments/1",
            "/payments%2F1",
            "/payments;x/1",
            "//payments/1",
            "/.//payments",
            "/%2fpayments",
            "/%5cpayments",
            "/%2570ayments",
        ] {
            assert_eq!(chosen(path), "/payments/*", "{path}");
        }
        for path in ["/orders/", "/orders//", "//orders", "/%6frders", "/orders;v=1", "/orders%2f"] {
            assert_eq!(chosen(path), "/orders", "{path}");
        }
    }

    #[test]
    fn an_escaped_slash_may_stay_in_its_segment() {
        assert_eq!(chosen("/%72efunds/a%2Fb"), "/refunds/{id}");
    }

    #[test]
    fn honest_paths_go_where_they_say() {
        for (path, route) in [
            ("/public/logo.png", "/public/*"),
            ("/public/a%20b", "/public/*"),
            ("/public/a%2Fb;v=1", "/public/*"),
            ("/public/v1..v2", "/public/*"),
            ("/public/.well-known/x", "/public/*"),
            ("/public/100%", "/public/*"),
            ("/files/a", "/files/{name}"),
            ("/else", "*"),
            // In one reading a file's name, in another a path of its own: the stricter.
            ("/files/a%2Fb", "*"),
        ] {
            assert_eq!(chosen(path), route, "{path}");
        }
    }
}
