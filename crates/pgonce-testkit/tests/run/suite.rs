use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use pgonce::{Error, Failure, Once, Outcome, RetryPolicy};
use pgonce_testkit::{TestDb, eventually, lock_waiters};
use serde_json::json;
use tokio::sync::Notify;

/// Which door this copy of the suite goes through.
fn direct() -> bool {
    module_path!().ends_with("direct")
}

async fn effect(tx: &pgonce::Tx, key: &str) -> Result<(), Failure> {
    let claim = tx.claim_id();
    let sql = "INSERT INTO public.effect (scope, key, claim_id) VALUES ('s', $1, $2)";
    tx.execute_typed(sql, &[(&key, tokio_postgres::types::Type::TEXT), (&claim, tokio_postgres::types::Type::UUID)])
        .await?;
    Ok(())
}

async fn simple(once: &Once, key: &str, payload: i64) -> Result<Outcome<i64>, Error> {
    once.intent("s", key)
        .payload(&payload)
        .run(async |tx| {
            effect(&tx, key).await?;
            Ok(payload)
        })
        .await
}

#[tokio::test]
async fn executed_then_replayed_then_refused_for_another_payload() {
    let db = TestDb::new().await.through(direct());
    let once = db.once().await;
    assert_eq!(simple(&once, "k", 7).await.unwrap(), Outcome::Executed(7));
    assert_eq!(simple(&once, "k", 7).await.unwrap(), Outcome::Replayed(7), "by a read: this process has seen it");
    assert_eq!(simple(&db.once().await, "k", 7).await.unwrap(), Outcome::Replayed(7), "by a claim");
    assert!(matches!(simple(&once, "k", 8).await, Err(Error::Conflict)));
    assert!(matches!(simple(&db.once().await, "k", 8).await, Err(Error::Conflict)));
    assert_eq!(db.effects("k").await, 1);
    let tenant = once.intent("s", "k").tenant("other").payload(&9).run(async |_| Ok(9)).await.unwrap();
    assert_eq!(tenant, Outcome::Executed(9), "another tenant's key is another key");
}

#[tokio::test]
async fn a_refusal_is_recorded_and_its_effect_is_rolled_back() {
    let db = TestDb::new().await.through(direct());
    let once = db.once().await;
    let refused = async |once: &Once| {
        once.intent("s", "k")
            .run(async |tx| -> Result<i32, Failure> {
                effect(&tx, "k").await?;
                Err(Failure::refuse("no_stock", "nothing left"))
            })
            .await
    };
    assert!(matches!(refused(&once).await, Err(Error::Failed { code, .. }) if code == "no_stock"));
    assert!(matches!(refused(&once).await, Err(Error::FailedBefore { code, .. }) if code == "no_stock"));
    assert_eq!(db.effects("k").await, 0);
    assert_eq!(db.status("s", "k").await.as_deref(), Some("failed_final"));
}

#[tokio::test]
async fn a_transient_failure_is_never_final() {
    let db = TestDb::new().await.through(direct());
    let once = db.once().await;
    let policy = RetryPolicy { attempts_max: 2, ..RetryPolicy::default() };
    let tries = AtomicU32::new(0);
    let outcome = once
        .intent("s", "k")
        .retry(policy)
        .run(async |tx| -> Result<i32, Failure> {
            tries.fetch_add(1, Ordering::SeqCst);
            effect(&tx, "k").await?;
            Err(Failure::retry("upstream", "not now"))
        })
        .await;
    assert!(matches!(outcome, Err(error @ Error::FailedRetryable { .. }) if error.is_retryable()));
    assert_eq!(tries.load(Ordering::SeqCst), 2);
    assert_eq!((db.effects("k").await, db.status("s", "k").await.as_deref()), (0, Some("failed_retryable")));
    assert_eq!(simple(&once, "k2", 1).await.unwrap(), Outcome::Executed(1));
    let outcome = once.intent("s", "k").run(async |tx| Ok(tx.attempt())).await.unwrap();
    assert_eq!(outcome, Outcome::Executed(2), "the second attempt, by what is recorded");
}

#[tokio::test]
async fn serialization_failures_run_again_from_the_start() {
    let db = TestDb::new().await.through(direct());
    let once = db.once().await;
    let tries = AtomicU32::new(0);
    let outcome = once
        .intent("s", "k")
        .run(async |tx| {
            effect(&tx, "k").await?;
            if tries.fetch_add(1, Ordering::SeqCst) < 3 {
                tx.batch_execute("DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '40001'; END $$").await?;
            }
            Ok(1)
        })
        .await;
    assert_eq!(outcome.unwrap(), Outcome::Executed(1));
    assert_eq!((tries.load(Ordering::SeqCst), db.effects("k").await), (4, 1));
}

#[tokio::test]
async fn a_unique_violation_of_the_business_is_final() {
    let db = TestDb::new().await.through(direct());
    db.client()
        .await
        .batch_execute("CREATE TABLE public.thing (name text UNIQUE); INSERT INTO public.thing VALUES ('taken')")
        .await
        .unwrap();
    let once = db.once().await;
    let outcome = once
        .intent("s", "k")
        .run(async |tx| {
            tx.batch_execute("INSERT INTO public.thing VALUES ('taken')").await?;
            Ok(1)
        })
        .await;
    assert!(matches!(outcome, Err(Error::Failed { code, .. }) if code == "23505"));
    assert_eq!(db.status("s", "k").await.as_deref(), Some("failed_final"));
}

/// Trap 10: an error that the effect swallows aborts the transaction; COMMIT then answers "ROLLBACK" as success.
#[tokio::test]
async fn a_swallowed_error_is_not_reported_as_done() {
    let db = TestDb::new().await.through(direct());
    let once = db.once_with(|settings| settings.pool_max = 1).await;
    // On a connection that has completed before: the completion and its COMMIT really travel together.
    assert_eq!(simple(&once, "before", 1).await.unwrap(), Outcome::Executed(1));
    let policy = RetryPolicy { attempts_max: 1, ..RetryPolicy::default() };
    let outcome = once
        .intent("s", "k")
        .retry(policy)
        .run(async |tx| {
            effect(&tx, "k").await?;
            let _ = tx.batch_execute("SELECT 1 / 0").await;
            Ok(1)
        })
        .await;
    assert!(outcome.is_err(), "{outcome:?}");
    assert_eq!((db.effects("k").await, db.status("s", "k").await), (0, None));
    assert_eq!(simple(&once, "k", 0).await.unwrap(), Outcome::Executed(0), "the connection is clean again");
}

#[tokio::test]
async fn a_dropped_future_leaves_nothing_half_open() {
    let db = TestDb::new().await.through(direct());
    let once = db.once_with(|settings| settings.pool_max = 1).await;
    let (reached, never) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let task = tokio::spawn({
        let (once, reached, never) = (once.clone(), Arc::clone(&reached), Arc::clone(&never));
        async move {
            once.intent("s", "k")
                .run(async |tx| {
                    effect(&tx, "k").await?;
                    reached.notify_one();
                    never.notified().await;
                    Ok(1)
                })
                .await
        }
    });
    reached.notified().await;
    task.abort();
    assert!(task.await.unwrap_err().is_cancelled());
    // The same single connection slot: a half-open transaction in it would make this claim part of it.
    let outcome = once.intent("s", "k").wait(Duration::from_secs(10)).run(async |tx| {
        effect(&tx, "k").await?;
        Ok(2)
    });
    assert_eq!(outcome.await.unwrap(), Outcome::Executed(2));
    assert_eq!(db.effects("k").await, 1);
}

#[tokio::test]
async fn a_transaction_kept_beyond_its_effect_commits_nothing() {
    let db = TestDb::new().await.through(direct());
    let once = db.once().await;
    let kept = std::sync::Mutex::new(None);
    let outcome = once
        .intent("s", "k")
        .run(async |tx| {
            effect(&tx, "k").await?;
            *kept.lock().unwrap() = Some(tx);
            Ok(1)
        })
        .await;
    assert!(matches!(outcome, Err(Error::Kept)), "{outcome:?}");
    // Whatever the keeper still sends must not commit, not even by itself; and the intent is free again.
    let kept = kept.into_inner().unwrap().unwrap();
    eventually("the session is ended", async || effect(&kept, "k").await.is_err()).await;
    eventually("the kept connection is closed", async || {
        let sql = "SELECT count(*) = 0 FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction'";
        db.client().await.query_one(sql, &[]).await.unwrap().get(0)
    })
    .await;
    assert_eq!(db.effects("k").await, 0);
}

#[tokio::test]
async fn a_pool_of_one_is_enough_for_everything() {
    let db = TestDb::new().await.through(direct());
    let once = db.once_with(|settings| settings.pool_max = 1).await;
    assert_eq!(simple(&once, "k", 1).await.unwrap(), Outcome::Executed(1));
    assert_eq!(simple(&once, "k", 1).await.unwrap(), Outcome::Replayed(1));
    let refused =
        once.intent("s", "k2").run(async |_| -> Result<i32, Failure> { Err(Failure::refuse("no", "no")) }).await;
    assert!(matches!(refused, Err(Error::Failed { .. })));
    let leased = once.intent("s", "k3").lease(Duration::from_millis(300)).run_leased(async |_| Ok(3)).await;
    assert_eq!(leased.unwrap(), Outcome::Executed(3));
}

#[tokio::test]
async fn an_exhausted_pool_refuses_in_time_and_says_so() {
    let db = TestDb::new().await.through(direct());
    let once = db
        .once_with(|settings| {
            settings.pool_max = 1;
            settings.pool_wait = Duration::from_millis(50);
            settings.retry.attempts_max = 1;
        })
        .await;
    let (reached, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let holder = tokio::spawn({
        let (once, reached, go) = (once.clone(), Arc::clone(&reached), Arc::clone(&go));
        async move {
            once.intent("s", "holder")
                .run(async |_| {
                    reached.notify_one();
                    go.notified().await;
                    Ok(1)
                })
                .await
        }
    });
    reached.notified().await;
    for _ in 0..6 {
        assert!(matches!(simple(&once, "k", 1).await, Err(Error::Overloaded { .. })));
    }
    // Told by the breaker: when it lets the next one through, and not how long this one waited in vain.
    let refused = simple(&once, "k", 1).await;
    assert!(matches!(refused, Err(Error::Overloaded { retry_after }) if retry_after > Duration::from_millis(50)));
    go.notify_one();
    assert_eq!(holder.await.unwrap().unwrap(), Outcome::Executed(1));
    eventually("the breaker closes", async || simple(&once, "k", 1).await.is_ok()).await;
}

#[tokio::test]
async fn answers_that_are_not_kept_cannot_be_rebuilt_and_are_not_run_again() {
    let db = TestDb::new().await.through(direct());
    db.client().await.batch_execute("SELECT once.define_scope('s', '{\"response\": \"reference\"}')").await.unwrap();
    let once = db.once().await;
    let run = async || {
        once.intent("s", "k")
            .run(async |tx| {
                effect(&tx, "k").await?;
                tx.made("order", "42");
                Ok(1)
            })
            .await
    };
    assert_eq!(run().await.unwrap(), Outcome::Executed(1));
    let Err(Error::AnswerUnreadable { result_id, .. }) = run().await else { panic!("expected a reference") };
    assert_eq!((result_id.as_deref(), db.effects("k").await), (Some("42"), 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_is_renewed_while_the_work_runs() {
    let db = TestDb::new().await.through(direct());
    let once = db.once().await;
    let (started, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let worker = tokio::spawn({
        let (once, started, go) = (once.clone(), Arc::clone(&started), Arc::clone(&go));
        async move {
            once.intent("s", "k")
                .lease(Duration::from_secs(2))
                .run_leased(async |lease| {
                    started.notify_one();
                    go.notified().await;
                    Ok(lease.attempt)
                })
                .await
        }
    });
    started.notified().await;
    let client = db.client().await;
    let sql = "SELECT locked_until, locked_until > clock_timestamp() FROM once.intents WHERE key = 'k'";
    let first: std::time::SystemTime = client.query_one(sql, &[]).await.unwrap().get(0);
    // Longer than the lease: two renewals later it is still held.
    let mut renewals = 0;
    let mut last = first;
    eventually("two renewals", async || {
        let row = client.query_one(sql, &[]).await.unwrap();
        assert!(row.get::<_, bool>(1), "never over while the work runs");
        let until = row.get(0);
        if until != last {
            (renewals, last) = (renewals + 1, until);
        }
        renewals >= 3
    })
    .await;
    let rival = once.intent("s", "k").run_leased(async |_| Ok(9)).await;
    assert!(matches!(rival, Err(Error::InProgress { .. })));
    go.notify_one();
    assert_eq!(worker.await.unwrap().unwrap(), Outcome::Executed(1));
    assert_eq!(once.intent("s", "k").run_leased(async |_| Ok(9)).await.unwrap(), Outcome::Replayed(1));
}

#[tokio::test]
async fn a_lost_lease_stops_the_work_and_records_nothing() {
    let db = TestDb::new().await.through(direct());
    let client = db.client().await;
    client
        .batch_execute(
            "SELECT once.define_scope('s', '{\"mode\": \"leased\", \"stale\": \"rerun\", \"lease\": \"200ms\"}')",
        )
        .await
        .unwrap();
    let once = db.once().await;
    let never = Notify::new();
    let outcome = once
        .intent("s", "k")
        .run_leased(async |_| -> Result<i32, Failure> {
            // Somebody else takes over: by the database's clock the lease is over.
            db.travel(Duration::from_secs(60)).await;
            let row = client
                .query_one("SELECT kind FROM once.claim('s', 'k', once.fingerprint_bytes(''), 'leased')", &[])
                .await?;
            assert_eq!(row.get::<_, &str>(0), "processing_stale");
            never.notified().await;
            Ok(1)
        })
        .await;
    assert!(matches!(outcome, Err(Error::LeaseLost)), "{outcome:?}");
    assert_eq!(db.status("s", "k").await.as_deref(), Some("processing"));
}

/// Trap 8: renewing behind our own completion would wait for ourselves.
#[tokio::test]
async fn the_heartbeat_is_not_in_the_way_of_the_completion() {
    let db = TestDb::new().await.through(direct());
    let once = db.once_with(|settings| settings.pool_max = 1).await;
    for turn in 0..20 {
        let outcome = once
            .intent("s", format!("k{turn}"))
            .lease(Duration::from_millis(10))
            .run_leased(async |_| {
                tokio::task::yield_now().await;
                Ok(turn)
            })
            .await;
        match outcome {
            Ok(Outcome::Executed(value)) => assert_eq!(value, turn),
            // A lease of ten milliseconds may really be over on a busy machine; it must then say so.
            Err(Error::LeaseLost) => {}
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn leased_failures_are_recorded_under_the_fence() {
    let db = TestDb::new().await.through(direct());
    let once = db.once().await;
    let failing = once
        .intent("s", "k")
        .run_leased(async |_| -> Result<i32, Failure> { Err(Failure::retry("busy", "later")) })
        .await;
    assert!(matches!(failing, Err(Error::FailedRetryable { .. })));
    assert_eq!(db.status("s", "k").await.as_deref(), Some("failed_retryable"));
    let refused = once
        .intent("s", "k")
        .run_leased(async |_| -> Result<i32, Failure> { Err(Failure::refuse("no", "never")) })
        .await;
    assert!(matches!(refused, Err(Error::Failed { .. })));
    assert!(matches!(once.intent("s", "k").run_leased(async |_| Ok(1)).await, Err(Error::FailedBefore { .. })));
}

#[tokio::test]
async fn counts_of_answers_reach_the_suppression_view() {
    let db = TestDb::new().await.through(direct());
    let once = db.once().await;
    for _ in 0..4 {
        simple(&once, "k", 1).await.unwrap();
    }
    once.flush_tally().await.unwrap();
    let row = db
        .client()
        .await
        .query_one("SELECT executions::int, suppressed::int FROM once.suppression WHERE scope = 's'", &[])
        .await
        .unwrap();
    assert_eq!((row.get::<_, i32>(0), row.get::<_, i32>(1)), (1, 3));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_duplicate_waits_and_gets_the_winners_answer() {
    let db = TestDb::new().await.through(direct());
    let once = db.once().await;
    let (reached, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let winner = tokio::spawn({
        let (once, reached, go) = (once.clone(), Arc::clone(&reached), Arc::clone(&go));
        async move {
            once.intent("s", "k")
                .payload(&json!(1))
                .run(async |_| {
                    reached.notify_one();
                    go.notified().await;
                    Ok("the winner's".to_owned())
                })
                .await
        }
    });
    reached.notified().await;
    let refused = once.intent("s", "k").payload(&json!(1)).wait(Duration::ZERO).run(async |_| Ok(String::new())).await;
    assert!(matches!(refused, Err(Error::InProgress { .. })));
    let waiter = tokio::spawn({
        let once = once.clone();
        async move { once.intent("s", "k").payload(&json!(1)).run(async |_| Ok("second".to_owned())).await }
    });
    lock_waiters(&db.client().await, 1).await;
    go.notify_one();
    assert_eq!(winner.await.unwrap().unwrap(), Outcome::Executed("the winner's".to_owned()));
    assert_eq!(waiter.await.unwrap().unwrap(), Outcome::Replayed("the winner's".to_owned()));
}

/// Trap 24: a rival's row is there when ours is written. It comes out as a replay of the rival's answer, never
/// as a business conflict, and our effect is rolled back.
#[tokio::test]
async fn who_is_overtaken_at_the_end_replays_the_winner() {
    let db = TestDb::new().await.through(direct());
    let once = db.once().await;
    let rival = db.client().await;
    let tries = AtomicU32::new(0);
    let outcome = once
        .intent("s", "k")
        .payload(&json!(1))
        .run(async |tx| {
            effect(&tx, "k").await?;
            if tries.fetch_add(1, Ordering::SeqCst) == 0 {
                // A rival that committed between our look and our lock has left exactly this.
                let sql = "INSERT INTO once.intent (claim_id, created_at, status, attempt_count, tenant, scope, key, fingerprint, response_body)
                           VALUES (gen_random_uuid(), clock_timestamp(), 'succeeded', 1, '', 's', 'k', once.fingerprint('1'), '7')";
                rival.batch_execute(sql).await?;
            }
            Ok(1)
        })
        .await;
    assert_eq!(outcome.unwrap(), Outcome::Replayed(7));
    assert_eq!((tries.load(Ordering::SeqCst), db.effects("k").await), (1, 0));
}

/// Long durations: 40 minutes are more microseconds than 32 bits hold.
#[tokio::test]
async fn a_long_lease_and_a_long_wait_are_understood_by_every_version() {
    let db = TestDb::new().await.through(direct());
    let once = db.once().await;
    let outcome = once
        .intent("s", "k")
        .lease(Duration::from_secs(2400))
        .wait(Duration::from_secs(299))
        .run_leased(async |_| {
            let sql =
                "SELECT locked_until > clock_timestamp() + interval '39 minutes' FROM once.intents WHERE key = 'k'";
            Ok(db.client().await.query_one(sql, &[]).await?.get::<_, bool>(0))
        })
        .await;
    assert_eq!(outcome.unwrap(), Outcome::Executed(true));
}
