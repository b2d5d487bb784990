//! An order that is created once, however often and by however many it is asked for.
//!
//! `DATABASE_URL=postgres://… cargo run -p pgonce --example orders`

use pgonce::{Error, Once, Outcome};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

#[derive(Debug, Clone, Serialize)]
struct Request {
    customer: String,
    amount: i64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Order {
    id: Uuid,
    amount: i64,
}

/// The whole write path: the order and its outcome commit together, or not at all.
async fn create_order(once: &Once, key: &str, request: &Request) -> Result<Outcome<Order>, Error> {
    once.intent("create_order", key)
        .payload(request)
        .run(async |tx| {
            let order = Order { id: tx.stable_uuid("order"), amount: request.amount };
            tx.execute(
                "INSERT INTO example_orders (id, customer, amount) VALUES ($1, $2, $3)",
                &[&order.id, &request.customer, &order.amount],
            )
            .await?;
            tx.made("order", order.id.to_string());
            Ok(order)
        })
        .await
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::var("DATABASE_URL")?;
    let mut client = pgonce::migrate::connect(&url).await?;
    pgonce::migrate::apply(&mut client, false).await?;
    client
        .batch_execute(
            "CREATE TABLE IF NOT EXISTS example_orders (id uuid PRIMARY KEY, customer text NOT NULL, amount bigint NOT NULL)",
        )
        .await?;
    let once = Once::connect(&url).await?;
    let key = format!("checkout-{}", Uuid::new_v4());
    let request = Request { customer: "c-1".into(), amount: 1999 };

    // Ten callers at once with the same intent, as after a storm of client timeouts.
    let mut callers = tokio::task::JoinSet::new();
    for _ in 0..10 {
        let (once, key, request) = (once.clone(), key.clone(), request.clone());
        callers.spawn(async move { create_order(&once, &key, &request).await });
    }
    let (mut executed, mut replayed) = (0, 0);
    while let Some(outcome) = callers.join_next().await {
        match outcome?? {
            Outcome::Executed(order) => {
                executed += 1;
                eprintln!("executed: {order:?}");
            }
            Outcome::Replayed(_) => replayed += 1,
        }
    }
    eprintln!("executed {executed}, replayed {replayed}");

    let other = Request { amount: 5, ..request };
    match create_order(&once, &key, &other).await {
        Err(Error::Conflict) => eprintln!("another payload under the same key: refused"),
        unexpected => return Err(format!("expected a conflict, got {unexpected:?}").into()),
    }
    if (executed, replayed) != (1, 9) {
        return Err("expected one execution".into());
    }
    Ok(())
}
