//! A response as it is kept with its intent, and as it is replayed: status, some headers, exact bytes.
//!
//! Headers are kept as a JSON array of `[name, value]` pairs, in order, duplicates and all; a value's bytes are
//! the Latin-1 characters of the same number, so that any value survives. Names that start with a colon, which
//! no header can have, are marks of our own: `:not-stored` with the reason, `:sealed` with the id of the key
//! that the body is encrypted with. A reader that does not know a mark refuses the answer.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header};
use pgonce::Answer;
use serde_json::Value;

use crate::latin1;
use crate::problem::{Problem, StatusMap};

/// Set to `true` on a response that was stored before.
pub const REPLAYED: HeaderName = HeaderName::from_static("idempotency-replayed");

const MARK_NOT_STORED: &str = ":not-stored";
const MARK_SEALED: &str = ":sealed";

/// What is kept of every response that has it: what says how to read the body, and what it is about.
const KEPT: [&str; 15] = [
    "cache-control",
    "content-digest",
    "content-disposition",
    "content-encoding",
    "content-language",
    "content-location",
    "content-type",
    "digest",
    "etag",
    "expires",
    "last-modified",
    "link",
    "location",
    "repr-digest",
    "vary",
];

/// What is never kept and never replayed, even if asked for: what belongs to one caller, to one connection, or
/// to how one message was framed.
const NEVER: [&str; 16] = [
    "authentication-info",
    "authorization",
    "connection",
    "content-length",
    "cookie",
    "cookie2",
    "http2-settings",
    "idempotency-replayed",
    "keep-alive",
    "set-cookie",
    "set-cookie2",
    "te",
    "trailer",
    "trailers",
    "transfer-encoding",
    "upgrade",
];

/// A response that is an intent's outcome.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredResponse {
    /// Its status.
    pub status: StatusCode,
    /// The headers that are kept, in order.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// The exact bytes, with whatever content encoding they came in.
    pub body: Bytes,
    /// The effect is done, and its response was too large to keep, or its scope keeps none: the body is empty
    /// and must not be passed off as the response.
    pub not_stored: bool,
}

/// Why a stored answer is no HTTP response. The effect is done.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoredError {
    /// No status of a final response.
    #[error("the stored response code {0} is not a status from 200 to 599; the effect is done")]
    Code(i32),
    /// Neither an array of pairs nor an object, or a name or value that no header can have.
    #[error("the stored response headers cannot be read: {0}; the effect is done")]
    Headers(&'static str),
    /// Encrypted; see [`sealed_with`] and [`StoredResponse::from_opened`].
    #[error("the stored response is encrypted; the effect is done")]
    Sealed,
}

/// The headers of a response that are kept: the list of this module and `extra`, never what belongs to one
/// caller or one connection, be it asked for or not.
#[must_use]
pub fn kept_headers(headers: &HeaderMap, extra: &[HeaderName]) -> Vec<(HeaderName, HeaderValue)> {
    // What Connection names is for this connection only (RFC 9110, 7.6.1).
    let named: Vec<String> = headers
        .get_all(header::CONNECTION)
        .iter()
        .flat_map(|line| {
            latin1::decode(line.as_bytes()).split(',').map(|t| t.trim().to_lowercase()).collect::<Vec<_>>()
        })
        .collect();
    let is_kept = |name: &HeaderName| {
        (KEPT.contains(&name.as_str()) || extra.contains(name))
            && !is_never_kept(name)
            && !named.iter().any(|token| token == name.as_str())
    };
    headers.iter().filter(|(name, _)| is_kept(name)).map(|(name, value)| (name.clone(), value.clone())).collect()
}

/// Whether a header is never kept, so that asking for it is a mistake to tell about.
#[must_use]
pub fn is_never_kept(name: &HeaderName) -> bool {
    NEVER.contains(&name.as_str()) || name.as_str().starts_with("proxy-")
}

/// The id of the key that an answer's body is encrypted with; none where it is not.
#[must_use]
pub fn sealed_with(answer: &Answer) -> Option<&str> {
    let pairs = answer.headers.as_ref()?.as_array()?;
    pairs.iter().find(|pair| pair[0] == MARK_SEALED)?[1].as_str()
}

impl StoredResponse {
    /// As an intent's answer. `sealed_with` is the id of the key that the body is encrypted with, where it is.
    #[must_use]
    pub fn to_answer(self, sealed_with: Option<&str>) -> Answer {
        let mut pairs: Vec<Value> = Vec::with_capacity(self.headers.len());
        if self.not_stored {
            pairs.push([MARK_NOT_STORED, "larger than the limit"].as_slice().into());
        }
        if let Some(id) = sealed_with {
            pairs.push([MARK_SEALED, id].as_slice().into());
        }
        for (name, value) in &self.headers {
            pairs.push(vec![name.as_str().to_owned(), latin1::decode(value.as_bytes())].into());
        }
        Answer {
            code: Some(self.status.as_u16().into()),
            // Even where there are none: see read.
            headers: Some(Value::Array(pairs)),
            body: Some(if self.not_stored { Vec::new() } else { self.body.into() }),
            ..Answer::default()
        }
    }

    /// From an intent's answer, which an upstream may have committed by itself with `once.succeed`: a JSON object
    /// of headers is read too, a code that is absent is 200, and what only came as `p_response` is JSON. An answer
    /// with neither headers nor body is one whose scope keeps no responses.
    ///
    /// # Errors
    /// Where it is encrypted, or is no HTTP response.
    pub fn from_answer(answer: &Answer) -> Result<Self, StoredError> {
        Self::read(answer, None)
    }

    /// From an answer that was encrypted, and the body that was opened.
    ///
    /// # Errors
    /// Where it is no HTTP response.
    pub fn from_opened(answer: &Answer, body: Bytes) -> Result<Self, StoredError> {
        Self::read(answer, Some(body))
    }

    fn read(answer: &Answer, opened: Option<Bytes>) -> Result<Self, StoredError> {
        let code = answer.code.unwrap_or(200);
        let status = u16::try_from(code)
            .ok()
            .filter(|code| (200..600).contains(code))
            .and_then(|code| StatusCode::from_u16(code).ok())
            .ok_or(StoredError::Code(code))?;
        let stored = answer.headers.as_ref().filter(|headers| !headers.is_null());
        let mut marks = Marks::default();
        let mut headers = stored.map_or(Ok(Vec::new()), |json| read_headers(json, &mut marks))?;
        if marks.sealed && opened.is_none() {
            return Err(StoredError::Sealed);
        }
        let body = opened.or_else(|| answer.body.clone().map(Bytes::from));
        // to_answer always writes both. An answer with neither was stripped by its scope's policy, or never had a
        // response: an empty body would be a made-up one, except with a status that has none.
        let nothing = stored.is_none() && body.is_none() && !has_no_body(status);
        let body = body.unwrap_or_default();
        if stored.is_none() && is_json(&body) {
            headers.push((header::CONTENT_TYPE, HeaderValue::from_static("application/json")));
        }
        Ok(Self { status, headers, body, not_stored: marks.not_stored || nothing })
    }

    /// As the response that is sent. One that was not stored comes out as the problem that says so, with its
    /// default status; where statuses are mapped, ask [`StoredResponse::not_stored`] first.
    #[must_use]
    pub fn into_http(self, replayed: bool) -> Response<Bytes> {
        if self.not_stored {
            let code = Some(self.status.as_u16());
            return Problem::ResponseNotStored { code }.response(&StatusMap::default(), None);
        }
        let mut response = Response::new(self.body);
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        for (name, value) in self.headers {
            headers.append(name, value);
        }
        if replayed {
            headers.insert(REPLAYED, HeaderValue::from_static("true"));
        }
        response
    }
}

fn has_no_body(status: StatusCode) -> bool {
    matches!(status, StatusCode::NO_CONTENT | StatusCode::RESET_CONTENT | StatusCode::NOT_MODIFIED)
}

fn is_json(body: &[u8]) -> bool {
    !body.is_empty() && serde_json::from_slice::<serde::de::IgnoredAny>(body).is_ok()
}

#[derive(Default)]
struct Marks {
    not_stored: bool,
    sealed: bool,
}

type Headers = Vec<(HeaderName, HeaderValue)>;

fn read_headers(json: &Value, marks: &mut Marks) -> Result<Headers, StoredError> {
    let mut headers = Vec::new();
    match json {
        Value::Array(pairs) => {
            for pair in pairs {
                let Some([Value::String(name), value]) = pair.as_array().map(Vec::as_slice) else {
                    return Err(StoredError::Headers("not an array of [name, value] pairs"));
                };
                read_header(name, value, marks, &mut headers)?;
            }
        }
        Value::Object(members) => {
            for (name, value) in members {
                match value {
                    Value::Array(lines) => {
                        lines.iter().try_for_each(|line| read_header(name, line, marks, &mut headers))?;
                    }
                    line => read_header(name, line, marks, &mut headers)?,
                }
            }
        }
        _ => return Err(StoredError::Headers("neither an array nor an object")),
    }
    Ok(headers)
}

fn read_header(name: &str, value: &Value, marks: &mut Marks, headers: &mut Headers) -> Result<(), StoredError> {
    match name {
        MARK_NOT_STORED => marks.not_stored = true,
        MARK_SEALED => marks.sealed = true,
        _ if name.starts_with(':') => return Err(StoredError::Headers("a mark that this version does not know")),
        _ => {
            let name: HeaderName = name.parse().map_err(|_| StoredError::Headers("a name that no header can have"))?;
            let text = match value {
                Value::String(text) => text.clone(),
                Value::Number(number) => number.to_string(),
                _ => return Err(StoredError::Headers("a value that is not a string")),
            };
            let value = latin1::encode(&text).and_then(|bytes| HeaderValue::from_bytes(&bytes).ok());
            let value = value.ok_or(StoredError::Headers("a value that no header can have"))?;
            // An upstream may have stored what it answers with, whole.
            if !is_never_kept(&name) {
                headers.push((name, value));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn map(lines: &[(&'static str, &'static str)]) -> HeaderMap {
        let pair = |(name, value): &(&'static str, &'static str)| {
            (HeaderName::from_static(name), HeaderValue::from_static(value))
        };
        lines.iter().map(pair).collect()
    }

    fn names(headers: &[(HeaderName, HeaderValue)]) -> Vec<&str> {
        headers.iter().map(|(name, _)| name.as_str()).collect()
    }

    fn response(headers: Headers, body: &'static [u8]) -> StoredResponse {
        StoredResponse { status: StatusCode::CREATED, headers, body: Bytes::from_static(body), not_stored: false }
    }

    fn answer(code: Option<i32>, headers: Option<Value>, body: Option<&[u8]>) -> Answer {
        Answer { code, headers, body: body.map(<[u8]>::to_vec), ..Answer::default() }
    }

    #[test]
    fn what_describes_the_response_is_kept_and_the_rest_is_not() {
        let sent = map(&[
            ("content-type", "application/json"),
            ("etag", "\"1\""),
            ("location", "/orders/1"),
            ("date", "Mon, 01 Jan 2024 00:00:00 GMT"),
            ("server", "x"),
            ("x-request-id", "7"),
            ("retry-after", "3"),
            ("accept-ranges", "bytes"),
            ("x-total", "9"),
        ]);
        assert_eq!(names(&kept_headers(&sent, &[])), ["content-type", "etag", "location"]);
        let extra = [HeaderName::from_static("x-total")];
        assert_eq!(names(&kept_headers(&sent, &extra)), ["content-type", "etag", "location", "x-total"]);
        assert!(KEPT.iter().all(|name| !is_never_kept(&HeaderName::from_static(name))));
        assert!(KEPT.is_sorted() && NEVER.is_sorted());
    }

    #[test]
    fn what_is_one_callers_or_one_connections_is_never_kept() {
        let private = [
            ("set-cookie", "session=1"),
            ("set-cookie2", "session=1"),
            ("cookie", "session=1"),
            ("authorization", "Basic eA=="),
            ("authentication-info", "nextnonce=1"),
            ("proxy-authenticate", "Basic"),
            ("proxy-authorization", "Basic eA=="),
            ("proxy-authentication-info", "x"),
            ("proxy-connection", "close"),
            ("connection", "close"),
            ("keep-alive", "timeout=5"),
            ("te", "trailers"),
            ("trailer", "etag"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "h2c"),
            ("content-length", "5"),
            ("idempotency-replayed", "true"),
        ];
        let asked: Vec<HeaderName> = private.iter().map(|(name, _)| HeaderName::from_static(name)).collect();
        assert_eq!(kept_headers(&map(&private), &asked), []);
        assert!(asked.iter().all(is_never_kept));
        // Nor replayed, where an upstream has stored them by itself.
        let pairs: Vec<Value> = private.iter().map(|(name, value)| json!([name.to_uppercase(), value])).collect();
        let object = private.iter().map(|(name, value)| ((*name).to_owned(), json!(value))).collect();
        for stored in [Value::Array(pairs), Value::Object(object)] {
            let read = StoredResponse::from_answer(&answer(Some(200), Some(stored), Some(b"x"))).unwrap();
            assert_eq!(read.headers, []);
        }
    }

    #[test]
    fn what_connection_names_is_not_kept() {
        let mut sent = map(&[("etag", "1"), ("x-hop", "1"), ("x-end", "1"), ("link", "<a>")]);
        sent.append("connection", HeaderValue::from_static("close, X-Hop"));
        sent.append("connection", HeaderValue::from_static("ETag ,"));
        let extra = ["x-hop", "x-end"].map(HeaderName::from_static);
        assert_eq!(names(&kept_headers(&sent, &extra)), ["x-end", "link"]);
    }

    #[test]
    fn duplicates_stay_and_stay_in_order() {
        let sent = map(&[("link", "<b>"), ("vary", "accept"), ("link", "<a>"), ("link", "<b>")]);
        let kept = kept_headers(&sent, &[]);
        let links = |headers: &HeaderMap| headers.get_all("link").iter().cloned().collect::<Vec<_>>();
        let answer = response(kept, b"x").to_answer(None);
        let replayed = StoredResponse::from_answer(&answer).unwrap().into_http(true);
        assert_eq!(links(replayed.headers()), ["<b>", "<a>", "<b>"]);
        assert_eq!(replayed.headers()["vary"], "accept");
    }

    #[test]
    fn a_replay_has_the_status_the_bytes_and_says_what_it_is() {
        let stored = response(vec![(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"))], b"\x1f\x8b\0\xff");
        for replayed in [true, false] {
            let sent = stored.clone().into_http(replayed);
            assert_eq!(sent.status(), 201);
            assert_eq!(sent.body(), &b"\x1f\x8b\0\xff"[..]);
            assert_eq!(sent.headers().get(REPLAYED).is_some_and(|value| value == "true"), replayed);
        }
    }

    #[test]
    fn no_content_type_stays_no_content_type() {
        let read = StoredResponse::from_answer(&response(Vec::new(), b"{}").to_answer(None)).unwrap();
        assert_eq!(read, response(Vec::new(), b"{}"));
    }

    #[test]
    fn an_upstreams_own_answer_is_read() {
        // once.succeed(p_response => …): a body that is JSON, and nothing else.
        let read = StoredResponse::from_answer(&answer(None, None, Some(b"{\"id\": 1}"))).unwrap();
        assert_eq!((read.status, read.not_stored), (StatusCode::OK, false));
        assert_eq!(read.headers, [(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))]);
        let null = StoredResponse::from_answer(&answer(Some(201), Some(Value::Null), Some(b"[1]"))).unwrap();
        assert_eq!(names(&null.headers), ["content-type"]);
        // p_response_body without headers: bytes of no known type.
        for body in [&b"plain"[..], b"", b"\xff"] {
            let read = StoredResponse::from_answer(&answer(None, None, Some(body))).unwrap();
            assert_eq!((names(&read.headers), read.body.as_ref(), read.not_stored), (vec![], body, false));
        }
        // Headers as an object, in any spelling of their names.
        let headers = json!({"Content-Type": "text/plain", "x-n": 7, "link": ["<a>", "<b>"]});
        let sent = StoredResponse::from_answer(&answer(Some(202), Some(headers), Some(b"{}"))).unwrap().into_http(true);
        assert_eq!(sent.headers()["content-type"], "text/plain");
        assert_eq!(sent.headers()["x-n"], "7");
        assert_eq!(sent.headers().get_all("link").iter().collect::<Vec<_>>(), ["<a>", "<b>"]);
        // Headers that say nothing of the type are headers all the same.
        let read = StoredResponse::from_answer(&answer(None, Some(json!({})), Some(b"{}"))).unwrap();
        assert_eq!(read.headers, []);
    }

    #[test]
    fn an_answer_without_a_response_is_not_passed_off_as_an_empty_one() {
        for code in [None, Some(200), Some(201)] {
            let read = StoredResponse::from_answer(&answer(code, None, None)).unwrap();
            assert!(read.not_stored);
            let sent = read.into_http(true);
            assert_eq!(sent.status(), 410);
            let body: Value = serde_json::from_slice(sent.body()).unwrap();
            assert_eq!((&body["effect"], &body["original_status"]), (&json!("done"), &json!(code.unwrap_or(200))));
        }
        for code in [204, 304] {
            assert!(!StoredResponse::from_answer(&answer(Some(code), None, None)).unwrap().not_stored);
        }
        assert!(!StoredResponse::from_answer(&answer(Some(202), Some(json!([])), None)).unwrap().not_stored);
    }

    #[test]
    fn a_response_that_was_too_large_leaves_a_mark_and_no_body() {
        let large = StoredResponse { not_stored: true, ..response(Vec::new(), b"the beginning") };
        let answer = large.to_answer(None);
        assert_eq!(answer.body.as_deref(), Some(&b""[..]));
        let read = StoredResponse::from_answer(&answer).unwrap();
        assert!(read.not_stored && read.body.is_empty());
        assert_eq!(read.status, 201);
        assert_eq!(read.headers, []);
    }

    #[test]
    fn what_is_sealed_is_not_read_as_if_it_were_open() {
        let plain = response(vec![(header::ETAG, HeaderValue::from_static("1"))], b"plain");
        let sealed = StoredResponse { body: Bytes::from_static(b"sealed"), ..plain.clone() }.to_answer(Some("k1"));
        assert_eq!(sealed_with(&sealed), Some("k1"));
        assert_eq!(StoredResponse::from_answer(&sealed), Err(StoredError::Sealed));
        assert_eq!(StoredResponse::from_opened(&sealed, Bytes::from_static(b"plain")), Ok(plain.clone()));
        assert_eq!(sealed_with(&plain.to_answer(None)), None);
        assert_eq!(sealed_with(&answer(None, None, None)), None);
        assert_eq!(sealed_with(&answer(None, Some(json!(["x", [], 3, {"a": 1}])), None)), None);
    }

    #[test]
    fn what_is_no_response_is_an_error_and_not_a_guess() {
        for code in [-1, 0, 99, 100, 101, 199, 600, 999, 65736, i32::MAX, i32::MIN] {
            let read = StoredResponse::from_answer(&answer(Some(code), None, Some(b"x")));
            assert_eq!(read, Err(StoredError::Code(code)));
        }
        for headers in [
            json!("text"),
            json!(1),
            json!(["content-type", "text/plain"]),
            json!([["content-type"]]),
            json!([["content-type", "a", "b"]]),
            json!([[1, "a"]]),
            json!([["a", null]]),
            json!({"a": {"b": "c"}}),
            json!({"a": [["b"]]}),
            json!({"": "x"}),
            json!({"a b": "x"}),
            json!({"a": "x\r\nset-cookie: y"}),
            json!({"a": "x\u{0}"}),
            json!({"a": "\u{20ac}"}),
            json!([[":later", "x"]]),
            json!([[":status", "200"]]),
        ] {
            let read = StoredResponse::from_answer(&answer(Some(200), Some(headers.clone()), Some(b"x")));
            assert!(matches!(read, Err(StoredError::Headers(_))), "{headers}");
        }
    }

    fn any_value() -> impl Strategy<Value = HeaderValue> {
        let byte = prop_oneof![Just(b'\t'), 0x20_u8..0x7f, 0x80_u8..=0xff];
        proptest::collection::vec(byte, 0..40).prop_map(|bytes| HeaderValue::from_bytes(&bytes).unwrap())
    }

    proptest! {
        /// Through the text of the JSON too, which is what the database keeps.
        #[test]
        fn any_response_survives(
            code in 200_u16..600,
            values in proptest::collection::vec((0..KEPT.len(), any_value()), 0..8),
            body in proptest::collection::vec(any::<u8>(), 0..200),
        ) {
            let headers = values.into_iter().map(|(at, value)| (HeaderName::from_static(KEPT[at]), value)).collect();
            let status = StatusCode::from_u16(code).unwrap();
            let stored = StoredResponse { status, headers, body: body.into(), not_stored: false };
            let mut answer = stored.clone().to_answer(None);
            let text = answer.headers.unwrap().to_string();
            answer.headers = Some(serde_json::from_str(&text).unwrap());
            prop_assert_eq!(StoredResponse::from_answer(&answer), Ok(stored));
        }
    }
}
