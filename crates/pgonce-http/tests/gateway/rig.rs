//! A gateway between a client and a service, all real: sockets, processes' signals aside, and PostgreSQL.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body as AxumBody;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::StatusCode;
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use pgonce_http::gateway;
use pgonce_testkit::TestDb;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, Semaphore, mpsc, oneshot};

/// A service that counts its effects in the database, and behaves as the path says.
pub struct Service {
    pub address: SocketAddr,
    pub state: Arc<ServiceState>,
}

pub struct ServiceState {
    url: String,
    client: tokio::sync::Mutex<Option<tokio_postgres::Client>>,
    /// How many requests came.
    pub requests: AtomicUsize,
    /// The last request's headers.
    pub seen: std::sync::Mutex<http::HeaderMap>,
    /// Requests to /hold wait for it.
    pub gate: Notify,
    /// Told when a request to /hold has arrived.
    pub arrived: Notify,
    /// How many pieces /stream may send.
    pub pieces: Semaphore,
    /// The last request's protocol.
    pub version: std::sync::Mutex<http::Version>,
}

impl Service {
    pub async fn start(url: &str) -> Self {
        let state = Arc::new(ServiceState {
            url: url.to_owned(),
            client: tokio::sync::Mutex::default(),
            requests: AtomicUsize::new(0),
            seen: std::sync::Mutex::default(),
            gate: Notify::new(),
            arrived: Notify::new(),
            pieces: Semaphore::new(0),
            version: std::sync::Mutex::default(),
        });
        let router = Router::new().fallback(serve).with_state(Arc::clone(&state));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self { address, state }
    }

    pub fn requests(&self) -> usize {
        self.state.requests.load(Ordering::SeqCst)
    }

    pub fn header(&self, name: &str) -> Option<String> {
        self.state.seen.lock().unwrap().get(name).map(|value| value.to_str().unwrap().to_owned())
    }
}

impl ServiceState {
    /// Commits one effect for the claim that the gateway told.
    async fn effect(&self, headers: &http::HeaderMap) {
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned();
        let claim: uuid::Uuid = text("pgonce-claim").parse().unwrap_or_default();
        let key = text("idempotency-key").trim_matches('"').to_owned();
        let mut client = self.client.lock().await;
        if client.as_ref().is_none_or(tokio_postgres::Client::is_closed) {
            let (made, connection) = tokio_postgres::connect(&self.url, tokio_postgres::NoTls).await.unwrap();
            tokio::spawn(connection);
            *client = Some(made);
        }
        let sql = "INSERT INTO public.effect (tenant, scope, key, claim_id) VALUES ($1, $2, $3, $4)";
        let parameters: [&(dyn tokio_postgres::types::ToSql + Sync); 4] =
            [&text("pgonce-tenant"), &text("pgonce-scope"), &key, &claim];
        client.as_ref().unwrap().execute(sql, &parameters).await.unwrap();
    }
}

async fn serve(State(state): State<Arc<ServiceState>>, request: Request) -> Response {
    let number = state.requests.fetch_add(1, Ordering::SeqCst) + 1;
    let (head, body) = request.into_parts();
    *state.seen.lock().unwrap() = head.headers.clone();
    *state.version.lock().unwrap() = head.version;
    let path = head.uri.path().to_owned();
    let Ok(body) = body.collect().await.map(|body| body.to_bytes()) else {
        return StatusCode::BAD_REQUEST.into_response();
    };
    let answer = |status: u16, text: String| {
        let mut response = Response::new(AxumBody::from(text));
        *response.status_mut() = StatusCode::from_u16(status).unwrap();
        let headers = response.headers_mut();
        headers.insert("content-type", "application/json".parse().unwrap());
        headers.insert("location", format!("/orders/{number}").parse().unwrap());
        headers.append("set-cookie", "session=secret".parse().unwrap());
        headers.append("link", "</a>; rel=a".parse().unwrap());
        headers.append("link", "</b>; rel=b".parse().unwrap());
        headers.insert("x-private", "1".parse().unwrap());
        response
    };
    match path.split('/').nth(1).unwrap_or_default() {
        "orders" => {
            state.effect(&head.headers).await;
            answer(201, format!("{{\"order\":{number},\"bytes\":{}}}", body.len()))
        }
        "status" => {
            let status: u16 = path.rsplit('/').next().unwrap().parse().unwrap();
            if status < 500 {
                state.effect(&head.headers).await;
            }
            answer(status, format!("{{\"status\":{status},\"number\":{number}}}"))
        }
        // The effect happens, and the answer is lost.
        "reset" => {
            state.effect(&head.headers).await;
            panic!("the connection breaks here")
        }
        "hold" => {
            state.arrived.notify_one();
            state.gate.notified().await;
            state.effect(&head.headers).await;
            answer(201, format!("{{\"held\":{number}}}"))
        }
        "large" => {
            state.effect(&head.headers).await;
            let bytes: usize = path.rsplit('/').next().unwrap().parse().unwrap();
            answer(200, "x".repeat(bytes))
        }
        // Pieces when they are let go, without a length.
        "stream" => {
            state.effect(&head.headers).await;
            let pieces = futures_util::stream::unfold((0, Arc::clone(&state)), |(n, state)| async move {
                if n == 5 {
                    return None;
                }
                state.pieces.acquire().await.unwrap().forget();
                Some((Ok::<_, std::io::Error>(format!("piece {n}\n")), (n + 1, state)))
            });
            let mut response = answer(200, String::new());
            *response.body_mut() = AxumBody::from_stream(pieces);
            response
        }
        "cut" => {
            state.effect(&head.headers).await;
            let pieces = futures_util::stream::iter([
                Ok(Bytes::from(vec![b'y'; 100_000])),
                Err(std::io::Error::other("cut in the middle")),
            ]);
            let mut response = answer(200, String::new());
            *response.body_mut() = AxumBody::from_stream(pieces);
            response
        }
        "bytes" => {
            state.effect(&head.headers).await;
            let mut response = answer(200, String::new());
            let headers = response.headers_mut();
            headers.insert("content-encoding", "gzip".parse().unwrap());
            headers.insert("content-type", "application/octet-stream".parse().unwrap());
            *response.body_mut() = AxumBody::from(vec![0x1f, 0x8b, 0, 255, 254, 10, 13, 0]);
            response
        }
        _ => answer(200, format!("{{\"{}\":{number}}}", head.method)),
    }
}

/// A running gateway.
pub struct Gateway {
    pub address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    pub reload: mpsc::Sender<()>,
    pub config: std::path::PathBuf,
    ended: Option<tokio::task::JoinHandle<Result<(), gateway::GatewayError>>>,
    _dir: tempfile::TempDir,
}

impl Gateway {
    /// Starts one; `config` has the keys of its one route, and whatever sections follow.
    pub async fn start(database: &str, upstream: SocketAddr, config: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pgonce.toml");
        std::fs::write(&path, Self::file("127.0.0.1:0", upstream, config)).unwrap();
        let source = gateway::config::ConfigSource { path: Some(path.clone()), ..Default::default() };
        let (stop, stopped) = oneshot::channel::<()>();
        let (reload, reloads) = mpsc::channel(1);
        let (ready, address) = oneshot::channel();
        let settings = pgonce::Settings::from_url(database);
        let ended = tokio::spawn(gateway::run(
            settings,
            source,
            move |address| {
                let _ = ready.send(address);
            },
            async move {
                let _ = stopped.await;
            },
            reloads,
        ));
        let Ok(address) = address.await else { panic!("the gateway did not start: {:?}", ended.await.unwrap().err()) };
        Self { address, stop: Some(stop), reload, config: path, ended: Some(ended), _dir: dir }
    }

    /// A configuration file. A line `upstream.KEY = …` or `gateway.KEY = …` is for the section of that name.
    pub fn file(listen: &str, upstream: SocketAddr, config: &str) -> String {
        let of = |section: &str| -> String {
            config.lines().filter_map(|line| line.strip_prefix(section)).map(|line| format!("{line}\n")).collect()
        };
        let (of_gateway, mut of_upstream) = (of("gateway."), of("upstream."));
        if !config.contains("upstream.url") {
            of_upstream.push_str(&format!("url = \"http://{upstream}\"\n"));
        }
        let of_route: Vec<&str> =
            config.lines().filter(|line| !line.starts_with("gateway.") && !line.starts_with("upstream.")).collect();
        let route = if config.contains("[[gateway.route]]") { "" } else { "[[gateway.route]]\npath = \"*\"" };
        format!(
            "[gateway]\nlisten = \"{listen}\"\n{of_gateway}[gateway.upstream]\n{of_upstream}{route}\n{}\n",
            of_route.join("\n")
        )
    }

    /// Rewrites its file, and has it read again as SIGHUP does. When it has been, the test has to see for itself.
    pub async fn reload(&self, upstream: SocketAddr, config: &str) {
        std::fs::write(&self.config, Self::file("127.0.0.1:0", upstream, config)).unwrap();
        self.reload.send(()).await.unwrap();
    }

    /// Stops it as SIGTERM does, and waits for its end.
    pub async fn stop(mut self) {
        drop(self.stop.take());
        self.ended.take().unwrap().await.unwrap().unwrap();
    }
}

/// A database, a service and a gateway.
pub struct Rig {
    pub db: TestDb,
    pub service: Service,
    pub gateway: Gateway,
}

impl Rig {
    pub async fn new(config: &str) -> Self {
        let db = TestDb::new().await;
        let service = Service::start(db.direct_url()).await;
        let gateway = Gateway::start(db.url(), service.address, config).await;
        Self { db, service, gateway }
    }

    /// A POST with a key.
    pub async fn post(&self, path: &str, key: &str, body: &str) -> Reply {
        self.send("POST", path, &[("idempotency-key", &format!("\"{key}\""))], body).await
    }

    pub async fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Reply {
        send(self.gateway.address, method, path, headers, body.as_bytes()).await
    }

    pub async fn effects(&self, key: &str) -> i64 {
        self.db.effects(key).await
    }

    /// All rows of a key, whatever scope: their states.
    pub async fn states(&self, key: &str) -> Vec<String> {
        states(&self.db, key).await
    }

    /// A number on the gateway's own page of metrics.
    pub async fn metric(&self, name: &str) -> f64 {
        let page = self.send("GET", "/_pgonce/metrics", &[], "").await;
        let page = String::from_utf8_lossy(&page.body).into_owned();
        let line = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.map_or(0.0, |value| value.parse().unwrap())
    }
}

pub async fn states(db: &TestDb, key: &str) -> Vec<String> {
    let sql = "SELECT status::text FROM once.intents WHERE key = $1 ORDER BY tenant, scope";
    db.client().await.query(sql, &[&key]).await.unwrap().iter().map(|row| row.get(0)).collect()
}

/// What a client got.
#[derive(Debug, Clone, PartialEq)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, Vec<u8>)>,
    pub body: Bytes,
}

impl Reply {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| std::str::from_utf8(value).unwrap())
    }

    pub fn all(&self, name: &str) -> Vec<&str> {
        let found = self.headers.iter().filter(|(known, _)| known == name);
        found.map(|(_, value)| std::str::from_utf8(value).unwrap()).collect()
    }

    pub fn is_replay(&self) -> bool {
        self.header("idempotency-replayed") == Some("true")
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("no JSON: {:?}", self.body))
    }

    /// The last part of the problem's type.
    pub fn problem(&self) -> String {
        assert_eq!(self.header("content-type"), Some("application/problem+json"), "{self:?}");
        self.json()["type"].as_str().unwrap().rsplit(['/', ':']).next().unwrap().to_owned()
    }
}

static CLIENT: std::sync::LazyLock<Client<HttpConnector, Full<Bytes>>> =
    std::sync::LazyLock::new(|| Client::builder(TokioExecutor::new()).pool_max_idle_per_host(0).build_http());

pub async fn send(address: SocketAddr, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Reply {
    try_send(address, method, path, headers, body).await.unwrap()
}

/// The same over kept connections, for those who send much.
pub async fn send_kept(address: SocketAddr, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Reply {
    static KEPT: std::sync::LazyLock<Client<HttpConnector, Full<Bytes>>> =
        std::sync::LazyLock::new(|| Client::builder(TokioExecutor::new()).build_http());
    send_by(&KEPT, address, method, path, headers, body).await.unwrap()
}

pub async fn try_send(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> Result<Reply, Box<dyn std::error::Error + Send + Sync>> {
    send_by(&CLIENT, address, method, path, headers, body).await
}

async fn send_by(
    client: &Client<HttpConnector, Full<Bytes>>,
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> Result<Reply, Box<dyn std::error::Error + Send + Sync>> {
    let mut request = http::Request::builder().method(method).uri(format!("http://{address}{path}"));
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let response = client.request(request.body(Full::from(body.to_vec()))?).await?;
    let (head, body) = response.into_parts();
    let headers = head.headers.iter().map(|(name, value)| (name.to_string(), value.as_bytes().to_vec())).collect();
    Ok(Reply { status: head.status.as_u16(), headers, body: body.collect().await?.to_bytes() })
}

/// Bytes in, bytes out, until the other side closes or is silent.
pub async fn raw(address: SocketAddr, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(bytes).await.unwrap();
    let mut answer = Vec::new();
    loop {
        let mut piece = [0; 4096];
        match tokio::time::timeout(Duration::from_millis(700), stream.read(&mut piece)).await {
            Ok(Ok(0) | Err(_)) | Err(_) => break,
            Ok(Ok(length)) => answer.extend_from_slice(&piece[..length]),
        }
    }
    String::from_utf8_lossy(&answer).into_owned()
}
