//! What a gateway meets besides the service of the rig: clients over TLS and HTTP/2, services of bare bytes, and
//! a wire that can be cut.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http::{HeaderMap, Request};
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use pgonce_testkit::TestDb;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tempfile::TempDir;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};
use tokio_rustls::{TlsAcceptor, TlsConnector, client::TlsStream};

use crate::rig::{Gateway, Reply};

pub type Error = Box<dyn std::error::Error + Send + Sync>;

/// An authority, and what it signed, as files.
pub struct Authority {
    dir: TempDir,
    issuer: CertifiedIssuer<'static, KeyPair>,
}

/// A certificate and its key.
#[derive(Clone)]
pub struct Identity {
    pub cert: PathBuf,
    pub key: PathBuf,
}

impl Authority {
    pub fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("ca.pem"), issuer.pem()).unwrap();
        Self { dir, issuer }
    }

    pub fn ca(&self) -> PathBuf {
        self.dir.path().join("ca.pem")
    }

    /// For localhost, with this common name.
    pub fn sign(&self, common_name: &str) -> Identity {
        let mut params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, common_name);
        let pair = KeyPair::generate().unwrap();
        let signed = params.signed_by(&pair, &self.issuer).unwrap();
        let file = |ending: &str| self.dir.path().join(format!("{common_name}.{ending}"));
        let identity = Identity { cert: file("pem"), key: file("key") };
        std::fs::write(&identity.cert, signed.pem()).unwrap();
        std::fs::write(&identity.key, pair.serialize_pem()).unwrap();
        identity
    }

    /// A client that believes this authority.
    pub fn client(&self, identity: Option<&Identity>, alpn: &[&str]) -> TlsConnector {
        let mut roots = RootCertStore::empty();
        roots.add(certificate(&self.ca())).unwrap();
        let builder = ClientConfig::builder_with_provider(rustls::crypto::ring::default_provider().into())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots);
        let mut config = match identity {
            Some(Identity { cert, key }) => {
                let key = PrivateKeyDer::from_pem_file(key).unwrap();
                builder.with_client_auth_cert(vec![certificate(cert)], key).unwrap()
            }
            None => builder.with_no_client_auth(),
        };
        config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
        TlsConnector::from(Arc::new(config))
    }

    /// A server that shows a certificate of this authority.
    pub fn server(&self, alpn: &[&str]) -> TlsAcceptor {
        let Identity { cert, key } = self.sign("service");
        let mut config = ServerConfig::builder_with_provider(rustls::crypto::ring::default_provider().into())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certificate(&cert)], PrivateKeyDer::from_pem_file(key).unwrap())
            .unwrap();
        config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
        TlsAcceptor::from(Arc::new(config))
    }
}

fn certificate(file: &Path) -> CertificateDer<'static> {
    CertificateDer::from_pem_file(file).unwrap()
}

/// The section that makes a gateway speak TLS.
pub fn tls_section(identity: &Identity, client_ca: Option<&Path>) -> String {
    let client_ca = client_ca.map_or(String::new(), |file| format!("client_ca = \"{}\"\n", file.display()));
    format!("[gateway.tls]\ncert = \"{}\"\nkey = \"{}\"\n{client_ca}", identity.cert.display(), identity.key.display())
}

pub async fn tls(address: SocketAddr, connector: &TlsConnector) -> Result<TlsStream<TcpStream>, Error> {
    let stream = TcpStream::connect(address).await?;
    Ok(connector.connect(ServerName::try_from("localhost")?, stream).await?)
}

/// A POST with a key, to be sent over a connection of one's own.
pub fn keyed(path: &str, key: &str) -> Request<Full<Bytes>> {
    Request::post(format!("http://shop.example{path}"))
        .header("idempotency-key", format!("\"{key}\""))
        .body(Full::from("a"))
        .unwrap()
}

/// One request over one connection, and the trailers of its answer.
pub async fn over<S>(stream: S, http2: bool, mut request: Request<Full<Bytes>>) -> Result<(Reply, HeaderMap), Error>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let response = if http2 {
        let (mut sender, connection) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await?;
        tokio::spawn(connection);
        sender.send_request(request).await?
    } else {
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        tokio::spawn(connection);
        let host = request.uri().authority().unwrap().as_str().parse()?;
        request.headers_mut().insert("host", host);
        *request.uri_mut() = request.uri().path_and_query().unwrap().as_str().parse()?;
        sender.send_request(request).await?
    };
    let (head, body) = response.into_parts();
    let body = body.collect().await?;
    let trailers = body.trailers().cloned().unwrap_or_default();
    let headers = head.headers.iter().map(|(name, value)| (name.to_string(), value.as_bytes().to_vec())).collect();
    Ok((Reply { status: head.status.as_u16(), headers, body: body.to_bytes() }, trailers))
}

/// A service of bare bytes: whoever connects is given to a function.
pub struct Bare {
    pub address: SocketAddr,
}

impl Bare {
    pub async fn start<F, Served>(serve: F) -> Self
    where
        F: Fn(TcpStream) -> Served + Send + 'static,
        Served: Future<Output = ()> + Send + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream));
            }
        });
        Self { address }
    }

    /// A gateway before it.
    pub async fn gateway(&self, config: &str) -> (TestDb, Gateway) {
        let db = TestDb::new().await;
        let gateway = Gateway::start(db.url(), self.address, config).await;
        (db, gateway)
    }
}

/// Reads until what was read ends so, or contains it, and answers all of it.
pub async fn read_until<S: AsyncRead + Unpin>(stream: &mut S, text: &str) -> String {
    let mut got = Vec::new();
    while !String::from_utf8_lossy(&got).contains(text) {
        let mut piece = [0; 4096];
        let length = stream.read(&mut piece).await.unwrap();
        assert_ne!(length, 0, "it ended before {text:?}: {:?}", String::from_utf8_lossy(&got));
        got.extend_from_slice(&piece[..length]);
    }
    String::from_utf8_lossy(&got).into_owned()
}

/// A request's head, in small letters.
pub async fn read_head(stream: &mut TcpStream) -> String {
    read_until(stream, "\r\n\r\n").await.to_ascii_lowercase()
}

/// A wire: what connects here is connected there, until it is cut.
pub struct Wire {
    pub address: SocketAddr,
    to: Arc<Mutex<Option<SocketAddr>>>,
    tls: Option<TlsAcceptor>,
    connections: Arc<AtomicUsize>,
    task: Option<JoinHandle<()>>,
}

impl Wire {
    /// A wire whose other end is connected later.
    pub async fn open(tls: Option<TlsAcceptor>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut wire = Self { address, to: Arc::default(), tls, connections: Arc::default(), task: None };
        wire.run(listener);
        wire
    }

    pub async fn to(address: SocketAddr) -> Self {
        let wire = Self::open(None).await;
        wire.lead_to(address);
        wire
    }

    pub fn lead_to(&self, address: SocketAddr) {
        *self.to.lock().unwrap() = Some(address);
    }

    /// How many connections came.
    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }

    /// Ends every connection, and refuses new ones.
    pub async fn cut(&mut self) {
        let task = self.task.take().unwrap();
        task.abort();
        let _ = task.await;
    }

    /// Takes connections again, at the same address.
    pub async fn mend(&mut self) {
        let listener = TcpListener::bind(self.address).await.unwrap();
        self.run(listener);
    }

    fn run(&mut self, listener: TcpListener) {
        let (to, tls, count) = (Arc::clone(&self.to), self.tls.clone(), Arc::clone(&self.connections));
        self.task = Some(tokio::spawn(async move {
            let mut open = JoinSet::new();
            while let Ok((mut near, _)) = listener.accept().await {
                count.fetch_add(1, Ordering::SeqCst);
                let (to, tls) = (*to.lock().unwrap(), tls.clone());
                open.spawn(async move {
                    let Ok(mut far) = TcpStream::connect(to.expect("a wire that leads somewhere")).await else {
                        return;
                    };
                    let _ = match tls {
                        None => tokio::io::copy_bidirectional(&mut near, &mut far).await,
                        Some(tls) => match tls.accept(near).await {
                            Ok(mut near) => tokio::io::copy_bidirectional(&mut near, &mut far).await,
                            Err(error) => Err(error),
                        },
                    };
                });
            }
        }));
    }
}
