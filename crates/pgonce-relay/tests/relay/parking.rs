//! What a sink does not take: tried again, parked with its key, resumed in order, while other keys flow.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use pgonce_relay::Verdict;
use pgonce_testkit::{TestDb, eventually};

use crate::sink::{Recorder, n};
use crate::{Running, emit, number, relay_all};

fn refused() -> Option<Verdict> {
    Some(Verdict::Refused { reason: "too large".into() })
}

#[tokio::test]
async fn poison_is_parked_with_its_key_while_others_flow() {
    let db = TestDb::new().await;
    for n in 0..30 {
        emit(&db, &format!("k{}", n % 3), n).await;
    }
    let sink = Arc::new(Recorder::default());
    let poisonous = Arc::new(AtomicBool::new(true));
    let poison = Arc::clone(&poisonous);
    sink.rule(move |message| (n(message) == 4 && poison.load(Ordering::SeqCst)).then(refused).flatten());
    let finished = relay_all(&db, &sink).await;
    assert_eq!(finished.left.unwrap().parked, 1);
    assert_eq!(sink.by_key()["k1"], [1], "what is behind it waits");
    assert_eq!((sink.by_key()["k0"].len(), sink.by_key()["k2"].len()), (10, 10));
    assert_eq!(number(&db, "SELECT count(*) FROM once.held WHERE state = 'behind'").await, 8);
    // New messages of the key queue up behind it, those of others pass; another relay knows, too.
    emit(&db, "k1", 31).await;
    emit(&db, "k2", 32).await;
    relay_all(&db, &sink).await;
    assert_eq!((sink.by_key()["k1"].len(), sink.by_key()["k2"].len()), (1, 11));
    poisonous.store(false, Ordering::SeqCst);
    db.client().await.batch_execute("SELECT once.resume_held('s', NULL, 'ann', 'fixed')").await.unwrap();
    relay_all(&db, &sink).await;
    assert_eq!(sink.by_key()["k1"], [1, 4, 7, 10, 13, 16, 19, 22, 25, 28, 31], "in order, all of it");
    assert_eq!(number(&db, "SELECT count(*) FROM once.held").await, 0);
    emit(&db, "k1", 34).await;
    relay_all(&db, &sink).await;
    assert_eq!(sink.by_key()["k1"].last(), Some(&34), "the key flows again");
}

#[tokio::test]
async fn what_fails_is_tried_again_and_parked_after_its_limit() {
    let db = TestDb::new().await;
    emit(&db, "a", 1).await;
    emit(&db, "b", 2).await;
    emit(&db, "a", 3).await;
    let sink = Arc::new(Recorder::default());
    let attempts = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&attempts);
    sink.rule(move |message| {
        let fails = n(message) == 1 && counted.fetch_add(1, Ordering::SeqCst) < 3;
        fails.then(|| Verdict::Retry { reason: "not now".into(), after: Some(Duration::from_millis(1)) })
    });
    relay_all(&db, &sink).await;
    assert_eq!(sink.by_key()["a"], [1, 3]);
    assert_eq!(attempts.load(Ordering::SeqCst), 4);
    // For ever is parked after the limit.
    sink.rule(|message| (n(message) == 5).then(|| Verdict::Retry { reason: "never".into(), after: None }));
    emit(&db, "a", 5).await;
    let limited = Running::with(&db, &sink, |settings| {
        (settings.until_empty, settings.attempts_max) = (true, 4);
    });
    assert_eq!(limited.task.await.unwrap().left.unwrap().parked, 1);
    assert_eq!(number(&db, "SELECT attempts::bigint FROM once.outbox_parked").await, 4);
}

#[tokio::test]
async fn a_sink_that_is_away_costs_nobody_an_attempt() {
    let db = TestDb::new().await;
    for n in 0..20 {
        emit(&db, &format!("k{n}"), n).await;
    }
    let sink = Arc::new(Recorder::default());
    let sends = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&sends);
    // Away in the middle of the batch, several times.
    sink.rule(move |_| {
        let send = counted.fetch_add(1, Ordering::SeqCst);
        (send > 5 && send < 60).then(|| Verdict::Away { reason: "gone".into() })
    });
    let finished = relay_all(&db, &sink).await;
    assert_eq!((sink.count(), finished.left.unwrap().parked), (20, 0));
    assert_eq!(number(&db, "SELECT count(*) FROM once.held").await, 0);
}

#[tokio::test]
async fn a_sink_that_wants_no_more_is_left_alone_until_somebody_resumes_it() {
    let db = TestDb::new().await;
    emit(&db, "a", 1).await;
    let sink = Arc::new(Recorder::default());
    let gone = Arc::new(AtomicBool::new(true));
    let asked = Arc::clone(&gone);
    sink.rule(move |_| asked.load(Ordering::SeqCst).then(|| Verdict::Disabled { reason: "410".into() }));
    let relay = Running::start(&db, &sink);
    eventually("it is disabled", async || {
        number(&db, "SELECT count(*) FROM once.sink WHERE disabled = '410'").await == 1
    })
    .await;
    relay.crash();
    gone.store(false, Ordering::SeqCst);
    assert_eq!(relay_all(&db, &sink).await.delivered, 0);
    db.client().await.batch_execute("SELECT once.resume_sink('s', 'ann', 'it is back')").await.unwrap();
    relay_all(&db, &sink).await;
    assert_eq!(sink.first(), [1]);
}

/// Too many keys failing is the sink's illness, not theirs: the outbox keeps what is new, not the held queue.
#[tokio::test]
async fn an_ill_sink_gets_nothing_new() {
    let db = TestDb::new().await;
    let sink = Arc::new(Recorder::default());
    let ill = Arc::new(AtomicBool::new(true));
    let asked = Arc::clone(&ill);
    sink.rule(move |_| {
        asked
            .load(Ordering::SeqCst)
            .then(|| Verdict::Retry { reason: "ill".into(), after: Some(Duration::from_millis(20)) })
    });
    let relay = Running::with(&db, &sink, |settings| {
        (settings.failing_max, settings.attempts_max, settings.batch_max) = (5, 1000, 3);
    });
    for n in 0..60 {
        emit(&db, &format!("k{n}"), n).await;
    }
    eventually("it is taken to be ill", async || number(&db, "SELECT count(*) FROM once.held").await > 5).await;
    assert!(number(&db, "SELECT count(*) FROM once.held").await < 30);
    ill.store(false, Ordering::SeqCst);
    eventually("all is there", async || sink.count() == 60).await;
    relay.stop().await;
    assert_eq!(number(&db, "SELECT count(*) FROM once.held").await, 0);
}

/// An operator lets the only held message of a key go while a relay works: what comes next for the key is not left behind
/// nothing.
#[tokio::test]
async fn a_key_flows_again_after_its_only_held_message_was_discarded() {
    let db = TestDb::new().await;
    let sink = Arc::new(Recorder::default());
    sink.rule(|message| (n(message) == 1).then(refused).flatten());
    let relay = Running::start(&db, &sink);
    emit(&db, "k", 1).await;
    eventually("it is parked", async || {
        number(&db, "SELECT count(*) FROM once.held WHERE state = 'parked'").await == 1
    })
    .await;
    db.client().await.batch_execute("SELECT once.resume_held('s', NULL, 'ann', 'never mind', true)").await.unwrap();
    emit(&db, "k", 2).await;
    eventually("the next one comes", async || sink.first() == [2]).await;
    emit(&db, "k", 3).await;
    eventually("and the one after it", async || sink.first() == [2, 3]).await;
    eventually("nothing is held", async || number(&db, "SELECT count(*) FROM once.held").await == 0).await;
    relay.stop().await;
}

#[tokio::test]
async fn a_sink_that_wants_no_more_is_asked_no_more_for_held_messages_either() {
    let db = TestDb::new().await;
    let sink = Arc::new(Recorder::default());
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    sink.rule(move |_| match count.fetch_add(1, Ordering::SeqCst) {
        0 => Some(Verdict::Retry { reason: "not now".into(), after: Some(Duration::from_millis(1)) }),
        _ => Some(Verdict::Disabled { reason: "410".into() }),
    });
    emit(&db, "k", 1).await;
    let finished = relay_all(&db, &sink).await;
    assert_eq!(asked.load(Ordering::SeqCst), 2, "once new, once again, and then no more");
    assert_eq!(finished.left.unwrap().failing, 1, "what it did not get is told");
}

/// Away is no answer about a held message, and no reason to ask without a pause.
#[tokio::test]
async fn a_held_message_waits_for_a_sink_that_is_away() {
    let db = TestDb::new().await;
    let sink = Arc::new(Recorder::default());
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    sink.rule(move |_| match count.fetch_add(1, Ordering::SeqCst) {
        0 => Some(Verdict::Retry { reason: "not now".into(), after: Some(Duration::from_millis(1)) }),
        1..20 => Some(Verdict::Away { reason: "gone".into() }),
        _ => None,
    });
    emit(&db, "k", 1).await;
    let began = std::time::Instant::now();
    relay_all(&db, &sink).await;
    assert_eq!(sink.first(), [1]);
    assert!(began.elapsed() > Duration::from_millis(60), "nineteen looks with pauses between them");
    assert_eq!(number(&db, "SELECT count(*) FROM once.held").await, 0);
}
