//! The one body type of the gateway: whole, streaming through, or passed on while it is recorded.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Version, header};
use http_body::{Body as _, Frame, SizeHint};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use tokio::sync::mpsc;

use super::headers::clean_trailers;

/// Why a body ended before its end.
pub(crate) type BodyError = Box<dyn std::error::Error + Send + Sync>;

/// A request or response body.
#[derive(Debug)]
pub(crate) enum Body {
    /// Known to the last byte.
    Whole(Option<Bytes>),
    /// Whatever the other side sends.
    Streaming(Incoming),
    /// Passed on piece by piece by whoever records it; the last piece comes when the outcome is stored.
    Recorded { pieces: mpsc::Receiver<Result<Bytes, BodyError>>, left: Option<u64> },
}

impl Body {
    pub(crate) fn empty() -> Self {
        Self::Whole(None)
    }
}

impl From<Bytes> for Body {
    fn from(bytes: Bytes) -> Self {
        Self::Whole((!bytes.is_empty()).then_some(bytes))
    }
}

/// Of a refused body, so much is read and dropped, for so long.
const DISCARDED_BYTES_MAX: usize = 64 * 1024 * 1024;
const DISCARDING_MAX: Duration = Duration::from_secs(10);

/// Lets go of a request that was refused before its body was read. The client may still be writing: to close the
/// connection under it would take the answer along (RFC 9112, 9.6), so what it writes is read, within limits.
pub(crate) fn discard(version: Version, headers: &HeaderMap, mut body: Incoming) {
    // Over HTTP/2 the answer goes its own way; and reading would ask a client that waits for 100 to send.
    if version == Version::HTTP_2 || headers.contains_key(header::EXPECT) || body.is_end_stream() {
        return;
    }
    tokio::spawn(tokio::time::timeout(DISCARDING_MAX, async move {
        let mut left = DISCARDED_BYTES_MAX;
        while let Some(Ok(frame)) = body.frame().await {
            let Some(rest) = left.checked_sub(frame.data_ref().map_or(0, Bytes::len)) else { return };
            left = rest;
        }
    }));
}

fn cleaned(mut frame: Frame<Bytes>) -> Frame<Bytes> {
    if let Some(trailers) = frame.trailers_mut() {
        clean_trailers(trailers);
    }
    frame
}

impl http_body::Body for Body {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        match self.get_mut() {
            Self::Whole(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Self::Streaming(incoming) => {
                let frame = ready!(Pin::new(incoming).poll_frame(context));
                Poll::Ready(frame.map(|frame| frame.map(cleaned).map_err(Into::into)))
            }
            Self::Recorded { pieces, left } => Poll::Ready(match ready!(pieces.poll_recv(context)) {
                Some(Ok(bytes)) => {
                    if let Some(left) = left {
                        *left = left.saturating_sub(bytes.len() as u64);
                    }
                    Some(Ok(Frame::data(bytes)))
                }
                Some(Err(error)) => Some(Err(error)),
                None => None,
            }),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Whole(bytes) => bytes.is_none(),
            Self::Streaming(incoming) => incoming.is_end_stream(),
            // Even with nothing left to send: the end is said by whoever records, after storing.
            Self::Recorded { .. } => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            Self::Streaming(incoming) => incoming.size_hint(),
            Self::Recorded { left: Some(left), .. } => SizeHint::with_exact(*left),
            Self::Recorded { left: None, .. } => SizeHint::default(),
        }
    }
}
