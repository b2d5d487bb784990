//! Connections in: accepted, bounded, served until they are asked to end.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::GracefulShutdown;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

use super::body::Body;
use super::upstream::Peer;
use super::{Acceptor, Gateway};
use crate::tenant::PeerIdentity;

/// How long a client may take for its TLS handshake.
const HANDSHAKE_MAX: Duration = Duration::from_secs(10);

/// Accepts until told to stop, then lets what runs come to its end.
pub(crate) async fn serve(gateway: Arc<Gateway>, listener: TcpListener, stop: impl Future<Output = ()>) {
    let connections_max = gateway.live.load().config.limits.connections_max;
    let slots = Arc::new(Semaphore::new(connections_max));
    let graceful = GracefulShutdown::new();
    tokio::pin!(stop);
    loop {
        let slot = tokio::select! {
            () = &mut stop => break,
            slot = Arc::clone(&slots).acquire_owned() => slot,
        };
        // Nobody closes it.
        let Ok(slot) = slot.map(Arc::new) else { break };
        let place = Arc::downgrade(&slot);
        let accepted = tokio::select! {
            () = &mut stop => break,
            accepted = listener.accept() => accepted,
        };
        let (stream, address) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of file descriptors, most likely: no reason to end, and none to spin.
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let gateway = Arc::clone(&gateway);
        let watcher = graceful.watcher();
        tokio::spawn(async move {
            let _slot = slot;
            let _ = stream.set_nodelay(true);
            let acceptor = gateway.live.load().tls.clone();
            match acceptor {
                None => {
                    let peer = Peer { address, tls: false, trusted: false, identity: PeerIdentity::default(), place };
                    connection(gateway, stream, peer, watcher).await;
                }
                Some(acceptor) => {
                    if let Some((stream, identity)) = handshake(&acceptor, stream, address).await {
                        let peer = Peer { address, tls: true, trusted: false, identity, place };
                        connection(gateway, stream, peer, watcher).await;
                    }
                }
            }
        });
    }
    drop(listener);
    let drain = gateway.live.load().config.drain_timeout;
    gateway.tasks.close();
    let drained = async {
        graceful.shutdown().await;
        gateway.tasks.wait().await;
    };
    if tokio::time::timeout(drain, drained).await.is_err() {
        tracing::warn!("not everything came to its end in time; leases of what was cut off will run out");
    }
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

async fn connection<S>(gateway: Arc<Gateway>, stream: S, peer: Peer, watcher: hyper_util::server::graceful::Watcher)
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
    let service = service_fn(move |request: Request<Incoming>| {
        let gateway = Arc::clone(&gateway);
        let peer = Arc::clone(&peer);
        async move { Ok::<Response<Body>, std::convert::Infallible>(gateway.handle(request, peer).await) }
    });
    let served = watcher.watch(builder.serve_connection_with_upgrades(TokioIo::new(stream), service)).await;
    if let Err(error) = served {
        tracing::debug!(%error, "a connection ended badly");
    }
}
