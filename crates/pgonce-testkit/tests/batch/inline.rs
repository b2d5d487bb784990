//! A caller that finds a connection idle makes its call itself. What is true of calls through a worker is true of it.

use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use pgonce::{Batcher, Observed, Recorded};
use pgonce_testkit::{TestDb, eventually, lock_waiters};
use tokio_postgres::Client;
use uuid::Uuid;

use crate::batcher::{batcher_at, own, owned};
use crate::faults::SLOW;
use crate::rows::{answer, database, name, status_of};

/// One connection each, which knows its statements: a call that is polled once is on its way.
async fn warm(db: &TestDb) -> Batcher {
    warm_at(db.url()).await
}

async fn warm_at(url: &str) -> Batcher {
    let batcher = batcher_at(url, |batch| (batch.claim_connections, batch.complete_connections) = (1, 1)).await;
    let one = name("s", "warm");
    let id = own(&batcher, &one).await;
    batcher.succeed(&one, id, answer("warm")).await.unwrap();
    batcher
}

async fn poll_once<F: Future>(future: &mut Pin<Box<F>>) {
    let polled = std::future::poll_fn(|context| Poll::Ready(future.as_mut().poll(context).is_pending())).await;
    assert!(polled, "it cannot have its answer yet");
}

/// How many connections the batcher has, where it was made by [`TestDb::direct_url`]: a pooler's are its own.
async fn connections(client: &Client) -> i64 {
    let sql =
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'pgonce'";
    client.query_one(sql, &[]).await.unwrap().get(0)
}

/// Ends the one session that waits for a lock.
async fn terminate(client: &Client) {
    lock_waiters(client, 1).await;
    let sql = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
    assert!(client.query_one(sql, &[]).await.unwrap().get::<_, bool>(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_ends_in_mid_call_is_made_again() {
    let (db, client) = database().await;
    let watcher = db.client().await;
    let batcher = warm(&db).await;
    let one = name("s", "k");
    let id = Uuid::new_v4();
    client.batch_execute("BEGIN; LOCK TABLE once.intent IN ACCESS EXCLUSIVE MODE").await.unwrap();
    let (claimed, ()) = tokio::join!(batcher.claim(&one, id), async {
        terminate(&watcher).await;
        client.batch_execute("ROLLBACK").await.unwrap();
    });
    assert_eq!(owned(claimed.unwrap()).claim_id, id);
    client.batch_execute("BEGIN; LOCK TABLE once.intent IN ACCESS EXCLUSIVE MODE").await.unwrap();
    let (recorded, ()) = tokio::join!(batcher.succeed(&one, id, answer("x")), async {
        terminate(&watcher).await;
        client.batch_execute("ROLLBACK").await.unwrap();
    });
    assert!(matches!(recorded.unwrap(), Recorded::Now { .. }));
}

/// The caller leaves in mid-call, then the connection breaks, then the batcher is dropped: it is recorded all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_completion_goes_on_without_its_caller_and_its_connection() {
    let (db, client) = database().await;
    let watcher = db.client().await;
    let batcher = warm(&db).await;
    let one = name("s", "k");
    let id = own(&batcher, &one).await;
    client.batch_execute("BEGIN; LOCK TABLE once.intent IN ACCESS EXCLUSIVE MODE").await.unwrap();
    let mut completing = Box::pin(batcher.succeed(&one, id, answer("x")));
    poll_once(&mut completing).await;
    lock_waiters(&watcher, 1).await;
    drop(completing);
    drop(batcher);
    terminate(&watcher).await;
    client.batch_execute("ROLLBACK").await.unwrap();
    eventually("recorded", async || status_of(&client, &one).await.as_deref() == Some("succeeded")).await;
}

/// The claim is made after its caller has left; until then its connection is in use, and no other takes its place.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_whose_caller_left_keeps_its_connection_until_it_is_given_back() {
    let (db, client) = database().await;
    let watcher = db.client().await;
    let batcher = warm_at(db.direct_url()).await;
    client.batch_execute(SLOW).await.unwrap();
    let before = connections(&watcher).await;
    for turn in 0..3 {
        let slow = name("s", &format!("slow {turn}"));
        let mut claiming = Box::pin(batcher.claim(&slow, Uuid::new_v4()));
        poll_once(&mut claiming).await;
        lock_waiters(&watcher, 1).await;
        drop(claiming);
        let next = name("s", &format!("next {turn}"));
        let mut waits = Box::pin(batcher.claim(&next, Uuid::new_v4()));
        poll_once(&mut waits).await;
        eventually("it waits", async || batcher.queue_wait() > Duration::from_millis(20)).await;
        assert_eq!(connections(&watcher).await, before, "the number of connections is fixed");
        assert_eq!(status_of(&watcher, &next).await, None, "and the one there is, is in use");
        client.batch_execute("SELECT pg_advisory_unlock(42)").await.unwrap();
        let _ = owned(waits.await.unwrap());
        eventually("given back", async || {
            let sql = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'pgonce' AND state <> 'idle'";
            status_of(&client, &slow).await.is_none() && client.query_one(sql, &[]).await.unwrap().get::<_, i64>(0) == 0
        })
        .await;
        client.batch_execute("SELECT pg_advisory_lock(42)").await.unwrap();
    }
}

/// A caller may begin a call and then attend to something else, without dropping it: others do not wait for that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_waits_for_a_caller_that_does_not_look() {
    let (db, _client) = database().await;
    let batcher = warm(&db).await;
    let [first, second] = ["first", "second"].map(|key| name("s", key));
    let ids = [Uuid::new_v4(), Uuid::new_v4()];
    let soon = async |what: &str, call: &mut (dyn Future<Output = Result<Observed, pgonce::Error>> + Unpin)| {
        owned(tokio::time::timeout(Duration::from_secs(1), call).await.expect(what).unwrap())
    };
    let mut idles = Box::pin(batcher.claim(&first, ids[0]));
    poll_once(&mut idles).await;
    let _ = soon("others are answered", &mut Box::pin(batcher.claim(&second, ids[1]))).await;
    let _ = soon("and so is it, when it looks", &mut idles).await;

    let mut idles = Box::pin(batcher.succeed(&first, ids[0], answer("x")));
    poll_once(&mut idles).await;
    assert!(batcher.is_ready().await, "it asks with the same connection");
    let recorded = batcher.succeed(&second, ids[1], answer("y")).await.unwrap();
    assert!(matches!(recorded, Recorded::Now { .. }));
    assert!(matches!(idles.await.unwrap(), Recorded::Now { .. }));
}

/// Also where nobody waits: what was begun is done. The statement is not prepared yet, so the first poll sends no more
/// than that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_begun_is_done_though_its_caller_does_not_look() {
    let (db, client) = database().await;
    let batcher = crate::batcher::batcher(&db).await;
    let one = name("s", "k");
    let id = Uuid::new_v4();
    let mut claiming = Box::pin(batcher.claim(&one, id));
    poll_once(&mut claiming).await;
    eventually("claimed", async || status_of(&client, &one).await.as_deref() == Some("processing")).await;
    assert_eq!(owned(claiming.await.unwrap()).claim_id, id);
    let mut completing = Box::pin(batcher.succeed(&one, id, answer("x")));
    poll_once(&mut completing).await;
    eventually("recorded", async || status_of(&client, &one).await.as_deref() == Some("succeeded")).await;
    assert!(matches!(completing.await.unwrap(), Recorded::Now { .. }));
}

/// Calls of callers that live on another runtime outlive that runtime.
#[test]
fn a_call_does_not_depend_on_its_callers_runtime() {
    let runtime = || tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (home, away) = (runtime(), runtime());
    let (db, client, batcher, one, id) = home.block_on(async {
        let (db, client) = database().await;
        let batcher = warm(&db).await;
        let one = name("s", "k");
        let id = own(&batcher, &one).await;
        client.batch_execute("BEGIN; LOCK TABLE once.intent IN ACCESS EXCLUSIVE MODE").await.unwrap();
        (db, client, batcher, one, id)
    });
    let watcher = home.block_on(db.client());
    away.block_on(async {
        let mut completing = Box::pin(batcher.succeed(&one, id, answer("x")));
        poll_once(&mut completing).await;
    });
    drop(away);
    home.block_on(async {
        terminate(&watcher).await;
        client.batch_execute("ROLLBACK").await.unwrap();
        eventually("recorded", async || status_of(&client, &one).await.as_deref() == Some("succeeded")).await;
    });
}

/// What is to be sent again after a pause is still to be done when the last handle is dropped.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_completion_that_pauses_outlives_the_batcher() {
    let (db, client) = database().await;
    let watcher = db.client().await;
    let batcher = warm_at(db.direct_url()).await;
    let one = name("s", "k");
    let id = own(&batcher, &one).await;
    let before = connections(&watcher).await;
    client.batch_execute("BEGIN; SELECT 1 FROM once.intent WHERE key = 'k' FOR UPDATE").await.unwrap();
    let mut completing = Box::pin(batcher.succeed(&one, id, answer("x")));
    poll_once(&mut completing).await;
    drop(completing);
    drop(batcher);
    eventually("the connection that claims is closed", async || connections(&watcher).await < before).await;
    client.batch_execute("ROLLBACK").await.unwrap();
    eventually("recorded", async || status_of(&client, &one).await.as_deref() == Some("succeeded")).await;
}
