//! One flight, one Sync. What the driver sends as two requests, each with a Sync of its own, PostgreSQL answers with two
//! packets and two wake-ups, also where both travel together: BEGIN with the claim, the outcome with its COMMIT. That costs a
//! protected write a tenth of its CPU time, and the driver has no call for it. So a stream between driver and socket leaves
//! the inner Sync out, and gives the driver the answers that it would have had.
//!
//! It changes nothing else: what the server skipped because of an error is sent as the driver wrote it (`joiner.rs`), and what
//! is not plainly one of the two flights passes as it is. Where the driver learns to share a Sync, this folder goes.

mod connect;
mod joiner;

use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker, ready};

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, ReadBuf};
use tokio_postgres::tls::{ChannelBinding, TlsStream};

pub(crate) use connect::connect;
use joiner::Joiner;

/// How much is read at once while a joined flight is answered.
const READ_BYTES: usize = 8 * 1024;
/// Room that is kept for the next flight: a large answer does not stay in memory for as long as its connection lives.
const KEPT_BYTES_MAX: usize = 64 * 1024;

/// The stream. It joins from when it is armed on: between the driver's startup and its first request.
pub(crate) struct Flight<S> {
    inner: S,
    armed: Arc<AtomicBool>,
    joiner: Joiner,
    /// Joined, and not written yet.
    outgoing: BytesMut,
    /// Bytes of the driver's that began to pass as they are.
    passing: usize,
    /// Read from the server and not looked at.
    incoming: BytesMut,
    /// For the driver.
    answers: BytesMut,
    /// The driver wants to write, while a joined flight is under way.
    writer: Option<Waker>,
}

impl<S> Flight<S> {
    fn new(inner: S, armed: Arc<AtomicBool>) -> Self {
        Self {
            inner,
            armed,
            joiner: Joiner::default(),
            outgoing: BytesMut::new(),
            passing: 0,
            incoming: BytesMut::new(),
            answers: BytesMut::new(),
            writer: None,
        }
    }

    fn is_armed(&self) -> bool {
        self.armed.load(Ordering::Relaxed)
    }
}

impl<S: AsyncWrite + Unpin> Flight<S> {
    /// Writes what is joined.
    fn poll_outgoing(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.outgoing.is_empty() {
            let written = ready!(Pin::new(&mut self.inner).poll_write(context, &self.outgoing))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.outgoing.advance(written);
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Flight<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if !this.is_armed() {
            return Pin::new(&mut this.inner).poll_write(context, bytes);
        }
        ready!(this.poll_outgoing(context))?;
        if this.joiner.is_under_way() {
            // What the server may skip is sent before anything that comes later.
            this.writer = Some(context.waker().clone());
            return Poll::Pending;
        }
        if this.passing == 0 {
            if this.joiner.join(bytes, &mut this.outgoing) {
                // Taken, whether or not the socket takes all of it now.
                if let Poll::Ready(Err(error)) = this.poll_outgoing(context) {
                    return Poll::Ready(Err(error));
                }
                return Poll::Ready(Ok(bytes.len()));
            }
            this.passing = bytes.len();
        }
        let some = bytes.get(..this.passing).unwrap_or(bytes);
        let written = ready!(Pin::new(&mut this.inner).poll_write(context, some))?;
        this.passing -= written;
        Poll::Ready(Ok(written))
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(this.poll_outgoing(context))?;
        Pin::new(&mut this.inner).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(this.poll_outgoing(context))?;
        Pin::new(&mut this.inner).poll_shutdown(context)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Flight<S> {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if !this.is_armed() {
            return Pin::new(&mut this.inner).poll_read(context, buffer);
        }
        while this.answers.is_empty() {
            if !this.joiner.is_under_way() {
                let before = buffer.filled().len();
                ready!(Pin::new(&mut this.inner).poll_read(context, buffer))?;
                this.joiner.pass(buffer.filled().get(before..).unwrap_or_default());
                return Poll::Ready(Ok(()));
            }
            this.incoming.reserve(READ_BYTES);
            if ready!(pin!(this.inner.read_buf(&mut this.incoming)).poll(context))? == 0 {
                this.joiner.end(&mut this.answers);
                break; // the server is gone: nothing, or what was kept back, and then nothing
            }
            this.joiner.answer(&mut this.incoming, &mut this.answers, &mut this.outgoing);
            if this.joiner.is_under_way() {
                continue;
            }
            // What came behind the flight's end is not the flight's.
            let rest = this.incoming.split();
            this.joiner.pass(&rest);
            this.answers.extend_from_slice(&rest);
            if let Poll::Ready(Err(error)) = Pin::new(&mut *this).poll_flush(context) {
                return Poll::Ready(Err(error));
            }
            if let Some(writer) = this.writer.take() {
                writer.wake();
            }
        }
        let some = this.answers.len().min(buffer.remaining());
        buffer.put_slice(&this.answers[..some]);
        this.answers.advance(some);
        for room in [&mut this.answers, &mut this.incoming] {
            if room.is_empty() && room.try_reclaim(KEPT_BYTES_MAX + 1) {
                *room = BytesMut::new();
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: TlsStream + Unpin> TlsStream for Flight<S> {
    fn channel_binding(&self) -> ChannelBinding {
        self.inner.channel_binding()
    }
}
