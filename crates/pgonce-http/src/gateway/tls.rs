//! TLS by rustls, both ways: what clients meet, and what the gateway expects of an upstream or another region.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::Uri;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder, MaybeHttpsStream};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioIo;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tower_service::Service;

use super::config::{ClientTls, ServerTls};
use crate::tenant::PeerIdentity;

/// Why TLS cannot be done as configured.
#[derive(Debug, thiserror::Error)]
#[error("TLS: {}{reason}", .file.as_ref().map_or(String::new(), |file| format!("{}: ", file.display())))]
pub struct TlsError {
    file: Option<PathBuf>,
    reason: String,
}

impl TlsError {
    fn new(reason: impl ToString) -> Self {
        Self { file: None, reason: reason.to_string() }
    }

    fn file(file: &Path, reason: impl ToString) -> Self {
        Self { file: Some(file.to_owned()), reason: reason.to_string() }
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// What takes clients' connections. Built anew with each configuration, it reads the files again: renewed
/// certificates come with SIGHUP, and connections that are open keep theirs.
pub(super) fn acceptor(tls: &ServerTls) -> Result<TlsAcceptor, TlsError> {
    let builder =
        ServerConfig::builder_with_provider(provider()).with_safe_default_protocol_versions().map_err(TlsError::new)?;
    let builder = match &tls.client_ca {
        Some(file) => {
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots(file)?), provider());
            builder.with_client_cert_verifier(verifier.build().map_err(|error| TlsError::file(file, error))?)
        }
        None => builder.with_no_client_auth(),
    };
    let (chain, key) = identity(&tls.cert, &tls.key)?;
    let mut config = builder.with_single_cert(chain, key).map_err(|error| TlsError::file(&tls.cert, error))?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// Who the client of a connection is, by the certificate that the handshake verified.
pub(super) fn peer(stream: &tokio_rustls::server::TlsStream<TcpStream>) -> PeerIdentity {
    let certificate = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
    certificate.map(|certificate| PeerIdentity::of_certificate(certificate)).unwrap_or_default()
}

/// Certificates and the private key of the first.
fn identity(cert: &Path, key: &Path) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>), TlsError> {
    let chain = certificates(cert)?;
    let key = PrivateKeyDer::from_pem_file(key).map_err(|error| TlsError::file(key, error))?;
    Ok((chain, key))
}

fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let unreadable = |error| TlsError::file(file, error);
    let found: Vec<_> =
        CertificateDer::pem_file_iter(file).map_err(unreadable)?.collect::<Result<_, _>>().map_err(unreadable)?;
    if found.is_empty() { Err(TlsError::file(file, "no certificate in it")) } else { Ok(found) }
}

fn roots(file: &Path) -> Result<RootCertStore, TlsError> {
    let mut store = RootCertStore::empty();
    for certificate in certificates(file)? {
        store.add(certificate).map_err(|error| TlsError::file(file, error))?;
    }
    Ok(store)
}

/// What makes connections to an upstream or another region, over TLS where the URL says https.
pub(super) fn connector(tls: &ClientTls, connect_timeout: Duration, http2: bool) -> Result<Connector, TlsError> {
    let store = match &tls.ca_file {
        Some(file) => roots(file)?,
        None => {
            let mut store = RootCertStore::empty();
            // None at all is no mistake yet: the upstream may be plain HTTP.
            store.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            store
        }
    };
    let builder = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(TlsError::new)?
        .with_root_certificates(store);
    let config = match &tls.identity {
        Some((cert, key)) => {
            let (chain, key) = identity(cert, key)?;
            builder.with_client_auth_cert(chain, key).map_err(|error| TlsError::file(cert, error))?
        }
        None => builder.with_no_client_auth(),
    };
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    // A peer that vanished is noticed also on a connection that waits for its answer.
    tcp.set_keepalive(Some(Duration::from_secs(60)));
    let builder = HttpsConnectorBuilder::new().with_tls_config(config).https_or_http().enable_http1();
    let inner = if http2 { builder.enable_http2().wrap_connector(tcp) } else { builder.wrap_connector(tcp) };
    Ok(Connector { inner, timeout: connect_timeout })
}

/// Connects within its time: name, TCP and TLS together. (The inner connector's own limit is for TCP alone: a
/// peer that accepts and says nothing would hold a request for ever.)
#[derive(Clone)]
pub(super) struct Connector {
    inner: HttpsConnector<HttpConnector>,
    timeout: Duration,
}

type BoxError = Box<dyn std::error::Error + Send + Sync>;

impl Service<Uri> for Connector {
    type Response = MaybeHttpsStream<TokioIo<TcpStream>>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, to: Uri) -> Self::Future {
        let connecting = self.inner.call(to);
        let timeout = self.timeout;
        Box::pin(async move {
            match tokio::time::timeout(timeout, connecting).await {
                Ok(connected) => connected,
                Err(_) => Err(format!("not connected after {timeout:?}").into()),
            }
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on should stop, loudly")]
mod tests {
    use http_body_util::{BodyExt as _, Empty};
    use hyper_util::client::legacy::Client;
    use hyper_util::rt::TokioExecutor;
    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
    use tempfile::TempDir;
    use tokio::net::TcpListener;

    use super::*;

    /// An authority, and what it signed, as files.
    struct Authority {
        dir: TempDir,
        issuer: CertifiedIssuer<'static, KeyPair>,
    }

    impl Authority {
        fn new() -> Self {
            let mut params = CertificateParams::new(Vec::new()).unwrap();
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
            let dir = tempfile::tempdir().unwrap();
            std::fs::write(dir.path().join("ca.pem"), issuer.pem()).unwrap();
            Self { dir, issuer }
        }

        fn file(&self, name: &str) -> PathBuf {
            self.dir.path().join(name)
        }

        fn sign(&self, name: &str, common_name: &str) -> (PathBuf, PathBuf) {
            let mut params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
            params.distinguished_name.push(DnType::CommonName, common_name);
            let key = KeyPair::generate().unwrap();
            let cert = params.signed_by(&key, &self.issuer).unwrap();
            let (cert_file, key_file) = (self.file(&format!("{name}.pem")), self.file(&format!("{name}.key")));
            std::fs::write(&cert_file, cert.pem()).unwrap();
            std::fs::write(&key_file, key.serialize_pem()).unwrap();
            (cert_file, key_file)
        }
    }

    /// Takes one connection, and answers with what TLS says of it.
    async fn serve_one(acceptor: TlsAcceptor) -> (u16, tokio::task::JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let task = tokio::spawn(async move {
            let (tcp, _) = listener.accept().await.unwrap();
            let Ok(stream) = acceptor.accept(tcp).await else { return };
            let subject = peer(&stream).certificate_subject.unwrap_or_else(|| "nobody".into());
            let protocol = stream.get_ref().1.alpn_protocol().map(|name| String::from_utf8(name.to_vec()).unwrap());
            let said = format!("{subject} {}", protocol.unwrap_or_default());
            let service = hyper::service::service_fn(move |_| {
                let said = said.clone();
                async move { Ok::<_, std::convert::Infallible>(http::Response::new(said)) }
            });
            let server = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
            let _ = server.serve_connection(TokioIo::new(stream), service).await;
        });
        (port, task)
    }

    async fn ask(connector: Connector, port: u16) -> Result<String, hyper_util::client::legacy::Error> {
        let client: Client<_, Empty<bytes::Bytes>> = Client::builder(TokioExecutor::new()).build(connector);
        let response = client.get(format!("https://localhost:{port}/").parse().unwrap()).await?;
        Ok(String::from_utf8(response.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap())
    }

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test]
    async fn both_ends_meet_and_the_client_is_known() {
        let authority = Authority::new();
        let (cert, key) = authority.sign("server", "server");
        let (client_cert, client_key) = authority.sign("client", "shop-7");
        let ca = authority.file("ca.pem");
        let server = ServerTls { cert, key, client_ca: None };
        let trusting = ClientTls { ca_file: Some(ca.clone()), identity: None };
        for (http2, expected) in [(true, "nobody h2"), (false, "nobody ")] {
            let (port, _) = serve_one(acceptor(&server).unwrap()).await;
            let said = ask(connector(&trusting, 10 * SECOND, http2).unwrap(), port).await.unwrap();
            assert_eq!(said, expected, "without a choice of protocols it is HTTP/1.1");
        }
        let mutual = ServerTls { client_ca: Some(ca.clone()), ..server };
        let known = ClientTls { ca_file: Some(ca), identity: Some((client_cert, client_key)) };
        let (port, _) = serve_one(acceptor(&mutual).unwrap()).await;
        assert_eq!(ask(connector(&known, 10 * SECOND, true).unwrap(), port).await.unwrap(), "shop-7 h2");
        let (port, _) = serve_one(acceptor(&mutual).unwrap()).await;
        assert!(
            ask(connector(&trusting, 10 * SECOND, true).unwrap(), port).await.is_err(),
            "a certificate is required"
        );
    }

    #[tokio::test]
    async fn strangers_are_not_believed() {
        let (authority, other) = (Authority::new(), Authority::new());
        let (cert, key) = authority.sign("server", "server");
        let (port, _) = serve_one(acceptor(&ServerTls { cert, key, client_ca: None }).unwrap()).await;
        let wrong = ClientTls { ca_file: Some(other.file("ca.pem")), identity: None };
        assert!(ask(connector(&wrong, 10 * SECOND, true).unwrap(), port).await.unwrap_err().is_connect());
    }

    #[tokio::test]
    async fn a_peer_that_says_nothing_is_given_up() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let connector = connector(&ClientTls::default(), SECOND / 10, false).unwrap();
        let error = ask(connector, port).await.unwrap_err();
        assert!(error.is_connect(), "nothing was sent: {error:?}");
        drop(listener);
    }

    #[test]
    fn files_that_do_not_fit_are_named() {
        let authority = Authority::new();
        let (cert, key) = authority.sign("server", "server");
        let (_, other_key) = authority.sign("other", "other");
        let tls = |cert: &Path, key: &Path| ServerTls { cert: cert.into(), key: key.into(), client_ca: None };
        let told = |tls: &ServerTls| acceptor(tls).map(drop).unwrap_err().to_string();
        assert!(acceptor(&tls(&cert, &key)).is_ok());
        assert!(told(&tls(&authority.file("none"), &key)).contains("none"));
        assert!(told(&tls(&key, &key)).contains("no certificate"));
        assert!(told(&tls(&cert, &cert)).contains("server.pem"));
        assert!(told(&tls(&cert, &other_key)).contains("server.pem"));
        let empty = ServerTls { client_ca: Some(key.clone()), ..tls(&cert, &key) };
        assert!(told(&empty).contains("server.key"));
        assert!(connector(&ClientTls { ca_file: Some(key), identity: None }, SECOND, false).is_err());
    }
}
