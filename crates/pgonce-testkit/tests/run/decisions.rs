//! Effects that decide about their answer themselves: `run_answer` and `run_leased_answer`.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use pgonce::{Answer, Answered, Decision, Error, Failure, Once, Outcome, RetryPolicy};
use pgonce_testkit::{TestDb, eventually};
use serde_json::json;
use tokio_postgres::types::Type;

fn direct() -> bool {
    module_path!().ends_with("direct")
}

async fn effect(tx: &pgonce::Tx, key: &str) -> Result<(), Failure> {
    let claim = tx.claim_id();
    let sql = "INSERT INTO public.effect (scope, key, claim_id) VALUES ('s', $1, $2)";
    tx.execute_typed(sql, &[(&key, Type::TEXT), (&claim, Type::UUID)]).await?;
    Ok(())
}

fn answer(code: i32) -> Answer {
    Answer {
        code: Some(code),
        headers: Some(json!([["content-type", "text/plain"], ["link", "a"], ["link", "b"]])),
        body: Some(b"\0exact \xff bytes".to_vec()),
        ..Answer::default()
    }
}

async fn decide(once: &Once, decision: impl Fn() -> Decision<u32>) -> Result<Answered<u32>, Error> {
    once.intent("s", "k")
        .payload(&1)
        .run_answer(async |tx| {
            effect(&tx, "k").await?;
            Ok(decision())
        })
        .await
}

#[tokio::test]
async fn what_is_done_commits_with_its_exact_answer() {
    let db = TestDb::new().await.through(direct());
    let once = db.once().await;
    let executed = once
        .intent("s", "k")
        .payload(&1)
        .run_answer(async |tx| {
            effect(&tx, "k").await?;
            tx.made("order", "42");
            tx.status(500); // the answer says otherwise
            Ok(Decision::Done(answer(201), 7))
        })
        .await;
    assert_eq!(executed.unwrap(), Answered::Executed(7));
    let stored = Answer { result_type: Some("order".into()), result_id: Some("42".into()), ..answer(201) };
    for again in [&once, &db.once().await] {
        let replayed = decide(again, || Decision::NotDone(0)).await.unwrap();
        assert_eq!(replayed, Answered::Replayed(stored.clone()));
    }
    assert_eq!(db.effects("k").await, 1);
}

#[tokio::test]
async fn a_refused_effect_is_rolled_back_and_its_answer_is_stored() {
    let db = TestDb::new().await.through(direct());
    let once = db.once_with(|settings| settings.pool_max = 1).await;
    let refused = decide(&once, || Decision::Refused(answer(409), 7)).await;
    assert_eq!(refused.unwrap(), Answered::Executed(7));
    assert_eq!((db.effects("k").await, db.status("s", "k").await.as_deref()), (0, Some("succeeded")));
    let replayed = decide(&db.once().await, || Decision::Done(answer(200), 8)).await;
    assert_eq!(replayed.unwrap(), Answered::Replayed(answer(409)));
    let other = once.intent("s", "k").payload(&2).run_answer(async |_| Ok(Decision::NotDone(0))).await;
    assert!(matches!(other, Err(Error::Conflict)), "{other:?}");
    assert_eq!(db.effects("k").await, 0);
}

/// Between the rollback and the storing of a refusal a rival may settle the intent: then its outcome counts.
#[tokio::test]
async fn a_rival_that_settles_before_a_refusal_is_stored_wins() {
    let db = TestDb::new().await.through(direct());
    let once = db.once().await;
    let rival = db.client().await;
    let outcome = once
        .intent("s", "k")
        .payload(&1)
        .run_answer(async |tx| {
            effect(&tx, "k").await?;
            // A rival that committed between the rollback and the second claim has left exactly this.
            let sql = "INSERT INTO once.intent (claim_id, created_at, status, attempt_count, tenant, scope, key, fingerprint, response_body)
                       VALUES (gen_random_uuid(), clock_timestamp(), 'succeeded', 1, '', 's', 'k', once.fingerprint('1'), 'rival')";
            rival.batch_execute(sql).await?;
            Ok(Decision::Refused(answer(409), 7))
        })
        .await;
    let rivals = Answer { body: Some(b"rival".to_vec()), ..Answer::default() };
    assert_eq!(outcome.unwrap(), Answered::Replayed(rivals));
    assert_eq!(db.effects("k").await, 0);
}

#[tokio::test]
async fn what_is_not_done_leaves_nothing_and_runs_again() {
    let db = TestDb::new().await.through(direct());
    let once = db.once_with(|settings| settings.pool_max = 1).await;
    for decision in [Decision::NotDone(7), Decision::Unknown(7)] {
        let undone = decide(&once, || decision.clone()).await;
        assert_eq!(undone.unwrap(), Answered::NotStored(7));
        assert_eq!((db.effects("k").await, db.status("s", "k").await), (0, None));
    }
    let done = decide(&once, || Decision::Done(answer(200), 8)).await;
    assert_eq!(done.unwrap(), Answered::Executed(8));
    assert_eq!(db.effects("k").await, 1);
}

/// An effect that lost its connection decides by what it saw, and that was not about the intent.
#[tokio::test]
async fn a_decision_over_a_lost_connection_is_not_believed() {
    let db = TestDb::new().await.through(direct());
    let once = db.once().await;
    for (key, decision) in [("k1", Decision::NotDone(0)), ("k2", Decision::Refused(answer(400), 0))] {
        let tries = AtomicU32::new(0);
        let outcome = once
            .intent("s", key)
            .run_answer(async |tx| {
                if tries.fetch_add(1, Ordering::SeqCst) == 0 {
                    let lost = tx.batch_execute("SELECT pg_terminate_backend(pg_backend_pid())").await;
                    assert!(lost.is_err());
                    return Ok(decision.clone());
                }
                effect(&tx, key).await?;
                Ok(Decision::Done(answer(201), 7))
            })
            .await;
        assert_eq!(outcome.unwrap(), Answered::Executed(7));
        assert_eq!((tries.load(Ordering::SeqCst), db.effects(key).await), (2, 1));
    }
}

#[tokio::test]
async fn a_kept_transaction_is_told_whatever_was_decided() {
    let db = TestDb::new().await.through(direct());
    let once = db.once().await;
    for decision in [Decision::Done(answer(200), 0), Decision::Refused(answer(400), 0), Decision::NotDone(0)] {
        let kept = Mutex::new(None);
        let outcome = once
            .intent("s", "k")
            .run_answer(async |tx| {
                effect(&tx, "k").await?;
                *kept.lock().unwrap() = Some(tx.clone());
                Ok(decision.clone())
            })
            .await;
        assert!(matches!(outcome, Err(Error::Kept)), "{outcome:?}");
        // While the handle is still there: the intent is not locked for as long as it lives.
        eventually("the intent is free", async || {
            let asked = once.intent("s", "k").wait(std::time::Duration::ZERO);
            let free = asked.run_answer(async |_| Ok(Decision::NotDone(1))).await;
            matches!(free, Ok(Answered::NotStored(1)))
        })
        .await;
        drop(kept);
    }
    assert_eq!((db.effects("k").await, db.status("s", "k").await), (0, None));
}

#[tokio::test]
async fn a_failure_beside_the_decisions_is_retried_or_recorded_as_ever() {
    let db = TestDb::new().await.through(direct());
    let once = db.once().await;
    let tries = AtomicU32::new(0);
    let outcome = once
        .intent("s", "k")
        .run_answer(async |tx| {
            effect(&tx, "k").await?;
            if tries.fetch_add(1, Ordering::SeqCst) == 0 {
                tx.batch_execute("DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '40001'; END $$").await?;
            }
            Ok(Decision::Done(answer(200), 1))
        })
        .await;
    assert_eq!(outcome.unwrap(), Answered::Executed(1));
    assert_eq!((tries.load(Ordering::SeqCst), db.effects("k").await), (2, 1));
    let policy = RetryPolicy { attempts_max: 1, ..RetryPolicy::default() };
    let refuse = async |_| -> Result<Decision<()>, Failure> { Err(Failure::refuse("no", "never")) };
    let refused = once.intent("s", "k2").retry(policy).run_answer(refuse).await;
    assert!(matches!(refused, Err(Error::Failed { .. })), "{refused:?}");
    assert!(matches!(once.intent("s", "k2").run_answer(refuse).await, Err(Error::FailedBefore { .. })));
}

#[tokio::test]
async fn leased_work_decides_too() {
    let db = TestDb::new().await.through(direct());
    let client = db.client().await;
    let hold = "SELECT once.define_scope('held', '{\"stale\": \"hold\"}'), once.define_scope('rerun', '{\"stale\": \"rerun\"}')";
    client.batch_execute(hold).await.unwrap();
    let once = db.once().await;
    let work = async |scope: &str, key: &str, decision: Decision<u32>| {
        once.intent(scope, key).run_leased_answer(async |_| Ok(decision)).await
    };
    for (key, decision) in [("done", Decision::Done(answer(201), 1)), ("refused", Decision::Refused(answer(201), 1))] {
        assert_eq!(work("held", key, decision).await.unwrap(), Answered::Executed(1));
        assert_eq!(work("held", key, Decision::NotDone(2)).await.unwrap(), Answered::Replayed(answer(201)));
    }
    assert_eq!(work("held", "not", Decision::NotDone(1)).await.unwrap(), Answered::NotStored(1));
    assert_eq!(db.status("held", "not").await, None, "given back as if it had never been claimed");
    for scope in ["held", "rerun"] {
        assert_eq!(work(scope, "unknown", Decision::Unknown(1)).await.unwrap(), Answered::NotStored(1));
        // At once, and not when the scope's thirty seconds are over: the policy is asked.
        let mut next = None;
        eventually("the lease is over", async || {
            next = Some(work(scope, "unknown", Decision::Done(answer(200), 2)).await);
            !matches!(next, Some(Err(Error::InProgress { .. })))
        })
        .await;
        match scope {
            "held" => assert!(matches!(next, Some(Err(Error::Uncertain))), "{next:?}"),
            _ => assert!(matches!(next, Some(Ok(Answered::Executed(2)))), "{next:?}"),
        }
    }
}

/// A value that is no JSON is not done in atomic mode, and may be done in leased mode.
#[tokio::test]
async fn an_answer_that_cannot_be_written_is_never_stored() {
    let db = TestDb::new().await.through(direct());
    let once = db.once().await;
    type NoJson = std::collections::BTreeMap<(u8, u8), u8>;
    let value = || NoJson::from([((1, 2), 3)]);
    let written: Result<Outcome<NoJson>, Error> = once
        .intent("s", "k")
        .run(async |tx| {
            effect(&tx, "k").await?;
            Ok(value())
        })
        .await;
    assert!(matches!(written, Err(Error::Json(_))), "{written:?}");
    assert_eq!((db.effects("k").await, db.status("s", "k").await), (0, None));
    let written: Result<Outcome<NoJson>, Error> = once.intent("s", "k").run_leased(async |_| Ok(value())).await;
    assert!(matches!(written, Err(Error::Json(_))), "{written:?}");
    assert_eq!(db.status("s", "k").await.as_deref(), Some("processing"));
}
