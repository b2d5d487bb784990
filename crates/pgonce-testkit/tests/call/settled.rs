//! What the application does when a call is settled, and what persons decide.

use crate::desk::{ASKED, Desk};

/// The verdict never stays without the local effect, nor the effect without the verdict.
#[tokio::test]
async fn a_continuation_that_raises_leaves_the_call_unknown() {
    let desk = Desk::new(ASKED).await;
    let taken = desk.sent("k").await;
    desk.client.batch_execute("INSERT INTO app.broken VALUES (true)").await.unwrap();
    assert_eq!(desk.answered(taken, 200, r#"{"id": "ch_1"}"#).await.unwrap(), "unknown");
    assert_eq!(desk.settled().await, Vec::<String>::new(), "rolled back with it");
    let note = "SELECT last_note FROM once.calls";
    let note: String = desk.client.query_one(note, &[]).await.unwrap().get(0);
    assert!(note.contains("23514"), "{note}");
    assert_eq!(desk.settle(taken.id, "confirmed").await.unwrap_err(), "23514", "a person is told");
    desk.client.batch_execute("DELETE FROM app.broken").await.unwrap();
    desk.travel(10).await;
    let asking = desk.doubt().await;
    assert_eq!(desk.asked(asking, 200, r#"{"status": "succeeded"}"#).await.unwrap(), "confirmed");
    assert_eq!(desk.settled().await, ["confirmed"]);
}

#[tokio::test]
async fn a_person_settles_what_nobody_else_can() {
    let desk = Desk::new(ASKED).await;
    let sent = desk.sent("sent").await;
    assert_eq!(desk.settle(sent.id, "failed").await.unwrap_err(), "P4013", "a worker is at it");
    desk.answered(sent, 200, "{}").await.unwrap();
    assert_eq!(desk.settle(sent.id, "failed").await.unwrap_err(), "P4013", "it has its verdict");
    assert_eq!(desk.settle(uuid::Uuid::new_v4(), "failed").await.unwrap_err(), "P4013", "there is none");
    for (verdict, state) in
        [("confirmed", "confirmed"), ("failed", "failed"), ("retry", "requested"), ("ask", "unknown")]
    {
        let taken = desk.unknown(verdict).await;
        assert_eq!(desk.settle(taken.id, verdict).await.unwrap(), state);
        desk.client.execute("DELETE FROM once.call WHERE id = $1", &[&taken.id]).await.unwrap();
    }
    let requested = desk.call("not wanted any more").await;
    assert_eq!(desk.settle(requested, "ask").await.unwrap_err(), "P4013", "it was never sent");
    assert_eq!(desk.settle(requested, "failed").await.unwrap(), "failed");
    for (actor, reason) in [("", "x"), ("x", " ")] {
        let sql = "SELECT once.call_settle($1, 'failed', $2, $3)";
        assert_eq!(desk.said(sql, &[&requested, &actor, &reason]).await.unwrap_err(), "P4013");
    }
    assert_eq!(desk.settled().await, ["confirmed", "confirmed", "failed", "failed"]);
}

#[tokio::test]
async fn purge_takes_what_is_settled_and_old_and_nothing_else() {
    let desk = Desk::new(&ASKED.replace("\"timeout\"", "\"retention\": \"1 day\", \"timeout\"")).await;
    let done = desk.sent("done").await;
    desk.answered(done, 200, "{}").await.unwrap();
    desk.notice("n", "confirmed", Some(done.id), None).await.unwrap();
    let open = desk.unknown("open").await;
    let waiting = desk.call("waiting").await;
    assert_eq!(desk.number("SELECT once.purge_calls()").await, 0);
    desk.travel(2 * 86_400).await;
    let young = desk.sent("young").await; // the waiting one is due, too: either may be handed out
    assert_eq!(desk.number("SELECT once.purge_calls()").await, 1);
    assert_eq!(desk.number("SELECT count(*) FROM once.calls_evidence").await, 1, "evidence goes with its call");
    assert_eq!(desk.number("SELECT count(*) FROM once.calls_notices").await, 0);
    assert_eq!(desk.state(open.id).await, "unknown");
    assert!(["requested", "sent"].contains(&desk.state(waiting).await.as_str()));
    assert_eq!(desk.state(young.id).await, "sent");
}
