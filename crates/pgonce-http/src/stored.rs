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
