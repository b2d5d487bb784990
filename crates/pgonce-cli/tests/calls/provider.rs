//! The provider: knows nothing of pgonce. HTTP by hand, so that it can break off wherever it likes; its books are a file
//! that is flushed to disk before anything is answered.

use std::collections::{HashMap, HashSet};
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

/// How late a late charge is, measured from the request: longer than its caller waits.
const LATE: Duration = Duration::from_millis(1200);

/// What it can do wrong, once for each key.
pub const FAULTS: [&str; 14] = [
    "none",
    "timeout",
    "late",
    "reset",
    "reset_before",
    "lie",
    "twice",
    "early",
    "throttle",
    "error",
    "error_before",
    "decline",
    "accepted",
    "kill",
];

/// Every charge and every refusal that was ever written, in order.
pub fn books(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    // The last line may have been cut by a kill: it was not flushed, so nobody was told.
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

struct Provider {
    books: Mutex<Books>,
    hook: u16,
    knows_keys: bool,
}

struct Books {
    file: File,
    /// By key: the answer that was given.
    known: HashMap<String, Value>,
    /// Keys whose fault has happened.
    faulted: HashSet<String>,
    count: usize,
}

impl Books {
    fn open(path: &Path) -> Self {
        let mut file = OpenOptions::new().create(true).append(true).open(path).unwrap();
        // After a line that was cut.
        file.write_all(b"\n").unwrap();
        let mut books = Self { file, known: HashMap::new(), faulted: HashSet::new(), count: 0 };
        for entry in self::books(path) {
            books.count += 1;
            let key = entry["key"].as_str().unwrap().to_owned();
            books.faulted.insert(key.clone());
            if entry["status"] != "fault" {
                books.known.insert(key, entry);
            }
        }
        books
    }

    fn write(&mut self, key: &str, status: &str) -> Value {
        self.count += 1;
        let entry = json!({"key": key, "status": status, "id": format!("ch_{}", self.count)});
        self.file.write_all(format!("{entry}\n").as_bytes()).unwrap();
        self.file.sync_all().unwrap();
        if status != "fault" {
            self.known.insert(key.to_owned(), entry.clone());
        }
        entry
    }
}

struct Request {
    method: String,
    path: String,
    headers: HashMap<String, String>,
    body: Value,
}

async fn read(stream: &mut TcpStream) -> Option<Request> {
    let mut bytes = Vec::new();
    loop {
        let end = bytes.windows(4).position(|part| part == b"\r\n\r\n");
        if let Some(end) = end {
            let head = String::from_utf8(bytes[..end].to_vec()).ok()?;
            let mut lines = head.lines();
            let mut first = lines.next()?.split(' ');
            let (method, path) = (first.next()?.to_owned(), first.next()?.to_owned());
            let headers: HashMap<String, String> = lines
                .filter_map(|line| line.split_once(": "))
                .map(|(name, value)| (name.to_lowercase(), value.to_owned()))
                .collect();
            let length: usize = headers.get("content-length").map_or(0, |length| length.parse().unwrap());
            if bytes.len() >= end + 4 + length {
                let body = serde_json::from_slice(&bytes[end + 4..]).unwrap_or(Value::Null);
                return Some(Request { method, path, headers, body });
            }
        }
        if stream.read_buf(&mut bytes).await.ok()? == 0 {
            return None; // whoever it was is gone: half a request is none
        }
    }
}

fn response(code: u16, body: &Value) -> String {
    let body = body.to_string();
    format!(
        "HTTP/1.1 {code} x\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\nretry-after: 1\r\n\r\n{body}",
        body.len()
    )
    .replace("retry-after: 1\r\n", if code == 429 { "retry-after: 1\r\n" } else { "" })
}

impl Provider {
    fn charge(&self, key: &str) -> Value {
        let mut books = self.books.lock().unwrap();
        match books.known.get(key).filter(|_| self.knows_keys).cloned() {
            Some(known) => known,
            None => books.write(key, "succeeded"),
        }
    }

    /// The fault that is to happen now.
    fn fault(&self, key: &str, asked: &str) -> String {
        let mut books = self.books.lock().unwrap();
        if books.known.contains_key(key) && self.knows_keys {
            return "known".into();
        }
        if !books.faulted.insert(key.to_owned()) {
            return "none".into();
        }
        books.write(key, "fault");
        asked.to_owned()
    }

    /// Requests are read and charged one after the other, in the order in which they came: a question that comes after a
    /// call is answered after it. Only answers may take their time.
    async fn handle(self: &Arc<Self>, mut stream: TcpStream) {
        let Ok(Some(request)) = tokio::time::timeout(Duration::from_secs(5), read(&mut stream)).await else { return };
        if request.method == "GET" {
            let key = request.path.rsplit('/').next().unwrap().to_owned();
            let known = self.books.lock().unwrap().known.get(&key).cloned();
            let answer = known.map_or_else(|| response(404, &json!({})), |entry| response(200, &entry));
            let _ = stream.write_all(answer.as_bytes()).await;
            return;
        }
        let key = request.headers["idempotency-key"].clone();
        let fault = self.fault(&key, request.body["fault"].as_str().unwrap_or("none"));
        match fault.as_str() {
            "reset_before" => return drop(stream),
            "throttle" => return answer(stream, 429, &json!({})),
            "error_before" => return answer(stream, 500, &json!({})),
            "late" | "accepted" => {
                let provider = Arc::clone(self);
                tokio::spawn(async move {
                    if fault == "accepted" {
                        let _ = stream.write_all(response(202, &json!({"status": "processing"})).as_bytes()).await;
                    }
                    tokio::time::sleep(LATE).await;
                    let charged = provider.charge(&key);
                    provider.tell(&charged, 1).await;
                    drop(stream);
                });
                return;
            }
            "decline" => {
                let entry = self.books.lock().unwrap().write(&key, "failed");
                return answer(stream, 402, &entry);
            }
            "known" => {
                let entry = self.books.lock().unwrap().known[&key].clone();
                let code = if entry["status"] == "succeeded" { 200 } else { 402 };
                return answer(stream, code, &entry);
            }
            _ => {}
        }
        let charged = self.charge(&key);
        let provider = Arc::clone(self);
        match fault.as_str() {
            "kill" => kill(),
            "reset" => drop(stream),
            "timeout" => {
                tokio::spawn(async move {
                    let mut rest = Vec::new();
                    let _ = stream.read_to_end(&mut rest).await; // until the caller gives up
                });
            }
            "error" => answer(stream, 500, &json!({"error": "after the charge"})),
            "lie" => {
                answer(stream, 402, &json!({"status": "failed"}));
                tokio::spawn(async move { provider.tell(&charged, 1).await });
            }
            "early" => {
                tokio::spawn(async move {
                    provider.tell(&charged, 1).await;
                    answer(stream, 200, &charged);
                });
            }
            "twice" => {
                tokio::spawn(async move {
                    let _ = stream.write_all(response(200, &charged).repeat(2).as_bytes()).await;
                    provider.tell(&charged, 3).await;
                });
            }
            _ => {
                answer(stream, 200, &charged);
                tokio::spawn(async move { provider.tell(&charged, 1).await });
            }
        }
    }

    /// A webhook: so often, and again until it is taken.
    async fn tell(&self, entry: &Value, times: usize) {
        let body = entry.to_string();
        let request = format!("POST /hook HTTP/1.1\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        for _ in 0..times {
            for _ in 0..200 {
                let mut answer = [0; 12];
                let sent = async {
                    let mut stream = TcpStream::connect(("127.0.0.1", self.hook)).await?;
                    stream.write_all(request.as_bytes()).await?;
                    stream.read_exact(&mut answer).await
                };
                if sent.await.is_ok() && answer.ends_with(b"200") {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

fn answer(mut stream: TcpStream, code: u16, body: &Value) {
    let text = response(code, body);
    tokio::spawn(async move {
        let _ = stream.write_all(text.as_bytes()).await;
    });
}

fn kill() {
    let own = std::process::id().to_string();
    let _ = std::process::Command::new("kill").args(["-KILL", &own]).status();
    loop {
        std::thread::park();
    }
}

/// The program that the tests start, and kill.
#[tokio::test(flavor = "current_thread")]
#[ignore = "the process that others start"]
async fn in_a_process_of_its_own() {
    let variable = |name: &str| std::env::var(name).ok();
    let (Some(port), Some(books)) = (variable("PROVIDER_PORT"), variable("PROVIDER_BOOKS")) else { return };
    let provider = Arc::new(Provider {
        books: Mutex::new(Books::open(&PathBuf::from(books))),
        hook: variable("PROVIDER_HOOK").unwrap().parse().unwrap(),
        knows_keys: variable("PROVIDER_KNOWS_KEYS").is_some(),
    });
    let listener = TcpListener::bind(("127.0.0.1", port.parse().unwrap())).await.unwrap();
    eprintln!("ready");
    loop {
        let Ok((stream, _)) = listener.accept().await else { continue };
        provider.handle(stream).await;
    }
}

/// A webhook as its receiver reads it: its body.
pub async fn receive(stream: &mut TcpStream) -> Option<Value> {
    read(stream).await.map(|request| request.body)
}
