//! The service behind the gateway, which knows nothing of pgonce: one row in `public.effect` a request, committed on
//! a connection of its own, then an answer. In the test's process, or in one of its own, to be killed.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, StatusCode};
use axum::response::{IntoResponse as _, Response};
use futures_util::StreamExt as _;
use tokio::net::TcpListener;
use tokio::process::{Child, Command};
use tokio::sync::watch;
use tokio_postgres::{Client, NoTls};

use crate::rig::{Said, spawn};

/// What the service does beside answering.
pub const SCHEMA: &str = "
    CREATE FUNCTION public.make_effect(p_tenant text, p_scope text, p_key text, p_claim uuid, p_attempt text, p_once boolean)
    RETURNS void LANGUAGE plpgsql AS $$
    BEGIN
        IF p_once THEN
            PERFORM pg_advisory_xact_lock(hashtextextended(p_key, 0));
        END IF;
        INSERT INTO public.effect (tenant, scope, key, claim_id, attempt)
            SELECT p_tenant, p_scope, p_key, p_claim, p_attempt
            WHERE NOT p_once OR NOT EXISTS (SELECT 1 FROM public.effect e WHERE e.key = p_key);
    END $$;
    CREATE FUNCTION public.was_done(p_key text) RETURNS boolean LANGUAGE sql SECURITY DEFINER
        AS 'SELECT EXISTS (SELECT 1 FROM public.effect e WHERE e.key = p_key)'";

/// The larger part of a long response: more than the gateway gathers before it passes it on.
const LONG: usize = 100_000;

#[derive(Debug, Clone, Default)]
pub struct Options {
    /// It deduplicates by the key itself: one effect a key, however often it is asked.
    pub deduplicates: bool,
    /// Where its process is killed, once.
    pub die_at: Option<(String, PathBuf)>,
}

#[derive(Debug)]
pub struct Service {
    pub address: SocketAddr,
    state: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    config: tokio_postgres::Config,
    options: Options,
    idle: Mutex<Vec<Client>>,
    requests: AtomicUsize,
    /// Requests to /slow, and the ends of responses to /long, wait until it is open.
    gate: watch::Sender<bool>,
    waiting: watch::Sender<usize>,
}

impl Service {
    /// One in this process.
    pub async fn start(url: &str, options: Options) -> Self {
        Self::on(TcpListener::bind("127.0.0.1:0").await.unwrap(), url, options)
    }

    fn on(listener: TcpListener, url: &str, options: Options) -> Self {
        let mut config: tokio_postgres::Config = url.parse().unwrap();
        config.application_name("service");
        let state = Arc::new(Inner {
            config,
            options,
            idle: Mutex::default(),
            requests: AtomicUsize::new(0),
            gate: watch::Sender::new(false),
            waiting: watch::Sender::new(0),
        });
        let address = listener.local_addr().unwrap();
        let router = Router::new().fallback(serve).with_state(Arc::clone(&state));
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self { address, state }
    }

    /// How many guarded requests came.
    pub fn requests(&self) -> usize {
        self.state.requests.load(Ordering::SeqCst)
    }

    /// Until so many are at the gate.
    pub async fn at_gate(&self, count: usize) {
        self.state.waiting.subscribe().wait_for(|waiting| *waiting >= count).await.unwrap();
    }

    /// Lets all of them go on, and all that come.
    pub fn open_gate(&self) {
        self.state.gate.send_replace(true);
    }
}

impl Inner {
    /// Commits one effect for the claim that the gateway told.
    async fn effect(&self, headers: &HeaderMap) -> Result<(), tokio_postgres::Error> {
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned();
        let idle = self.idle.lock().unwrap().pop().filter(|client| !client.is_closed());
        let client = match idle {
            Some(client) => client,
            None => {
                let (client, connection) = self.config.connect(NoTls).await?;
                tokio::spawn(connection);
                client
            }
        };
        let claim: uuid::Uuid = text("pgonce-claim").parse().expect("a claim");
        let sql = "SELECT public.make_effect($1, $2, $3, $4, $5, $6)";
        let (tenant, scope, key, attempt) =
            (text("pgonce-tenant"), text("pgonce-scope"), text("pgonce-key"), text("x-attempt"));
        client.execute(sql, &[&tenant, &scope, &key, &claim, &attempt, &self.options.deduplicates]).await?;
        self.idle.lock().unwrap().push(client);
        Ok(())
    }

    async fn gate(&self) {
        self.waiting.send_modify(|waiting| *waiting += 1);
        self.gate.subscribe().wait_for(|open| *open).await.unwrap();
    }

    /// The process ends here, if that was asked for and has not happened.
    fn dies_at(&self, point: &str) -> bool {
        self.options.die_at.as_ref().is_some_and(|(at, mark)| at == point && !mark.exists())
    }

    fn die(&self) -> ! {
        let (_, mark) = self.options.die_at.as_ref().unwrap();
        std::fs::write(mark, "").unwrap();
        let own = std::process::id().to_string();
        assert!(std::process::Command::new("kill").args(["-KILL", &own]).status().unwrap().success());
        loop {
            std::thread::park();
        }
    }
}

/// A request that has come is carried out, whether or not somebody still waits for the answer.
async fn serve(State(state): State<Arc<Inner>>, request: Request) -> Response {
    tokio::spawn(carry_out(state, request)).await.unwrap()
}

async fn carry_out(state: Arc<Inner>, request: Request) -> Response {
    let (head, body) = request.into_parts();
    if to_bytes(body, usize::MAX).await.is_err() {
        return StatusCode::BAD_REQUEST.into_response();
    }
    if head.method == Method::GET {
        return "passed".into_response();
    }
    let number = state.requests.fetch_add(1, Ordering::SeqCst) + 1;
    if head.uri.path() == "/slow" {
        state.gate().await;
    }
    if state.dies_at("before_effect") {
        state.die();
    }
    if let Err(error) = state.effect(&head.headers).await {
        // Done or not: the service itself does not know.
        return (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response();
    }
    if state.dies_at("after_effect") {
        state.die();
    }
    // Every run answers with other bytes: whose answer it is shows.
    let answer = format!("{{\"run\":{number},\"at\":\"{}\"}}", uuid::Uuid::new_v4());
    let long = state.dies_at("in_answer") || head.uri.path().starts_with("/long");
    if !long {
        return (StatusCode::CREATED, answer).into_response();
    }
    let (path, length) = (head.uri.path().to_owned(), LONG + answer.len());
    let is_long = path.starts_with("/long");
    let end = async move {
        if is_long {
            state.gate().await;
        }
        if state.dies_at("in_answer") {
            state.die();
        }
        Ok::<_, std::io::Error>(answer)
    };
    let begin = futures_util::stream::iter([Ok("x".repeat(LONG))]);
    let body = Body::from_stream(begin.chain(futures_util::stream::once(end)));
    let mut response = (StatusCode::CREATED, body).into_response();
    if path == "/long/length" {
        response.headers_mut().insert("content-length", length.into());
    }
    response
}

/// A service in a process of its own.
#[derive(Debug)]
pub struct Process {
    child: Child,
    _said: Said,
}

impl Process {
    /// Starts one: this very program, which runs the test below.
    pub async fn start(url: &str, port: u16, options: &Options) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "service::in_a_process_of_its_own", "--ignored", "--nocapture"]);
        command.env("SERVICE_DATABASE", url).env("SERVICE_PORT", port.to_string());
        if options.deduplicates {
            command.env("SERVICE_DEDUPLICATES", "1");
        }
        if let Some((point, mark)) = &options.die_at {
            command.env("SERVICE_DIE_AT", point).env("SERVICE_DIED", mark);
        }
        let said = Said::new("service");
        let mut child = spawn(command);
        said.until_ready(child.stderr.take().unwrap()).await;
        Self { child, _said: said }
    }

    /// Waits for the end that it was asked for.
    pub async fn died(mut self) {
        crate::rig::killed(&mut self.child).await;
    }

    /// Ends it, and its port is free.
    pub async fn kill(mut self) {
        self.child.kill().await.unwrap();
    }
}

#[tokio::test]
#[ignore = "the process that others start"]
async fn in_a_process_of_its_own() {
    let variable = |name: &str| std::env::var(name).ok();
    let (Some(url), Some(port)) = (variable("SERVICE_DATABASE"), variable("SERVICE_PORT")) else { return };
    let options = Options {
        deduplicates: variable("SERVICE_DEDUPLICATES").is_some(),
        die_at: variable("SERVICE_DIE_AT").zip(variable("SERVICE_DIED").map(PathBuf::from)),
    };
    let listener = TcpListener::bind(("127.0.0.1", port.parse().unwrap())).await.unwrap();
    let service = Service::on(listener, &url, options);
    eprintln!("ready {}", service.address);
    std::future::pending().await
}
