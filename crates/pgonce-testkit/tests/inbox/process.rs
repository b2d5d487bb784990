//! `Inbox::process`: a message and its effect in one transaction, from Rust.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use pgonce::{Error, Failure, Incoming, IsolationLevel, MessageTx, Once, Processed};
use pgonce_testkit::{Cut, FaultProxy, TestDb, eventually};
use tokio::sync::Barrier;
use tokio::task::JoinSet;

use crate::desk::{number, text};

async fn write(tx: &MessageTx, key: &str) -> Result<(), Failure> {
    let sql = "INSERT INTO public.effect (scope, key, claim_id) VALUES ('inbox', $1, gen_random_uuid())";
    tx.execute(sql, &[&key]).await?;
    Ok(())
}

async fn deliver(once: &Once, level: Option<IsolationLevel>, message: &Incoming) -> Result<Processed<()>, Error> {
    let mut inbox = once.consumer("c");
    if let Some(level) = level {
        inbox = inbox.isolation(level);
    }
    inbox.process(message, async |tx| write(&tx, &message.id).await).await
}

#[tokio::test]
async fn applied_duplicate_and_another_body() {
    let db = TestDb::new().await;
    let once = db.once().await;
    let message = Incoming::new("s", "m", b"body");
    assert_eq!(deliver(&once, None, &message).await.unwrap(), Processed::Applied(()));
    assert_eq!(deliver(&once, None, &message).await.unwrap(), Processed::Duplicate);
    let other = Incoming::new("s", "m", b"another body");
    let refused = deliver(&once, None, &other).await.unwrap_err();
    assert!(matches!(refused, Error::OtherBody) && !refused.is_retryable());
    assert_eq!(refused.sqlstate(), Some("P4050"));
    assert_eq!(db.effects("m").await, 1);
    // The hash is SHA-256 of the body, as SQL callers make it.
    let sql = "SELECT once.admit('c', 's', 'm', sha256('body'))";
    assert_eq!(text(&db.client().await, sql, &[]).await.unwrap(), "duplicate");
}

/// What a handler has in an intent's transaction it has here: ids that stay, and messages that wake relays.
#[tokio::test]
async fn a_handler_has_stable_ids_and_wakes_relays() {
    let db = TestDb::new().await;
    let once = db.once().await;
    let mut signals = pgonce::Signals::listen(db.direct_url()).await.unwrap();
    let mut made = Vec::new();
    for (consumer, id) in [("c", "m"), ("c", "m"), ("c", "n"), ("d", "m")] {
        let ids = std::sync::Mutex::new(Vec::new());
        let handler = async |tx: MessageTx| {
            ids.lock().unwrap().extend([tx.stable_uuid("order"), tx.stable_uuid("line")]);
            Err::<(), _>(Failure::refuse("no", "only looking"))
        };
        once.consumer(consumer).process(&Incoming::new("s", id, b""), handler).await.unwrap_err();
        made.push(ids.into_inner().unwrap());
    }
    assert_eq!(made[0], made[1], "the same in every delivery");
    let mut all = made.concat();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), 6, "and nobody else's");
    let emits = async |tx: MessageTx| Ok(tx.emit(pgonce::Event::new("t", "x", &1)).await?);
    once.consumer("c").process(&Incoming::new("s", "m", b""), emits).await.unwrap();
    let woken = tokio::time::timeout(std::time::Duration::from_secs(60), signals.next()).await;
    assert_eq!(woken, Ok(true), "relays were told");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_number_at_once_in_every_isolation_level() {
    let db = TestDb::new().await;
    let once = db.once_with(|settings| settings.pool_max = 50).await;
    for level in [IsolationLevel::ReadCommitted, IsolationLevel::RepeatableRead, IsolationLevel::Serializable] {
        for rivals in [2, 20, 50] {
            let message = Incoming::new("s", format!("{level:?} {rivals}"), b"body");
            let barrier = Arc::new(Barrier::new(rivals));
            let mut tasks = JoinSet::new();
            for _ in 0..rivals {
                let (once, message, barrier) = (once.clone(), message.clone(), Arc::clone(&barrier));
                tasks.spawn(async move {
                    barrier.wait().await;
                    // A broker delivers again what could not be settled.
                    loop {
                        match deliver(&once, Some(level), &message).await {
                            Ok(processed) => return processed,
                            Err(error) => assert!(error.is_retryable(), "{level:?}: {error}"),
                        }
                    }
                });
            }
            let all = tasks.join_all().await;
            let applied = all.iter().filter(|processed| **processed != Processed::Duplicate).count();
            assert_eq!((applied, db.effects(&message.id).await), (1, 1), "{level:?}, {rivals}");
        }
    }
}

#[tokio::test]
async fn a_failure_takes_the_admission_with_it() {
    let db = TestDb::new().await;
    let once = db.once_with(|settings| settings.pool_max = 1).await;
    // The one connection has its statements prepared: an aborted transaction shows at its end only.
    deliver(&once, None, &Incoming::new("s", "warm", b"")).await.unwrap();
    let message = Incoming::new("s", "m", b"body");
    let inbox = once.consumer("c");
    let failures = [(Failure::retry("later", "not now"), true), (Failure::refuse("never", "no such customer"), false)];
    for (failure, retryable) in failures {
        let failed = inbox
            .process(&message, async |tx| {
                write(&tx, "m").await?;
                Err::<(), _>(failure.clone())
            })
            .await
            .unwrap_err();
        assert_eq!(failed.is_retryable(), retryable);
        assert_eq!(db.effects("m").await, 0);
    }
    // An error that was swallowed left the transaction aborted: its COMMIT would be a ROLLBACK.
    let swallowed = inbox
        .process(&message, async |tx| {
            let _ = tx.execute("SELECT 1 / 0", &[]).await;
            Ok(())
        })
        .await
        .unwrap_err();
    assert_eq!(swallowed.sqlstate(), Some("25P02"), "{swallowed}");
    assert_eq!(deliver(&once, None, &message).await.unwrap(), Processed::Applied(()));
}

#[tokio::test]
async fn serialization_failures_are_run_again() {
    let db = TestDb::new().await;
    let once = db.once().await;
    let runs = AtomicUsize::new(0);
    let applied = once
        .consumer("c")
        .process(&Incoming::new("s", "m", b"body"), async |tx| {
            write(&tx, "m").await?;
            if runs.fetch_add(1, Ordering::SeqCst) < 2 {
                let sql = "DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '40001'; END $$";
                tx.batch_execute(sql).await?;
            }
            Ok(())
        })
        .await
        .unwrap();
    assert_eq!((applied, runs.into_inner(), db.effects("m").await), (Processed::Applied(()), 3, 1));
}

#[tokio::test]
async fn results_and_references_are_noted() {
    let db = TestDb::new().await;
    let once = db.once().await;
    let inbox = once.consumer("c").source("s");
    let made = async |tx: MessageTx| {
        tx.made("order", "7");
        Ok(())
    };
    inbox.process(&inbox.message("made", b""), made).await.unwrap();
    let ignored = async |tx: MessageTx| {
        tx.ignored();
        Ok(())
    };
    inbox.process(&inbox.message("ignored", b""), ignored).await.unwrap();
    inbox.set_aside(&inbox.message("poison", b""), true, Some(("dead letter", "d-1"))).await.unwrap();
    assert_eq!(deliver(&once, None, &inbox.message("poison", b"")).await.unwrap(), Processed::Duplicate);
    let client = db.client().await;
    let all = "SELECT string_agg(concat_ws(' ', message_id, result, result_type, result_id), ', ' ORDER BY message_id) FROM once.admitted_messages";
    assert_eq!(
        text(&client, all, &[]).await.unwrap(),
        "ignored ignored, made applied order 7, poison failed_final dead letter d-1"
    );
}

#[tokio::test]
async fn a_kept_handle_commits_nothing() {
    let db = TestDb::new().await;
    let once = db.once().await;
    let kept = std::sync::Mutex::new(None);
    let message = Incoming::new("s", "m", b"body");
    let error = once
        .consumer("c")
        .process(&message, async |tx| {
            write(&tx, "m").await?;
            *kept.lock().unwrap() = Some(tx);
            Ok(())
        })
        .await
        .unwrap_err();
    assert!(matches!(error, Error::Kept), "{error}");
    assert_eq!(db.effects("m").await, 0);
    let tx = kept.into_inner().unwrap().unwrap();
    eventually("the session is ended", async || tx.is_closed()).await;
    assert_eq!(deliver(&once, None, &message).await.unwrap(), Processed::Applied(()));
}

/// COMMIT, or its answer, is lost: none or one. The redelivery tells, and in the end there is one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_commit_is_settled_by_the_redelivery() {
    let db = TestDb::new().await;
    let proxy = FaultProxy::before(db.direct_url()).await;
    let direct = db.once().await;
    let mut seen = Vec::new();
    // Whether a COMMIT whose sender is cut off is still carried out, the server's socket decides: until it was.
    for turn in 0..50_usize {
        let once = Once::connect(&proxy.url(db.direct_url())).await.unwrap();
        // The statements are prepared: COMMIT alone is left to cut.
        deliver(&once, None, &Incoming::new("s", format!("warm {turn}"), b"")).await.unwrap();
        let message = Incoming::new("s", format!("m {turn}"), b"body");
        proxy.arm(if turn == 0 { Cut::BeforeCommit } else { Cut::AnswerOfCommit });
        let doubt = deliver(&once, None, &message).await.unwrap_err();
        assert!(matches!(doubt, Error::InDoubt { .. }) && doubt.is_retryable(), "{doubt}");
        assert_eq!(proxy.fired(), turn + 1);
        let again = deliver(&direct, None, &message).await.unwrap();
        assert_eq!(db.effects(&message.id).await, 1, "turn {turn}");
        seen.push(again);
        if seen.last() == Some(&Processed::Duplicate) {
            break;
        }
    }
    assert_eq!(seen[0], Processed::Applied(()), "it never arrived");
    assert_eq!(seen.last(), Some(&Processed::Duplicate), "it arrived, and nobody was told");
}

/// A handler's future that is dropped in the middle leaves nothing, and the pool is clean.
#[tokio::test]
async fn a_dropped_delivery_leaves_nothing() {
    let db = TestDb::new().await;
    let once = db.once_with(|settings| settings.pool_max = 1).await;
    let message = Incoming::new("s", "m", b"body");
    let inbox = once.consumer("c");
    let (reached, entered) = tokio::sync::oneshot::channel();
    let reached = std::sync::Mutex::new(Some(reached));
    let delivery = inbox.process(&message, async |tx| {
        write(&tx, "m").await?;
        let reached = reached.lock().unwrap().take();
        let _ = reached.map(|reached| reached.send(()));
        std::future::pending::<()>().await;
        Ok(())
    });
    tokio::select! {
        _ = delivery => panic!("it never ends"),
        entered = entered => entered.unwrap(),
    }
    assert_eq!(deliver(&once, None, &message).await.unwrap(), Processed::Applied(()));
    assert_eq!(db.effects("m").await, 1);
    assert_eq!(number(&db.client().await, "SELECT count(*) FROM once.admitted_messages").await, 1);
}
