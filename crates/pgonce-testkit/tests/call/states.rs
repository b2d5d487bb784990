//! From requested to its end, by each way.

use crate::desk::{ASKED, DUMB, Desk};

#[tokio::test]
async fn an_answer_settles_a_call_with_what_the_application_does_about_it() {
    let desk = Desk::new(ASKED).await;
    let taken = desk.sent("k").await;
    assert_eq!(desk.state(taken.id).await, "sent", "committed before a byte goes out");
    assert!(desk.take(1).await.is_empty(), "it is one worker's");
    assert_eq!(desk.answered(taken, 200, r#"{"id": "ch_1", "status": "succeeded"}"#).await.unwrap(), "confirmed");
    assert_eq!(desk.answered(taken, 200, r#"{"id": "ch_1"}"#).await.unwrap(), "confirmed", "said twice");
    let row = desk.client.query_one("SELECT verdict, reference FROM app.settled", &[]).await.unwrap();
    assert_eq!((row.get(0), row.get(1)), ("confirmed", "ch_1"));
    let kept = "SELECT count(*) FROM once.calls_evidence WHERE code = 200 AND convert_from(body, 'UTF8') LIKE '%ch_1%'";
    assert_eq!(desk.number(kept).await, 2, "the answers are kept");
}

/// Each status, on a first send, and on one whose earlier send may have arrived.
#[tokio::test]
async fn what_a_status_means() {
    let meanings = [
        (200, "confirmed", "confirmed"),
        (201, "confirmed", "confirmed"),
        (202, "unknown", "unknown"),
        (302, "unknown", "unknown"),
        (400, "failed", "unknown"),
        (401, "failed", "unknown"),
        (402, "failed", "unknown"),
        (404, "failed", "unknown"),
        (408, "unknown", "unknown"),
        (409, "unknown", "unknown"),
        (422, "failed", "unknown"),
        (425, "requested", "unknown"),
        (429, "requested", "unknown"),
        (500, "unknown", "unknown"),
        (503, "unknown", "unknown"),
    ];
    let desk = Desk::new(ASKED).await;
    for (code, first, doubted) in meanings {
        let taken = desk.sent(&format!("first {code}")).await;
        assert_eq!(desk.heard(taken, "answered", Some(code)).await.unwrap(), first, "{code}");
        desk.client.batch_execute("DELETE FROM once.call").await.unwrap();
        desk.call(&format!("doubted {code}")).await;
        desk.client.batch_execute("UPDATE once.call SET doubted = true").await.unwrap();
        let taken = desk.take(1).await[0];
        assert_eq!(desk.heard(taken, "answered", Some(code)).await.unwrap(), doubted, "{code}, in doubt");
        desk.client.batch_execute("DELETE FROM once.call").await.unwrap();
    }
    // Nobody else can be asked: what the provider itself says under the key counts, what stands before it does not.
    let desk = Desk::new(
        r#"{"base_url": "https://b.example", "resend": true, "server_error": "not_done", "accepted": "confirmed"}"#,
    )
    .await;
    for (code, state) in [(402, "failed"), (422, "failed"), (401, "unknown"), (404, "unknown"), (202, "confirmed")] {
        desk.call(&format!("k {code}")).await;
        desk.client.batch_execute("UPDATE once.call SET doubted = true WHERE state = 'requested'").await.unwrap();
        let taken = desk.take(1).await[0];
        assert_eq!(desk.heard(taken, "answered", Some(code)).await.unwrap(), state, "{code}");
    }
    let taken = desk.sent("500").await;
    assert_eq!(desk.heard(taken, "answered", Some(500)).await.unwrap(), "requested", "by policy");
}

#[tokio::test]
async fn what_never_went_out_is_sent_again_and_what_may_have_is_not() {
    let desk = Desk::new(DUMB).await;
    let taken = desk.sent("refused").await;
    assert_eq!(desk.heard(taken, "unsent", None).await.unwrap(), "requested");
    assert!(desk.take(1).await.is_empty(), "after its backoff");
    desk.travel(5).await;
    let again = desk.take(1).await[0];
    assert_eq!(again.id, taken.id, "under the same key");
    assert_eq!(desk.heard(again, "lost", None).await.unwrap(), "unknown");
    desk.travel(60).await;
    assert!(
        desk.take(10).await.is_empty() && desk.doubts(10).await.is_empty(),
        "nobody can be asked: it waits for a notice"
    );
    assert_eq!(desk.state(taken.id).await, "unknown");
    desk.travel(7200).await;
    assert!(desk.doubts(10).await.is_empty());
    assert_eq!(desk.state(taken.id).await, "escalated", "and then for a person");
    assert_eq!(desk.settled().await, Vec::<String>::new());
}

/// A sender that vanishes leaves an unknown call, and never one that looks untouched.
#[tokio::test]
async fn a_vanished_sender_leaves_an_unknown_call() {
    let desk = Desk::new(ASKED).await;
    let taken = desk.sent("k").await;
    assert_eq!(desk.number("SELECT once.call_recover()::bigint").await, 0, "its lease runs");
    desk.travel(30).await;
    assert_eq!(desk.number("SELECT count(*) FROM once.calls_unknown").await, 1, "seen before anybody moves it");
    assert!(desk.take(1).await.is_empty(), "never taken for untouched");
    assert_eq!(desk.number("SELECT once.call_recover()::bigint").await, 1);
    assert_eq!(desk.state(taken.id).await, "unknown");
    // It was only slow, and nobody has taken the call since: what it heard counts.
    assert_eq!(desk.answered(taken, 200, "{}").await.unwrap(), "confirmed");
}

#[tokio::test]
async fn a_worker_that_lost_the_call_is_refused() {
    let desk = Desk::new(ASKED).await;
    let slow = desk.sent("k").await;
    desk.travel(30).await;
    desk.client.execute("SELECT once.call_recover()", &[]).await.unwrap();
    desk.travel(60).await;
    let asking = desk.doubt().await;
    assert_eq!(desk.answered(slow, 200, "{}").await.unwrap_err(), "P4061");
    assert_eq!(desk.asked(slow, 404, "").await.unwrap_err(), "P4061");
    assert_eq!(desk.state(slow.id).await, "unknown");
    assert!(desk.doubts(1).await.is_empty(), "it is being asked about");
    desk.travel(120).await;
    let other = desk.doubt().await;
    assert_eq!(
        desk.asked(asking, 200, r#"{"status": "failed"}"#).await.unwrap_err(),
        "P4061",
        "the first one's lease is over"
    );
    assert_eq!(desk.asked(other, 200, r#"{"status": "succeeded", "id": "ch_1"}"#).await.unwrap(), "confirmed");
    assert_eq!(desk.settled().await, ["confirmed"]);
}

/// "Not found" right after a timeout proves nothing: the provider may be late.
#[tokio::test]
async fn an_absence_is_believed_after_its_time_and_not_before() {
    let desk = Desk::new(ASKED).await;
    let first = desk.unknown("k").await;
    desk.travel(10).await;
    let asking = desk.doubt().await;
    assert_eq!(desk.asked(asking, 404, "").await.unwrap(), "unknown", "ten seconds after");
    desk.travel(70).await;
    let asking = desk.doubt().await;
    assert_eq!(desk.asked(asking, 404, "").await.unwrap(), "requested", "a minute after");
    desk.travel(80).await;
    let again = desk.take(1).await[0];
    assert_eq!(again.id, first.id, "under the same key");
    // In doubt still: what the first send did is not known by a refused connection.
    assert_eq!(desk.heard(again, "unsent", None).await.unwrap(), "unknown");
    desk.travel(100).await;
    let asking = desk.doubt().await;
    assert_eq!(desk.asked(asking, 404, "").await.unwrap(), "unknown", "the second send has its own minute");
    desk.travel(120).await;
    let asking = desk.doubt().await;
    assert_eq!(desk.asked(asking, 200, r#"{"status": "succeeded"}"#).await.unwrap(), "confirmed", "late");
    assert_eq!(desk.settled().await, ["confirmed"]);
}

#[tokio::test]
async fn a_believed_absence_may_mean_failed_or_a_person() {
    for (absent, state, settled) in [("failed", "failed", vec!["failed"]), ("escalate", "escalated", vec![])] {
        let policy = ASKED.replace(r#""absent": "resend""#, &format!(r#""absent": "{absent}""#));
        let desk = Desk::new(&policy).await;
        desk.unknown("k").await;
        desk.travel(70).await;
        let asking = desk.doubt().await;
        assert_eq!(desk.asked(asking, 404, "").await.unwrap(), state);
        assert_eq!(desk.settled().await, settled);
    }
}

#[tokio::test]
async fn what_stays_unclear_is_escalated_after_its_limit() {
    let desk = Desk::new(ASKED).await;
    let taken = desk.unknown("k").await;
    let answers = [
        (500, ""),
        (200, r#"{"status": "processing"}"#),
        (200, "no json"),
        (200, r#"{"status": "\u0000"}"#),
        (403, ""),
    ];
    for (step, (code, body)) in answers.into_iter().enumerate() {
        desk.travel(10 * (step as u64 + 1)).await;
        let asking = desk.doubt().await;
        assert_eq!(desk.asked(asking, code, body).await.unwrap(), "unknown", "{code} {body}");
    }
    let row = desk
        .client
        .query_one("SELECT asked, last_code, unknown_for > interval '40 seconds' FROM once.calls_unknown", &[])
        .await;
    let row = row.unwrap();
    assert_eq!((row.get::<_, i32>(0), row.get::<_, Option<i32>>(1), row.get::<_, bool>(2)), (5, Some(403), true));
    desk.travel(4000).await;
    let asking = desk.doubt().await;
    assert_eq!(desk.asked(asking, 500, "").await.unwrap(), "escalated");
    assert!(desk.doubts(1).await.is_empty() && desk.take(1).await.is_empty());
    assert_eq!(desk.state(taken.id).await, "escalated");
}

#[tokio::test]
async fn a_provider_that_knows_our_keys_is_simply_sent_it_again() {
    let desk =
        Desk::new(r#"{"base_url": "https://b.example", "resend": true, "backoff": "1s", "attempts_max": 2}"#).await;
    let first = desk.unknown("k").await;
    desk.travel(10).await;
    assert!(desk.doubts(1).await.is_empty());
    assert_eq!(desk.state(first.id).await, "requested");
    desk.travel(20).await;
    let again = desk.take(1).await[0];
    assert_eq!(again.id, first.id);
    assert_eq!(desk.heard(again, "lost", None).await.unwrap(), "unknown");
    desk.travel(40).await;
    assert!(desk.doubts(1).await.is_empty());
    assert_eq!(desk.state(first.id).await, "escalated", "twice is its limit");
}

#[tokio::test]
async fn attempts_that_never_get_through_end_at_a_person() {
    let desk = Desk::new(r#"{"base_url": "https://b.example", "backoff": "0s", "attempts_max": 3}"#).await;
    let id = desk.call("k").await;
    for state in ["requested", "requested", "escalated"] {
        let taken = desk.take(1).await[0];
        assert_eq!(desk.heard(taken, "unsent", None).await.unwrap(), state);
    }
    assert_eq!(desk.settle(id, "retry").await.unwrap(), "requested");
    let taken = desk.take(1).await[0];
    assert_eq!(desk.heard(taken, "answered", Some(200)).await.unwrap(), "confirmed");
}

/// A provider that says "failed" and has charged: where that is to be verified, the question decides.
#[tokio::test]
async fn a_refusal_may_be_verified_before_it_counts() {
    let policy = ASKED.replace(r#""resend": true"#, r#""resend": true, "verify_failed": true"#);
    let desk = Desk::new(&policy).await;
    let taken = desk.sent("lie").await;
    assert_eq!(desk.answered(taken, 402, r#"{"error": "declined"}"#).await.unwrap(), "unknown");
    desk.travel(10).await;
    let asking = desk.doubt().await;
    assert_eq!(desk.asked(asking, 200, r#"{"status": "succeeded", "id": "ch_1"}"#).await.unwrap(), "confirmed");
    let taken = desk.sent("truth").await;
    assert_eq!(desk.answered(taken, 402, "").await.unwrap(), "unknown");
    desk.travel(30).await;
    let asking = desk.doubt().await;
    assert_eq!(desk.asked(asking, 200, r#"{"status": "failed"}"#).await.unwrap(), "failed");
    assert_eq!(desk.settled().await, ["confirmed", "failed"]);
}

#[tokio::test]
async fn a_sql_function_can_be_asked() {
    let desk = Desk::new(DUMB).await;
    desk.client
        .batch_execute(
            "CREATE TABLE app.books (key text, status text);
             CREATE FUNCTION app.look(p_call jsonb) RETURNS jsonb LANGUAGE sql SECURITY DEFINER AS $$
                SELECT coalesce((SELECT jsonb_build_object('verdict', b.status, 'reference', 'ref') FROM app.books b
                    WHERE b.key = p_call ->> 'id'), '{\"verdict\": \"absent\"}') $$",
        )
        .await
        .unwrap();
    desk.define(r#"{"base_url": "https://b.example", "reconcile": {"how": "sql", "function": "app.look"}, "on_settled": "app.on_settled", "backoff": "1s"}"#).await;
    let first = desk.unknown("k").await;
    desk.travel(10).await;
    let ask = "SELECT once.call_ask_sql($1, $2)";
    let asking = desk.doubt().await;
    assert_eq!(desk.said(ask, &[&asking.id, &asking.claim]).await.unwrap(), "unknown");
    assert_eq!(desk.said(ask, &[&asking.id, &uuid::Uuid::new_v4()]).await.unwrap_err(), "P4061");
    for (status, state) in [("nonsense", "unknown"), ("confirmed", "confirmed")] {
        desk.client.batch_execute("DELETE FROM app.books").await.unwrap();
        desk.client.execute("INSERT INTO app.books VALUES ($1::uuid::text, $2)", &[&first.id, &status]).await.unwrap();
        desk.travel(if state == "unknown" { 30 } else { 60 }).await;
        let asking = desk.doubt().await;
        assert_eq!(desk.said(ask, &[&asking.id, &asking.claim]).await.unwrap(), state, "{status}");
    }
    assert_eq!(desk.settled().await, ["confirmed"]);
}

/// Illegal moves raise, and a row that fits no state cannot be.
#[tokio::test]
async fn the_state_machine_is_guarded() {
    let desk = Desk::new(ASKED).await;
    let taken = desk.sent("k").await;
    desk.answered(taken, 200, "{}").await.unwrap();
    for to in ["requested", "sent", "unknown", "failed", "escalated"] {
        let sql = format!(
            "DO $$ DECLARE o once.call; n once.call; BEGIN SELECT * INTO o FROM once.call; n := o; n.state := '{to}';
             PERFORM once.call_move(o, n); END $$"
        );
        let error = desk.client.batch_execute(&sql).await.unwrap_err();
        assert_eq!(error.code().unwrap().code(), "P4099", "{to}");
    }
    for wrong in
        ["state = 'sent'", "state = 'requested'", "settled_at = NULL", "leased_until = now()", "state = 'failed'"]
    {
        let error = desk.client.batch_execute(&format!("UPDATE once.call SET {wrong}")).await.unwrap_err();
        assert_eq!(error.code().unwrap().code(), "23514", "{wrong}");
    }
}
