//! The example is run as a reader would use it.

use pgonce_testkit::TestDb;

use crate::client::{post, send};
use crate::shop::serve;

#[allow(dead_code, reason = "its main is not called here")]
#[path = "../../examples/orders.rs"]
mod orders;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_orders_example_makes_each_order_once() {
    let db = TestDb::new().await;
    let address = serve(orders::app(db.direct_url()).await.unwrap()).await;
    let order = r#"{"sku": "abc", "quantity": 2}"#;
    let first = send(address, post("/orders", "checkout-3c51", order)).await;
    let retry = send(address, post("/orders", "checkout-3c51", order)).await;
    assert_eq!((first.status, retry.status, retry.is_replay()), (201, 201, true));
    assert_eq!(retry.body, first.body);
    let path = first.header("location").unwrap();
    let found = send(address, format!("GET {path} HTTP/1.1\r\nHost: shop\r\nConnection: close\r\n\r\n")).await;
    assert_eq!((found.status, &found.json()["quantity"]), (200, &2.into()));
    let too_many = r#"{"sku": "abc", "quantity": 99}"#;
    for replayed in [false, true] {
        let refused = send(address, post("/orders", "too-many", too_many)).await;
        assert_eq!((refused.status, refused.is_replay()), (409, replayed));
    }
    let reused = send(address, post("/orders", "checkout-3c51", too_many)).await;
    assert_eq!((reused.status, reused.problem().as_str()), (422, "conflict"));
    let counted = "SELECT (SELECT count(*) FROM http_orders), (SELECT left_over FROM http_stock)";
    let row = db.client().await.query_one(counted, &[]).await.unwrap();
    assert_eq!((row.get::<_, i64>(0), row.get::<_, i32>(1)), (1, 98));
}
