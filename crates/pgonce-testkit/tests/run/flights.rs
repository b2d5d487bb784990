//! BEGIN travels with the claim and COMMIT with the outcome, each pair as one request; and whatever goes wrong there is as if
//! they had travelled apart.

use bytes::Bytes;
use futures_util::SinkExt as _;
use pgonce::{Error, Failure, IsolationLevel, Once, Outcome, RetryPolicy, Settings};
use pgonce_testkit::{FaultProxy, TestDb};

const EFFECT: &str = "INSERT INTO public.effect (scope, key, claim_id) VALUES ('s', $1, $2)";

/// One connection, behind a proxy that counts.
async fn counted(db: &TestDb, direct: bool) -> (FaultProxy, Once) {
    let proxy = FaultProxy::before(db.direct_url()).await;
    let mut settings = Settings::from_url(&proxy.url(db.direct_url()));
    (settings.pool_max, settings.direct) = (1, Some(direct));
    settings.tally_every = std::time::Duration::ZERO;
    (proxy, Once::with_settings(settings).await.unwrap())
}

/// Runs an intent that does `also` beside its effect, and says which backend it was at.
async fn run(once: &Once, key: &str, also: &str) -> Result<Outcome<i32>, Error> {
    once.intent("s", key)
        .retry(RetryPolicy { attempts_max: 1, ..RetryPolicy::default() })
        .run(async |tx| {
            tx.execute(&tx.prepared(EFFECT).await?, &[&key, &tx.claim_id()]).await?;
            if !also.is_empty() {
                tx.batch_execute(also).await?;
            }
            Ok(tx.query_typed_one("SELECT pg_backend_pid()", &[]).await?.get(0))
        })
        .await
}

async fn backend(once: &Once, key: &str, also: &str) -> i32 {
    match run(once, key, also).await.unwrap() {
        Outcome::Executed(pid) => pid,
        Outcome::Replayed(_) => panic!("{key} was there"),
    }
}

#[tokio::test]
async fn a_protected_write_is_two_requests_more_than_its_effect() {
    let db = TestDb::new().await;
    for direct in [false, true] {
        let (proxy, once) = counted(&db, direct).await;
        backend(&once, &format!("warm {direct}"), "").await;
        for turn in 0..3 {
            let before = proxy.requests();
            backend(&once, &format!("{direct} {turn}"), "").await;
            assert_eq!(proxy.requests() - before, 4, "the effect's statement, its question, and one before and after");
        }
        for level in [IsolationLevel::ReadCommitted, IsolationLevel::RepeatableRead, IsolationLevel::Serializable] {
            for turn in 0..2 {
                let key = format!("{direct} {level:?} {turn}");
                let before = proxy.requests();
                let shown = once.intent("s", &key).isolation(level).run(async |tx| {
                    Ok(tx.query_typed_one("SHOW transaction_isolation", &[]).await?.get::<_, String>(0))
                });
                let Outcome::Executed(shown) = shown.await.unwrap() else { panic!("{key} was there") };
                assert_eq!(shown.replace(' ', ""), format!("{level:?}").to_lowercase());
                assert_eq!(proxy.requests() - before, 3);
            }
        }
    }
}

#[tokio::test]
async fn a_refused_outcome_is_rolled_back_and_the_connection_stays() {
    let db = TestDb::new().await;
    for direct in [false, true] {
        let (_proxy, once) = counted(&db, direct).await;
        let pid = backend(&once, &format!("before {direct}"), "").await;
        // A statement whose failure the effect does not look at: the outcome behind it is refused (25P02), and its COMMIT skipped.
        let key = format!("aborted {direct}");
        let aborted = once.intent("s", &key).run(async |tx| {
            tx.execute(EFFECT, &[&key, &tx.claim_id()]).await?;
            let _ = tx.batch_execute("SELECT 1 / 0").await;
            Ok(1)
        });
        assert!(matches!(aborted.await, Err(Error::Database(error)) if error.code().unwrap().code() == "25P02"));
        assert_eq!((db.effects(&key).await, db.status("s", &key).await), (0, None));
        assert_eq!(
            backend(&once, &format!("after {direct}"), "").await,
            pid,
            "the transaction was ended, not the session"
        );
    }
}

/// The first COMMIT of a connection is prepared in its flight; where the outcome before it is refused, it is not.
#[tokio::test]
async fn a_connection_whose_first_outcome_was_refused_commits_the_next() {
    let db = TestDb::new().await;
    for direct in [false, true] {
        let (_proxy, once) = counted(&db, direct).await;
        let refused = once.intent("s", format!("refused {direct}")).run(async |tx| {
            tx.made("thing", "x".repeat(2000)); // too long: the transaction is fine until the outcome
            Ok(1)
        });
        assert!(matches!(refused.await, Err(Error::Database(error)) if error.code().unwrap().code() == "P4005"));
        for turn in 0..3 {
            let key = format!("next {direct} {turn}");
            backend(&once, &key, "").await;
            assert_eq!(db.effects(&key).await, 1);
        }
    }
}

#[tokio::test]
async fn a_commit_that_fails_by_itself_is_a_failure() {
    let db = TestDb::new().await;
    let sql = "CREATE TABLE public.late (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)";
    db.client().await.batch_execute(sql).await.unwrap();
    for direct in [false, true] {
        let (_proxy, once) = counted(&db, direct).await;
        let key = format!("twice {direct}");
        let twice = run(&once, &key, "INSERT INTO public.late VALUES (1), (1)").await;
        assert!(matches!(twice, Err(Error::Database(error)) if error.code().unwrap().code() == "23505"));
        assert_eq!((db.effects(&key).await, db.status("s", &key).await), (0, None), "nothing of it is there");
        backend(&once, &format!("after {direct}"), "").await;
    }
}

#[tokio::test]
async fn a_refused_claim_leaves_the_connection_as_it_was() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client.batch_execute("SELECT once.define_scope('s', '{\"key_pattern\": \"^[a-z ]+$\"}')").await.unwrap();
    for direct in [false, true] {
        let (_proxy, once) = counted(&db, direct).await;
        let pid = backend(&once, if direct { "before" } else { "long before" }, "").await;
        assert!(matches!(run(&once, "K1", "").await, Err(error) if error.sqlstate() == Some("P4001")));
        assert_eq!(backend(&once, if direct { "after" } else { "long after" }, "").await, pid);
    }
}

#[tokio::test]
async fn forgotten_statements_are_sent_as_the_driver_wrote_them() {
    let db = TestDb::new().await;
    let (proxy, once) = counted(&db, true).await;
    backend(&once, "first", "").await;
    for (name, turn) in [("BEGIN", 0), ("BEGIN", 1)] {
        let drops = if turn == 0 { format!("DEALLOCATE \"pgonce {name}\"") } else { String::new() };
        backend(&once, &format!("drops {turn}"), &drops).await;
    }
    let before = proxy.requests();
    backend(&once, "goes on", "").await;
    assert_eq!(proxy.requests() - before, 6, "nothing is joined on this connection any more, and everything is done");
    for key in ["first", "drops 0", "drops 1", "goes on"] {
        assert_eq!(db.effects(key).await, 1);
    }
}

#[tokio::test]
async fn copy_is_not_in_the_way() {
    let db = TestDb::new().await;
    db.client().await.batch_execute("CREATE TABLE public.copied (n int)").await.unwrap();
    let (_proxy, once) = counted(&db, true).await;
    for turn in 0..3 {
        let copied = once.intent("s", format!("copy {turn}")).run(async |tx| {
            let mut sink = Box::pin(tx.copy_in::<_, Bytes>("COPY public.copied FROM STDIN").await?);
            let sent = sink.send(Bytes::from_static(b"1\n2\n")).await;
            sent.map_err(Failure::from)?;
            Ok(sink.as_mut().finish().await?)
        });
        assert_eq!(copied.await.unwrap(), Outcome::Executed(2));
        backend(&once, &format!("after copy {turn}"), "").await;
    }
}

/// The backend ends in the middle of each flight: before the claim's answer, and before the outcome's.
#[tokio::test]
async fn a_backend_that_ends_is_heard() {
    let db = TestDb::new().await;
    let (_proxy, once) = counted(&db, true).await;
    let client = db.client().await;
    for turn in 0..3 {
        let pid = backend(&once, &format!("alive {turn}"), "").await;
        client.execute("SELECT pg_terminate_backend($1, 10000)", &[&pid]).await.unwrap();
        let next = once
            .intent("s", format!("begins {turn}"))
            .run(async |tx| Ok(tx.query_typed_one("SELECT pg_backend_pid()", &[]).await?.get::<_, i32>(0)));
        assert!(
            matches!(next.await.unwrap(), Outcome::Executed(other) if other != pid),
            "run again on a new connection"
        );
        let key = format!("ends {turn}");
        let ends = once.intent("s", &key).run(async |tx| {
            tx.execute(EFFECT, &[&key, &tx.claim_id()]).await?;
            let pid: i32 = tx.query_typed_one("SELECT pg_backend_pid()", &[]).await?.get(0);
            if tx.attempt() == 1 && db.effects(&format!("killed {turn}")).await == 0 {
                let sql = "INSERT INTO public.effect (scope, key, claim_id) VALUES ('s', $1, gen_random_uuid())";
                client.execute(sql, &[&format!("killed {turn}")]).await.unwrap();
                client.execute("SELECT pg_terminate_backend($1, 10000)", &[&pid]).await.unwrap();
            }
            Ok(1)
        });
        assert_eq!(ends.await.unwrap(), Outcome::Executed(1));
        assert_eq!(db.effects(&key).await, 1);
    }
}
