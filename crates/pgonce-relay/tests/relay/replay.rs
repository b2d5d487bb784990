//! Sending again, on purpose.

use std::sync::Arc;

use pgonce_relay::relay::replay::Replay;
use pgonce_testkit::TestDb;
use tokio::sync::watch;

use crate::sink::Recorder;
use crate::{emit, number, relay_all};

async fn ask(db: &TestDb, selection: &str) -> i64 {
    number(db, &format!("SELECT id FROM once.ask_replay('s', '{selection}', 'ann', 'a test')")).await
}

#[tokio::test]
async fn what_was_delivered_is_sent_again_and_what_was_not_is_not() {
    let db = TestDb::new().await;
    for n in 0..20 {
        emit(&db, &format!("k{}", n % 2), n).await;
    }
    let sink = Arc::new(Recorder::default());
    relay_all(&db, &sink).await;
    emit(&db, "k0", 20).await;
    let counted = "SELECT messages FROM once.ask_replay('s', '{\"ordering_key\": \"k0\"}', '', '', NULL, true)";
    assert_eq!(number(&db, counted).await, 10, "what is still to come would be overtaken");
    let id = ask(&db, "{\"ordering_key\": \"k0\"}").await;
    let again = Arc::new(Recorder::default());
    let (_stop, stopped) = watch::channel(false);
    let replay = Replay { database_url: db.url().to_owned(), id, sink: "s".into() };
    let progress = replay.run(Arc::clone(&again) as _, stopped.clone(), |_| {}).await.unwrap();
    assert_eq!((progress.sent, progress.failed, progress.finished), (10, 0, true));
    assert_eq!(again.first(), (0..20).filter(|n| n % 2 == 0).collect::<Vec<_>>(), "in order");
    let error = replay.run(again as _, stopped, |_| {}).await.expect_err("it is finished");
    assert_eq!(error.sqlstate(), Some("P4071"));
    assert_eq!(
        number(&db, "SELECT count(*) FROM once.audit_trail WHERE action = 'outbox:replay' AND reason = 'a test'").await,
        1
    );
}

#[tokio::test]
async fn a_replay_that_was_stopped_goes_on_where_it_was() {
    let db = TestDb::new().await;
    let sql = "SELECT count(once.emit('t', 'x', jsonb_build_object('n', n), 'k' || n)) FROM generate_series(0, 1999) n";
    db.client().await.batch_execute(sql).await.unwrap();
    let sink = Arc::new(Recorder::default());
    relay_all(&db, &sink).await;
    let id = ask(&db, "{}").await;
    let again = Arc::new(Recorder::default());
    let (stop, stopped) = watch::channel(false);
    let replay = Replay { database_url: db.url().to_owned(), id, sink: "s".into() };
    let first = replay
        .run(Arc::clone(&again) as _, stopped.clone(), |_| {
            stop.send_replace(true);
        })
        .await
        .unwrap();
    assert!(!first.finished && first.sent > 0 && first.sent < 2000, "{first:?}");
    let (_stop, stopped) = watch::channel(false);
    let second = replay.run(Arc::clone(&again) as _, stopped, |_| {}).await.unwrap();
    assert!(second.finished);
    assert_eq!((first.sent + second.sent, again.count()), (2000, 2000), "nothing twice, nothing left out");
    assert_eq!(number(&db, "SELECT sent FROM once.outbox_replays").await, 2000);
}

/// Another sink's replay is refused; one that was stopped while its sink was away can go on at once, or be given up.
#[tokio::test]
async fn a_replay_is_its_sinks_and_can_be_abandoned() {
    let db = TestDb::new().await;
    emit(&db, "k", 1).await;
    let sink = Arc::new(Recorder::default());
    relay_all(&db, &sink).await;
    let id = ask(&db, "{}").await;
    let (stop, stopped) = watch::channel(false);
    let replay = |sink: &str| Replay { database_url: db.url().to_owned(), id, sink: sink.to_owned() };
    let wrong = replay("other").run(Arc::clone(&sink) as _, stopped.clone(), |_| {}).await;
    assert_eq!(wrong.expect_err("not its own").sqlstate(), Some("P4071"));
    sink.rule(move |_| {
        stop.send_replace(true);
        Some(pgonce_relay::Verdict::away("gone"))
    });
    let ended = replay("s").run(Arc::clone(&sink) as _, stopped, |_| {}).await.unwrap();
    assert!(!ended.finished);
    sink.rule(|_| None);
    let (_stop, stopped) = watch::channel(false);
    let ended = replay("s").run(Arc::clone(&sink) as _, stopped.clone(), |_| {}).await.unwrap();
    assert_eq!((ended.sent, ended.finished), (1, true), "at once");
    let id = ask(&db, "{}").await;
    let abandon = format!("SELECT once.abandon_replay({id}, 'ann', 'a test')::int::bigint");
    assert_eq!(number(&db, &abandon).await, 1);
    assert_eq!(number(&db, &abandon).await, 0, "there is nothing left to abandon");
}

#[tokio::test]
async fn a_segment_is_kept_while_it_is_being_replayed() {
    let db = TestDb::new().await;
    emit(&db, "k", 1).await;
    let sink = Arc::new(Recorder::default());
    relay_all(&db, &sink).await;
    let id = ask(&db, "{}").await;
    let client = db.client().await;
    client.batch_execute("SELECT once.keep_outbox('0')").await.unwrap();
    db.travel(std::time::Duration::from_secs(600)).await;
    client.batch_execute("SELECT once.rotate_outbox(); SELECT once.rotate_outbox()").await.unwrap();
    assert_eq!(number(&db, "SELECT count(*) FROM once.outbox").await, 1);
    let again = Arc::new(Recorder::default());
    let (_stop, stopped) = watch::channel(false);
    Replay { database_url: db.url().to_owned(), id, sink: "s".into() }
        .run(Arc::clone(&again) as _, stopped, |_| {})
        .await
        .unwrap();
    assert_eq!(again.first(), [1]);
    client.batch_execute("SELECT once.rotate_outbox()").await.unwrap();
    assert_eq!(number(&db, "SELECT count(*) FROM once.outbox").await, 0);
}
