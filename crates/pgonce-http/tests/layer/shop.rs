//! The service under test: orders, whose handlers do what the request's body says.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::Json;
use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{AppendHeaders, IntoResponse, Response};
use axum::routing::{get, post};
use pgonce::{Once, Tx};
use pgonce_http::{Failed, IdempotencyLayer, Policy, Requirement, Transaction};
use pgonce_testkit::TestDb;
use serde_json::{Value, json};
use tokio::sync::Semaphore;

/// What tests see of the handlers, and how they hold them.
#[derive(Clone, Default)]
pub struct Shop {
    calls: Arc<AtomicUsize>,
    /// A permit for every handler that has begun with `{"hold": true}`.
    pub reached: Arc<Gate>,
    /// A permit lets one of them go on.
    pub go: Arc<Gate>,
    /// Transactions that a handler kept.
    pub kept: Arc<std::sync::Mutex<Vec<Tx>>>,
}

/// Permits that are given and taken.
pub struct Gate(Semaphore);

impl Default for Gate {
    fn default() -> Self {
        Self(Semaphore::new(0))
    }
}

impl Gate {
    pub fn open(&self) {
        self.0.add_permits(1);
    }

    pub async fn pass(&self) {
        self.0.acquire().await.unwrap().forget();
    }
}

impl Shop {
    /// How often the handler ran.
    pub fn calls(&self) -> usize {
        self.calls.load(Ordering::SeqCst)
    }

    /// Behind this layer, on a port of its own.
    pub async fn serve(&self, layer: IdempotencyLayer) -> SocketAddr {
        let orders = Router::new()
            .route("/orders", post(create).get(async || "list"))
            .route("/stream", get(stream).post(stream))
            .layer(layer)
            .route("/outside", post(create));
        serve(orders.with_state(self.clone())).await
    }

    pub fn begin(&self) -> usize {
        self.calls.fetch_add(1, Ordering::SeqCst)
    }
}

pub async fn serve(router: Router) -> SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, router).await });
    address
}

/// A database, the shop, and where it listens.
pub async fn open(change: impl FnOnce(&mut Policy)) -> (TestDb, Shop, SocketAddr) {
    let (db, shop) = (TestDb::new().await, Shop::default());
    let once = db.once().await;
    let address = shop.serve(IdempotencyLayer::new(once, policy(change))).await;
    (db, shop, address)
}

pub fn policy(change: impl FnOnce(&mut Policy)) -> Policy {
    let mut policy = Policy { requirement: Requirement::Required, ..Policy::new("orders") };
    change(&mut policy);
    policy
}

/// The effect: a row that says whose it is.
pub async fn insert(tx: &Tx, key: &str) -> Result<(), tokio_postgres::Error> {
    let claim = tx.claim_id();
    let sql = "INSERT INTO public.effect (scope, key, claim_id) VALUES ('orders', $1, $2)";
    tx.execute(&tx.prepared(sql).await?, &[&key, &claim]).await?;
    Ok(())
}

pub fn key_of(headers: &HeaderMap) -> String {
    headers["idempotency-key"].to_str().unwrap().trim_matches('"').to_owned()
}

/// `POST /orders`: writes its effect, then does what it is asked for.
async fn create(
    State(shop): State<Shop>,
    tx: Transaction,
    headers: HeaderMap,
    Json(order): Json<Value>,
) -> Result<Response, Failed> {
    let call = shop.begin();
    insert(&tx, &key_of(&headers)).await?;
    if order["hold"] == true {
        shop.reached.open();
        shop.go.pass().await;
    }
    if order["keep"] == true {
        shop.kept.lock().unwrap().push(tx.0.clone());
    }
    if order["panic"] == true {
        panic!("the test asked for it");
    }
    if let Some(times) = order["serialization_failures"].as_u64()
        && (call as u64) < times
    {
        tx.batch_execute("DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '40001'; END $$").await?;
    }
    if let Some(sql) = order["sql"].as_str() {
        tx.batch_execute(sql).await?;
    }
    let status = order["status"].as_u64().map_or(201, |status| status as u16);
    let size = order["size"].as_u64().unwrap_or(0) as usize;
    let headers = AppendHeaders([
        ("location", "/orders/1"),
        ("set-cookie", "session=secret"),
        ("link", "<b>"),
        ("link", "<a>"),
        ("x-private", "1"),
    ]);
    let body = json!({"id": tx.stable_uuid("order"), "call": call, "filler": "x".repeat(size)});
    let mut response = (StatusCode::from_u16(status).unwrap(), headers, Json(body)).into_response();
    if let Some(length) = order["length"].as_u64() {
        response.headers_mut().insert("content-length", length.into());
    }
    Ok(response)
}

/// `/stream`: a body of unknown length.
async fn stream(tx: Option<Transaction>, headers: HeaderMap) -> Result<Response, Failed> {
    if let Some(tx) = tx {
        insert(&tx, &key_of(&headers)).await?;
    }
    let chunks = (0..10).map(|turn| Ok::<_, std::io::Error>(format!("chunk {turn}\n")));
    Ok(Body::from_stream(futures_util::stream::iter(chunks)).into_response())
}

/// Another connection's settings.
pub async fn small_once(db: &TestDb, pool_max: usize) -> Once {
    db.once_with(|settings| settings.pool_max = pool_max).await
}
