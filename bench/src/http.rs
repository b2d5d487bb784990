//! The gateway beside nginx and beside the usual middleware, all before the same service.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, Command};

use crate::Arguments;
use crate::measure::{Series, emit, report};

/// Clients at once.
const CLIENTS: usize = 64;
/// Keys that are replayed.
const REPLAYED: u64 = 100;

/// A process that ends with this one.
struct Peer {
    _child: Child,
    address: SocketAddr,
}

/// Pass-through, first executions and replays; latencies; memory with many waiters.
pub async fn http(arguments: &Arguments, url: &str) -> Result<()> {
    let service = serve().await?;
    let redis = start_redis().await?;
    let cached = gateway(url, service, &[]).await.context("pgonce gateway")?;
    let shared =
        gateway(url, service, &["memory_bytes = 0", &format!("redis = \"redis://{}\"", redis.address)]).await?;
    let bare = gateway(url, service, &["memory_bytes = 0"]).await?;
    let nginx = start_nginx(service).await?;
    let express = start_express(service, redis.address).await?;
    let unique = Arc::new(AtomicU64::new(0));
    let run = std::process::id();

    let get: Make = Arc::new(|| "GET /item HTTP/1.1\r\nhost: bench\r\n\r\n".to_owned());
    let first: Make = {
        let unique = Arc::clone(&unique);
        Arc::new(move || post(&format!("first-{run}-{}", unique.fetch_add(1, Ordering::Relaxed))))
    };
    let again: Make = {
        let unique = Arc::clone(&unique);
        Arc::new(move || post(&format!("again-{run}-{}", unique.fetch_add(1, Ordering::Relaxed) % REPLAYED)))
    };
    for peer in [&cached, &shared, &bare, &express] {
        load(peer.address, &again, Duration::from_secs(1), 1).await?; // one after the other: the keys have their outcomes
    }

    let contenders: [(&str, SocketAddr, &Make); 10] = [
        ("nginx, plain proxy", nginx.address, &get),
        ("gateway, pass-through", cached.address, &get),
        ("gateway, first execution", cached.address, &first),
        ("gateway, replay from its memory", cached.address, &again),
        ("gateway, replay from Redis", shared.address, &again),
        ("gateway, replay from PostgreSQL", bare.address, &again),
        ("express + Redis, pass-through", express.address, &get),
        ("express + Redis, first execution", express.address, &first),
        ("express + Redis, replay", express.address, &again),
        ("the service itself", service, &get),
    ];
    let mut series: Vec<Series> =
        contenders.iter().map(|(name, ..)| Series { name: (*name).to_owned(), rates: Vec::new() }).collect();
    let mut latencies: Vec<Vec<Duration>> = vec![Vec::new(); contenders.len()];
    for _ in 0..arguments.rounds {
        for (index, (_, address, make)) in contenders.iter().enumerate() {
            let (rate, mut took) = load(*address, make, arguments.window(), CLIENTS).await?;
            series[index].rates.push(rate);
            latencies[index].append(&mut took);
        }
    }
    report(&format!("HTTP, {CLIENTS} clients (ratio to nginx)"), &series);
    for (one, took) in series.iter().zip(&mut latencies) {
        took.sort();
        let at = |share: f64| took.get((took.len() as f64 * share) as usize).copied().unwrap_or_default();
        emit(&format!("        p50 {:>9.3} ms  p99 {:>9.3} ms  {}", ms(at(0.5)), ms(at(0.99)), one.name));
    }
    waiters(url, service).await
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

type Make = Arc<dyn Fn() -> String + Send + Sync>;

fn post(key: &str) -> String {
    const BODY: &str = r#"{"customer":"c-1","amount":1999,"currency":"EUR","items":["tea","cups"]}"#;
    format!(
        "POST /orders HTTP/1.1\r\nhost: bench\r\nidempotency-key: \"{key}\"\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{BODY}",
        BODY.len()
    )
}

/// Requests from so many kept connections: their rate, and a sample of how long they took.
async fn load(address: SocketAddr, make: &Make, window: Duration, clients: usize) -> Result<(f64, Vec<Duration>)> {
    let mut tasks = tokio::task::JoinSet::new();
    let started = Instant::now();
    for _ in 0..clients {
        let make = Arc::clone(make);
        tasks.spawn(async move {
            let mut stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            let mut buffer = Vec::with_capacity(4096);
            let mut took = Vec::new();
            let mut count = 0_u64;
            while started.elapsed() < window {
                let asked = Instant::now();
                stream.write_all(make().as_bytes()).await?;
                let status = read_response(&mut stream, &mut buffer).await?;
                ensure!(status < 300, "status {status} from {address}");
                if count.is_multiple_of(16) {
                    took.push(asked.elapsed());
                }
                count += 1;
            }
            Ok((count, took))
        });
    }
    let (mut total, mut all) = (0, Vec::new());
    while let Some(done) = tasks.join_next().await {
        let (count, mut took) = done??;
        total += count;
        all.append(&mut took);
    }
    Ok((total as f64 / started.elapsed().as_secs_f64(), all))
}

/// One response with a length, read to its end.
async fn read_response(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> Result<u16> {
    buffer.clear();
    let mut needed = usize::MAX;
    let mut status = 0;
    while buffer.len() < needed {
        if stream.read_buf(buffer).await? == 0 {
            bail!("the connection ended");
        }
        if needed == usize::MAX
            && let Some(end) = buffer.windows(4).position(|window| window == b"\r\n\r\n")
        {
            let head = std::str::from_utf8(&buffer[..end])?.to_ascii_lowercase();
            status = head.get(9..12).unwrap_or_default().parse()?;
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap_or("0");
            needed = end + 4 + length.trim().parse::<usize>()?;
        }
    }
    Ok(status)
}

/// The service that all of them stand before: an answer of 200 bytes, at once; `/hold` never answers.
async fn serve() -> Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let body = "x".repeat(200);
    let answer: Arc<str> = format!(
        "HTTP/1.1 201 Created\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .into();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let answer = Arc::clone(&answer);
            tokio::spawn(async move {
                let _ = stream.set_nodelay(true);
                let mut buffer = Vec::with_capacity(4096);
                while read_request(&mut stream, &mut buffer).await.is_ok() {
                    if buffer.starts_with(b"POST /hold") {
                        std::future::pending::<()>().await;
                    }
                    if stream.write_all(answer.as_bytes()).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    Ok(address)
}

async fn read_request(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> Result<()> {
    buffer.clear();
    loop {
        if stream.read_buf(buffer).await? == 0 {
            bail!("the connection ended");
        }
        if let Some(end) = buffer.windows(4).position(|window| window == b"\r\n\r\n") {
            let head = std::str::from_utf8(&buffer[..end])?.to_ascii_lowercase();
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap_or("0");
            if buffer.len() >= end + 4 + length.trim().parse::<usize>()? {
                return Ok(());
            }
        }
    }
}

/// The memory and the database connections of a gateway with ten thousand duplicates waiting on one key.
async fn waiters(url: &str, service: SocketAddr) -> Result<()> {
    const WAITERS: usize = 10_000;
    let peer =
        gateway(url, service, &["[[gateway.route]]", "path = \"*\"", "in_progress = \"wait\"", "wait_max = \"120s\""])
            .await?;
    let pid = peer._child.id().context("it runs")?;
    let before = rss_mb(pid)?;
    let key = format!("waiters-{}", std::process::id());
    let hold = post(&key).replace("/orders", "/hold");
    let mut streams = Vec::with_capacity(WAITERS);
    for _ in 0..WAITERS {
        let mut stream = TcpStream::connect(peer.address).await?;
        stream.write_all(hold.as_bytes()).await?;
        streams.push(stream);
    }
    let waiting = async {
        loop {
            let page = metrics(peer.address).await?;
            let count = page.lines().find_map(|line| line.strip_prefix("pgonce_gateway_waiters ")).unwrap_or("0");
            if count.trim().parse::<f64>()? >= (WAITERS - 1) as f64 {
                return anyhow::Ok(());
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), waiting).await.context("not all of them wait")??;
    let client = crate::work::client(url).await?;
    let sql = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'pgonce%' OR usename = current_user AND pid <> pg_backend_pid() AND backend_type = 'client backend'";
    let connections: i64 = client.query_one(sql, &[]).await?.get(0);
    emit(&format!(
        "\n{WAITERS} waiters on one key: {:.0} MB (before: {before:.0} MB); database connections of all gateways here: {connections}",
        rss_mb(pid)?
    ));
    Ok(())
}

async fn metrics(address: SocketAddr) -> Result<String> {
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(b"GET /_pgonce/metrics HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n\r\n").await?;
    let mut page = String::new();
    stream.read_to_string(&mut page).await?;
    Ok(page)
}

fn rss_mb(pid: u32) -> Result<f64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let kb = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("VmRSS")?;
    Ok(kb.trim().trim_end_matches(" kB").parse::<f64>()? / 1024.0)
}

/// The real binary, beside this one.
async fn gateway(url: &str, service: SocketAddr, lines: &[&str]) -> Result<Peer> {
    let binary = std::env::current_exe()?.with_file_name("pgonce");
    ensure!(binary.exists(), "{} is not built: cargo build --release -p pgonce-cli", binary.display());
    let dir = dir("gateway")?;
    let config = dir.join("pgonce.toml");
    let (route, cache): (Vec<&str>, Vec<&str>) = if lines.first().is_some_and(|line| line.starts_with("[[")) {
        (lines.to_vec(), Vec::new())
    } else {
        (Vec::new(), lines.to_vec())
    };
    let text = format!(
        "[gateway]\nlisten = \"127.0.0.1:0\"\n[gateway.upstream]\nurl = \"http://{service}\"\ntimeout = \"120s\"\n[gateway.cache]\n{}\n[gateway.limits]\ntenant_waiters_max = 20000\nwaiters_max = 20000\ninflight_max = 20000\ntenant_inflight_max = 20000\n{}\n",
        cache.join("\n"),
        route.join("\n")
    );
    std::fs::write(&config, text)?;
    let mut command = Command::new(binary);
    command.args(["gateway", "--config"]).arg(&config).args(["--database-url", url]).env("RUST_LOG", "error");
    let (child, line) = spawned(&mut command, "ready").await?;
    let address = line.rsplit("http://").next().unwrap_or_default().trim().parse()?;
    Ok(Peer { _child: child, address })
}

async fn start_nginx(service: SocketAddr) -> Result<Peer> {
    let (dir, port) = (dir("nginx")?, free_port().await?);
    let config = dir.join("nginx.conf");
    std::fs::write(
        &config,
        format!(
            "worker_processes auto;\npid {0}/nginx.pid;\nerror_log {0}/error.log;\ndaemon off;\nevents {{ worker_connections 4096; }}\n\
             http {{ access_log off; client_body_temp_path {0}/b; proxy_temp_path {0}/p; fastcgi_temp_path {0}/f; uwsgi_temp_path {0}/u; scgi_temp_path {0}/s;\n\
             keepalive_requests 1000000000; upstream service {{ server {service}; keepalive 256; keepalive_requests 1000000000; }}\n\
             server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://service; proxy_http_version 1.1; proxy_set_header Connection \"\"; }} }} }}\n",
            dir.display()
        ),
    )?;
    let mut command = Command::new("nginx");
    command.arg("-c").arg(&config).arg("-p").arg(&dir).env("PATH", path_with_sbin());
    let child = quiet(&mut command).spawn().context("nginx (scripts/setup.sh nginx installs it)")?;
    listening(child, port).await
}

async fn start_redis() -> Result<Peer> {
    let (dir, port) = (dir("redis")?, free_port().await?);
    let mut command = Command::new("redis-server");
    command
        .args(["--bind", "127.0.0.1", "--port", &port.to_string(), "--save", "", "--appendonly", "no", "--dir"])
        .arg(&dir);
    let child = quiet(&mut command).spawn().context("redis-server (scripts/setup.sh redis installs it)")?;
    listening(child, port).await
}

async fn start_express(service: SocketAddr, redis: SocketAddr) -> Result<Peer> {
    let port = free_port().await?;
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("peers/express-redis");
    let home = std::env::temp_dir().join("pgonce-bench-express");
    std::fs::create_dir_all(&home)?;
    for file in ["package.json", "server.js"] {
        std::fs::copy(source.join(file), home.join(file))?;
    }
    let mut npm = Command::new("npm");
    npm.args(["install", "--no-audit", "--no-fund", "--silent"]).current_dir(&home);
    ensure!(npm.status().await?.success(), "npm install of the peer failed");
    let mut command = Command::new("node");
    command.arg("server.js").arg(port.to_string()).arg(format!("redis://{redis}")).arg(format!("http://{service}"));
    command.current_dir(&home).env("NODE_ENV", "production");
    let (child, _) = spawned(&mut command, "ready").await?;
    Ok(Peer { _child: child, address: SocketAddr::from(([127, 0, 0, 1], port)) })
}

/// Starts a program and waits for the line that says it serves.
async fn spawned(command: &mut Command, ready: &str) -> Result<(Child, String)> {
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true).spawn()?;
    let mut lines = BufReader::new(child.stderr.take().context("its stderr")?).lines();
    while let Some(line) = lines.next_line().await? {
        if line.starts_with(ready) {
            tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
            return Ok((child, line));
        }
        eprintln!("{line}");
    }
    bail!("it did not start")
}

fn quiet(command: &mut Command) -> &mut Command {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true)
}

async fn listening(child: Child, port: u16) -> Result<Peer> {
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    for _ in 0..500 {
        if TcpStream::connect(address).await.is_ok() {
            return Ok(Peer { _child: child, address });
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    bail!("nothing listens on {address}")
}

async fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0").await?.local_addr()?.port())
}

fn dir(what: &str) -> Result<PathBuf> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let dir = std::env::temp_dir().join(format!("pgonce-bench-{}-{what}-{number}", std::process::id()));
    std::fs::create_dir_all(&dir)?;
    Ok(dir)
}

fn path_with_sbin() -> String {
    format!("{}:/usr/sbin:/usr/local/sbin", std::env::var("PATH").unwrap_or_default())
}
