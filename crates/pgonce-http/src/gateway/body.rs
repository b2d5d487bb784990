//! The one body type of the gateway: whole, streaming through, or passed on while it is recorded.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Response, Version, header};
use http_body::{Body as _, Frame, SizeHint};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use tokio::sync::mpsc;
use tokio::time::{Instant, Sleep};

use super::config::ResponseTimes;
use super::headers::clean_trailers;

/// Why a body ended before its end.
pub(crate) type BodyError = Box<dyn std::error::Error + Send + Sync>;

/// A request or response body.
#[derive(Debug)]
pub(crate) enum Body {
    /// Known to the last byte.
    Whole(Option<Bytes>),
    /// Whatever the other side sends.
    Streaming(Arriving),
    /// Passed on piece by piece by whoever records it; the last piece comes when the outcome is stored.
    Recorded { pieces: mpsc::Receiver<Result<Bytes, BodyError>>, left: Option<u64> },
}

impl Body {
    pub(crate) fn empty() -> Self {
        Self::Whole(None)
    }
}

/// What the other side sends, whether it was all, and how long that may take.
#[derive(Debug)]
pub(crate) struct Arriving {
    incoming: Incoming,
    http2: bool,
    patience: Option<Patience>,
}

/// How long somebody waits for what comes next. A timer is set only when there is something to wait for, and is not
/// touched by what arrives: when it rings, it looks since when nothing came.
#[derive(Debug)]
struct Patience {
    idle_max: Duration,
    until: Option<Instant>,
    waits_since: Option<Instant>,
    timer: Option<Pin<Box<Sleep>>>,
}

impl Patience {
    /// Something came. Whether it came too late.
    fn moved(&mut self) -> bool {
        self.waits_since = None;
        self.until.is_some_and(|until| Instant::now() >= until)
    }

    /// Nothing is there: ready when that has lasted too long.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let now = Instant::now();
        let end = *self.waits_since.get_or_insert(now) + self.idle_max;
        let end = self.until.map_or(end, |until| until.min(end));
        if now >= end {
            return Poll::Ready(());
        }
        let timer = self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(end)));
        while timer.as_mut().poll(context).is_ready() {
            if timer.deadline() >= end {
                return Poll::Ready(());
            }
            timer.as_mut().reset(end);
        }
        Poll::Pending
    }
}

/// Why a body that came from the other side is not whole.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CutOff {
    /// The connection ended, or the stream was reset.
    #[error(transparent)]
    Broken(#[from] hyper::Error),
    /// The stream was reset without an error.
    #[error("the stream was reset before its end")]
    Reset,
    /// It stood still, or took too long in all.
    #[error("the rest did not come in time")]
    TimedOut,
}

impl Arriving {
    pub(crate) fn new(incoming: Incoming, version: Version) -> Self {
        Self { incoming, http2: version == Version::HTTP_2, patience: None }
    }

    /// From now on it may take so long.
    pub(crate) fn within(mut self, times: ResponseTimes) -> Self {
        let ResponseTimes { idle_max, total_max } = times;
        let until = total_max.map(|total_max| Instant::now() + total_max);
        self.patience = Some(Patience { idle_max, until, waits_since: None, timer: None });
        self
    }

    /// The body of a response that came.
    pub(crate) fn of(response: Response<Incoming>) -> Response<Self> {
        let version = response.version();
        response.map(|incoming| Self::new(incoming, version))
    }
}

impl http_body::Body for Arriving {
    type Data = Bytes;
    type Error = CutOff;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, CutOff>>> {
        let polled = Pin::new(&mut self.incoming).poll_frame(context);
        if let Some(patience) = &mut self.patience {
            let is_over = match &polled {
                Poll::Pending => patience.poll(context).is_ready(),
                Poll::Ready(_) => patience.moved(),
            };
            if is_over {
                return Poll::Ready(Some(Err(CutOff::TimedOut)));
            }
        }
        match ready!(polled) {
            Some(frame) => Poll::Ready(Some(frame.map_err(CutOff::from))),
            // To hyper, RST_STREAM with NO_ERROR is the end (RFC 9113, 8.1). It says that the rest is not wanted, or
            // will not come; that a body is whole, only END_STREAM says.
            None if self.http2 && !self.incoming.is_end_stream() => Poll::Ready(Some(Err(CutOff::Reset))),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.incoming.size_hint()
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
pub(crate) fn discard(headers: &HeaderMap, mut body: Arriving) {
    // Over HTTP/2 the answer goes its own way; and reading would ask a client that waits for 100 to send.
    if body.http2 || headers.contains_key(header::EXPECT) || body.is_end_stream() {
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
            Self::Streaming(arriving) => {
                let frame = ready!(Pin::new(arriving).poll_frame(context));
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
            Self::Streaming(arriving) => arriving.is_end_stream(),
            // Even with nothing left to send: the end is said by whoever records, after storing.
            Self::Recorded { .. } => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            Self::Streaming(arriving) => arriving.size_hint(),
            Self::Recorded { left: Some(left), .. } => SizeHint::with_exact(*left),
            Self::Recorded { left: None, .. } => SizeHint::default(),
        }
    }
}
