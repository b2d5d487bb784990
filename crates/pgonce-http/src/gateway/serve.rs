//! Connections in: accepted, bounded, served until they are asked to end.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http::header::{self, HeaderValue};
use http::{Request, Response, StatusCode, Version};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::Instant;

use super::body::Body;
use super::upstream::Peer;
use super::{Acceptor, Gateway};
use crate::tenant::PeerIdentity;

/// How long a client may take for its TLS handshake.
const HANDSHAKE_MAX: Duration = Duration::from_secs(10);
/// How long a client that is connected when the end begins may take to have its request here. What it has sent
/// would be lost if its connection was closed at once: it could not know whether that was run.
const LAST_REQUEST_MAX: Duration = Duration::from_secs(1);

/// How often a gateway that stops says what it waits for.
const TELL_EVERY: Duration = Duration::from_secs(5);

/// Accepts until told to stop, then lets what runs come to its end.
pub(crate) async fn serve(gateway: Arc<Gateway>, listener: TcpListener, stop: impl Future<Output = ()>) {
    let connections_max = gateway.live.load().config.limits.connections_max;
    let slots = Arc::new(Semaphore::new(connections_max));
    // True from the beginning of the end on. Connections hold the other side of it for as long as they last.
    let ending = watch::Sender::new(false);
    tokio::pin!(stop);
    loop {
        let slot = tokio::select! {
            () = &mut stop => break,
            slot = Arc::clone(&slots).acquire_owned() => slot,
        };
        let accepted = tokio::select! {
            () = &mut stop => break,
            accepted = listener.accept() => accepted,
        };
        match (accepted, slot) {
            (Ok((stream, address)), Ok(slot)) => accept(&gateway, stream, address, slot, ending.subscribe()),
            (Err(error), _) => {
                // Out of file descriptors, most likely: no reason to end, and none to spin.
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            (_, Err(_)) => break, // nobody closes it
        }
    }
    // Whoever the system has let in for us may have sent its request already.
    if let Ok(listener) = listener.into_std() {
        while let (Ok((stream, address)), Ok(slot)) = (listener.accept(), Arc::clone(&slots).try_acquire_owned()) {
            if let Ok(stream) = stream.set_nonblocking(true).and_then(|()| TcpStream::from_std(stream)) {
                accept(&gateway, stream, address, slot, ending.subscribe());
            }
        }
    }
    let drain = gateway.live.load().config.drain_timeout;
    gateway.tasks.close();
    ending.send_replace(true);
    let deadline = Instant::now() + drain;
    let held = || Held::of(&gateway, connections_max.saturating_sub(slots.available_permits()));
    let drained = async {
        ending.closed().await;
        gateway.tasks.wait().await;
    };
    let told = async {
        // Who has nothing to do is gone by then, and not worth a word.
        let mut pause = LAST_REQUEST_MAX + LAST_REQUEST_MAX / 2;
        loop {
            tokio::time::sleep(pause).await;
            pause = TELL_EVERY;
            let left = deadline.saturating_duration_since(Instant::now());
            tracing::warn!("stopping: waiting for {}, {}s at most", held(), left.as_secs());
        }
    };
    tokio::select! {
        () = drained => {}
        () = told => {}
        () = tokio::time::sleep_until(deadline) => {
            tracing::warn!("stopped with {} cut off: their leases run out, and their scopes' policies decide", held());
        }
    }
}

/// What a gateway that stops waits for.
struct Held {
    running: usize,
    waiting: usize,
    connections: usize,
}

impl Held {
    fn of(gateway: &Gateway, connections: usize) -> Self {
        let (counts, _) = gateway.admission.usage();
        Self { running: counts.running, waiting: counts.waiting, connections }
    }
}

impl std::fmt::Display for Held {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { running, waiting, connections } = self;
        write!(
            f,
            "{running} guarded requests that run, {waiting} that wait for another's outcome, {connections} connections"
        )
    }
}

/// Serves a client, in a task of its own.
fn accept(
    gateway: &Arc<Gateway>,
    stream: TcpStream,
    address: SocketAddr,
    slot: OwnedSemaphorePermit,
    ending: watch::Receiver<bool>,
) {
    let gateway = Arc::clone(gateway);
    tokio::spawn(async move {
        let slot = Arc::new(slot);
        let place = Arc::downgrade(&slot);
        let _ = stream.set_nodelay(true);
        let acceptor = gateway.live.load().tls.clone();
        match acceptor {
            None => {
                let peer = Peer { address, tls: false, trusted: false, identity: PeerIdentity::default(), place };
                connection(gateway, stream, peer, ending).await;
            }
            // On the heap: connections without TLS need not have room for it.
            Some(acceptor) => {
                Box::pin(async move {
                    if let Some((stream, identity)) = handshake(&acceptor, stream, address).await {
                        let peer = Peer { address, tls: true, trusted: false, identity, place };
                        connection(gateway, stream, peer, ending).await;
                    }
                })
                .await
            }
        }
    });
}

async fn handshake(
    acceptor: &Acceptor,
    stream: TcpStream,
    address: SocketAddr,
) -> Option<(tokio_rustls::server::TlsStream<TcpStream>, PeerIdentity)> {
    match tokio::time::timeout(HANDSHAKE_MAX, acceptor.0.accept(stream)).await {
        Ok(Ok(accepted)) => {
            let identity = super::tls::peer(&accepted);
            Some((accepted, identity))
        }
        Ok(Err(error)) => {
            tracing::debug!(%error, %address, "TLS handshake failed");
            None
        }
        Err(_) => None,
    }
}

async fn connection<S>(gateway: Arc<Gateway>, stream: S, peer: Peer, mut ending: watch::Receiver<bool>)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (header_timeout, header_bytes_max) = {
        let live = gateway.live.load();
        (live.config.limits.header_timeout, live.config.limits.header_bytes_max)
    };
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(header_timeout)
        .max_buf_size(header_bytes_max.max(8192))
        .http2()
        .timer(TokioTimer::new())
        .max_header_list_size(u32::try_from(header_bytes_max).unwrap_or(u32::MAX))
        .max_concurrent_streams(250)
        .keep_alive_interval(Duration::from_secs(20))
        .keep_alive_timeout(Duration::from_secs(20));
    let peer = Arc::new(peer);
    let is_ending = ending.clone();
    let service = service_fn(move |request: Request<Incoming>| {
        let gateway = Arc::clone(&gateway);
        let peer = Arc::clone(&peer);
        let is_ending = is_ending.clone();
        async move {
            let version = request.version();
            let mut response = gateway.handle(request, peer).await;
            if version < Version::HTTP_2 && *is_ending.borrow() && response.status() != StatusCode::SWITCHING_PROTOCOLS
            {
                response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            Ok::<Response<Body>, std::convert::Infallible>(response)
        }
    });
    let served = builder.serve_connection_with_upgrades(TokioIo::new(stream), service);
    tokio::pin!(served);
    let last_requests = async {
        let _ = ending.wait_for(|ending| *ending).await;
        tokio::time::sleep(LAST_REQUEST_MAX).await;
    };
    let served = tokio::select! {
        served = served.as_mut() => served,
        () = last_requests => {
            served.as_mut().graceful_shutdown();
            served.await
        }
    };
    if let Err(error) = served {
        tracing::debug!(%error, "a connection ended badly");
    }
}
