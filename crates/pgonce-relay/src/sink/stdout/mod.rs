//! Standard output: one CloudEvent a line. For people, pipes and trying things out.

use std::io::Write as _;

use futures_util::future::BoxFuture;

use super::{Sink, Verdict};
use crate::{Envelope, Message, Target, TargetError};

/// The sink.
#[derive(Debug)]
pub struct Stdout;

/// Opens it.
///
/// # Errors
/// None: the signature is that of all sinks.
pub fn open(_: &Target) -> Result<Stdout, TargetError> {
    Ok(Stdout)
}

impl Sink for Stdout {
    fn send<'a>(&'a self, messages: &'a [Message]) -> BoxFuture<'a, Vec<Verdict>> {
        Box::pin(async move { messages.iter().map(write).collect() })
    }
}

/// Written and flushed is all that can be known of a pipe: whoever reads it may still lose it.
fn write(message: &Message) -> Verdict {
    let mut stdout = std::io::stdout().lock();
    let body = Envelope::Structured.encode(message, "").body;
    match stdout.write_all(&body).and_then(|()| stdout.write_all(b"\n")).and_then(|()| stdout.flush()) {
        Ok(()) => Verdict::Delivered,
        // Whoever read it has enough: that is its right, and this one's end.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {
            Verdict::Closed { reason: "nobody reads standard output any more".into() }
        }
        Err(error) => Verdict::Away { reason: format!("standard output: {error}") },
    }
}
