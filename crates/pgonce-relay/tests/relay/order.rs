//! Nothing lost, nothing that did not commit, each key in commit order: whatever the writers and the relays do.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use pgonce_testkit::{TestDb, eventually};
use tokio_postgres::Client;

use crate::sink::Recorder;
use crate::{Running, emit, relay_all};

const KEYS: i64 = 7;

/// Counts up one of the keys, emits its new value, and commits now, later or never.
async fn write(client: &Client, round: usize) {
    let key = rand::random_range(0..KEYS);
    client.batch_execute("BEGIN").await.unwrap();
    if rand::random_bool(0.3) {
        // A number taken early: its transaction may well be the last to lock the row.
        client.batch_execute("SELECT pg_current_xact_id()").await.unwrap();
    }
    let sql = "UPDATE counter SET n = n + 1 WHERE key = $1 RETURNING n";
    let n: i64 = client.query_one(sql, &[&key]).await.unwrap().get(0);
    let emit = "SELECT once.emit('t', 'x', jsonb_build_object('n', $2::bigint), 'k' || $1::bigint)";
    client.query_one(emit, &[&key, &n]).await.unwrap();
    if round.is_multiple_of(3) {
        client.batch_execute("SELECT pg_sleep(0.003)").await.unwrap();
    }
    client.batch_execute(if rand::random_bool(0.2) { "ROLLBACK" } else { "COMMIT" }).await.unwrap();
}

async fn counters(db: &TestDb) -> BTreeMap<String, Vec<i64>> {
    let rows = db.client().await.query("SELECT 'k' || key, n FROM counter WHERE n > 0", &[]).await.unwrap();
    rows.iter().map(|row| (row.get(0), (1..=row.get::<_, i64>(1)).collect())).collect()
}

async fn prepare(db: &TestDb) {
    let sql = format!(
        "CREATE TABLE counter (key bigint PRIMARY KEY, n bigint NOT NULL);
         INSERT INTO counter SELECT n, 0 FROM generate_series(0, {}) n",
        KEYS - 1
    );
    db.client().await.batch_execute(&sql).await.unwrap();
}

/// Writers that commit late and roll back, idle transactions here and in another database, relays that come and die.
#[tokio::test(flavor = "multi_thread")]
async fn every_committed_message_arrives_in_its_keys_commit_order() {
    let (db, other) = (TestDb::new().await, TestDb::new().await);
    prepare(&db).await;
    let idle = [db.client().await, other.client().await];
    for client in &idle {
        client.batch_execute("BEGIN; CREATE TABLE idle (n int)").await.unwrap();
    }
    let sink = Arc::new(Recorder::default());
    let mut writers = tokio::task::JoinSet::new();
    let at_work = Arc::new(AtomicUsize::new(8));
    for _ in 0..8 {
        let (client, at_work) = (db.client().await, Arc::clone(&at_work));
        writers.spawn(async move {
            for round in 0..60 {
                write(&client, round).await;
            }
            at_work.fetch_sub(1, Ordering::SeqCst);
        });
    }
    let mut relays = vec![Running::start(&db, &sink)];
    for _ in 0..4 {
        let so_far = sink.count();
        relays.push(Running::start(&db, &sink));
        eventually("messages flow", async || sink.count() > so_far + 10 || at_work.load(Ordering::SeqCst) == 0).await;
        relays.remove(0).crash();
    }
    while writers.join_next().await.is_some() {}
    for relay in relays {
        relay.stop().await;
    }
    // The crashed ones' leases are waited for.
    relay_all(&db, &sink).await;
    assert_eq!(sink.by_key(), counters(&db).await);
    drop(idle);
}

#[tokio::test]
async fn a_batch_of_one_key_goes_one_by_one() {
    let db = TestDb::new().await;
    for n in 0..50 {
        emit(&db, "k", n).await;
    }
    let sink = Arc::new(Recorder::default());
    let finished = relay_all(&db, &sink).await;
    assert_eq!(sink.first(), (0..50).collect::<Vec<_>>());
    assert_eq!(finished.delivered, 50);
    assert_eq!(sink.count(), 50, "once, where nothing breaks");
    assert_eq!(relay_all(&db, &sink).await.delivered, 0, "what is recorded is not sent again");
}

/// Messages that are not recorded as delivered, whatever was sent.
const UNRECORDED: &str = "SELECT count(d.position) FROM once.lane l CROSS JOIN LATERAL
    once.outbox_difference('s', ARRAY[l.lane], l.delivered, l.target, coalesce(l.position, 0), 100000) d";

/// More than one batch, and a crash between two of them: the next relay goes on in the middle of the difference.
#[tokio::test]
async fn a_long_difference_is_taken_up_in_the_middle() {
    const MESSAGES: i64 = 5000;
    let db = TestDb::new().await;
    let sql = format!(
        "SELECT count(once.emit('t', 'x', jsonb_build_object('n', n), 'k' || n % 10)) FROM generate_series(0, {}) n",
        MESSAGES - 1
    );
    db.client().await.batch_execute(&sql).await.unwrap();
    let sink = Arc::new(Recorder::default());
    let relay = Running::with(&db, &sink, |settings| settings.batch_max = 50);
    eventually("a part is recorded", async || {
        crate::number(&db, "SELECT coalesce(max(position), 0) FROM once.lane").await > 300
    })
    .await;
    relay.crash();
    let left = crate::number(&db, UNRECORDED).await;
    assert!(0 < left && left < MESSAGES, "it was in the middle: {left}");
    let finished = relay_all(&db, &sink).await;
    let again = i64::try_from(finished.delivered).unwrap();
    assert!(again <= left, "only what was not recorded comes again: {again} of {left}");
    let expected: BTreeMap<_, _> =
        (0..10).map(|k| (format!("k{k}"), (0..MESSAGES).filter(|n| n % 10 == k).collect())).collect();
    assert_eq!(sink.by_key(), expected);
}

#[tokio::test]
async fn relays_share_a_sinks_work() {
    let db = TestDb::new().await;
    let sink = Arc::new(Recorder::default());
    let relays = [Running::start(&db, &sink), Running::start(&db, &sink)];
    eventually("each has its half", async || {
        let sql = "SELECT count(*) FROM (SELECT owner FROM once.lane WHERE owner IS NOT NULL GROUP BY owner HAVING count(*) = 4) o";
        crate::number(&db, sql).await == 2
    })
    .await;
    for n in 0..40 {
        emit(&db, &format!("k{n}"), n).await;
    }
    eventually("all is there", async || sink.count() >= 40).await;
    let mut delivered = Vec::new();
    for relay in relays {
        delivered.push(relay.stop().await.delivered);
    }
    assert!(delivered.iter().all(|count| *count > 0), "both worked: {delivered:?}");
    assert_eq!(delivered.iter().sum::<u64>(), 40);
}

#[tokio::test]
async fn filters_choose_and_the_cursor_follows() {
    let db = TestDb::new().await;
    let client = db.client().await;
    for (topic, kind, tenant) in
        [("orders", "order.created", ""), ("orders", "order.paid", ""), ("mail", "order.created", "b")]
    {
        let sql = format!("SELECT once.emit('{topic}', '{kind}', '{{\"n\": 1}}', p_tenant => '{tenant}')");
        client.batch_execute(&sql).await.unwrap();
    }
    for (topics, types, tenants, expected) in
        [(vec!["ord%"], vec![], vec![], 2), (vec![], vec!["order.created"], vec![], 2), (vec![], vec![], vec!["b"], 1)]
    {
        let sink = Arc::new(Recorder::default());
        let mut settings = pgonce_relay::relay::RelaySettings::new(db.url());
        settings.until_empty = true;
        let wanted = pgonce_relay::relay::SinkSettings {
            name: format!("{topics:?}{types:?}{tenants:?}"),
            topics: topics.into_iter().map(String::from).collect(),
            types: types.into_iter().map(String::from).collect(),
            tenants: tenants.into_iter().map(String::from).collect(),
            from_now: false,
        };
        let (_stop, stopped) = tokio::sync::watch::channel(false);
        pgonce_relay::relay::run(&settings, &wanted, Arc::clone(&sink) as _, stopped, || {}).await.unwrap();
        assert_eq!(sink.count(), expected, "{wanted:?}");
    }
}
