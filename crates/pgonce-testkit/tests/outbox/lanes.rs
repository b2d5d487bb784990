//! Who works for a sink: shares, leases, fences; what it did not take.

use std::time::Duration;

use pgonce_testkit::TestDb;
use tokio_postgres::Client;
use uuid::Uuid;

use crate::{LANES, number, refused, text};

async fn hold(client: &Client, relay: &str) -> Vec<(i16, Uuid)> {
    let sql = format!("SELECT lane, claim_id FROM once.hold_lanes('s', '{relay}', '10 seconds')");
    client.query(&sql, &[]).await.unwrap().iter().map(|row| (row.get(0), row.get(1))).collect()
}

fn advance(held: &[(i16, Uuid)], more: &str) -> String {
    let lanes: Vec<String> = held.iter().map(|(lane, _)| lane.to_string()).collect();
    let claims: Vec<String> = held.iter().map(|(_, claim)| claim.to_string()).collect();
    format!("SELECT once.advance_lanes('s', '{{{}}}', '{{{}}}', '100:100:', {more})", lanes.join(","), claims.join(","))
}

async fn sink(db: &TestDb) -> Client {
    let client = db.client().await;
    client.batch_execute("SELECT once.open_sink('s')").await.unwrap();
    client
}

#[tokio::test]
async fn work_is_shared_and_handed_over() {
    let db = TestDb::new().await;
    let client = sink(&db).await;
    assert_eq!(hold(&client, "a").await.len(), 8);
    assert_eq!(hold(&client, "b").await.len(), 0, "nothing is free");
    let share = text(&client, "SELECT share::text FROM once.hold_lanes('s', 'a') LIMIT 1").await;
    assert_eq!(share, "4", "a should have half");
    client.batch_execute("SELECT once.drop_lanes('s', 'a', '{4,5,6,7}')").await.unwrap();
    assert_eq!(hold(&client, "b").await.iter().map(|(lane, _)| *lane).collect::<Vec<_>>(), [4, 5, 6, 7]);
    assert_eq!(hold(&client, "a").await.len(), 4);
    // A goodbye frees at once; a death, with the lease.
    client.batch_execute("SELECT once.drop_lanes('s', 'b')").await.unwrap();
    assert_eq!(hold(&client, "a").await.len(), 8);
    assert_eq!(hold(&client, "c").await.len(), 0);
    db.travel(Duration::from_secs(11)).await;
    assert_eq!(hold(&client, "c").await.len(), 8, "a and its leases are over");
}

#[tokio::test]
async fn a_stale_relay_records_nothing() {
    let db = TestDb::new().await;
    let client = sink(&db).await;
    let stale = hold(&client, "a").await;
    client.batch_execute(&advance(&stale, "7")).await.unwrap();
    db.travel(Duration::from_secs(11)).await;
    let fresh = hold(&client, "b").await;
    assert!(fresh.iter().zip(&stale).all(|(fresh, stale)| fresh.0 == stale.0 && fresh.1 != stale.1));
    assert_eq!(refused(&client, &advance(&stale, "NULL")).await, "P4071");
    let mixed: Vec<_> = fresh[..7].iter().chain(&stale[7..]).copied().collect();
    assert_eq!(refused(&client, &advance(&mixed, "NULL")).await, "P4071", "all or nothing");
    let cursors =
        "SELECT count(*) FROM once.lane WHERE delivered::text = '1:1:' AND target::text = '100:100:' AND position = 7";
    assert_eq!(number(&client, cursors).await, 8, "the next owner goes on in the middle of the difference");
    client.batch_execute(&advance(&fresh, "NULL")).await.unwrap();
    let done =
        "SELECT count(*) FROM once.lane WHERE delivered::text = '100:100:' AND target IS NULL AND position IS NULL";
    assert_eq!(number(&client, done).await, 8);
}

#[tokio::test]
async fn fifty_relays_never_share_a_lane() {
    let db = TestDb::new().await;
    let client = sink(&db).await;
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..50 {
        let client = db.client().await;
        tasks.spawn(async move { hold(&client, &format!("r{n}")).await });
    }
    let mut taken: Vec<i16> = tasks.join_all().await.into_iter().flatten().map(|(lane, _)| lane).collect();
    taken.sort_unstable();
    assert_eq!(taken, [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(number(&client, "SELECT count(*) FROM once.relay").await, 50);
}

#[tokio::test]
async fn what_was_not_taken_waits_with_its_key() {
    let db = TestDb::new().await;
    let client = sink(&db).await;
    for n in 0..3 {
        client.batch_execute(&format!("SELECT once.emit('t', 'x', '{{\"n\": {n}}}', 'k')")).await.unwrap();
    }
    let held = hold(&client, "a").await;
    let xids: Vec<String> = client
        .query("SELECT xid::text FROM once.outbox ORDER BY position", &[])
        .await
        .unwrap()
        .iter()
        .map(|row| row.get(0))
        .collect();
    let json = format!(
        "'[{{\"position\": 0, \"xid\": {}, \"state\": \"failing\", \"error\": \"no\", \"delay_ms\": 60000}},
           {{\"position\": 1, \"xid\": {}, \"state\": \"behind\"}}, {{\"position\": 2, \"xid\": {}, \"state\": \"behind\"}}]'",
        xids[0], xids[1], xids[2]
    );
    client.batch_execute(&advance(&held, &format!("NULL, {json}"))).await.unwrap();
    client.batch_execute(&advance(&held, &format!("NULL, {json}"))).await.expect("held twice is held once");
    let due = async || number(&client, &format!("SELECT count(*) FROM once.held_due('s', {LANES})")).await;
    assert_eq!(due().await, 0, "not yet");
    db.travel(Duration::from_secs(61)).await;
    assert_eq!(due().await, 1, "the first of its key only");
    let lane = text(&client, "SELECT once.lane_of('', 'k')::text").await.parse::<i16>().unwrap();
    let claim = hold(&client, "a").await.iter().find(|(held, _)| *held == lane).unwrap().1;
    let settle =
        |position: i32, state: &str| format!("SELECT once.settle_held('s', {position}, '{claim}', '{state}', 'no', 0)");
    client.batch_execute(&settle(0, "parked")).await.unwrap();
    assert_eq!(due().await, 0);
    assert_eq!(
        text(&client, "SELECT state || ' ' || attempts || ' ' || behind FROM once.outbox_parked").await,
        "parked 2 2"
    );
    assert_eq!(refused(&client, "SELECT once.resume_held('s', 0, '', 'why')").await, "P4013");
    assert_eq!(text(&client, "SELECT once.resume_held('s', 0, 'ann', 'fixed')::text").await, "1");
    assert_eq!(due().await, 1);
    assert_eq!(
        text(&client, &format!("SELECT ({})::text", settle(0, "delivered").replace("SELECT ", ""))).await,
        "true"
    );
    let next = format!("SELECT position::text FROM once.held_due('s', {LANES})");
    assert_eq!(text(&client, &next).await, "1", "the next of the key comes up, in order");
    let other = Uuid::new_v4();
    assert_eq!(
        refused(&client, &settle(1, "delivered").replace(&claim.to_string(), &other.to_string())).await,
        "P4071"
    );
    client.batch_execute(&settle(1, "parked")).await.unwrap();
    assert_eq!(text(&client, "SELECT once.resume_held('s', NULL, 'ann', 'never mind', true)::text").await, "1");
    assert_eq!(text(&client, &next).await, "2", "what was behind a discarded one goes on");
    client.batch_execute(&settle(2, "delivered")).await.unwrap();
    assert_eq!(number(&client, "SELECT count(*) FROM once.held").await, 0);
    let audit = "SELECT string_agg(action || ' ' || reason, '; ' ORDER BY at) FROM once.audit_trail";
    assert_eq!(text(&client, audit).await, "outbox:resume fixed; outbox:discard never mind");
}

#[tokio::test]
async fn bad_input_changes_nothing() {
    let db = TestDb::new().await;
    let client = sink(&db).await;
    for (sql, code) in [
        ("SELECT once.open_sink('')", "P4040"),
        ("SELECT once.open_sink(repeat('s', 256))", "P4040"),
        ("SELECT once.open_sink('t', NULL)", "P4040"),
        ("SELECT once.hold_lanes('s', 'a', '0')", "P4040"),
        ("SELECT once.hold_lanes('s', 'a', '2 hours')", "P4040"),
        ("SELECT once.hold_lanes('s', '', '10 s')", "P4040"),
        ("SELECT once.keep_outbox('-1 day')", "P4020"),
        ("SELECT once.ask_replay('s', '{\"kind\": 1}', 'a', 'r')", "P4020"),
        ("SELECT once.ask_replay('nobody', '{}', 'a', 'r')", "P4020"),
        ("SELECT once.ask_replay('s', '{}', 'a', '')", "P4013"),
        ("SELECT once.continue_replay(7, 's', gen_random_uuid())", "P4071"),
        ("SELECT once.outbox_messages('{1,2}', '{1}')", "P4040"),
        ("SELECT once.adopt_outbox('a', ' ')", "P4013"),
    ] {
        assert_eq!(refused(&client, sql).await, code, "{sql}");
    }
    assert_eq!(number(&client, "SELECT count(*) FROM once.sink").await, 1);
}

/// One carries a replay out at a time; what another one says of it is refused until the lease is over.
#[tokio::test]
async fn a_replay_is_fenced() {
    let db = TestDb::new().await;
    let client = sink(&db).await;
    let id = number(&client, "SELECT id FROM once.ask_replay('s', '{}', 'ann', 'a test')").await;
    client.batch_execute("UPDATE once.outbox_replay SET upto = 10").await.unwrap();
    let (mine, other) = (Uuid::new_v4(), Uuid::new_v4());
    client.batch_execute("SELECT once.emit('t', 'x', '{}')").await.unwrap();
    client.batch_execute("UPDATE once.lane SET delivered = '9000000000:9000000000:'").await.unwrap();
    let go_on = |claim: Uuid| format!("SELECT * FROM once.continue_replay({id}, 's', '{claim}')");
    let record = |claim: Uuid| format!("SELECT once.record_replay({id}, '{claim}', 0, 1)");
    client.batch_execute(&go_on(mine)).await.unwrap();
    assert_eq!(refused(&client, &go_on(other)).await, "P4071");
    assert_eq!(refused(&client, &record(other)).await, "P4071");
    client.batch_execute(&record(mine)).await.unwrap();
    db.travel(Duration::from_secs(61)).await;
    client.batch_execute("UPDATE once.outbox_replay SET position = -1").await.unwrap();
    client.batch_execute(&go_on(other)).await.unwrap();
    assert_eq!(refused(&client, &record(mine)).await, "P4071", "the one before is too late");
}
