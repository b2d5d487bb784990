//! Space is given back by whole segments, and never what somebody still needs (I13).

use std::time::Duration;

use pgonce_testkit::TestDb;
use tokio_postgres::Client;

use crate::{Reader, number};

/// Everything of the sink's lanes is delivered up to the present.
async fn deliver(reader: &mut Reader) -> Vec<i64> {
    let came = reader.next().await;
    let sql = format!("UPDATE once.lane SET delivered = '{}'", reader.delivered);
    reader.client.batch_execute(&sql).await.unwrap();
    came
}

async fn rotate(client: &Client) -> i64 {
    number(client, "SELECT once.rotate_outbox()::bigint").await
}

async fn rows(client: &Client) -> i64 {
    number(client, "SELECT count(*) FROM once.outbox").await
}

async fn segment(client: &Client) -> i64 {
    number(client, "SELECT (last_value >> 40) & 15 FROM once.outbox_position").await
}

async fn emit(client: &Client, n: i32) {
    client.batch_execute(&format!("SELECT once.emit('t', 'x', '{{\"n\": {n}}}', 'k')")).await.unwrap();
}

#[tokio::test]
async fn a_segment_goes_when_every_sink_is_past_it_and_nobody_wants_it() {
    let db = TestDb::new().await;
    let mut reader = Reader::new(&db).await;
    let client = db.client().await;
    client.batch_execute("SELECT once.keep_outbox('1 hour')").await.unwrap();
    emit(&client, 1).await;
    assert_eq!(rotate(&client).await, 0);
    assert_eq!(segment(&client).await, 0, "not yet time");
    db.travel(Duration::from_secs(600)).await;
    rotate(&client).await;
    assert_eq!(segment(&client).await, 1);
    emit(&client, 2).await;
    db.travel(Duration::from_secs(2 * 3600)).await;
    assert_eq!(rotate(&client).await, 0);
    assert_eq!(rows(&client).await, 2, "old, but not delivered");
    assert_eq!(deliver(&mut reader).await, [1, 2], "in order over segments");
    emit(&client, 3).await;
    client.batch_execute("SELECT once.open_sink('second')").await.unwrap();
    assert_eq!(rotate(&client).await, 0, "delivered to one sink, not to the other");
    client.batch_execute("SELECT once.resume_sink('second', 'ann', 'gone', true)").await.unwrap();
    assert_eq!(rotate(&client).await, 2);
    assert_eq!(rows(&client).await, 1, "what is not delivered, or not old enough, stays");
    assert_eq!(deliver(&mut reader).await, [3]);
}

#[tokio::test]
async fn what_is_delivered_is_kept_for_its_time() {
    let db = TestDb::new().await;
    let mut reader = Reader::new(&db).await;
    let client = db.client().await;
    emit(&client, 1).await;
    deliver(&mut reader).await;
    db.travel(Duration::from_secs(20 * 3600)).await;
    rotate(&client).await;
    emit(&client, 2).await;
    assert_eq!((rotate(&client).await, rows(&client).await), (0, 2));
    db.travel(Duration::from_secs(25 * 3600)).await;
    assert_eq!((rotate(&client).await, rows(&client).await), (1, 1));
}

#[tokio::test]
async fn nothing_goes_where_there_is_no_sink_yet() {
    let db = TestDb::new().await;
    let client = db.client().await;
    emit(&client, 1).await;
    db.travel(Duration::from_secs(48 * 3600)).await;
    rotate(&client).await;
    assert_eq!((rotate(&client).await, rows(&client).await), (0, 1));
}

#[tokio::test]
async fn an_open_writer_keeps_its_segment() {
    let db = TestDb::new().await;
    let mut reader = Reader::new(&db).await;
    let (client, writer) = (db.client().await, db.client().await);
    client.batch_execute("SELECT once.keep_outbox('0')").await.unwrap();
    emit(&client, 1).await;
    writer.batch_execute("BEGIN; SELECT once.emit('t', 'x', '{\"n\": 2}', 'k')").await.unwrap();
    deliver(&mut reader).await;
    db.travel(Duration::from_secs(120)).await;
    rotate(&client).await;
    assert_eq!(segment(&client).await, 1);
    assert_eq!(rotate(&client).await, 0, "nobody waits for the writer, and its row is safe");
    writer.batch_execute("COMMIT").await.unwrap();
    assert_eq!(rotate(&client).await, 0, "committed, not delivered");
    assert_eq!(deliver(&mut reader).await, [2]);
    assert_eq!((rotate(&client).await, rows(&client).await), (1, 0));
}

#[tokio::test]
async fn the_ring_stops_before_it_bites_its_tail() {
    let db = TestDb::new().await;
    let mut reader = Reader::new(&db).await;
    let client = db.client().await;
    client.batch_execute("SELECT once.keep_outbox('0')").await.unwrap();
    for n in 0..20 {
        emit(&client, n).await;
        db.travel(Duration::from_secs(120 * (u64::try_from(n).unwrap() + 1))).await;
        rotate(&client).await;
    }
    assert_eq!((segment(&client).await, rows(&client).await), (15, 20), "the last segment goes on growing");
    assert_eq!(deliver(&mut reader).await, (0..20).collect::<Vec<_>>());
    db.travel(Duration::from_secs(9000)).await;
    assert_eq!(rotate(&client).await, 15);
    assert_eq!(segment(&client).await, 0, "round again");
    emit(&client, 20).await;
    assert_eq!(deliver(&mut reader).await, [20]);
}
