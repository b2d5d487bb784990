//! Reading by snapshot difference: traps 14 and 15.

use pgonce_testkit::{TestDb, lock_waiters};

use crate::{Reader, refused};

fn emit(n: i32) -> String {
    format!("SELECT once.emit('t', 'x', '{{\"n\": {n}}}', 'k')")
}

#[tokio::test]
async fn a_late_committer_is_not_lost() {
    let db = TestDb::new().await;
    let mut reader = Reader::new(&db).await;
    let (late, quick) = (db.client().await, db.client().await);
    late.batch_execute(&format!("BEGIN; {}", emit(1))).await.unwrap();
    quick.batch_execute(&emit(2)).await.unwrap();
    assert_eq!(reader.next().await, [2], "an open writer holds up nobody");
    assert_eq!(reader.next().await, [0; 0]);
    quick.batch_execute(&emit(3)).await.unwrap();
    late.batch_execute("COMMIT").await.unwrap();
    assert_eq!(reader.next().await, [1, 3], "a lower position, committed later, is delivered");
    assert_eq!(reader.next().await, [0; 0], "and once only");
    late.batch_execute(&format!("BEGIN; {}", emit(4))).await.unwrap();
    reader.next().await;
    late.batch_execute("ROLLBACK").await.unwrap();
    assert_eq!(reader.next().await, [0; 0], "what was rolled back never comes");
}

/// The order by xid would be the wrong one: the transaction with the lower number locks the aggregate second.
#[tokio::test]
async fn an_aggregates_messages_follow_its_commits() {
    let db = TestDb::new().await;
    let mut reader = Reader::new(&db).await;
    let (older, younger, observer) = (db.client().await, db.client().await, db.client().await);
    observer.batch_execute("CREATE TABLE a (id int PRIMARY KEY, n int); INSERT INTO a VALUES (1, 0)").await.unwrap();
    older.batch_execute("BEGIN; SELECT pg_current_xact_id()").await.unwrap();
    younger.batch_execute(&format!("BEGIN; UPDATE a SET n = 1; {}", emit(1))).await.unwrap();
    let waiting = tokio::spawn(async move {
        older.batch_execute(&format!("UPDATE a SET n = 2; {}; COMMIT", emit(2))).await.unwrap();
    });
    lock_waiters(&observer, 1).await;
    younger.batch_execute("COMMIT").await.unwrap();
    waiting.await.unwrap();
    assert_eq!(reader.next().await, [1, 2]);
    let numbers = "SELECT (SELECT xid FROM once.outbox ORDER BY position LIMIT 1) > (SELECT xid FROM once.outbox ORDER BY position DESC LIMIT 1)";
    assert!(observer.query_one(numbers, &[]).await.unwrap().get::<_, bool>(0), "the numbers do run the other way");
}

#[tokio::test]
async fn an_open_transaction_elsewhere_stalls_nothing() {
    let (db, other) = (TestDb::new().await, TestDb::new().await);
    let mut reader = Reader::new(&db).await;
    let (here, there, writer) = (db.client().await, other.client().await, db.client().await);
    for idle in [&here, &there] {
        idle.batch_execute("BEGIN; CREATE TABLE held (n int); INSERT INTO held VALUES (1)").await.unwrap();
    }
    for n in 0..100 {
        writer.batch_execute(&emit(n)).await.unwrap();
    }
    assert_eq!(reader.next().await, (0..100).collect::<Vec<_>>());
    assert_eq!(reader.next().await, [0; 0]);
    drop((here, there));
}

#[tokio::test]
async fn a_transaction_that_has_written_does_not_read_the_log() {
    let db = TestDb::new().await;
    let reader = Reader::new(&db).await;
    let read = format!("SELECT once.outbox_difference('s', {}, '1:1:', NULL, -1, 10)", crate::LANES);
    reader.client.batch_execute("BEGIN").await.unwrap();
    reader.client.batch_execute(&read).await.unwrap();
    reader.client.batch_execute(&emit(1)).await.unwrap();
    assert_eq!(refused(&reader.client, &read).await, "25001", "it would see itself before it has committed");
}

/// Plans are made once, when segments are empty: they must not be the plans of empty tables.
#[tokio::test]
async fn a_look_at_an_idle_log_reads_no_table_whole() {
    let db = TestDb::new().await;
    let mut reader = Reader::new(&db).await;
    reader.next().await;
    let many = "SELECT count(once.emit('t', 'x', '{}', n::text)) FROM generate_series(1, 20000) n";
    db.client().await.batch_execute(many).await.unwrap();
    reader.next().await;
    let scans = async || {
        let sql = "SELECT coalesce(sum(seq_scan), 0)::bigint FROM pg_stat_all_tables WHERE relname LIKE 'outbox\\_%' AND n_live_tup > 0";
        reader.client.batch_execute("SELECT pg_stat_force_next_flush()").await.ok();
        reader.client.query_one(sql, &[]).await.unwrap().get::<_, i64>(0)
    };
    let before = scans().await;
    for _ in 0..20 {
        let sql = format!(
            "SELECT * FROM once.outbox_difference('s', {}, '{}', NULL, -1, 10)",
            crate::LANES,
            reader.delivered
        );
        reader.client.batch_execute(&sql).await.unwrap();
    }
    assert_eq!(scans().await, before);
}
