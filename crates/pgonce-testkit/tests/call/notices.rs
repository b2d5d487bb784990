//! What providers tell by themselves: in any order, each once, never lost, never overwriting.

use pgonce_testkit::lock_waiters;

use crate::desk::{ASKED, DUMB, Desk, said};

#[tokio::test]
async fn a_notice_settles_a_call_in_any_state() {
    let desk = Desk::new(ASKED).await;
    // Before it is sent: the provider did it under our key, by a hand that we have forgotten.
    let id = desk.call("requested").await;
    assert_eq!(desk.notice("n1", "confirmed", Some(id), Some("ch_1")).await.unwrap(), "confirmed");
    assert!(desk.take(1).await.is_empty(), "nothing is left to be sent");
    // Before its own answer, which then changes nothing.
    let taken = desk.sent("sent").await;
    assert_eq!(desk.notice("n2", "confirmed", Some(taken.id), Some("ch_2")).await.unwrap(), "confirmed");
    assert_eq!(desk.answered(taken, 200, r#"{"id": "ch_2"}"#).await.unwrap(), "confirmed");
    // While nobody knows.
    let taken = desk.unknown("unknown").await;
    assert_eq!(desk.notice("n3", "failed", Some(taken.id), None).await.unwrap(), "failed");
    // While it is asked about: what the question brings is evidence.
    desk.unknown("asking").await;
    desk.travel(10).await;
    let asking = desk.doubt().await;
    assert_eq!(desk.notice("n4", "confirmed", Some(asking.id), None).await.unwrap(), "confirmed");
    assert_eq!(desk.asked(asking, 404, "").await.unwrap(), "confirmed", "an absence contradicts nothing");
    // When a person was already called for, but nothing contradictory was said.
    let taken = desk.unknown("escalated").await;
    desk.client.execute("UPDATE once.call SET state = 'escalated' WHERE id = $1", &[&taken.id]).await.unwrap();
    assert_eq!(desk.notice("n5", "confirmed", Some(taken.id), None).await.unwrap(), "confirmed");
    assert_eq!(desk.settled().await, ["confirmed", "confirmed", "failed", "confirmed", "confirmed"], "each once");
    // Pending is no verdict.
    let taken = desk.unknown("pending").await;
    assert_eq!(desk.notice("n6", "pending", Some(taken.id), Some("ch_6")).await.unwrap(), "unknown");
    assert_eq!(
        desk.notice("n7", "confirmed", None, Some("ch_6")).await.unwrap(),
        "confirmed",
        "known by its reference now"
    );
}

#[tokio::test]
async fn a_notice_counts_once() {
    let desk = Desk::new(ASKED).await;
    let taken = desk.unknown("k").await;
    assert_eq!(desk.notice("n", "confirmed", Some(taken.id), None).await.unwrap(), "confirmed");
    assert_eq!(desk.notice("n", "confirmed", Some(taken.id), None).await.unwrap(), "duplicate");
    assert_eq!(desk.notice("n", "failed", Some(taken.id), None).await.unwrap_err(), "P4050");
    assert_eq!(desk.notice("n", "confirmed", Some(taken.id), Some("x")).await.unwrap_err(), "P4050");
    assert_eq!(desk.notice("another", "confirmed", Some(taken.id), None).await.unwrap(), "confirmed");
    assert_eq!(desk.settled().await, ["confirmed"]);
    assert_eq!(desk.state(taken.id).await, "confirmed");
}

/// Never silently overwritten: evidence, a flag, and a person.
#[tokio::test]
async fn a_contradiction_is_kept_flagged_and_escalated() {
    let desk = Desk::new(ASKED).await;
    let answer_then_notice = desk.sent("a").await;
    desk.answered(answer_then_notice, 402, "declined").await.unwrap();
    assert_eq!(desk.notice("n1", "confirmed", Some(answer_then_notice.id), None).await.unwrap(), "escalated");
    let notice_then_answer = desk.sent("b").await;
    desk.notice("n2", "failed", Some(notice_then_answer.id), None).await.unwrap();
    assert_eq!(desk.answered(notice_then_answer, 200, "{}").await.unwrap(), "escalated");
    // Two references are two charges.
    let twice = desk.sent("c").await;
    desk.answered(twice, 200, r#"{"id": "ch_1"}"#).await.unwrap();
    assert_eq!(desk.notice("n3", "confirmed", Some(twice.id), Some("ch_2")).await.unwrap(), "escalated");
    assert_eq!(desk.number("SELECT count(*) FROM once.calls WHERE contradicted AND state = 'escalated'").await, 3);
    assert_eq!(desk.number("SELECT count(*) FROM once.calls_evidence WHERE note LIKE 'contradicts%'").await, 3);
    // Whatever is said from here on is kept, and settles nothing.
    assert_eq!(desk.notice("n4", "confirmed", Some(notice_then_answer.id), None).await.unwrap(), "escalated");
    assert_eq!(desk.settled().await, ["failed", "failed", "confirmed"], "what was said first");
    // A person decides; the application hears of it only where that is news.
    assert_eq!(desk.settle(twice.id, "confirmed").await.unwrap(), "confirmed");
    assert_eq!(desk.settle(answer_then_notice.id, "confirmed").await.unwrap(), "confirmed");
    assert_eq!(desk.settled().await, ["failed", "failed", "confirmed", "confirmed"]);
    let audit = "SELECT count(*) FROM once.audit_trail WHERE action = 'call_settle:confirmed' AND actor = 'tester' AND from_status = 'escalated'";
    assert_eq!(desk.number(audit).await, 2);
}

#[tokio::test]
async fn a_notice_before_its_call_is_not_lost() {
    let desk = Desk::new(DUMB).await;
    let id: uuid::Uuid =
        desk.client.query_one("SELECT once.call_key('', 'bank', 'pay', 'k', 'charge', 0)", &[]).await.unwrap().get(0);
    assert_eq!(desk.notice("n", "confirmed", Some(id), Some("ch_1")).await.unwrap(), "stored");
    assert_eq!(desk.notice("n", "confirmed", Some(id), Some("ch_1")).await.unwrap(), "duplicate");
    assert_eq!(desk.call("k").await, id);
    assert_eq!(desk.state(id).await, "confirmed");
    assert_eq!(desk.settled().await, ["confirmed"]);
    // By its reference, before the answer that tells it.
    desk.define(r#"{"base_url": "https://b.example", "reference": "id", "accepted": "pending", "on_settled": "app.on_settled"}"#).await;
    let taken = desk.sent("by reference").await;
    assert_eq!(desk.notice("r", "failed", None, Some("ch_2")).await.unwrap(), "stored");
    assert_eq!(desk.answered(taken, 202, r#"{"id": "ch_2"}"#).await.unwrap(), "failed");
    assert_eq!(desk.settled().await, ["confirmed", "failed"]);
}

/// The call's transaction is open when the notice comes: neither sees the other. Both ways to find it are tried.
#[tokio::test]
async fn a_notice_that_races_with_its_call_is_found() {
    for (way, isolation) in [
        ("take", "READ COMMITTED"),
        ("sweep", "READ COMMITTED"),
        ("take", "REPEATABLE READ"),
        ("sweep", "SERIALIZABLE"),
    ] {
        let desk = Desk::new(DUMB).await;
        let calling = desk.db.client().await;
        calling.batch_execute(&format!("BEGIN ISOLATION LEVEL {isolation}; SELECT 1 FROM app.settled")).await.unwrap();
        let sql = "SELECT once.call('bank', 'charge', '/charges', p_scope => 'pay', p_key => 'k')";
        let id: uuid::Uuid = if isolation == "READ COMMITTED" {
            let id = calling.query_one(sql, &[]).await.unwrap().get(0);
            assert_eq!(desk.notice("n", "confirmed", Some(id), None).await.unwrap(), "stored");
            id
        } else {
            // Its snapshot is older than the notice: it cannot see it, and says so to nobody.
            let key = "SELECT once.call_key('', 'bank', 'pay', 'k', 'charge', 0)";
            let id = desk.client.query_one(key, &[]).await.unwrap().get(0);
            assert_eq!(desk.notice("n", "confirmed", Some(id), None).await.unwrap(), "stored");
            assert_eq!(calling.query_one(sql, &[]).await.unwrap().get::<_, uuid::Uuid>(0), id);
            id
        };
        calling.batch_execute("COMMIT").await.unwrap();
        assert_eq!(desk.state(id).await, "requested", "{way} {isolation}");
        if way == "take" {
            assert!(desk.take(10).await.is_empty(), "it is done already: nothing is sent");
        } else {
            desk.travel(10).await;
            assert_eq!(desk.number("SELECT once.call_sweep()::bigint").await, 1);
        }
        assert_eq!(desk.state(id).await, "confirmed", "{way} {isolation}");
        assert_eq!(desk.settled().await, ["confirmed"]);
    }
}

/// A notice waits for the answer that is just being recorded, and then adds to it.
#[tokio::test]
async fn a_notice_and_an_answer_at_once() {
    let desk = Desk::new(ASKED).await;
    let taken = desk.sent("k").await;
    let (answering, telling) = (desk.db.client().await, desk.db.client().await);
    answering.batch_execute("BEGIN").await.unwrap();
    let heard = "SELECT once.call_heard($1, $2, 'answered', 200)";
    assert_eq!(said(&answering, heard, &[&taken.id, &taken.claim]).await.unwrap(), "confirmed");
    let id = taken.id.to_string();
    let told =
        tokio::spawn(async move { said(&telling, "SELECT once.call_notice('bank', 'n', 'failed', $1)", &[&id]).await });
    lock_waiters(&desk.client, 1).await;
    answering.batch_execute("COMMIT").await.unwrap();
    assert_eq!(told.await.unwrap().unwrap(), "escalated", "it saw the verdict that it contradicts");
    assert_eq!(desk.settled().await, ["confirmed"]);
}

#[tokio::test]
async fn a_notice_about_nothing_of_ours_is_looked_for_less_and_less_and_goes() {
    let desk = Desk::new(ASKED).await;
    assert_eq!(desk.notice("n1", "confirmed", None, Some("theirs")).await.unwrap(), "stored");
    let sql = "SELECT once.call_notice('bank', 'n2', 'confirmed', 'not a key of ours')";
    assert_eq!(desk.said(sql, &[]).await.unwrap(), "stored");
    for step in 1..4 {
        desk.travel(step * 1000).await;
        assert_eq!(desk.number("SELECT once.call_sweep()::bigint").await, 0);
    }
    let looked =
        "SELECT count(*) FROM once.calls_notices WHERE looked = 3 AND look_at > once.clock() + interval '3 seconds'";
    assert_eq!(desk.number(looked).await, 2);
    assert_eq!(desk.number("SELECT once.purge_calls()").await, 0);
    desk.travel(91 * 86_400).await;
    assert_eq!(desk.number("SELECT once.purge_calls()").await, 2);
}
