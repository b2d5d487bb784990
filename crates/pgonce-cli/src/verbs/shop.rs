//! The service behind the gateway of `pgonce up`: orders, each made with its outcome in one transaction.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde_json::json;
use tokio::net::TcpListener;
use tokio_postgres::types::Type;
use tokio_postgres::{Client, Transaction};

use crate::database;

const TABLE: &str = "
CREATE SCHEMA IF NOT EXISTS pgonce_demo;
CREATE TABLE IF NOT EXISTS pgonce_demo.shop_orders (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, item jsonb NOT NULL, at timestamptz NOT NULL DEFAULT now())";

/// One connection is enough for a demo; one that broke is made again.
struct Shop {
    url: String,
    client: tokio::sync::Mutex<Option<Client>>,
}

/// Starts the service on a free port of this machine; it runs until the process ends.
pub async fn start(url: &str) -> anyhow::Result<SocketAddr> {
    let client = database::connect(url).await?;
    client.batch_execute(TABLE).await.map_err(pgonce::Error::from)?;
    let shop = Arc::new(Shop { url: url.to_owned(), client: tokio::sync::Mutex::new(Some(client)) });
    let router = Router::new().route("/orders", post(create)).route("/orders/{id}", get(read)).with_state(shop);
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    tokio::spawn(async move { axum::serve(listener, router).await });
    Ok(address)
}

/// Whatever fails here has rolled back: not done.
struct Refused(StatusCode, String);

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        (self.0, [(header::CONTENT_TYPE, "application/json")], json!({ "error": self.1 }).to_string()).into_response()
    }
}

impl<E: Into<anyhow::Error>> From<E> for Refused {
    fn from(error: E) -> Self {
        let error: anyhow::Error = error.into();
        Self(StatusCode::SERVICE_UNAVAILABLE, crate::output::explain(&error))
    }
}

async fn create(State(shop): State<Arc<Shop>>, headers: HeaderMap, body: Bytes) -> Result<Response, Refused> {
    let item: serde_json::Value = serde_json::from_slice(&body)
        .map_err(|error| Refused(StatusCode::BAD_REQUEST, format!("an order is JSON: {error}")))?;
    let mut client = shop.connected().await?;
    let Some(client) = client.as_mut() else {
        return Err(Refused(StatusCode::SERVICE_UNAVAILABLE, "no database".into()));
    };
    let transaction = client.transaction().await.map_err(pgonce::Error::from)?;
    let sql = "INSERT INTO pgonce_demo.shop_orders (item) VALUES ($1) RETURNING id";
    let row = transaction.query_typed_one(sql, &[(&item, Type::JSONB)]).await.map_err(pgonce::Error::from)?;
    let id: i64 = row.try_get(0).map_err(pgonce::Error::from)?;
    let answer = json!({ "order": id, "item": item }).to_string();
    // The outcome commits with the order: whatever dies now, a retry gets this answer and no second order.
    succeed(&transaction, &headers, &answer).await.map_err(pgonce::Error::from)?;
    transaction.commit().await.map_err(pgonce::Error::from)?;
    Ok((StatusCode::CREATED, [(header::CONTENT_TYPE, "application/json")], answer).into_response())
}

/// What the gateway told about its claim goes back with the effect.
async fn succeed(
    transaction: &Transaction<'_>,
    headers: &HeaderMap,
    answer: &str,
) -> Result<(), tokio_postgres::Error> {
    let told = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let Ok(claim_id) = told("pgonce-claim").parse::<uuid::Uuid>() else { return Ok(()) };
    let sql = "SELECT once.succeed(p_scope => $1, p_key => $2, p_claim_id => $3, p_response_code => 201,
        p_response_headers => '[[\"content-type\", \"application/json\"]]', p_response_body => $4, p_tenant => $5)";
    transaction
        .query_typed_one(
            sql,
            &[
                (&told("pgonce-scope"), Type::TEXT),
                (&told("pgonce-key"), Type::TEXT),
                (&claim_id, Type::UUID),
                (&answer.as_bytes(), Type::BYTEA),
                (&told("pgonce-tenant"), Type::TEXT),
            ],
        )
        .await?;
    Ok(())
}

async fn read(State(shop): State<Arc<Shop>>, Path(id): Path<i64>) -> Result<Response, Refused> {
    let client = shop.connected().await?;
    let Some(client) = client.as_ref() else {
        return Err(Refused(StatusCode::SERVICE_UNAVAILABLE, "no database".into()));
    };
    let sql = "SELECT item FROM pgonce_demo.shop_orders WHERE id = $1";
    let row = client.query_typed_opt(sql, &[(&id, Type::INT8)]).await.map_err(pgonce::Error::from)?;
    let Some(row) = row else { return Err(Refused(StatusCode::NOT_FOUND, "no such order".into())) };
    let item: serde_json::Value = row.try_get(0).map_err(pgonce::Error::from)?;
    let answer = json!({ "order": id, "item": item }).to_string();
    Ok(([(header::CONTENT_TYPE, "application/json")], answer).into_response())
}

impl Shop {
    async fn connected(&self) -> anyhow::Result<tokio::sync::MutexGuard<'_, Option<Client>>> {
        let mut client = self.client.lock().await;
        if client.as_ref().is_none_or(Client::is_closed) {
            *client = Some(database::connect(&self.url).await?);
        }
        Ok(client)
    }
}
