//! Batches beside each other, beside single calls, and beside themselves.

use std::sync::Arc;

use pgonce_testkit::checksum;
use rand::seq::SliceRandom as _;
use uuid::Uuid;

use crate::rows::{
    HOUR, answer, claim, database, ids, kinds, name, names, renew, status_of, succeed, succeed_alone, try_claim,
    try_succeed, verdicts,
};

#[tokio::test]
async fn of_one_key_twice_in_a_batch_the_first_wins() {
    let (_db, client) = database().await;
    let fail = "SELECT once.fail('s', 'failed', $1, true, 'c')";
    let failed = names("s", &["failed"]);
    let id = ids(1);
    claim(&client, &failed, &id).await;
    client.execute(fail, &[&id[0]]).await.unwrap();
    let mut intents = names("s", &["b", "a", "b", "b", "a", "failed", "failed"]);
    intents[3] = crate::rows::other(&intents[3]);
    let mine = ids(7);
    let rows = claim(&client, &intents, &mine).await;
    assert_eq!(
        kinds(&rows),
        [
            "new_claim",
            "new_claim",
            "processing_active",
            "",
            "processing_active",
            "retryable_failure",
            "processing_active"
        ]
    );
    assert_eq!(rows[3].get::<_, &str>("error"), "P4002", "the first is a rival with another payload");
    for (at, row) in rows.iter().enumerate() {
        let owner = row.get::<_, Option<Uuid>>("claim_id");
        assert!(owner.is_none() || owner == Some(mine[at]));
    }
}

#[tokio::test]
async fn an_atomic_rival_is_not_waited_for() {
    let (db, client) = database().await;
    let rival = db.client().await;
    rival.batch_execute("BEGIN").await.unwrap();
    rival.query_one("SELECT once.claim('s', 'held', sha256('x'), p_mode => 'atomic')", &[]).await.unwrap();
    let intents = names("s", &["free", "held", "other"]);
    let mine = ids(3);
    client.batch_execute("SET statement_timeout = '5s'").await.unwrap();
    let rows = claim(&client, &intents, &mine).await;
    assert_eq!(kinds(&rows), ["new_claim", "processing_active", "new_claim"]);
    let retry: i64 = rows[1].get("retry_after_ms");
    assert!((1..1000).contains(&retry), "soon: {retry} ms");
    assert_eq!(status_of(&client, &intents[1]).await, None);
    rival.batch_execute("ROLLBACK").await.unwrap();
    assert_eq!(kinds(&claim(&client, &intents, &mine).await), ["new_claim", "new_claim", "new_claim"]);
}

/// The other way round: while a batch is open, an atomic claim of one of its keys is refused, and does not wait
/// for the row that the batch has inserted.
#[tokio::test]
async fn an_open_batch_is_a_rival_to_single_claims() {
    let (db, client) = database().await;
    client.batch_execute("BEGIN").await.unwrap();
    let intents = names("s", &["k"]);
    claim(&client, &intents, &ids(1)).await;
    let single = db.client().await;
    single.batch_execute("SET statement_timeout = '5s'").await.unwrap();
    for mode in ["atomic", "leased"] {
        let sql = "SELECT kind FROM once.claim('s', 'k', $1, p_mode => $2, p_wait => '0')";
        let row = single.query_one(sql, &[&intents[0].fingerprint, &mode]).await.unwrap();
        assert_eq!(row.get::<_, &str>(0), "processing_active", "{mode}");
    }
    assert_eq!(kinds(&claim(&single, &intents, &ids(1)).await), ["processing_active"]);
    client.batch_execute("ROLLBACK").await.unwrap();
    assert_eq!(kinds(&claim(&single, &intents, &ids(1)).await), ["new_claim"]);
}

#[tokio::test]
async fn a_stale_owners_completion_is_lost_and_its_neighbours_are_not() {
    let (db, client) = database().await;
    let intents = names("rerun", &["a", "taken", "z"]);
    let mine = ids(3);
    claim(&client, &intents[1..2], &mine[1..2]).await;
    db.travel(2 * HOUR).await;
    let rival = ids(1);
    assert_eq!(kinds(&claim(&client, &intents[1..2], &rival).await), ["processing_stale"]);
    claim(&client, &[intents[0].clone(), intents[2].clone()], &[mine[0], mine[2]]).await;
    let rows = succeed(&client, &intents, &mine, &vec![answer("mine"); 3]).await;
    assert_eq!(verdicts(&rows), ["recorded", "lost", "recorded"]);
    assert_eq!(status_of(&client, &intents[1]).await.as_deref(), Some("processing"), "the rival's claim is untouched");
    let renewed = renew(&client, &intents, &mine, None).await;
    assert_eq!(verdicts(&renewed), ["settled", "lost", "settled"]);
    assert_eq!(verdicts(&succeed(&client, &intents[1..2], &rival, &[answer("rival's")]).await), ["recorded"]);

    // Claim ids of nobody, of a neighbour, of another tenant: lost, and nothing changes.
    let open = names("rerun", &["o1", "o2"]);
    let owners = ids(2);
    claim(&client, &open, &owners).await;
    let before = checksum(&client).await;
    let mut elsewhere = open.clone();
    elsewhere[0].tenant = "b".into();
    for (intents, claims) in
        [(&open, ids(2)), (&open, vec![owners[1], owners[0]]), (&elsewhere, vec![owners[0], owners[0]])]
    {
        let rows = succeed(&client, intents, &claims, &vec![answer("x"); 2]).await;
        assert_eq!(verdicts(&rows), ["lost", "lost"]);
        assert_eq!(verdicts(&renew(&client, intents, &claims, Some("5 hours")).await), ["lost", "lost"]);
    }
    assert_eq!(checksum(&client).await, before);
}

#[tokio::test]
async fn a_row_that_is_being_completed_is_not_waited_for() {
    let (db, client) = database().await;
    let intents = names("s", &["a", "held", "z"]);
    let mine = ids(3);
    claim(&client, &intents, &mine).await;
    client.batch_execute("SET statement_timeout = '5s'").await.unwrap();
    let work = db.client().await;
    for (end, renewed, completed) in
        [("ROLLBACK", "renewed", None), ("COMMIT", "settled", Some(["recorded", "before", "recorded"]))]
    {
        work.batch_execute("BEGIN").await.unwrap();
        succeed_alone(&work, &intents[1], mine[1], "the work's").await.unwrap();
        assert_eq!(verdicts(&renew(&client, &intents, &mine, None).await), ["renewed", "busy", "renewed"]);
        if completed.is_some() {
            let rows = succeed(&client, &intents[1..2], &mine[1..2], &[answer("mine")]).await;
            assert_eq!(verdicts(&rows), ["busy"]);
        }
        work.batch_execute(end).await.unwrap();
        assert_eq!(verdicts(&renew(&client, &intents, &mine, None).await)[1], renewed);
        if let Some(expected) = completed {
            let rows = succeed(&client, &intents, &mine, &vec![answer("mine"); 3]).await;
            assert_eq!(verdicts(&rows), expected);
            assert_eq!(rows[1].get::<_, &[u8]>("response_body"), b"the work's");
        }
    }
}

#[tokio::test]
async fn leases_are_renewed_by_policy_or_wish_and_not_after_their_end() {
    let (db, client) = database().await;
    let intents = names("s", &["k"]);
    let mine = ids(1);
    claim(&client, &intents, &mine).await;
    let minutes = async |lease: Option<&str>| {
        let rows = renew(&client, &intents, &mine, lease).await;
        let sql =
            "SELECT round(extract(epoch FROM locked_until - once.clock()) / 60)::int FROM once.intent WHERE key = 'k'";
        let real: i32 = client.query_one(sql, &[]).await.unwrap().get(0);
        (verdicts(&rows)[0].clone(), rows[0].get::<_, Option<i64>>("lease_ms").map(|ms| ms / 60_000), real)
    };
    assert_eq!(minutes(None).await, ("renewed".into(), Some(60), 60));
    assert_eq!(minutes(Some("5 hours")).await, ("renewed".into(), Some(300), 300));
    assert_eq!(minutes(Some("1 hour")).await, ("renewed".into(), Some(60), 60), "a renewal may also shorten");
    db.travel(2 * HOUR).await;
    assert_eq!(minutes(None).await.0, "lost", "it is over: it may be somebody's already");
}

#[tokio::test]
async fn an_answer_that_is_too_large_is_its_own_trouble() {
    let (_db, client) = database().await;
    let intents = names("s", &["large", "small", "lost"]);
    let mine = ids(3);
    claim(&client, &intents[..2], &mine[..2]).await;
    let mut answers = vec![answer("small"); 3];
    answers[0].body = Some(vec![7; (16 << 20) + 1]);
    answers[2].body = answers[0].body.clone();
    let rows = succeed(&client, &intents, &mine, &answers).await;
    assert_eq!(verdicts(&rows), ["too_large", "recorded", "lost"]);
    assert_eq!(status_of(&client, &intents[0]).await.as_deref(), Some("processing"), "still its owner's");
    answers[0].body = Some(vec![7; 16 << 20]);
    let rows = succeed(&client, &intents[..1], &mine[..1], &answers[..1]).await;
    assert_eq!(verdicts(&rows), ["recorded"]);
    let rows = claim(&client, &intents[..2], &ids(2)).await;
    assert_eq!(kinds(&rows), ["replay_success", "replay_success"]);
    assert_eq!(rows[0].get::<_, &[u8]>("response_body").len(), 16 << 20);
}

/// So is one whose headers or reference are: in a batch, and alone.
#[tokio::test]
async fn what_is_beside_the_body_is_limited_too() {
    let (_db, client) = database().await;
    let intents = names("s", &["headers", "type", "id", "small"]);
    let mine = ids(4);
    claim(&client, &intents, &mine).await;
    let mut answers = vec![answer("small"); 4];
    answers[0].headers = Some(serde_json::json!({"h": "x".repeat(262_144)}));
    answers[1].result_type = Some("x".repeat(256));
    answers[2].result_id = Some("x".repeat(1025));
    for at in 0..3 {
        let rows = succeed(&client, &intents[at..=at], &mine[at..=at], &answers[at..=at]).await;
        assert_eq!(verdicts(&rows), ["too_large"], "{at}");
    }
    let rows = succeed(&client, &intents, &mine, &answers).await;
    assert_eq!(verdicts(&rows), ["too_large", "too_large", "too_large", "recorded"]);
    assert_eq!(status_of(&client, &intents[0]).await.as_deref(), Some("processing"), "still its owner's");
}

/// Batches over the same keys, each in an order of its own, claiming, renewing and completing: nobody is ever
/// chosen as a deadlock's victim, and every key has one owner.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_in_any_order_never_deadlock() {
    let (db, client) = database().await;
    let keys: Vec<String> = (0..40).map(|at| format!("k{at}")).collect();
    let owners: Arc<std::sync::Mutex<std::collections::HashMap<String, Uuid>>> = Arc::default();
    let recorded: Arc<std::sync::Mutex<std::collections::HashSet<String>>> = Arc::default();
    let mut running = tokio::task::JoinSet::new();
    for _ in 0..6 {
        let (client, keys, owners, recorded) =
            (db.client().await, keys.clone(), Arc::clone(&owners), Arc::clone(&recorded));
        running.spawn(async move {
            for round in 0..15 {
                let mut mixed: Vec<_> = keys.iter().map(|key| name("s", &format!("{round} {key}"))).collect();
                mixed.shuffle(&mut rand::rng());
                let mine = ids(mixed.len());
                let rows = try_claim(&client, &mixed, &mine).await.unwrap();
                {
                    let mut owners = owners.lock().unwrap();
                    for row in rows.iter().filter(|row| row.get::<_, Option<Uuid>>("claim_id").is_some()) {
                        let at = usize::try_from(row.get::<_, i32>("ordinal") - 1).unwrap();
                        let before = owners.insert(mixed[at].key.clone(), mine[at]);
                        assert_eq!(before, None, "{} has two owners", mixed[at].key);
                    }
                }
                // Everybody completes what anybody owns, as two sendings of one completion would.
                mixed.shuffle(&mut rand::rng());
                let known: Vec<Uuid> = {
                    let owners = owners.lock().unwrap();
                    mixed.iter().map(|name| owners.get(&name.key).copied().unwrap_or_else(Uuid::new_v4)).collect()
                };
                renew(&client, &mixed, &known, None).await;
                let rows = try_succeed(&client, &mixed, &known, &vec![answer("x"); mixed.len()]).await.unwrap();
                for (name, verdict) in mixed.iter().zip(verdicts(&rows)) {
                    let first = verdict != "recorded" || recorded.lock().unwrap().insert(name.key.clone());
                    assert!(first, "{} was recorded twice", name.key);
                }
            }
        });
    }
    running.join_all().await;
    // Whatever a busy row left open is completed by its owner.
    let owners = owners.lock().unwrap().clone();
    assert_eq!(owners.len(), 40 * 15);
    let (left, claims): (Vec<_>, Vec<_>) = owners.iter().map(|(key, id)| (name("s", key), *id)).unzip();
    let rows = succeed(&client, &left, &claims, &vec![answer("x"); left.len()]).await;
    for (name, verdict) in left.iter().zip(verdicts(&rows)) {
        let before = recorded.lock().unwrap().contains(&name.key);
        assert_eq!(verdict, if before { "before" } else { "recorded" }, "{}: what was told is so", name.key);
    }
}

/// A batch that fails in the middle leaves nothing, and says so for everybody: what the server cannot do now.
#[tokio::test]
async fn a_serialization_failure_is_the_whole_batchs() {
    let (db, client) = database().await;
    let rival = db.client().await;
    client.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1").await.unwrap();
    client.query_one("SELECT count(*) FROM once.intent", &[]).await.unwrap();
    let intents = names("s", &["a", "b"]);
    claim(&rival, &intents[1..], &ids(1)).await;
    let error = try_claim(&client, &intents, &ids(2)).await.unwrap_err();
    assert_eq!(crate::rows::code(&error), "40001");
    client.batch_execute("ROLLBACK").await.unwrap();
    assert_eq!(status_of(&rival, &intents[0]).await, None);
}
