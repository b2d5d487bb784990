//! An orders service in axum whose clients may retry: an order and the response that tells of it commit together.
//!
//! `DATABASE_URL=postgres://… cargo run -p pgonce-http --features axum --example orders`

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use pgonce::Once;
use pgonce_http::{Failed, IdempotencyLayer, Policy, Requirement, Transaction};
use serde::Deserialize;
use serde_json::json;
use tokio_postgres::Client;
use uuid::Uuid;

#[derive(Debug, Deserialize)]
struct NewOrder {
    sku: String,
    quantity: i32,
}

/// `POST /orders`. Every write goes through the transaction; the layer commits it with the response.
async fn create(tx: Transaction, Json(order): Json<NewOrder>) -> Result<Response, Failed> {
    // The same id in every attempt, so that it may go into other systems, too.
    let id = tx.stable_uuid("order");
    tx.execute("INSERT INTO http_orders (id, sku, quantity) VALUES ($1, $2, $3)", &[&id, &order.sku, &order.quantity])
        .await?;
    let stock = "UPDATE http_stock SET left_over = left_over - $2 WHERE sku = $1 AND left_over >= $2";
    if tx.execute(stock, &[&order.sku, &order.quantity]).await? == 0 {
        // A refusal: the order above is rolled back, and every retry gets this same answer.
        return Ok((StatusCode::CONFLICT, Json(json!({"error": "out of stock"}))).into_response());
    }
    tx.made("order", id.to_string());
    let location = [(header::LOCATION, format!("/orders/{id}"))];
    Ok((StatusCode::CREATED, location, Json(json!({"id": id, "quantity": order.quantity}))).into_response())
}

/// `GET /orders/{id}`. Reading needs no key: the layer lets it pass.
async fn read(State(client): State<Arc<Client>>, Path(id): Path<Uuid>) -> Result<Response, Failed> {
    let found = client.query_opt("SELECT sku, quantity FROM http_orders WHERE id = $1", &[&id]).await?;
    Ok(match found {
        Some(row) => {
            let (sku, quantity): (String, i32) = (row.get(0), row.get(1));
            Json(json!({"id": id, "sku": sku, "quantity": quantity})).into_response()
        }
        None => StatusCode::NOT_FOUND.into_response(),
    })
}

/// The service over a database, which gets the schema and two tables.
pub async fn app(url: &str) -> Result<Router, Box<dyn std::error::Error>> {
    let mut client = pgonce::migrate::connect(url).await?;
    pgonce::migrate::apply(&mut client, false).await?;
    client
        .batch_execute(
            "CREATE TABLE IF NOT EXISTS http_orders (id uuid PRIMARY KEY, sku text NOT NULL, quantity int NOT NULL);
             CREATE TABLE IF NOT EXISTS http_stock (sku text PRIMARY KEY, left_over int NOT NULL);
             INSERT INTO http_stock VALUES ('abc', 100) ON CONFLICT DO NOTHING",
        )
        .await?;
    let policy = Policy { requirement: Requirement::Required, ..Policy::new("create_order") };
    let guard = IdempotencyLayer::new(Once::connect(url).await?, policy);
    let orders = Router::new().route("/orders", post(create)).route("/orders/{id}", get(read)).layer(guard);
    Ok(orders.with_state(Arc::new(client)))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let app = app(&std::env::var("DATABASE_URL")?).await?;
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", 8080)).await?;
    eprintln!("ready on http://{}", listener.local_addr()?);
    axum::serve(listener, app).await?;
    Ok(())
}
