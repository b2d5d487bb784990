//! Messages that nobody waits for: `Tx::emit`, through both doors.

use std::sync::atomic::{AtomicUsize, Ordering};

use pgonce::{Error, Event, Once, Outcome, RetryPolicy, Settings};
use pgonce_testkit::TestDb;
use serde_json::json;
use tokio_postgres::Client;

use crate::{number, text};

const EFFECT: &str = "INSERT INTO public.effect (tenant, scope, key, claim_id) VALUES ('', 's', $1::text, $2::uuid)";

/// Not through a pooler: behind one, messages wait for their answers.
async fn start(direct: bool) -> (TestDb, Once, Client) {
    let db = TestDb::new().await;
    let mut settings = Settings::from_url(db.direct_url());
    settings.direct = Some(direct);
    let (once, client) = (Once::with_settings(settings).await.unwrap(), db.client().await);
    (db, once, client)
}

fn event(n: i64) -> Event {
    Event::new("orders", "order.created", &json!({"n": n})).ordered_by(n)
}

/// What is posted is sent before the effect's next statement, in the effect's transaction, however many there are.
#[tokio::test]
async fn what_is_posted_is_in_the_effects_transaction_and_in_order() {
    for direct in [false, true] {
        let (_db, once, client) = start(direct).await;
        for (key, messages) in [("one", 1), ("some", 3), ("many", 200)] {
            let outcome = once.intent("s", key).payload(&json!(1)).run(async |tx| {
                for n in 0..messages {
                    tx.emit(event(n).ordinal(i32::try_from(n).unwrap_or_default())).await?;
                    if n == 0 {
                        tx.execute(EFFECT, &[&key, &tx.claim_id()]).await?;
                    }
                }
                Ok(())
            });
            assert_eq!(outcome.await.unwrap(), Outcome::Executed(()));
            let same = format!(
                "SELECT count(*) FROM once.outbox o JOIN public.effect e ON e.key = o.key AND e.xmin::text = o.xid::text
                 WHERE o.key = '{key}' AND o.position IN (SELECT max(position) FROM once.outbox GROUP BY key, payload)"
            );
            assert_eq!(number(&client, &same).await, messages, "{key}");
            let ordered = format!(
                "SELECT bool_and(payload ->> 'n' = place)::text FROM (SELECT payload, (row_number() OVER (ORDER BY position) - 1)::text
                 AS place FROM once.outbox WHERE key = '{key}') o"
            );
            assert_eq!(text(&client, &ordered).await, "true", "{key}");
        }
    }
}

/// The intent was forgotten and runs again while its message is in the log: the message stays one.
#[tokio::test]
async fn a_message_that_is_in_the_log_already_is_told_from_another_one() {
    for direct in [false, true] {
        let (_db, once, client) = start(direct).await;
        let runs = AtomicUsize::new(0);
        let run = async |n: i64, late: bool| {
            // One attempt: asking whether it is the same message is not another one.
            let once_only = RetryPolicy { attempts_max: 1, ..RetryPolicy::default() };
            let outcome = once.intent("s", "k").payload(&json!(1)).retry(once_only).run(async |tx| {
                runs.fetch_add(1, Ordering::Relaxed);
                let id = tx.emit(event(n)).await?;
                if late {
                    // Fails because the message was refused: it is the message's error that counts.
                    tx.execute("SELECT 1", &[]).await?;
                }
                Ok(id.to_string())
            });
            outcome.await
        };
        let id = run(1, false).await.unwrap().into_inner();
        for late in [false, true] {
            client.batch_execute("DELETE FROM once.intent").await.unwrap();
            let before = runs.load(Ordering::Relaxed);
            assert_eq!(run(1, late).await.unwrap(), Outcome::Executed(id.clone()), "late {late}");
            let times = if direct { 2 } else { 1 }; // the function asks whether it is the same by itself
            assert_eq!(runs.load(Ordering::Relaxed), before + times, "direct {direct}");
            assert_eq!(number(&client, "SELECT count(*) FROM once.outbox").await, 1);
        }
        for late in [false, true] {
            client.batch_execute("DELETE FROM once.intent").await.unwrap();
            match run(2, late).await {
                Err(Error::Failed { code, .. }) => assert_eq!(code, "P4041", "late {late}"),
                other => panic!("{other:?}"),
            }
            assert_eq!(number(&client, "SELECT count(*) FROM once.outbox").await, 1);
        }
    }
}

/// Behind more of them than may be unanswered, the refused one is still what is told.
#[tokio::test]
async fn a_refused_message_is_told_however_many_follow() {
    for direct in [false, true] {
        let (_db, once, client) = start(direct).await;
        let twice = once.intent("s", "k").payload(&json!(1)).run(async |tx| {
            tx.emit(event(1)).await?;
            for n in 1..200_i64 {
                tx.emit(event(n).ordinal(i32::try_from(n % 150).unwrap_or_default())).await?;
            }
            Ok(())
        });
        match twice.await {
            Err(Error::Failed { code, .. }) => assert_eq!(code, "P4041"),
            other => panic!("{other:?}"),
        }
        assert_eq!(number(&client, "SELECT count(*) FROM once.outbox").await, 0);
    }
}

/// A savepoint takes a message back like every other write, also a refused one.
#[tokio::test]
async fn a_savepoint_takes_a_message_back() {
    for direct in [false, true] {
        let (_db, once, client) = start(direct).await;
        let outcome = once.intent("s", "k").payload(&json!(1)).run(async |tx| {
            tx.emit(event(1)).await?;
            tx.batch_execute("SAVEPOINT a").await?;
            tx.emit(event(2).ordinal(1)).await?;
            tx.batch_execute("ROLLBACK TO a").await?;
            tx.emit(event(3)).await?; // the id of the first
            tx.batch_execute("ROLLBACK TO a").await?;
            Ok(())
        });
        assert_eq!(outcome.await.unwrap(), Outcome::Executed(()));
        assert_eq!(text(&client, "SELECT string_agg(payload ->> 'n', '') FROM once.outbox").await, "1");
    }
}

/// What jsonb does not take is refused by the server, and told.
#[tokio::test]
async fn what_the_server_refuses_is_the_failure() {
    for direct in [false, true] {
        let (_db, once, client) = start(direct).await;
        let nul = once.intent("s", "k").payload(&json!(1)).run(async |tx| {
            tx.emit(Event::new("orders", "x", &json!("\u{0}"))).await?;
            Ok(())
        });
        match nul.await {
            Err(Error::Failed { code, .. }) => assert_eq!(code, "22P05"),
            other => panic!("{other:?}"),
        }
        assert_eq!(number(&client, "SELECT count(*) FROM once.outbox").await, 0);
    }
}
