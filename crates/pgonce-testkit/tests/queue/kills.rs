//! Real processes, really killed: each job's effect once, none lost, the order of each key kept.

use std::process::Stdio;

use pgonce_testkit::TestDb;
use tokio::process::{Child, Command};
use tokio_postgres::Client;

use crate::desk::{define, number, soon, state, text};

const DID: &str = "CREATE TABLE public.did (seq bigserial, key text, job bigint, attempt int);
    CREATE SEQUENCE public.none; GRANT ALL ON public.did TO PUBLIC";

struct Process {
    name: String,
    child: Child,
}

impl Process {
    fn start(db: &TestDb, number: usize, lease_ms: u32, group: usize) -> Self {
        let name = format!("process {number}");
        let child = Command::new(env!("CARGO_BIN_EXE_pgonce-test-worker"))
            .args([db.url(), "q", &name, &lease_ms.to_string(), &group.to_string()])
            .stdout(Stdio::null())
            .stderr(Stdio::inherit())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        Self { name, child }
    }

    fn signal(&self, signal: &str) {
        let id = self.child.id().unwrap().to_string();
        assert!(std::process::Command::new("kill").args([signal, &id]).status().unwrap().success());
    }

    async fn end(mut self, signal: &str) {
        self.signal(signal);
        self.child.wait().await.unwrap();
    }
}

async fn did(client: &Client) -> i64 {
    number(client, "SELECT count(*) FROM public.did").await
}

async fn check(client: &Client, jobs: i64) {
    assert_eq!(did(client).await, jobs, "each effect once");
    assert_eq!(number(client, "SELECT count(DISTINCT job) FROM public.did").await, jobs);
    let order = "SELECT count(*) FROM (SELECT job, lag(job) OVER (PARTITION BY key ORDER BY seq) AS before
                 FROM public.did WHERE key IS NOT NULL) d WHERE before > job";
    assert_eq!(number(client, order).await, 0, "a key's jobs are done in their order");
}

/// Under load, workers are killed, or stopped until their leases are over and then woken, one after another.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_and_stopped_under_load() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client.batch_execute(DID).await.unwrap();
    define(&client, r#"{"attempts_max": 1000}"#).await;
    let sql = "SELECT once.enqueue_batch('q', array_fill('{}'::jsonb, ARRAY[1200]),
               p_keys => ARRAY(SELECT CASE WHEN n % 4 > 0 THEN 'k' || n % 7 END FROM generate_series(1, 1200) n))";
    client.execute(sql, &[]).await.unwrap();
    let mut processes: Vec<Process> = (0..3).map(|number| Process::start(&db, number, 700, 20)).collect();
    for round in 0..6 {
        let before = did(&client).await;
        if before == 1200 {
            break;
        }
        soon("some progress", async || {
            let now = did(&client).await;
            now >= before + 60 || now == 1200
        })
        .await;
        let process = processes.remove(0);
        if round % 2 == 0 {
            process.end("-KILL").await;
        } else {
            process.signal("-STOP");
            let held = "SELECT count(*)::text FROM once.jobs WHERE worker = $1 AND leased_until > once.clock()";
            soon("its leases are over", async || text(&client, held, &[&process.name]).await.unwrap() == "0").await;
            process.signal("-CONT");
            processes.push(process);
            continue;
        }
        processes.push(Process::start(&db, 10 + round, 700, 20));
    }
    soon("everything is done", async || did(&client).await >= 1200).await;
    for process in processes {
        process.end("-TERM").await;
    }
    check(&client, 1200).await;
    assert_eq!(number(&client, "SELECT count(*) FROM once.jobs").await, 0);
}

/// A job that kills its worker is buried at its limit; the others of its group, and of its key, are done.
#[tokio::test]
async fn a_killer_is_buried() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client.batch_execute(DID).await.unwrap();
    define(&client, r#"{"attempts_max": 3}"#).await;
    let killer = number(&client, "SELECT once.enqueue('q', '{\"kill\": true}', p_key => 'k')").await;
    let behind = number(&client, "SELECT once.enqueue('q', '{}', p_key => 'k')").await;
    let mut died = 0;
    soon("it is buried, and the next is done", async || {
        let mut process = Process::start(&db, died, 400, 50);
        // Until it dies, or nothing is left to be done.
        loop {
            if process.child.try_wait().unwrap().is_some() {
                died += 1;
                return false;
            }
            if state(&client, killer).await == "buried" && state(&client, behind).await == "gone" {
                process.end("-TERM").await;
                return true;
            }
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    })
    .await;
    assert_eq!(died, 3, "three attempts, three workers");
    check(&client, 1).await;
    let reason = text(&client, "SELECT last_error FROM once.jobs_buried", &[]).await.unwrap();
    assert!(reason.contains("did not come back"), "{reason}");
}

/// SIGTERM: what was begun is finished, the rest goes back, and the process ends by itself.
#[tokio::test]
async fn a_terminated_worker_drains() {
    let db = TestDb::new().await;
    let (client, locker) = (db.client().await, db.client().await);
    client.batch_execute(DID).await.unwrap();
    locker.batch_execute("SELECT pg_advisory_lock(77)").await.unwrap();
    define(&client, "{}").await;
    let sql = "SELECT once.enqueue_batch('q', array_fill('{\"lock\": 77}'::jsonb, ARRAY[10]))";
    client.execute(sql, &[]).await.unwrap();
    let mut process = Process::start(&db, 0, 60_000, 1);
    pgonce_testkit::lock_waiters(&client, 2).await;
    process.signal("-TERM");
    let held = "SELECT count(*) FROM once.jobs WHERE state = 'running'";
    soon("what it did not begin is given back, or was never taken", async || number(&client, held).await <= 4).await;
    locker.batch_execute("SELECT pg_advisory_unlock(77)").await.unwrap();
    let ended = process.child.wait().await.unwrap();
    assert!(ended.success());
    assert_eq!(number(&client, held).await, 0);
    let done = did(&client).await;
    assert!((2..=4).contains(&done), "{done}");
    let back = "SELECT count(*) FROM once.jobs WHERE state = 'ready' AND attempts = 0";
    assert_eq!(number(&client, back).await, 10 - done);
}
