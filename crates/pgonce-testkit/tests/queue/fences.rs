//! Every word about a job carries its fence; a stale one changes nothing.

use std::time::Duration;

use pgonce_testkit::TestDb;

use crate::desk::{Held, code, define, enqueue, enqueue_batch, finish_batch, ids, number, state, take, text};

/// Each word that must be fenced, as a call of the id and the claim id of one job.
const WORDS: [(&str, &str); 7] = [
    ("finish", ""),
    ("retry", ""),
    ("bury", ""),
    ("heartbeat", ""),
    ("finish_batch", "batch"),
    ("retry_batch", "batch"),
    ("bury_batch", "batch"),
];

async fn say(client: &tokio_postgres::Client, held: &Held, word: &str, form: &str) -> Result<String, String> {
    let arguments = if form == "batch" { "ARRAY[$1::bigint], ARRAY[$2::uuid]" } else { "$1, $2" };
    let sql = format!("SELECT once.{word}({arguments})::text");
    text(client, &sql, &[&held.id, &held.claim_id]).await
}

#[tokio::test]
async fn a_stale_worker_changes_nothing() {
    for (word, form) in WORDS {
        let db = TestDb::new().await;
        let client = db.client().await;
        let id = enqueue(&client, "").await;
        let stale = take(&client, 1).await.remove(0);
        db.travel(Duration::from_secs(31)).await;
        let current = take(&client, 1).await.remove(0);
        assert_eq!((current.id, current.attempts), (id, 2));
        let before = number(&client, "SELECT count(*) FROM once.jobs WHERE state = 'running' AND attempts = 2").await;
        assert_eq!(before, 1);
        assert_eq!(say(&client, &stale, word, form).await, Err("P4060".into()), "{word}");
        let row = "SELECT state || attempts || claim_id FROM once.jobs";
        let expected = format!("running2{}", current.claim_id);
        assert_eq!(text(&client, row, &[]).await.unwrap(), expected, "{word}");
        current.finish(&client).await.unwrap();
        assert_eq!(state(&client, id).await, "gone");
        assert_eq!(say(&client, &current, word, form).await, Err("P4060".into()), "{word} after the end");
    }
}

/// Between the end of the lease and the next take the job is ready: its old worker does not hold it.
#[tokio::test]
async fn a_rescued_job_is_nobodys() {
    let db = TestDb::new().await;
    let client = db.client().await;
    define(&client, r#"{"running_max": 1}"#).await;
    enqueue(&client, ", p_priority => 1").await;
    let first = take(&client, 1).await.remove(0);
    let other = enqueue(&client, ", p_priority => 2").await;
    db.travel(Duration::from_secs(40)).await;
    // The one above it is taken; it is ready again.
    let second = take(&client, 1).await.remove(0);
    assert_eq!(second.id, other);
    assert_eq!(state(&client, first.id).await, "ready");
    for (word, form) in WORDS {
        assert_eq!(say(&client, &first, word, form).await, Err("P4060".into()), "{word}");
    }
}

#[tokio::test]
async fn a_stale_effect_goes_with_its_finish() {
    let db = TestDb::new().await;
    let (client, other) = (db.client().await, db.client().await);
    enqueue(&client, "").await;
    let stale = take(&client, 1).await.remove(0);
    let effect = "INSERT INTO public.effect (scope, key, claim_id) VALUES ('queue', 'job', gen_random_uuid())";
    client.batch_execute("BEGIN").await.unwrap();
    client.execute(effect, &[]).await.unwrap();
    db.travel(Duration::from_secs(31)).await;
    let current = take(&other, 1).await.remove(0);
    assert_eq!(stale.finish(&client).await, Err("P4060".into()));
    client.batch_execute("COMMIT").await.unwrap(); // which is a ROLLBACK
    assert_eq!(db.effects("job").await, 0);
    other.batch_execute("BEGIN").await.unwrap();
    other.execute(effect, &[]).await.unwrap();
    current.finish(&other).await.unwrap();
    other.batch_execute("COMMIT").await.unwrap();
    assert_eq!(db.effects("job").await, 1);
}

/// Each job by its own claim id: that another one of the batch has the right one is no help.
#[tokio::test]
async fn a_claim_id_of_a_neighbour_is_no_fence() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let first = enqueue(&client, "").await;
    let stale = take(&client, 1).await.remove(0);
    db.travel(Duration::from_secs(31)).await;
    let second = enqueue(&client, "").await;
    let current = take(&client, 2).await; // both under one claim id
    let sql = "SELECT once.finish_batch(ARRAY[$1, $2]::bigint[], ARRAY[$3, $4]::uuid[])::text";
    let said = text(&client, sql, &[&first, &second, &stale.claim_id, &current[0].claim_id]).await;
    assert_eq!(said, Err("P4060".into()));
    assert_eq!((state(&client, first).await, state(&client, second).await), ("running".into(), "running".into()));
    let twice = text(&client, sql, &[&first, &first, &current[0].claim_id, &current[0].claim_id]).await;
    assert_eq!(twice, Err("P4060".into()));
}

/// One lost job of a batch: nothing of the batch is done, and the error names it.
#[tokio::test]
async fn a_batch_is_whole_or_nothing() {
    let db = TestDb::new().await;
    let client = db.client().await;
    for _ in 0..3 {
        enqueue(&client, "").await;
    }
    let held = take(&client, 3).await;
    held[1].finish(&client).await.unwrap();
    for word in ["finish_batch", "retry_batch", "bury_batch"] {
        let sql = format!("SELECT once.{word}($1, $2)");
        let (ids, claims): (Vec<_>, Vec<_>) = held.iter().map(|one| (one.id, one.claim_id)).unzip();
        let error = client.query(&sql, &[&ids, &claims]).await.unwrap_err();
        let detail = error.as_db_error().unwrap().detail().unwrap().to_owned();
        assert!(detail.ends_with(&format!("Jobs: {}.", held[1].id)), "{word}: {detail}");
        assert_eq!(number(&client, "SELECT count(*) FROM once.jobs WHERE state = 'running'").await, 2, "{word}");
    }
    // A heartbeat tells each its own, and giving back passes over what is lost.
    let (ids, claims): (Vec<_>, Vec<_>) = held.iter().map(|one| (one.id, one.claim_id)).unzip();
    let rows = client.query("SELECT verdict FROM once.heartbeat_batch($1, $2)", &[&ids, &claims]).await.unwrap();
    let verdicts: Vec<&str> = rows.iter().map(|row| row.get(0)).collect();
    assert_eq!(verdicts, ["held", "lost", "held"]);
    let back: i32 = client.query_one("SELECT once.give_back($1, $2)", &[&ids, &claims]).await.unwrap().get(0);
    assert_eq!(back, 2);
    assert_eq!(number(&client, "SELECT count(*) FROM once.jobs WHERE state = 'ready' AND attempts = 0").await, 2);
}

#[tokio::test]
async fn a_heartbeat_prolongs_and_never_shortens() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = enqueue(&client, "").await;
    let held = take(&client, 1).await.remove(0);
    db.travel(Duration::from_secs(25)).await;
    held.say(&client, "heartbeat", "").await.unwrap();
    db.travel(Duration::from_secs(45)).await;
    assert_eq!(take(&client, 1).await, [], "it is held for thirty seconds from the heartbeat on");
    let before = text(&client, "SELECT leased_until::text FROM once.jobs", &[]).await.unwrap();
    held.say(&client, "heartbeat", ", '10 milliseconds'").await.unwrap();
    assert_eq!(text(&client, "SELECT leased_until::text FROM once.jobs", &[]).await.unwrap(), before);
    db.travel(Duration::from_secs(80)).await;
    assert_eq!(take(&client, 1).await[0].id, id);
}

/// A heartbeat on another connection, while the worker's own transaction has finished the job and not committed: it does
/// not wait, and it does not take the job for lost.
#[tokio::test]
async fn a_heartbeat_does_not_wait_for_the_own_finish() {
    let db = TestDb::new().await;
    let (client, other) = (db.client().await, db.client().await);
    enqueue(&client, "").await;
    let held = take(&client, 1).await.remove(0);
    client.batch_execute("BEGIN").await.unwrap();
    held.finish(&client).await.unwrap();
    other.batch_execute("SET statement_timeout = '20s'").await.unwrap();
    let sql = "SELECT verdict FROM once.heartbeat_batch(ARRAY[$1::bigint], ARRAY[$2::uuid])";
    assert_eq!(text(&other, sql, &[&held.id, &held.claim_id]).await.unwrap(), "held");
    client.batch_execute("COMMIT").await.unwrap();
    assert_eq!(text(&other, sql, &[&held.id, &held.claim_id]).await.unwrap(), "lost");
}

/// Jobs of one take, in a batch large enough to be finished by one walk over their ids: the same fence.
#[tokio::test]
async fn a_large_batch_is_fenced_job_by_job() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let first = enqueue_batch(&client, 300).await[0];
    let held = take(&client, 150).await;
    let stale = held.clone();
    held[7].finish(&client).await.unwrap();
    let error = finish_batch(&client, &held).await.unwrap_err();
    let detail = error.as_db_error().unwrap().detail().unwrap().to_owned();
    assert!(detail.ends_with(&format!("Jobs: {}.", first + 7)), "{detail}");
    let twice: Vec<Held> = held[8..].iter().chain(&held[8..10]).cloned().collect();
    assert_eq!(code(&finish_batch(&client, &twice).await.unwrap_err()), "P4060");
    assert_eq!(number(&client, "SELECT count(*) FROM once.jobs WHERE state = 'running'").await, 149, "all or nothing");

    // What lies between and was not named stays, whosever it is.
    let other = take(&client, 150).await;
    other[149].say(&client, "retry", ", 'e', '0'").await.unwrap(); // it comes to the front
    let some: Vec<Held> = held[8..].iter().filter(|one| one.id != first + 50).cloned().collect();
    finish_batch(&client, &some).await.unwrap();
    assert_eq!(
        (state(&client, first + 50).await, state(&client, first + 299).await),
        ("running".into(), "ready".into())
    );
    assert_eq!(number(&client, "SELECT count(*) FROM once.jobs").await, 8 + 149 + 1);

    // Their leases are over, and others have them: the old claim id finishes none of them.
    db.travel(Duration::from_secs(31)).await;
    let again = take(&client, 200).await;
    assert_eq!(again.len(), 158);
    let stolen: Vec<Held> = again.iter().map(|one| Held { claim_id: stale[0].claim_id, ..one.clone() }).collect();
    assert_eq!(code(&finish_batch(&client, &stolen).await.unwrap_err()), "P4060");
    let one_stolen: Vec<Held> = again[..157].iter().chain(&stolen[157..]).cloned().collect();
    assert_eq!(code(&finish_batch(&client, &one_stolen).await.unwrap_err()), "P4060");
    finish_batch(&client, &again).await.unwrap();
    assert_eq!(number(&client, "SELECT count(*) FROM once.jobs").await, 0);
}

/// Among many plain jobs one has a name: the next of its key goes on, or its unique key is free.
#[tokio::test]
async fn a_large_batch_lets_go_of_names() {
    let db = TestDb::new().await;
    let client = db.client().await;
    for name in [", p_key => 'name'", ", p_unique_key => 'name'"] {
        enqueue_batch(&client, 120).await;
        let first = enqueue(&client, name).await;
        let second = enqueue(&client, name).await;
        let held = take(&client, 200).await;
        assert_eq!((held.len(), held[120].id), (121, first), "{name}");
        finish_batch(&client, &held).await.unwrap();
        let next = if second == first { enqueue(&client, name).await } else { second };
        assert_ne!(next, first);
        let held = take(&client, 10).await;
        assert_eq!(ids(&held), [next], "{name}");
        finish_batch(&client, &held).await.unwrap();
    }
}

/// Jobs of one take that lie far apart are found one by one, and not by a walk over what lies between.
#[tokio::test]
async fn a_finish_does_not_walk_over_others() {
    let db = TestDb::new().await;
    let client = db.client().await;
    for _ in 0..100 {
        enqueue_batch(&client, 99).await;
        enqueue(&client, ", p_priority => 1").await;
    }
    let held = take(&client, 100).await;
    let walked = "SELECT pg_stat_get_xact_tuples_returned('once.job_pkey'::regclass)";
    client.batch_execute("BEGIN").await.unwrap();
    finish_batch(&client, &held).await.unwrap();
    let walked = number(&client, walked).await;
    client.batch_execute("COMMIT").await.unwrap();
    assert!(walked < 1000, "{walked} index entries for a hundred jobs");
    assert_eq!(number(&client, "SELECT count(*) FROM once.jobs").await, 9900);
}
