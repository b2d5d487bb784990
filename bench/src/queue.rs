//! Jobs: bulk enqueueing and end to end, each by its own client, against a bare loop in batches of 500 on 2 connections;
//! a one-insert effect in the transaction of its finish, against that insert alone; the same with a transaction left open.

use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use pgonce::{Failure, Job, JobTx, NewJob, Worker};
use serde_json::Value;
use tokio::process::Command;
use tokio::task::JoinSet;
use tokio_postgres::Client;

use crate::Arguments;
use crate::measure::{Series, emit, rate, report};
use crate::work::{client, once};

const BATCH: usize = 500;
const CONNECTIONS: usize = 2;

const SCHEMA: &str = "DROP TABLE IF EXISTS bench.bare, bench.effect;
    CREATE TABLE bench.bare (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, payload jsonb NOT NULL);
    CREATE TABLE bench.effect (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, job bigint NOT NULL, body jsonb NOT NULL);
    SELECT once.define_queue('bench', '{}')";
const BARE_ADD: &str = "INSERT INTO bench.bare (payload) SELECT p FROM unnest($1::jsonb[]) p";
const BARE_WORK: &str = "DELETE FROM bench.bare WHERE id = ANY (ARRAY(
        SELECT id FROM bench.bare ORDER BY id LIMIT 500 FOR UPDATE SKIP LOCKED)) RETURNING id, payload";
const EFFECT: &str = "INSERT INTO bench.effect (job, body) VALUES ($1, $2)";

/// Jobs a second, in and out, with ratios to the bare loop.
pub async fn queue(arguments: &Arguments, url: &str) -> Result<()> {
    let jobs = arguments.jobs.div_ceil(BATCH * CONNECTIONS) * BATCH * CONNECTIONS;
    client(url).await?.batch_execute(SCHEMA).await?;
    let peers = Peers::install(url).await?;
    let series = |names: &[&str]| -> Vec<Series> {
        names.iter().map(|name| Series { name: (*name).to_owned(), rates: Vec::new() }).collect()
    };
    let mut added = series(&["bare insert", "pgonce enqueue_batch", "graphile-worker add_jobs", "pg-boss insert"]);
    let mut worked = series(&[
        "bare claim-and-delete",
        "pgonce, 1 worker",
        "pgonce, 2 workers",
        "pgonce, 4 workers",
        "pgonce, 2 workers, a transaction open",
        "graphile-worker, 2 processes",
        "pg-boss fetch and complete",
    ]);
    let mut effects = series(&["the insert alone", "with its job's finish", "the same, a transaction open"]);
    for _ in 0..arguments.rounds {
        added[0].rates.push(bare_fill(url, jobs).await?);
        worked[0].rates.push(bare(url, jobs).await?);
        for (place, workers) in [(1, 1), (2, 2), (3, 4)] {
            let rate = fill(url, jobs).await?;
            if place == 1 {
                added[1].rates.push(rate);
            }
            worked[place].rates.push(work(url, jobs, workers).await?);
        }
        let idle = idle(url).await?;
        fill(url, jobs).await?;
        work(url, jobs, 2).await?; // what it leaves behind cannot be removed
        fill(url, jobs).await?;
        worked[4].rates.push(work(url, jobs, 2).await?);
        drop(idle);
        let (in_rate, out_rate) = peers.run("graphile.js", jobs, 2).await?;
        added[2].rates.push(in_rate);
        worked[5].rates.push(out_rate);
        let (in_rate, out_rate) = peers.run("pgboss.js", jobs, 1).await?;
        added[3].rates.push(in_rate);
        worked[6].rates.push(out_rate);

        effects[0].rates.push(inserts(arguments, url).await?);
        fill(url, jobs).await?;
        effects[1].rates.push(with_effect(url, jobs).await?);
        let idle = self::idle(url).await?;
        fill(url, jobs).await?;
        effects[2].rates.push(with_effect(url, jobs).await?);
        drop(idle);
    }
    report("queue, jobs/s enqueued in batches of 500, 2 connections (ratio to the bare insert)", &added);
    report(&format!("queue, {jobs} jobs without an effect, jobs/s (ratio to the bare loop)"), &worked);
    report("queue, a one-insert effect, 4 connections (ratio to the insert alone)", &effects);
    emit(&format!("       this process had {:.0} MB at most", memory_mb()?));
    Ok(())
}

fn payload() -> Value {
    serde_json::json!({"customer": "c-1234567890", "note": "please deliver in the morning, ring twice"})
}

/// Inserts in batches, on two connections: rows a second.
async fn bare_fill(url: &str, jobs: usize) -> Result<f64> {
    let payloads = Arc::new(vec![payload(); BATCH]);
    let mut lanes = Vec::new();
    for _ in 0..CONNECTIONS {
        let client = client(url).await?;
        let statement = client.prepare(BARE_ADD).await?;
        lanes.push((client, statement));
    }
    let started = Instant::now();
    let mut tasks = JoinSet::new();
    for (client, statement) in lanes {
        let payloads = Arc::clone(&payloads);
        tasks.spawn(async move {
            for _ in 0..jobs / BATCH / CONNECTIONS {
                client.execute(&statement, &[&*payloads]).await?;
            }
            anyhow::Ok(())
        });
    }
    all(tasks).await?;
    Ok(per_second(jobs, started))
}

/// Enqueues in batches, on two connections: jobs a second.
async fn fill(url: &str, jobs: usize) -> Result<f64> {
    let batch: Arc<Vec<NewJob>> = Arc::new((0..BATCH).map(|_| NewJob::new(&payload())).collect());
    let once = once(url, CONNECTIONS).await?;
    let started = Instant::now();
    let mut tasks = JoinSet::new();
    for _ in 0..CONNECTIONS {
        let (once, batch) = (once.clone(), Arc::clone(&batch));
        tasks.spawn(async move {
            for _ in 0..jobs / BATCH / CONNECTIONS {
                once.queue("bench").enqueue_batch(&batch).await?;
            }
            anyhow::Ok(())
        });
    }
    all(tasks).await?;
    Ok(per_second(jobs, started))
}

/// The limit: claims and deletes in one statement, reads the job, keeps nothing, fences nothing.
async fn bare(url: &str, jobs: usize) -> Result<f64> {
    let started = Instant::now();
    let mut tasks = JoinSet::new();
    for _ in 0..CONNECTIONS {
        let client = client(url).await?;
        tasks.spawn(async move {
            let statement = client.prepare(BARE_WORK).await?;
            loop {
                let rows = client.query(&statement, &[]).await?;
                if rows.is_empty() {
                    return anyhow::Ok(());
                }
                for row in rows {
                    std::hint::black_box((row.try_get::<_, i64>(0)?, row.try_get::<_, Value>(1)?));
                }
            }
        });
    }
    all(tasks).await?;
    Ok(per_second(jobs, started))
}

/// Workers with handlers that do nothing.
async fn work(url: &str, jobs: usize, workers: usize) -> Result<f64> {
    let done = Arc::new(AtomicU64::new(0));
    let started = Instant::now();
    let mut tasks = JoinSet::new();
    for _ in 0..workers {
        let (once, done) = (once(url, 6).await?, Arc::clone(&done));
        tasks.spawn(async move {
            let handler = async |_: Arc<Job>| {
                done.fetch_add(1, Ordering::Relaxed);
                Ok::<_, Failure>(None)
            };
            Worker::new(once.queue("bench")).at_once(8).run_outside(std::future::pending(), true, handler).await;
            anyhow::Ok(())
        });
    }
    all(tasks).await?;
    let rate = per_second(jobs, started);
    ensure!(done.load(Ordering::Relaxed) == jobs as u64, "each job once: {} of {jobs}", done.load(Ordering::Relaxed));
    Ok(rate)
}

/// Each an insert of its own, committed by itself.
async fn inserts(arguments: &Arguments, url: &str) -> Result<f64> {
    rate(4, arguments.window(), async |worker| {
        let client = Arc::new(client(url).await?);
        let statement = client.prepare(EFFECT).await?;
        let body = crate::work::body();
        let worker = i64::try_from(worker)?;
        Ok(move || {
            let (client, statement, body) = (Arc::clone(&client), statement.clone(), body.clone());
            async move {
                client.execute(&statement, &[&worker, &body]).await?;
                Ok(())
            }
        })
    })
    .await
}

/// The same insert as the effect of a job, in the transaction of its finish.
async fn with_effect(url: &str, jobs: usize) -> Result<f64> {
    let once = once(url, 8).await?;
    let body = crate::work::body();
    let started = Instant::now();
    let handler = async |tx: JobTx, job: Arc<Job>| {
        tx.execute(&tx.prepared(EFFECT).await?, &[&job.id, &body]).await?;
        Ok(())
    };
    Worker::new(once.queue("bench")).at_once(4).run_until_empty(std::future::pending(), handler).await;
    Ok(per_second(jobs, started))
}

/// A transaction that keeps vacuum from everything.
async fn idle(url: &str) -> Result<Client> {
    let client = client(url).await?;
    client.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM bench.effect").await?;
    Ok(client)
}

async fn all(mut tasks: JoinSet<Result<()>>) -> Result<()> {
    while let Some(done) = tasks.join_next().await {
        done??;
    }
    Ok(())
}

fn per_second(jobs: usize, started: Instant) -> f64 {
    jobs as f64 / started.elapsed().as_secs_f64()
}

/// The most memory that this process had.
fn memory_mb() -> Result<f64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("VmHWM")?;
    Ok(line.trim().trim_end_matches(" kB").trim().parse::<f64>()? / 1024.0)
}

/// Other queues, each with its own bulk API, by node.
struct Peers {
    home: PathBuf,
    url: String,
}

impl Peers {
    async fn install(url: &str) -> Result<Self> {
        let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("peers/queues");
        let home = std::env::temp_dir().join("pgonce-bench-queues");
        std::fs::create_dir_all(&home)?;
        for file in ["package.json", "graphile.js", "pgboss.js"] {
            std::fs::copy(source.join(file), home.join(file))?;
        }
        let mut npm = Command::new("npm");
        npm.args(["install", "--no-audit", "--no-fund", "--silent"]).current_dir(&home);
        ensure!(npm.status().await?.success(), "npm install of the peers failed");
        Ok(Self { home, url: for_node(url)? })
    }

    /// Enqueues, then works with so many processes: jobs a second in and out.
    async fn run(&self, script: &str, jobs: usize, processes: usize) -> Result<(f64, f64)> {
        let added = self.node(script, "add", jobs).await?;
        let mut running = Vec::new();
        for _ in 0..processes {
            running.push(self.node(script, "work", jobs));
        }
        // The slowest of them is when all is done.
        let mut slowest: f64 = 0.0;
        for ms in futures_util::future::join_all(running).await {
            slowest = slowest.max(ms?);
        }
        Ok((jobs as f64 / added * 1000.0, jobs as f64 / slowest * 1000.0))
    }

    async fn node(&self, script: &str, verb: &str, jobs: usize) -> Result<f64> {
        let mut command = Command::new("node");
        command
            .args([script, verb, &self.url, &jobs.to_string()])
            .current_dir(&self.home)
            .env("NODE_ENV", "production");
        let output = command.stderr(Stdio::inherit()).output().await?;
        ensure!(output.status.success(), "{script} {verb} failed");
        let said = String::from_utf8(output.stdout)?;
        let last: Value = serde_json::from_str(said.lines().last().context("what it measured")?)?;
        last["ms"].as_f64().context("milliseconds")
    }
}

/// The URL as node-postgres reads it: a socket's folder is a parameter.
fn for_node(url: &str) -> Result<String> {
    let config: tokio_postgres::Config = url.parse()?;
    let (user, database) = (config.get_user().unwrap_or("postgres"), config.get_dbname().unwrap_or("postgres"));
    let port = config.get_ports().first().copied().unwrap_or(5432);
    let password = config.get_password().map_or(String::new(), |word| format!(":{}", String::from_utf8_lossy(word)));
    Ok(match config.get_hosts().first() {
        Some(tokio_postgres::config::Host::Unix(folder)) => {
            format!("postgres://{user}{password}@localhost:{port}/{database}?host={}", folder.display())
        }
        Some(tokio_postgres::config::Host::Tcp(host)) => {
            format!("postgres://{user}{password}@{host}:{port}/{database}")
        }
        None => format!("postgres://{user}{password}@localhost:{port}/{database}"),
    })
}
