//! The Rust worker: groups, failures, cancellation, drain.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pgonce::{Error, Event, Failure, JobTx, NewJob, Once, Unique, Worker};
use pgonce_testkit::TestDb;
use serde_json::json;
use tokio::sync::{Notify, oneshot};

use crate::desk::{number, soon, state, text};

const EFFECT: &str = "INSERT INTO public.effect (scope, key, claim_id) VALUES ('queue', $1, $2)";

async fn effect(tx: &JobTx, key: &str) -> Result<(), Failure> {
    tx.execute(EFFECT, &[&key, &tx.claim_id()]).await?;
    Ok(())
}

fn worker(once: &Once) -> Worker<'_> {
    Worker::new(once.queue("q")).poll_max(Duration::from_millis(20))
}

async fn enqueue(once: &Once, jobs: usize) -> Vec<i64> {
    let jobs: Vec<NewJob> = (0..jobs).map(|job| NewJob::new(&json!({ "n": job }))).collect();
    once.queue("q").enqueue_batch(&jobs).await.unwrap()
}

fn never() -> std::future::Pending<()> {
    std::future::pending()
}

#[tokio::test]
async fn each_job_once_in_groups_and_alone() {
    for group in [1, 50] {
        let db = TestDb::new().await;
        let once = db.once().await;
        enqueue(&once, 300).await;
        let work = async |tx: JobTx, job: Arc<pgonce::Job>| effect(&tx, &job.payload["n"].to_string()).await;
        worker(&once).group(group).run_until_empty(never(), work).await;
        let client = db.client().await;
        assert_eq!(number(&client, "SELECT count(DISTINCT key) FROM public.effect").await, 300);
        assert_eq!(number(&client, "SELECT count(*) FROM public.effect").await, 300);
        assert_eq!(number(&client, "SELECT count(*) FROM once.jobs").await, 0);
    }
}

/// Each job of a key lets the next one through when it ends: a look that came before is no sign of an empty queue.
#[tokio::test(flavor = "multi_thread")]
async fn empty_means_nobody_waits_for_what_just_ended() {
    let db = TestDb::new().await;
    let once = db.once().await;
    let jobs: Vec<NewJob> = (0..200).map(|job| NewJob::new(&json!({ "n": job })).key("k")).collect();
    once.queue("q").enqueue_batch(&jobs).await.unwrap();
    let work = async |tx: JobTx, job: Arc<pgonce::Job>| effect(&tx, &job.payload["n"].to_string()).await;
    worker(&once).run_until_empty(never(), work).await;
    assert_eq!(number(&db.client().await, "SELECT count(*) FROM public.effect").await, 200);
}

/// Workers can be spawned, in each of their forms.
#[tokio::test]
async fn a_worker_can_be_a_task() {
    let db = TestDb::new().await;
    let once = db.once().await;
    enqueue(&once, 20).await;
    let inside = tokio::spawn({
        let once = once.clone();
        async move {
            let work = async |tx: JobTx, job: Arc<pgonce::Job>| effect(&tx, &job.id.to_string()).await;
            worker(&once).run_until_empty(never(), work).await;
        }
    });
    inside.await.unwrap();
    let outside = tokio::spawn(async move {
        worker(&once).run_outside(never(), true, async |_: Arc<pgonce::Job>| Ok(None)).await;
    });
    outside.await.unwrap();
    assert_eq!(number(&db.client().await, "SELECT count(*) FROM public.effect").await, 20);
}

/// A failure in the middle of a group: its own effect goes, its neighbours' stay.
#[tokio::test]
async fn a_failure_costs_its_neighbours_nothing() {
    let db = TestDb::new().await;
    let once = db.once().await;
    let ids = enqueue(&once, 20).await;
    let work = async |tx: JobTx, job: Arc<pgonce::Job>| {
        let n = job.payload["n"].as_i64().unwrap();
        effect(&tx, &n.to_string()).await?;
        match n {
            3 => Err(Failure::refuse("never", "not this one")),
            7 => Err(Failure::retry("later", "not now")),
            // A statement that fails aborts the transaction down to the savepoint.
            11 => {
                tx.execute("SELECT 1 / 0", &[]).await?;
                Ok(())
            }
            // One that is swallowed, too: the whole group goes, and each is run alone.
            15 => {
                let _ = tx.execute("SELECT 1 / 0", &[]).await;
                Ok(())
            }
            19 => Err(Failure::retry("later", "the last of its group")),
            _ => Ok(()),
        }
    };
    worker(&once).at_once(1).ahead(100).run_until_empty(never(), work).await;
    let client = db.client().await;
    assert_eq!(state(&client, ids[3]).await, "buried");
    for failed in [7, 11, 15, 19] {
        assert_eq!(state(&client, ids[failed]).await, "delayed", "{failed}");
    }
    assert_eq!(number(&client, "SELECT count(DISTINCT key) FROM public.effect").await, 15);
    assert_eq!(number(&client, "SELECT count(*) FROM public.effect").await, 15);
    let error = "SELECT last_error FROM once.jobs WHERE id = $1";
    assert!(text(&client, error, &[&ids[11]]).await.unwrap().contains("22012"));
}

/// One job of a group is lost before the group ends: the finish of all is refused, and the others are done alone, once.
#[tokio::test]
async fn a_lost_job_costs_its_group_a_second_run_and_no_more() {
    let db = TestDb::new().await;
    let once = db.once().await;
    let ids = enqueue(&once, 10).await;
    let thief = db.client().await;
    let work = async |tx: JobTx, job: Arc<pgonce::Job>| {
        effect(&tx, &job.id.to_string()).await?;
        if job.id == ids[4] && job.attempt == 1 {
            // As a rescue does, and another worker's take.
            let sql = "UPDATE once.job SET claim_id = gen_random_uuid() WHERE id = $1";
            thief.execute(sql, &[&job.id]).await.unwrap();
        }
        Ok(())
    };
    let stop = async {
        soon("the others are done", async || number(&thief, "SELECT count(*) FROM once.jobs").await == 1).await;
    };
    worker(&once).at_once(1).lease(Duration::from_secs(600)).run_until(stop, work).await;
    assert_eq!(number(&thief, "SELECT count(DISTINCT key) FROM public.effect").await, 9);
    assert_eq!(number(&thief, "SELECT count(*) FROM public.effect").await, 9);
    assert_eq!(state(&thief, ids[4]).await, "running", "it is the other's");
}

/// Serialization failures and deadlocks are run again, and are no attempts.
#[tokio::test]
async fn a_deadlock_is_run_again() {
    let db = TestDb::new().await;
    let once = db.once().await;
    let id = enqueue(&once, 1).await[0];
    let calls = AtomicUsize::new(0);
    let work = async |tx: JobTx, _: Arc<pgonce::Job>| {
        effect(&tx, "job").await?;
        if calls.fetch_add(1, Ordering::Relaxed) < 2 {
            tx.execute("DO $$ BEGIN RAISE EXCEPTION 'deadlock' USING ERRCODE = '40P01'; END $$", &[]).await?;
        }
        Ok(())
    };
    worker(&once).run_until_empty(never(), work).await;
    assert_eq!((db.effects("job").await, calls.into_inner()), (1, 3));
    assert_eq!(state(&db.client().await, id).await, "gone");
}

#[tokio::test]
async fn a_kept_transaction_is_not_committed() {
    let db = TestDb::new().await;
    let once = db.once().await;
    let id = enqueue(&once, 1).await[0];
    let kept = Mutex::new(Vec::new());
    let work = async |tx: JobTx, _: Arc<pgonce::Job>| {
        effect(&tx, "job").await?;
        kept.lock().unwrap().push(tx);
        Ok(())
    };
    worker(&once).run_until_empty(never(), work).await;
    assert_eq!(db.effects("job").await, 0);
    assert_eq!(state(&db.client().await, id).await, "delayed");
}

/// The handler of a job that was cancelled, or lost, is dropped, and what it wrote goes.
#[tokio::test]
async fn what_is_cancelled_is_dropped() {
    let db = TestDb::new().await;
    let once = db.once().await;
    let id = enqueue(&once, 1).await[0];
    let began = Notify::new();
    let work = async |tx: JobTx, _: Arc<pgonce::Job>| {
        effect(&tx, "job").await?;
        began.notify_one();
        std::future::pending().await
    };
    let client = db.client().await;
    let cancel = async {
        began.notified().await;
        assert_eq!(once.queue("q").cancel(id).await.unwrap().as_deref(), Some("asked"));
        soon("it is cancelled", async || state(&client, id).await == "cancelled").await;
    };
    worker(&once).lease(Duration::from_millis(300)).run_until(cancel, work).await;
    assert_eq!(db.effects("job").await, 0);
}

/// A handler that takes longer than the lease keeps its job by heartbeats.
#[tokio::test]
async fn heartbeats_keep_a_slow_job() {
    let db = TestDb::new().await;
    let once = db.once().await;
    let id = enqueue(&once, 1).await[0];
    let client = db.client().await;
    let lease = "SELECT leased_until::text FROM once.jobs";
    let work = async |tx: JobTx, _: Arc<pgonce::Job>| {
        let first = text(&client, lease, &[]).await.unwrap();
        let mut last = first.clone();
        // Longer than its lease is over without heartbeats.
        for _ in 0..4 {
            soon("a heartbeat", async || text(&client, lease, &[]).await.unwrap() != last).await;
            last = text(&client, lease, &[]).await.unwrap();
        }
        effect(&tx, "job").await
    };
    worker(&once).lease(Duration::from_millis(600)).run_until_empty(never(), work).await;
    assert_eq!(db.effects("job").await, 1);
    assert_eq!(state(&client, id).await, "gone");
}

/// Told to stop: what was begun is finished, what was taken ahead goes back, its attempt not counted.
#[tokio::test]
async fn a_drain_gives_back() {
    let db = TestDb::new().await;
    let once = db.once().await;
    enqueue(&once, 40).await;
    let (begun, going) = (Notify::new(), Notify::new());
    let (stop, stopped) = oneshot::channel::<()>();
    let work = async |tx: JobTx, job: Arc<pgonce::Job>| {
        effect(&tx, &job.id.to_string()).await?;
        if job.payload["n"] == 9 {
            begun.notify_one();
            going.notified().await;
        }
        Ok(())
    };
    let client = db.client().await;
    let worker = worker(&once).at_once(1).group(1).lease(Duration::from_secs(600));
    let running = worker.run_until(
        async {
            let _ = stopped.await;
        },
        work,
    );
    let told = async {
        begun.notified().await;
        // Some were taken ahead by now: quick ones came before.
        soon("more than one is in hand", async || {
            number(&client, "SELECT count(*) FROM once.jobs WHERE state = 'running'").await > 1
        })
        .await;
        stop.send(()).unwrap();
        going.notify_one();
    };
    tokio::join!(running, told);
    let done = number(&client, "SELECT count(*) FROM public.effect").await;
    assert_eq!(done, 10);
    let back = "SELECT count(*) FROM once.jobs WHERE state = 'ready' AND attempts = 0";
    assert_eq!(number(&client, back).await, 30);
}

#[tokio::test]
async fn enqueued_with_its_effect_and_by_every_door() {
    let db = TestDb::new().await;
    let once = db.once().await;
    let queue = once.queue("q").tenant("t");
    let client = db.client().await;
    let failed = once
        .intent("order", "k1")
        .tenant("t")
        .run(async |tx| {
            tx.enqueue("q", &NewJob::new(&1)).await?;
            Err::<(), _>(Failure::refuse("no", "no"))
        })
        .await;
    assert!(matches!(failed, Err(Error::Failed { .. })));
    assert_eq!(number(&client, "SELECT count(*) FROM once.jobs").await, 0);
    once.intent("order", "k2")
        .tenant("t")
        .run(async |tx| {
            tx.enqueue("q", &NewJob::new(&"by an intent").priority(2).key("k").attempts_max(5)).await?;
            Ok(())
        })
        .await
        .unwrap();
    let message = once.consumer("c").tenant("t").message("m", b"x");
    once.consumer("c")
        .tenant("t")
        .process(&message, async |tx| {
            tx.enqueue("q", &NewJob::new(&"by a message")).await?;
            Ok(())
        })
        .await
        .unwrap();
    pgonce::enqueue(&client, "t", "q", &NewJob::new(&"by a plain connection")).await.unwrap();
    let unique = NewJob::new(&"twice").unique("u", Unique::Window(Duration::from_secs(60)));
    let id = queue.enqueue(&unique).await.unwrap();
    assert_eq!(queue.enqueue(&unique).await.unwrap(), id);
    let later = queue.enqueue(&NewJob::new(&"later").after(Duration::from_secs(3600))).await.unwrap();
    let at = std::time::SystemTime::now() + Duration::from_secs(3600);
    queue.enqueue_batch(&[NewJob::new(&"at").at(at), NewJob::new(&"now")]).await.unwrap();
    let work = async |tx: JobTx, job: Arc<pgonce::Job>| {
        effect(&tx, job.payload.as_str().unwrap()).await?;
        if job.payload == "by an intent" {
            tx.result(json!({"priority": job.priority, "key": job.key, "attempts_max": job.attempts_max}));
            tx.emit(Event::new("orders", "order.done", &1)).await?;
            tx.enqueue("q", &NewJob::new(&"by a job")).await?;
        }
        Ok(())
    };
    worker(&once).run_until_empty(never(), work).await;
    for key in ["by an intent", "by a message", "by a plain connection", "twice", "now", "by a job"] {
        assert_eq!(db.effects(key).await, 1, "{key}");
    }
    assert_eq!(queue.look(later).await.unwrap().unwrap().state, "delayed");
    let result = "SELECT result::text FROM once.job_ended";
    let kept: serde_json::Value = serde_json::from_str(&text(&client, result, &[]).await.unwrap()).unwrap();
    assert_eq!(kept, json!({"priority": 2, "key": "k", "attempts_max": 5}));
    assert_eq!(number(&client, "SELECT count(*) FROM once.outbox").await, 1);
}

/// Effects elsewhere: finished in batches, each once while nobody dies.
#[tokio::test]
async fn outside_of_transactions() {
    let db = TestDb::new().await;
    let once = db.once().await;
    let ids = enqueue(&once, 200).await;
    let calls = AtomicUsize::new(0);
    let work = async |job: Arc<pgonce::Job>| {
        calls.fetch_add(1, Ordering::Relaxed);
        match job.payload["n"].as_i64().unwrap() {
            5 => Err(Failure::refuse("no", "never")),
            6 => Err(Failure::retry("no", "later")),
            7 => Ok(Some(json!("kept"))),
            _ => Ok(None),
        }
    };
    worker(&once).at_once(8).run_outside(never(), true, work).await;
    let client = db.client().await;
    assert_eq!(calls.into_inner(), 200);
    let states = (state(&client, ids[5]).await, state(&client, ids[6]).await, state(&client, ids[7]).await);
    assert_eq!(states, ("buried".into(), "delayed".into(), "succeeded".into()));
    assert_eq!(number(&client, "SELECT count(*) FROM once.jobs").await, 1);
}

/// However many are taken at once, and wherever their rows lie: the more urgent ones first, and then the older ones.
#[tokio::test]
async fn jobs_are_begun_in_their_order() {
    let db = TestDb::new().await;
    let (once, client) = (db.once().await, db.client().await);
    let jobs: Vec<NewJob> = (0..300).map(|job| NewJob::new(&job).priority(job / 100)).collect();
    let ids = once.queue("q").enqueue_batch(&jobs).await.unwrap();
    client.execute("UPDATE once.job SET position = -position WHERE priority = 1", &[]).await.unwrap();
    let begun = Mutex::new(Vec::new());
    let work = async |job: Arc<pgonce::Job>| {
        begun.lock().unwrap().push(job.id);
        Ok(None)
    };
    worker(&once).at_once(1).run_outside(never(), true, work).await;
    let expected = ids[200..].iter().chain(ids[100..200].iter().rev()).chain(&ids[..100]);
    assert_eq!(begun.into_inner().unwrap(), expected.copied().collect::<Vec<_>>());
}

/// One job was lost meanwhile: all others that were taken with it are finished.
#[tokio::test]
async fn a_lost_job_does_not_cost_others_their_finish() {
    let db = TestDb::new().await;
    let (once, client) = (db.once().await, db.client().await);
    let ids = enqueue(&once, 600).await;
    let lose = "UPDATE once.job SET claim_id = gen_random_uuid() WHERE id = $1 AND claim_id IS NOT NULL";
    let done = AtomicUsize::new(0);
    let work = async |job: Arc<pgonce::Job>| {
        if job.id == ids[500] {
            assert_eq!(client.execute(lose, &[&job.id]).await.unwrap(), 1);
        }
        done.fetch_add(1, Ordering::Relaxed);
        Ok(None)
    };
    worker(&once).at_once(8).run_outside(never(), true, work).await;
    assert_eq!((done.into_inner(), state(&client, ids[500]).await), (600, "running".into()));
    assert_eq!(number(&client, "SELECT count(*) FROM once.jobs").await, 1);
}

/// Workers fire what is due; each time makes one job, however many there are.
#[tokio::test]
async fn schedules_are_fired_by_workers() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let define = "SELECT once.define_schedule('every second', 'q', '* * * * * *', '{\"n\": 1}')";
    client.execute(define, &[]).await.unwrap();
    let never = "SELECT once.define_schedule('never', 'q', '0 0 30 2 *', '{}')";
    client.execute(never, &[]).await.unwrap();
    let (one, other) = (db.once().await, db.once().await);
    let done = "SELECT count(*) FROM public.effect";
    let stop = async || soon("three are done", async || number(&db.client().await, done).await >= 3).await;
    let work = async |tx: JobTx, job: Arc<pgonce::Job>| effect(&tx, &job.id.to_string()).await;
    let (one, other) = (worker(&one), worker(&other));
    tokio::join!(one.run_until(stop(), work), other.run_until(stop(), work));
    let fault = "SELECT last_error FROM once.schedules WHERE schedule = 'never'";
    assert!(text(&client, fault, &[]).await.unwrap().contains("never comes"));
    // A job a second, at most: ids are of different seconds.
    let twice =
        "SELECT count(*) FROM (SELECT date_trunc('second', at) FROM public.effect e GROUP BY 1 HAVING count(*) > 2) t";
    assert_eq!(number(&client, twice).await, 0);
}

/// A job that was cancelled while it waited in the worker's hands is not begun.
#[tokio::test]
async fn what_is_cancelled_in_hand_is_not_begun() {
    let db = TestDb::new().await;
    let (once, client) = (db.once().await, db.client().await);
    let jobs = enqueue(&once, 2).await;
    let (begun, release) = (AtomicUsize::new(0), Notify::new());
    let work = async |job: Arc<pgonce::Job>| {
        begun.fetch_add(1, Ordering::SeqCst);
        if job.id == jobs[0] {
            release.notified().await;
        }
        Ok(None)
    };
    let worker = worker(&once).at_once(1).lease(Duration::from_secs(3));
    let cancel = async {
        soon("both are taken", async || {
            number(&client, "SELECT count(*) FROM once.jobs WHERE state = 'running'").await == 2
        })
        .await;
        let cancelled = text(&client, "SELECT once.cancel_job($1)", &[&jobs[1]]).await;
        assert_eq!(cancelled.unwrap(), "asked");
        // Two heartbeats: what the first one was told is known when the second one comes.
        let lease = format!("SELECT leased_until::text FROM once.jobs WHERE id = {}", jobs[1]);
        for _ in 0..2 {
            let before = text(&client, &lease, &[]).await;
            soon("a heartbeat", async || text(&client, &lease, &[]).await != before).await;
        }
        release.notify_one();
    };
    tokio::join!(worker.run_outside(never(), true, work), cancel);
    assert_eq!(begun.load(Ordering::SeqCst), 1);
    assert_eq!(state(&client, jobs[1]).await, "cancelled");
}
