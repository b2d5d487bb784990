//! A batch whose answer was lost is sent again, and nothing happens twice.

use serde_json::json;
use uuid::Uuid;

use crate::rows::{
    HOUR, answer, claim, database, define, ids, kinds, name, names, row_of, status_of, stored, succeed, succeed_alone,
    verdicts,
};

#[tokio::test]
async fn claims_that_were_made_are_told_again() {
    let (db, client) = database().await;
    let fail = "SELECT once.fail($1, $2, $3, true, 'no_stock', 'sold out')";
    let mut intents = names("rerun", &["fresh", "retryable", "stale", "stale after a failure"]);
    let before = ids(4);
    claim(&client, &intents[1..], &before[1..]).await;
    for at in [1, 3] {
        client.execute(fail, &[&intents[at].scope, &intents[at].key, &before[at]]).await.unwrap();
    }
    claim(&client, &intents[3..], &ids(1)).await;
    db.travel(2 * HOUR).await;
    let held = name("rerun", "held by another");
    claim(&client, std::slice::from_ref(&held), &ids(1)).await;
    intents.push(held);

    let mine = ids(5);
    let first = claim(&client, &intents, &mine).await;
    assert_eq!(
        kinds(&first),
        ["new_claim", "retryable_failure", "processing_stale", "processing_stale", "processing_active"]
    );
    for turn in 0..3 {
        let again = claim(&client, &intents, &mine).await;
        assert_eq!(kinds(&again), kinds(&first), "sending {turn}");
        for (first, again) in first.iter().zip(&again) {
            for column in ["failure_code", "failure_message"] {
                assert_eq!(first.get::<_, Option<String>>(column), again.get(column));
            }
            assert_eq!(first.get::<_, Option<Uuid>>("claim_id"), again.get("claim_id"));
            assert_eq!(first.get::<_, Option<i32>>("attempt_count"), again.get("attempt_count"));
            assert_eq!(first.get::<_, Option<i64>>("fence"), again.get("fence"), "one claim, one number");
            assert_eq!(first.get::<_, Option<i64>>("lease_ms"), again.get("lease_ms"));
        }
    }
    // Another payload is not told about it, whatever id it comes with.
    let others: Vec<_> = intents.iter().map(crate::rows::other).collect();
    assert!(claim(&client, &others, &mine).await.iter().all(|row| row.get::<_, &str>("error") == "P4002"));
    let audited: i64 =
        client.query_one("SELECT count(*) FROM once.audit WHERE action = 'takeover'", &[]).await.unwrap().get(0);
    assert_eq!(audited, 2, "each takeover once");
}

/// A lease that ran out before the second sending, with nobody there: nothing was begun, so it starts anew, also
/// where policy would hold what is stale.
#[tokio::test]
async fn a_claim_whose_answer_came_too_late_is_still_had() {
    let (db, client) = database().await;
    let intents = names("s", &["k"]);
    let mine = ids(1);
    claim(&client, &intents, &mine).await;
    db.travel(2 * HOUR).await;
    let again = claim(&client, &intents, &mine).await;
    assert_eq!(kinds(&again), ["new_claim"]);
    assert_eq!(kinds(&claim(&client, &intents, &ids(1)).await), ["processing_active"], "its lease runs");
    // Taken by somebody else meanwhile: it is theirs.
    let taken = names("rerun", &["k"]);
    let (mine, theirs) = (ids(1), ids(1));
    claim(&client, &taken, &mine).await;
    db.travel(4 * HOUR).await;
    assert_eq!(kinds(&claim(&client, &taken, &theirs).await), ["processing_stale"]);
    assert_eq!(kinds(&claim(&client, &taken, &mine).await), ["processing_active"]);
    assert_eq!(verdicts(&succeed(&client, &taken, &mine, &[answer("mine")]).await), ["lost"]);
}

#[tokio::test]
async fn completions_that_were_recorded_are_told_again() {
    let (_db, client) = database().await;
    define(&client, "kept", json!({"mode": "leased", "response": "reference", "retention": "1d"})).await;
    let intents = [names("s", &["b", "a"]), names("kept", &["c"])].concat();
    let mine = ids(3);
    claim(&client, &intents, &mine).await;
    let answers = [answer("first"), answer("second"), answer("third")];
    let first = succeed(&client, &intents, &mine, &answers).await;
    assert_eq!(verdicts(&first), ["recorded", "recorded", "recorded"]);
    let expires = |row: &tokio_postgres::Row| row.get::<_, Option<i64>>("expires_in_ms").unwrap() / 60_000;
    assert_eq!(first.iter().map(expires).collect::<Vec<_>>(), [7 * 1440, 7 * 1440, 1440]);
    let mut rows = Vec::new();
    for one in &intents {
        rows.push(row_of(&client, one).await);
    }
    // Again, and with other answers: what is stored counts, and is told.
    for answers in [answers.clone(), [answer("x"), answer("y"), answer("z")]] {
        let again = succeed(&client, &intents, &mine, &answers).await;
        assert_eq!(verdicts(&again), ["before", "before", "before"]);
        assert_eq!((stored(&again[0]), stored(&again[1])), (answer("first"), answer("second")));
        assert_eq!(stored(&again[2]).body, None, "its policy keeps only the reference");
        assert_eq!(stored(&again[2]).result_id.as_deref(), Some("4711"));
        assert!(again.iter().all(|row| row.get::<_, &str>("status") == "succeeded"));
    }
    for (one, row) in intents.iter().zip(rows) {
        assert_eq!(row_of(&client, one).await, row, "nothing changed");
    }
    // The same completion twice in one batch.
    let twice = [name("s", "twice"), name("s", "twice")];
    let id = Uuid::new_v4();
    claim(&client, &twice[..1], &[id]).await;
    let rows = succeed(&client, &twice, &[id, id], &[answer("one"), answer("two")]).await;
    assert_eq!(verdicts(&rows), ["recorded", "before"]);
    assert_eq!(stored(&rows[1]), answer("one"));
}

/// The work recorded its outcome itself, in its own transaction: that is what the completion is told.
#[tokio::test]
async fn what_the_work_recorded_itself_counts() {
    let (_db, client) = database().await;
    let intents = names("s", &["succeeded", "failed", "retryable", "open"]);
    let mine = ids(4);
    claim(&client, &intents, &mine).await;
    succeed_alone(&client, &intents[0], mine[0], "the work's").await.unwrap();
    let fail = "SELECT once.fail('s', $1, $2, $3, 'no_stock', 'sold out')";
    client.execute(fail, &[&"failed", &mine[1], &false]).await.unwrap();
    client.execute(fail, &[&"retryable", &mine[2], &true]).await.unwrap();
    let answers = vec![answer("mine"); 4];
    let rows = succeed(&client, &intents, &mine, &answers).await;
    assert_eq!(verdicts(&rows), ["before", "before", "lost", "recorded"]);
    assert_eq!(rows[0].get::<_, &[u8]>("response_body"), b"the work's");
    assert_eq!(
        (rows[1].get::<_, &str>("status"), rows[1].get::<_, &str>("failure_code")),
        ("failed_final", "no_stock")
    );
    assert_eq!(status_of(&client, &intents[2]).await.as_deref(), Some("failed_retryable"));
}
