//! Connecting with the stream between driver and socket. Whatever is not one plain host is the driver's, and so is a host that
//! cannot be reached: it says why.

use std::io;
use std::net::SocketAddr;
#[cfg(unix)]
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::TryFutureExt as _;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
#[cfg(unix)]
use tokio::net::UnixStream;
use tokio::net::{TcpStream, lookup_host};
use tokio::time::timeout;
#[cfg(unix)]
use tokio_postgres::config::SslMode;
use tokio_postgres::config::{Host, LoadBalanceHosts, TargetSessionAttrs};
use tokio_postgres::tls::{MakeTlsConnect, TlsConnect};
use tokio_postgres::{AsyncMessage, Client, Config, Connection, Error};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::Flight;

/// What the server says beside answers; the connection lives as long as this is asked.
pub(crate) type Messages = Box<dyn AnyConnection + Send>;

/// A driver's connection, whatever it reads from.
pub(crate) trait AnyConnection {
    fn poll_message(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<AsyncMessage, Error>>>;
}

impl<S, T> AnyConnection for Connection<S, T>
where
    S: AsyncRead + AsyncWrite + Unpin,
    T: AsyncRead + AsyncWrite + Unpin,
{
    fn poll_message(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<AsyncMessage, Error>>> {
        Self::poll_message(self, context)
    }
}

/// Connects. `joined`: flights are joined where that is possible.
pub(crate) async fn connect(
    config: &Config,
    tls: &MakeRustlsConnect,
    joined: bool,
) -> Result<(Client, Messages), Error> {
    let mut refused = None;
    if joined && let Some((places, name)) = places(config).await {
        // One after the other until one takes us, as the driver does.
        for place in places {
            let Some(socket) = open(place, config).await else { continue };
            match begin(config, tls, socket, name).await {
                Ok(begun) => return Ok(begun),
                Err(error) => refused = Some(error),
            }
        }
    }
    if let Some(error) = refused {
        return Err(error);
    }
    let (client, connection) = config.connect(tls.clone()).await?;
    Ok((client, Box::new(connection)))
}

/// Begins a session over a socket.
async fn begin(
    config: &Config,
    tls: &MakeRustlsConnect,
    socket: Socket,
    name: &str,
) -> Result<(Client, Messages), Error> {
    let (below, above) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
    let encrypted = Arc::<AtomicBool>::default();
    let Ok(connector) = MakeTlsConnect::<Flight<Socket>>::make_tls_connect(&mut tls.clone(), name);
    let connector = Above { connector, encrypted: Arc::clone(&encrypted), armed: Arc::clone(&above) };
    let (client, connection) = config.connect_raw(Flight::new(socket, Arc::clone(&below)), connector).await?;
    // Only the stream that the driver itself talks to sees messages of the protocol.
    let armed = if encrypted.load(Ordering::SeqCst) { above } else { below };
    armed.store(true, Ordering::SeqCst);
    Ok((client, Box::new(connection)))
}

/// Where a server may be.
enum Place {
    Tcp(SocketAddr),
    #[cfg(unix)]
    Unix(PathBuf),
}

/// Where the one host that is named may be, and its name for TLS. None: several hosts, conditions on the session, an order
/// of chance, or a name that nobody knows; the driver knows how, or what to say.
async fn places(config: &Config) -> Option<(Vec<Place>, &str)> {
    let ([host], [] | [_]) = (config.get_hosts(), config.get_ports()) else { return None };
    if !config.get_hostaddrs().is_empty()
        || config.get_target_session_attrs() != TargetSessionAttrs::Any
        || config.get_load_balance_hosts() != LoadBalanceHosts::Disable
    {
        return None;
    }
    let port = config.get_ports().first().copied().unwrap_or(5432);
    match host {
        Host::Tcp(name) => Some((lookup_host((name.as_str(), port)).await.ok()?.map(Place::Tcp).collect(), name)),
        #[cfg(unix)]
        Host::Unix(_) if config.get_ssl_mode() == SslMode::Require => None,
        #[cfg(unix)]
        Host::Unix(folder) => Some((vec![Place::Unix(folder.join(format!(".s.PGSQL.{port}")))], "")),
    }
}

/// A socket to it. None: it cannot be reached; if nothing else can, the driver says why.
async fn open(place: Place, config: &Config) -> Option<Socket> {
    let limit = config.get_connect_timeout().copied().unwrap_or(Duration::MAX);
    match place {
        Place::Tcp(address) => {
            let stream = timeout(limit, TcpStream::connect(address)).await.ok()?.ok()?;
            configure(&stream, config).ok()?;
            Some(Socket::Tcp(stream))
        }
        #[cfg(unix)]
        Place::Unix(path) => Some(Socket::Unix(timeout(limit, UnixStream::connect(path)).await.ok()?.ok()?)),
    }
}

/// What the driver does with its own sockets.
fn configure(stream: &TcpStream, config: &Config) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = SockRef::from(stream);
    #[cfg(target_os = "linux")]
    if let Some(limit) = config.get_tcp_user_timeout() {
        socket.set_tcp_user_timeout(Some(*limit))?;
    }
    if config.get_keepalives() {
        let mut keepalive = TcpKeepalive::new().with_time(config.get_keepalives_idle());
        if let Some(interval) = config.get_keepalives_interval() {
            keepalive = keepalive.with_interval(interval);
        }
        if let Some(retries) = config.get_keepalives_retries() {
            keepalive = keepalive.with_retries(retries);
        }
        socket.set_tcp_keepalive(&keepalive)?;
    }
    Ok(())
}

/// A socket of either kind.
enum Socket {
    Tcp(TcpStream),
    #[cfg(unix)]
    Unix(UnixStream),
}

/// Calls the same method of whichever socket it is.
macro_rules! either {
    ($socket:expr, $stream:ident => $call:expr) => {
        match $socket.get_mut() {
            Socket::Tcp(stream) => {
                let $stream = Pin::new(stream);
                $call
            }
            #[cfg(unix)]
            Socket::Unix(stream) => {
                let $stream = Pin::new(stream);
                $call
            }
        }
    };
}

impl AsyncRead for Socket {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        either!(self, stream => stream.poll_read(context, buffer))
    }
}

impl AsyncWrite for Socket {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        either!(self, stream => stream.poll_write(context, bytes))
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, stream => stream.poll_flush(context))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, stream => stream.poll_shutdown(context))
    }
}

/// TLS between socket and driver, with the stream that joins above it.
struct Above<C> {
    connector: C,
    encrypted: Arc<AtomicBool>,
    armed: Arc<AtomicBool>,
}

impl<S, C> TlsConnect<S> for Above<C>
where
    C: TlsConnect<S, Future: Send + 'static> + 'static,
    C::Stream: 'static,
    C::Error: 'static,
{
    type Stream = Flight<C::Stream>;
    type Error = C::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Stream, Self::Error>> + Send>>;

    fn connect(self, stream: S) -> Self::Future {
        self.encrypted.store(true, Ordering::SeqCst);
        let armed = self.armed;
        Box::pin(self.connector.connect(stream).map_ok(|stream| Flight::new(stream, armed)))
    }
}
