//! The scenarios of the intent engine.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::Arguments;
use crate::measure::{Series, emit, rate, report};
use crate::work::{self, Keys, Plain, Tutorial, client, once, plain_pool, plain_pooled, protected, protected_emitting};

/// The database to measure on, and the private cluster that holds it, if there is one.
pub async fn database(arguments: &Arguments) -> Result<(String, Option<pgonce_cluster::Cluster>)> {
    if let Some(url) = &arguments.database_url {
        return Ok((url.clone(), None));
    }
    let cluster = tokio::task::spawn_blocking(pgonce_cluster::Cluster::temporary).await??;
    // By the Unix socket: the network's cost is not what is compared here (the delay scenario has its own).
    let url = format!("host={} port={} user=postgres dbname=postgres", cluster.socket_dir().display(), cluster.port());
    Ok((url, Some(cluster)))
}

/// Puts the schemas in place and says what is measured on.
pub async fn prepare(url: &str) -> Result<()> {
    let mut client = client(url).await?;
    pgonce::migrate::apply(&mut client, false).await?;
    client.batch_execute(work::SCHEMA).await?;
    let row = client
        .query_one("SELECT version(), current_setting('fsync'), current_setting('synchronous_commit'), current_setting('shared_buffers')", &[])
        .await?;
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    emit(&format!(
        "{} | fsync {} | synchronous_commit {} | shared_buffers {} | {cores} cores",
        row.get::<_, String>(0),
        row.get::<_, String>(1),
        row.get::<_, String>(2),
        row.get::<_, String>(3)
    ));
    Ok(())
}

/// Protected against unprotected, at 1, 8 and 32 connections, with the tutorial's way as the peer.
pub async fn write(arguments: &Arguments, url: &str) -> Result<()> {
    for connections in [1, 8, 32] {
        let series = writes(arguments, url, connections, true).await?;
        report(&format!("protected write, {connections} connections (ratio to plain)"), &series);
    }
    Ok(())
}

/// The unprotected write on connections of a pool, as pgonce has them.
const POOLED: &str = "plain, through a pool";
/// The outbox insert by [`pgonce::Tx::emit`], which costs no round trip of its own.
const EMITTING: &str = "pgonce, its message by emit";

async fn writes(arguments: &Arguments, url: &str, connections: usize, tutorial: bool) -> Result<Vec<Series>> {
    let names: &[&str] =
        if tutorial { &["plain", "pgonce", EMITTING, "tutorial", POOLED] } else { &["plain", "pgonce"] };
    let mut series: Vec<Series> =
        names.iter().map(|name| Series { name: (*name).to_owned(), rates: Vec::new() }).collect();
    let keys = Keys::new();
    let once = once(url, connections).await?;
    let pool = plain_pool(url, connections)?;
    for _ in 0..arguments.rounds {
        for one in &mut series {
            let window = arguments.window();
            let got = match one.name.as_str() {
                POOLED => {
                    rate(connections, window, async |_| {
                        let (pool, keys) = (pool.clone(), keys.clone());
                        Ok(move || {
                            let (pool, keys) = (pool.clone(), keys.clone());
                            async move { plain_pooled(&pool, &keys.fresh()).await }
                        })
                    })
                    .await?
                }
                "plain" => {
                    rate(connections, window, async |_| {
                        let (plain, keys) = (Arc::new(Plain::new(url).await?), keys.clone());
                        Ok(move || {
                            let (plain, keys) = (Arc::clone(&plain), keys.clone());
                            async move { plain.write(&keys.fresh()).await }
                        })
                    })
                    .await?
                }
                name @ ("pgonce" | EMITTING) => {
                    let emits = name == EMITTING;
                    rate(connections, window, async |_| {
                        let (once, keys) = (once.clone(), keys.clone());
                        Ok(move || {
                            let (once, keys) = (once.clone(), keys.clone());
                            async move {
                                if emits {
                                    protected_emitting(&once, keys.fresh()).await
                                } else {
                                    protected(&once, keys.fresh()).await
                                }
                            }
                        })
                    })
                    .await?
                }
                _ => {
                    rate(connections, window, async |_| {
                        let (tutorial, keys) = (Arc::new(Tutorial::new(url).await?), keys.clone());
                        Ok(move || {
                            let (tutorial, keys) = (Arc::clone(&tutorial), keys.clone());
                            async move { tutorial.write(&keys.fresh()).await }
                        })
                    })
                    .await?
                }
            };
            one.rates.push(got);
        }
    }
    Ok(series)
}

/// The same with a millisecond on every round trip.
pub async fn delay(arguments: &Arguments, url: &str) -> Result<()> {
    let slow = delaying_proxy(url, Duration::from_micros(500)).await?;
    let series = writes(arguments, &slow, 8, true).await?;
    report("protected write, 8 connections, 1 ms a round trip (ratio to plain)", &series);
    Ok(())
}

/// Replays against a bare primary-key select of a row of the same size.
pub async fn replay(arguments: &Arguments, url: &str) -> Result<()> {
    for (title, connections, keys) in [("replay, 8 connections", 8, 1), ("storm, 32 connections on 100 keys", 32, 100)]
    {
        if title.starts_with("storm") {
            continue;
        }
        report(
            &format!("{title} (ratio to a bare primary-key select)"),
            &replays(arguments, url, connections, keys).await?,
        );
    }
    Ok(())
}

/// 32 clients on 100 keys, all of them settled: what a retry storm is.
pub async fn storm(arguments: &Arguments, url: &str) -> Result<()> {
    report(
        "storm, 32 connections on 100 settled keys (ratio to a bare primary-key select)",
        &replays(arguments, url, 32, 100).await?,
    );
    Ok(())
}

async fn replays(arguments: &Arguments, url: &str, connections: usize, keys: usize) -> Result<Vec<Series>> {
    let names = ["select", "once.claim", "Intent::run", "tutorial"];
    let mut series: Vec<Series> = names.map(|name| Series { name: name.to_owned(), rates: Vec::new() }).into();
    let fresh = Keys::new();
    let once = once(url, connections).await?;
    let tutorial = Tutorial::new(url).await?;
    let mut all = Vec::new();
    for _ in 0..keys {
        let key = fresh.fresh();
        protected(&once, key.clone()).await?;
        tutorial.write(&key).await?;
        all.push(key);
    }
    let all: Arc<[String]> = all.into();
    let before = wal(url).await?;
    for _ in 0..arguments.rounds {
        for one in &mut series {
            let window = arguments.window();
            let got = match one.name.as_str() {
                "Intent::run" => {
                    rate(connections, window, async |index| {
                        let (once, all, turn) = (once.clone(), Arc::clone(&all), Turn::new(index));
                        let body = Arc::new(work::body());
                        Ok(move || {
                            let (once, body) = (once.clone(), Arc::clone(&body));
                            let key = all[turn.next() % all.len()].clone();
                            async move { work::protected_with(&once, key, &body).await }
                        })
                    })
                    .await?
                }
                "tutorial" => {
                    rate(connections, window, async |index| {
                        let (tutorial, all, turn) =
                            (Arc::new(Tutorial::new(url).await?), Arc::clone(&all), Turn::new(index));
                        Ok(move || {
                            let (tutorial, key) = (Arc::clone(&tutorial), all[turn.next() % all.len()].clone());
                            async move { tutorial.write(&key).await }
                        })
                    })
                    .await?
                }
                name => {
                    let text = if name == "select" {
                        "SELECT claim_id, attempt_count, response_code, response_headers, response_body, result_type, result_id, failure_code \
                         FROM once.intent WHERE tenant = '' AND scope = $1 AND key = $2 AND fingerprint = $3"
                    } else {
                        "SELECT once.claim($1, $2, $3)::text"
                    };
                    rate(connections, window, async |index| {
                        let client = client(url).await?;
                        let statement = client.prepare(text).await?;
                        let shared = Arc::new((client, statement));
                        let (all, turn) = (Arc::clone(&all), Turn::new(index));
                        let fingerprint = pgonce::fingerprint(&work::body(), "", "")?;
                        Ok(move || {
                            let (shared, key) = (Arc::clone(&shared), all[turn.next() % all.len()].clone());
                            async move {
                                let row = shared.0.query_one(&shared.1, &[&"bench", &key, &fingerprint]).await?;
                                ensure!(!row.is_empty());
                                Ok(())
                            }
                        })
                    })
                    .await?
                }
            };
            one.rates.push(got);
        }
    }
    let written = wal(url).await? - before;
    eprintln!("(WAL during all of it, tutorial included: {written} bytes)");
    Ok(series)
}

/// Which key is next for a worker.
struct Turn(std::sync::atomic::AtomicUsize);

impl Turn {
    fn new(start: usize) -> Self {
        Self(std::sync::atomic::AtomicUsize::new(start * 7))
    }

    fn next(&self) -> usize {
        self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
    }
}

async fn wal(url: &str) -> Result<i64> {
    let row = client(url).await?.query_one("SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint", &[]).await?;
    Ok(row.get(0))
}

/// CPU time of one write, in the client and in the server: steadier than rates on a busy machine.
pub async fn cpu(arguments: &Arguments, url: &str) -> Result<()> {
    let server: i32 = client(url).await?.query_one("SELECT pg_backend_pid()", &[]).await?.get(0);
    let postmaster = parent(server)?;
    eprintln!("\nCPU microseconds a write, 8 connections: client + server (ratio of the sum to plain)");
    let mut base = None;
    for contender in ["plain", "pgonce", EMITTING, "tutorial"] {
        let keys = Keys::new();
        let once = once(url, 8).await?;
        let calls = Arc::new(std::sync::atomic::AtomicU64::new(0));
        let before = (ticks(std::process::id())?, tree_ticks(&postmaster)?);
        rate(8, arguments.window() * 2, async |_| {
            let (plain, tutorial) = (Plain::new(url).await?, Tutorial::new(url).await?);
            let shared = Arc::new((plain, tutorial, once.clone(), keys.clone(), Arc::clone(&calls)));
            Ok(move || {
                let shared = Arc::clone(&shared);
                async move {
                    let (plain, tutorial, once, keys, calls) = &*shared;
                    calls.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    match contender {
                        "plain" => plain.write(&keys.fresh()).await,
                        "pgonce" => protected(once, keys.fresh()).await,
                        EMITTING => protected_emitting(once, keys.fresh()).await,
                        _ => tutorial.write(&keys.fresh()).await,
                    }
                }
            })
        })
        .await?;
        let after = (ticks(std::process::id())?, tree_ticks(&postmaster)?);
        let each = |ticks: u64| ticks as f64 * 10_000.0 / calls.load(std::sync::atomic::Ordering::Relaxed) as f64;
        let (ours, theirs) = (each(after.0 - before.0), each(after.1 - before.1));
        let first = *base.get_or_insert(ours + theirs);
        emit(&format!("{:5.2}  {ours:6.1} + {theirs:6.1}  {contender}", first / (ours + theirs)));
    }
    Ok(())
}

fn stat(pid: &str) -> Result<Vec<String>> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let rest = text.rsplit_once(')').map_or("", |(_, rest)| rest);
    Ok(rest.split_whitespace().map(str::to_owned).collect())
}

fn parent(pid: i32) -> Result<String> {
    Ok(stat(&pid.to_string())?.get(1).cloned().unwrap_or_default())
}

/// User and system time of a process, in hundredths of a second.
fn ticks(pid: u32) -> Result<u64> {
    let fields = stat(&pid.to_string())?;
    Ok(fields[11].parse::<u64>()? + fields[12].parse::<u64>()?)
}

/// The same for a server and all its children, ended ones included.
fn tree_ticks(postmaster: &str) -> Result<u64> {
    let mut sum = 0;
    for entry in std::fs::read_dir("/proc")? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        let Ok(fields) = stat(&name) else { continue };
        let ours = name == postmaster;
        if ours || fields.get(1).is_some_and(|parent| parent == postmaster) {
            let columns: &[usize] = if ours { &[11, 12, 13, 14] } else { &[11, 12] };
            sum += columns.iter().filter_map(|column| fields[*column].parse::<u64>().ok()).sum::<u64>();
        }
    }
    Ok(sum)
}

/// WAL bytes and row versions of one write.
pub async fn cost(url: &str) -> Result<()> {
    const WRITES: i64 = 2000;
    // Small tables: with large ones every random page would be counted with its full image.
    let empty = client(url).await?;
    empty.batch_execute("TRUNCATE once.intent, bench.business, bench.outbox, bench.tutorial").await?;
    let keys = Keys::new();
    let once = once(url, 1).await?;
    let (plain, tutorial) = (Plain::new(url).await?, Tutorial::new(url).await?);
    let observer = client(url).await?;
    let mut bytes = Vec::new();
    for contender in ["plain", "pgonce", "tutorial", "replay"] {
        // Full-page images belong to checkpoints, not to the work: write each page once before counting.
        observer.batch_execute("CHECKPOINT").await?;
        let settled = keys.fresh();
        protected(&once, settled.clone()).await?;
        let mut before = 0;
        for turn in 0..WRITES * 2 {
            if turn == WRITES {
                before = wal(url).await?;
            }
            match contender {
                "plain" => plain.write(&keys.fresh()).await?,
                "pgonce" => protected(&once, keys.fresh()).await?,
                "tutorial" => tutorial.write(&keys.fresh()).await?,
                _ => protected(&once, settled.clone()).await?,
            }
        }
        bytes.push((contender, (wal(url).await? - before) / WRITES));
    }
    eprintln!("\nWAL bytes a call (ratio to plain)");
    for (contender, each) in &bytes {
        emit(&format!("{:5.2}  {each:>6} bytes  {contender}", *each as f64 / bytes[0].1 as f64));
    }
    let versions =
        "SELECT n_tup_ins + n_tup_upd, n_tup_ins FROM pg_stat_user_tables WHERE relid = 'once.intent'::regclass";
    drop((plain, tutorial, once)); // ended backends have reported
    let row = loop {
        let row = observer.query_one(versions, &[]).await?;
        if row.get::<_, Option<i64>>(1).unwrap_or_default() >= WRITES {
            break row;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    emit(&format!("{:5.2}  row versions an atomic intent", row.get::<_, i64>(0) as f64 / row.get::<_, i64>(1) as f64));
    Ok(())
}

/// The cost of a new claim as the table grows.
pub async fn growth(arguments: &Arguments, url: &str) -> Result<()> {
    let observer = client(url).await?;
    let mut base = None;
    eprintln!("\nnew intents against a growing table, 8 connections (ratio: time a write, to that at 1,000 rows)");
    for rows in [1_000, 1_000_000, arguments.rows_max] {
        let have: i64 = observer.query_one("SELECT count(*) FROM once.intent", &[]).await?.get(0);
        let missing = i64::try_from(rows)? - have;
        if missing > 0 {
            observer
                .execute(
                    "INSERT INTO once.intent (claim_id, created_at, expires_at, status, attempt_count, tenant, scope, key, fingerprint, response_body)
                     SELECT gen_random_uuid(), now(), now() + interval '7 days', 'succeeded', 1, '', 'bench', gen_random_uuid()::text || n,
                            sha256(n::text::bytea), '\\x323031' FROM generate_series(1, $1::bigint) n",
                    &[&missing],
                )
                .await?;
            // One at a time: VACUUM does not run in the transaction that several statements in one message make.
            observer.batch_execute("VACUUM ANALYZE once.intent").await?;
            observer.batch_execute("CHECKPOINT").await?;
        }
        let series = writes(&Arguments { rounds: 3, ..arguments_like(arguments) }, url, 8, false).await?;
        let cost = series[0].median() / series[1].median();
        let first = *base.get_or_insert(cost);
        let size: String =
            observer.query_one("SELECT pg_size_pretty(pg_total_relation_size('once.intent'))", &[]).await?.get(0);
        emit(&format!(
            "{:5.2}  {rows:>9} rows ({size})  {:.0}/s protected, {:.0}/s plain",
            cost / first,
            series[1].median(),
            series[0].median()
        ));
    }
    Ok(())
}

fn arguments_like(arguments: &Arguments) -> Arguments {
    Arguments { scenarios: Vec::new(), brokers: Vec::new(), database_url: None, ..*arguments }
}

/// A proxy on loopback that holds every chunk back for a while, each way: half a round trip.
async fn delaying_proxy(url: &str, each_way: Duration) -> Result<String> {
    let config: tokio_postgres::Config = url.parse()?;
    let port = config.get_ports().first().copied().unwrap_or(5432);
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let ours = listener.local_addr()?.port();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            tokio::spawn(async move {
                let Ok(server) = TcpStream::connect(("127.0.0.1", port)).await else { return };
                let _ = (client.set_nodelay(true), server.set_nodelay(true));
                let (client_read, client_write) = client.into_split();
                let (server_read, server_write) = server.into_split();
                tokio::join!(late(client_read, server_write, each_way), late(server_read, client_write, each_way));
            });
        }
    });
    let (user, database) = (config.get_user().unwrap_or("postgres"), config.get_dbname().unwrap_or("postgres"));
    Ok(format!("host=127.0.0.1 port={ours} user={user} dbname={database} sslmode=disable"))
}

/// Passes chunks on, each so much later than it came: a line with latency, not one with less throughput.
async fn late(mut from: tokio::net::tcp::OwnedReadHalf, mut to: tokio::net::tcp::OwnedWriteHalf, delay: Duration) {
    let (sender, mut line) = tokio::sync::mpsc::unbounded_channel::<(tokio::time::Instant, Vec<u8>)>();
    let read = async move {
        let mut buffer = vec![0; 65536];
        while let Ok(length @ 1..) = from.read(&mut buffer).await {
            if sender.send((tokio::time::Instant::now() + delay, buffer[..length].to_vec())).is_err() {
                return;
            }
        }
    };
    let write = async move {
        while let Some((due, chunk)) = line.recv().await {
            tokio::time::sleep_until(due).await;
            if to.write_all(&chunk).await.is_err() {
                return;
            }
        }
    };
    tokio::join!(read, write);
}
