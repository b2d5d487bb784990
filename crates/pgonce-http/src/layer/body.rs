//! Bodies on their way through the layer: passed as they are, read whole, or begun and not finished.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{HeaderMap, header};
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};

use crate::{Policy, Problem};

/// What bodies may fail with.
pub(super) type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A body that has come through the layer: one that was read, one that was passed as it is, or the beginning of
/// one that was read followed by the rest as it is.
#[derive(Debug)]
pub struct LayerBody<B> {
    read: Option<Bytes>,
    rest: Option<Pin<Box<B>>>,
}

impl<B> LayerBody<B> {
    pub(super) fn passed(body: B) -> Self {
        Self { read: None, rest: Some(Box::pin(body)) }
    }

    pub(super) fn whole(read: Bytes) -> Self {
        Self { read: Some(read), rest: None }
    }

    /// The bytes, if they were all read.
    pub(super) fn as_whole(&self) -> Option<&Bytes> {
        self.read.as_ref().filter(|_| self.rest.is_none())
    }
}

impl<B: Body<Data = Bytes>> LayerBody<B> {
    /// Reads a body up to a limit. What is larger stays begun: [`LayerBody::as_whole`] is then none.
    pub(super) async fn read_up_to(body: B, bytes_max: usize) -> Result<Self, B::Error> {
        let too_large = |bytes: u64| usize::try_from(bytes).map_or(true, |bytes| bytes > bytes_max);
        if too_large(body.size_hint().lower()) {
            return Ok(Self::passed(body));
        }
        let mut rest = Box::pin(body);
        let mut read = Vec::new();
        while let Some(frame) = rest.frame().await {
            // Trailers are not kept.
            let Ok(data) = frame?.into_data() else { continue };
            read.push(data);
            if read.iter().map(Bytes::len).sum::<usize>() > bytes_max {
                return Ok(Self { read: Some(joined(read)), rest: Some(rest) });
            }
        }
        Ok(Self::whole(joined(read)))
    }
}

/// One chunk is the usual case, and is not copied.
fn joined(mut chunks: Vec<Bytes>) -> Bytes {
    match chunks.len() {
        0 => Bytes::new(),
        1 => chunks.swap_remove(0),
        _ => chunks.concat().into(),
    }
}

impl<B: Body<Data = Bytes>> Body for LayerBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        match self.read.take() {
            Some(read) if !read.is_empty() => Poll::Ready(Some(Ok(Frame::data(read)))),
            _ => match &mut self.rest {
                Some(rest) => rest.as_mut().poll_frame(context),
                None => Poll::Ready(None),
            },
        }
    }

    fn is_end_stream(&self) -> bool {
        self.read.as_ref().is_none_or(Bytes::is_empty) && self.rest.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        let read = self.read.as_ref().map_or(0, Bytes::len) as u64;
        let Some(rest) = &self.rest else { return SizeHint::with_exact(read) };
        let rest = rest.size_hint();
        let mut hint = SizeHint::new();
        hint.set_lower(rest.lower().saturating_add(read));
        if let Some(upper) = rest.upper().and_then(|upper| upper.checked_add(read)) {
            hint.set_upper(upper);
        }
        hint
    }
}

/// A request's body, whole: nothing is claimed before it is there.
pub(super) async fn request_body<B>(body: B, headers: &HeaderMap, policy: &Policy) -> Result<Bytes, Problem>
where
    B: Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    let limit = policy.body_bytes_max;
    if body.size_hint().lower() > limit as u64 {
        return Err(Problem::BodyTooLarge { limit });
    }
    match tokio::time::timeout(policy.body_timeout, Limited::new(body, limit).collect()).await {
        Ok(Ok(whole)) => match whole.to_bytes() {
            // Over HTTP/2 a client's reset can look like an end.
            whole if is_short(headers, whole.len()) => Err(Problem::BodyIncomplete),
            whole => Ok(whole),
        },
        Ok(Err(error)) if is_too_large(&*error) => Err(Problem::BodyTooLarge { limit }),
        Ok(Err(error)) => {
            tracing::debug!(%error, "request body broke off");
            Err(Problem::BodyIncomplete)
        }
        Err(_) => Err(Problem::BodyTimeout),
    }
}

/// Whether a body that ended is shorter than its head says.
pub(super) fn is_short(headers: &HeaderMap, bytes: usize) -> bool {
    let said = headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse::<usize>().ok());
    said.is_some_and(|said| bytes < said)
}

/// By our limit, or by one that stands before us.
fn is_too_large(error: &(dyn std::error::Error + 'static)) -> bool {
    std::iter::successors(Some(error), |error| error.source()).any(|error| error.is::<LengthLimitError>())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::convert::Infallible;

    use futures_util::stream;
    use http_body_util::{Full, StreamBody};

    use super::*;

    type Chunks = StreamBody<stream::Iter<std::vec::IntoIter<Result<Frame<Bytes>, Infallible>>>>;

    fn chunks(texts: &[&'static str]) -> Chunks {
        let frames: Vec<_> = texts.iter().map(|text| Ok(Frame::data(Bytes::from_static(text.as_bytes())))).collect();
        StreamBody::new(stream::iter(frames))
    }

    #[tokio::test]
    async fn a_body_is_read_whole_up_to_the_limit_and_goes_on_beyond() {
        for (texts, whole) in [(&["ab", "cd"][..], true), (&[], true), (&["abcd"], true), (&["ab", "cd", "e"], false)] {
            let body = LayerBody::read_up_to(chunks(texts), 4).await.unwrap();
            assert_eq!(body.as_whole().is_some(), whole, "{texts:?}");
            assert_eq!(body.size_hint().exact().is_some(), whole);
            assert_eq!(body.is_end_stream(), texts.is_empty());
            let all = body.collect().await.unwrap().to_bytes();
            assert_eq!(all, texts.concat().as_bytes());
        }
    }

    #[tokio::test]
    async fn what_says_that_it_is_larger_is_not_begun() {
        let body = LayerBody::read_up_to(Full::new(Bytes::from_static(b"abcde")), 4).await.unwrap();
        assert!(body.as_whole().is_none());
        assert_eq!(body.size_hint().exact(), Some(5));
        assert_eq!(body.collect().await.unwrap().to_bytes(), "abcde");
    }

    #[tokio::test]
    async fn a_request_body_is_whole_or_a_problem() {
        let policy = Policy { body_bytes_max: 4, ..Policy::new("s") };
        assert_eq!(request_body(chunks(&["ab", "cd"]), &HeaderMap::new(), &policy).await.unwrap(), "abcd");
        let large = Err(Problem::BodyTooLarge { limit: 4 });
        assert_eq!(request_body(chunks(&["ab", "cd", "e"]), &HeaderMap::new(), &policy).await, large);
        assert_eq!(request_body(Full::new(Bytes::from_static(b"abcde")), &HeaderMap::new(), &policy).await, large);
        let broken = StreamBody::new(stream::iter([
            Ok(Frame::data(Bytes::from_static(b"a"))),
            Err(std::io::Error::other("reset")),
        ]));
        let said = |length: &'static str| HeaderMap::from_iter([(header::CONTENT_LENGTH, length.parse().unwrap())]);
        assert_eq!(request_body(chunks(&["ab"]), &said("2"), &policy).await.unwrap(), "ab");
        assert_eq!(request_body(chunks(&["ab"]), &said("3"), &policy).await, Err(Problem::BodyIncomplete));
        assert_eq!(request_body(broken, &HeaderMap::new(), &policy).await, Err(Problem::BodyIncomplete));
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_request_body_is_given_up() {
        let never = StreamBody::new(stream::pending::<Result<Frame<Bytes>, Infallible>>());
        assert_eq!(request_body(never, &HeaderMap::new(), &Policy::new("s")).await, Err(Problem::BodyTimeout));
    }
}
