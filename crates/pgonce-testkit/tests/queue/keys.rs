//! Keys: whose turn it is; and parking, which must never miss the end of what it waits for.

use pgonce_testkit::{TestDb, lock_waiters};

use crate::desk::{define, enqueue, ids, keyed, number, state, states, take, take_soon, text};

const LEVELS: [&str; 3] = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"];

#[tokio::test]
async fn one_after_another_and_others_beside() {
    let db = TestDb::new().await;
    let (client, other) = (db.client().await, db.client().await);
    let (a1, a2, b1) = (keyed(&client, "a").await, keyed(&client, "a").await, keyed(&client, "b").await);
    let free = enqueue(&client, "").await;
    other.batch_execute("BEGIN").await.unwrap();
    let held = take(&other, 1).await;
    assert_eq!(ids(&held), [a1]);
    // While that is not committed its key is not touched.
    assert_eq!(ids(&take(&client, 10).await), [b1, free]);
    other.batch_execute("COMMIT").await.unwrap();
    assert_eq!(take(&client, 10).await, []);
    assert_eq!(state(&client, a2).await, "parked");
    held[0].finish(&client).await.unwrap();
    assert_eq!(ids(&take(&client, 10).await), [a2]);
}

/// A job with a lower id comes back while a take of a later one of its key has not committed: that one counts already.
#[tokio::test]
async fn a_take_that_has_not_committed_counts() {
    let db = TestDb::new().await;
    let (client, other) = (db.client().await, db.client().await);
    let first = keyed(&client, "k").await;
    take(&client, 1).await[0].say(&client, "bury", "").await.unwrap();
    let second = keyed(&client, "k").await;
    other.batch_execute("BEGIN").await.unwrap();
    let held = take(&other, 1).await;
    assert_eq!(ids(&held), [second]);
    client.execute("SELECT once.retry_buried('q', 'me', 'again')", &[]).await.unwrap();
    assert_eq!(take(&client, 10).await, [], "one of the key is being taken");
    other.batch_execute("COMMIT").await.unwrap();
    assert_eq!(take(&client, 10).await, [], "one of the key runs");
    held[0].finish(&client).await.unwrap();
    assert_eq!(ids(&take_soon(&client, 10).await), [first]);
}

#[tokio::test]
async fn as_many_of_a_key_as_its_queue_says() {
    let db = TestDb::new().await;
    let client = db.client().await;
    define(&client, r#"{"key_running_max": 3}"#).await;
    let mut made = Vec::new();
    for _ in 0..6 {
        made.push(keyed(&client, "k").await);
    }
    let held = take(&client, 10).await;
    assert_eq!(ids(&held), made[..3]);
    held[1].finish(&client).await.unwrap();
    assert_eq!(ids(&take(&client, 10).await), made[3..4]);
    held[0].say(&client, "bury", "").await.unwrap();
    held[2].say(&client, "retry", ", 'again', '1 hour'").await.unwrap();
    assert_eq!(ids(&take(&client, 10).await), made[4..5], "one that is to be retried keeps its place");
}

/// A take of one job goes past any number that wait for their turn.
#[tokio::test]
async fn a_long_key_does_not_hide_what_is_behind_it() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let sql = "SELECT once.enqueue_batch('q', array_fill('{}'::jsonb, ARRAY[2000]), p_keys => array_fill('hot'::text, ARRAY[2000]))";
    client.execute(sql, &[]).await.unwrap();
    let other = keyed(&client, "other").await;
    take(&client, 1).await;
    assert_eq!(ids(&take_soon(&client, 1).await), [other]);
}

/// A take parks a job behind a running one, and has not committed, when the running one is finished: the finish waits, and
/// then sees it, whatever its snapshot.
#[tokio::test]
async fn a_finish_sees_who_was_parked_before_it() {
    for level in LEVELS {
        let db = TestDb::new().await;
        let (client, taker, observer) = (db.client().await, db.client().await, db.client().await);
        keyed(&client, "k").await;
        let held = take(&client, 1).await.remove(0);
        let second = keyed(&client, "k").await;
        client.batch_execute(&format!("BEGIN ISOLATION LEVEL {level}; SELECT 1 FROM once.jobs")).await.unwrap();
        taker.batch_execute("BEGIN").await.unwrap();
        assert_eq!(take(&taker, 10).await, []);
        let finish = tokio::spawn(async move {
            held.finish(&client).await.unwrap();
            client.batch_execute("COMMIT").await.unwrap();
        });
        lock_waiters(&observer, 1).await;
        taker.batch_execute("COMMIT").await.unwrap();
        finish.await.unwrap();
        assert_eq!(ids(&take_soon(&observer, 10).await), [second], "{level}");
    }
}

/// The running one is finished, and that has not committed, when a take looks at the next: it is not parked, for nobody
/// would wake it.
#[tokio::test]
async fn nobody_is_parked_behind_what_is_ending() {
    for level in LEVELS {
        for word in ["finish", "bury", "retry"] {
            let db = TestDb::new().await;
            let (client, taker) = (db.client().await, db.client().await);
            keyed(&client, "k").await;
            let held = take(&client, 1).await.remove(0);
            let second = keyed(&client, "k").await;
            client.batch_execute(&format!("BEGIN ISOLATION LEVEL {level}")).await.unwrap();
            held.say(&client, word, "").await.unwrap();
            taker.batch_execute("SET statement_timeout = '20s'").await.unwrap();
            assert_eq!(take(&taker, 10).await, [], "{level} {word}");
            assert_eq!(state(&taker, second).await, "ready", "{level} {word}");
            client.batch_execute("COMMIT").await.unwrap();
            if word != "retry" {
                assert_eq!(ids(&take_soon(&taker, 10).await), [second], "{level} {word}");
            }
        }
    }
}

/// One that came due while a later one ran is parked behind it. When that one is put back, it does not run any more: the
/// parked one has the turn. Were it not woken, each of both would wait for the other.
#[tokio::test]
async fn what_is_put_back_wakes_who_is_before_it() {
    for (word, more) in [("retry", ", 'x', '1 hour'"), ("retry", ", 'x', '0'"), ("give_back", "")] {
        for level in LEVELS {
            let db = TestDb::new().await;
            let (client, taker, observer) = (db.client().await, db.client().await, db.client().await);
            let early = enqueue(&client, ", p_key => 'k', p_available_at => once.clock() + interval '1 hour'").await;
            keyed(&client, "k").await;
            let held = take(&client, 10).await.remove(0);
            client.execute("UPDATE once.job SET available_at = once.clock() WHERE id = $1", &[&early]).await.unwrap();
            client.batch_execute(&format!("BEGIN ISOLATION LEVEL {level}; SELECT 1 FROM once.jobs")).await.unwrap();
            taker.batch_execute("BEGIN").await.unwrap();
            // Promoted, looked at, and parked.
            assert_eq!(take(&taker, 10).await, []);
            assert_eq!(states(&taker).await, ["parked", "running"]);
            let back = tokio::spawn(async move {
                if word == "give_back" {
                    let sql = "SELECT once.give_back(ARRAY[$1::bigint], ARRAY[$2::uuid])::text";
                    text(&client, sql, &[&held.id, &held.claim_id]).await.unwrap();
                } else {
                    held.say(&client, word, more).await.unwrap();
                }
                client.batch_execute("COMMIT").await.unwrap();
            });
            lock_waiters(&observer, 1).await;
            taker.batch_execute("COMMIT").await.unwrap();
            back.await.unwrap();
            assert_eq!(ids(&take_soon(&observer, 1).await), [early], "{word} {level}");
        }
    }
}

/// The next of a key is locked by somebody else (a cancel that is then taken back) when its turn comes: it is not
/// waited for, and not forgotten.
#[tokio::test]
async fn who_could_not_be_woken_is_woken_later() {
    let db = TestDb::new().await;
    let (client, other) = (db.client().await, db.client().await);
    keyed(&client, "k").await;
    let second = keyed(&client, "k").await;
    let held = take(&client, 10).await.remove(0);
    assert_eq!(state(&client, second).await, "parked");
    other.batch_execute("BEGIN").await.unwrap();
    text(&other, "SELECT once.cancel_job($1)", &[&second]).await.unwrap();
    client.batch_execute("SET statement_timeout = '20s'").await.unwrap();
    held.finish(&client).await.unwrap();
    assert_eq!(take(&client, 10).await, []);
    other.batch_execute("ROLLBACK").await.unwrap();
    assert_eq!(ids(&take_soon(&client, 10).await), [second]);
    assert_eq!(number(&client, "SELECT count(*) FROM once.job_wake").await, 0);
}

/// Enqueueing a key never waits for anybody who works on it.
#[tokio::test]
async fn enqueueing_waits_for_nobody() {
    let db = TestDb::new().await;
    let (client, taker, finisher) = (db.client().await, db.client().await, db.client().await);
    keyed(&client, "k").await;
    let held = take(&client, 1).await.remove(0);
    keyed(&client, "k").await;
    taker.batch_execute("BEGIN").await.unwrap();
    take(&taker, 10).await;
    let other = tokio::spawn(async move {
        finisher.batch_execute("BEGIN").await.unwrap();
        held.finish(&finisher).await.unwrap();
        finisher
    });
    lock_waiters(&client, 1).await;
    client.batch_execute("SET statement_timeout = '20s'").await.unwrap();
    keyed(&client, "k").await;
    taker.batch_execute("COMMIT").await.unwrap();
    let finisher = other.await.unwrap();
    keyed(&client, "k").await;
    finisher.batch_execute("COMMIT").await.unwrap();
}

/// Where the first ones wait for their turn, a take looks further, and counts nothing twice.
#[tokio::test]
async fn a_take_is_filled_from_behind_those_that_wait() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let first = keyed(&client, "k").await;
    for _ in 0..9 {
        keyed(&client, "k").await;
    }
    let mut plain = Vec::new();
    for _ in 0..20 {
        plain.push(enqueue(&client, "").await);
    }
    let mut taken = ids(&take(&client, 10).await);
    assert_eq!(taken.remove(0), first);
    assert_eq!(taken, plain[..9]);
}
