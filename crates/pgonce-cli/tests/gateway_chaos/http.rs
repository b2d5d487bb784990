//! A client that says exactly what it got: one connection a request, and no answer that is not whole.

use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// Longer than anything that a gateway waits for.
const PATIENCE: Duration = Duration::from_secs(30);

/// A whole response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    pub status: u16,
    pub replayed: bool,
    pub body: Vec<u8>,
}

/// What a client got.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Got {
    /// No connection: nothing was sent.
    Refused,
    /// It was sent, and no whole response came.
    Cut(String),
    Reply(Reply),
}

impl Reply {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// A problem's slug and what it says of the effect.
    pub fn problem(&self) -> Option<(String, String)> {
        let body: Value = serde_json::from_slice(&self.body).ok()?;
        let slug = body["type"].as_str()?.rsplit(['/', ':']).next()?.to_owned();
        Some((slug, body["effect"].as_str()?.to_owned()))
    }
}

/// Sends a request on a connection of its own, and reads to the end.
pub async fn send(address: &str, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Got {
    let Ok(mut stream) = TcpStream::connect(address).await else { return Got::Refused };
    let mut head = format!("{method} {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n");
    for (name, value) in headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    head.push_str(&format!("content-length: {}\r\n\r\n{body}", body.len()));
    let mut bytes = Vec::new();
    let exchange = async {
        stream.write_all(head.as_bytes()).await?;
        stream.read_to_end(&mut bytes).await
    };
    let ended = match tokio::time::timeout(PATIENCE, exchange).await {
        Ok(Ok(_)) => "closed".to_owned(),
        Ok(Err(error)) => error.to_string(),
        Err(_) => "no answer in time".to_owned(),
    };
    read(&bytes).map_or_else(|| Got::Cut(format!("{ended} after {} bytes", bytes.len())), Got::Reply)
}

/// None: not whole.
fn read(bytes: &[u8]) -> Option<Reply> {
    let end = bytes.windows(4).position(|four| four == b"\r\n\r\n")?;
    let (head, body) = (std::str::from_utf8(&bytes[..end]).unwrap(), &bytes[end + 4..]);
    let mut lines = head.split("\r\n");
    let status: u16 = lines.next()?.split(' ').nth(1)?.parse().ok()?;
    let (mut length, mut chunked, mut replayed) = (None, false, false);
    for (name, value) in lines.filter_map(|line| line.split_once(':')) {
        match (name.to_ascii_lowercase().as_str(), value.trim()) {
            ("content-length", value) => length = value.parse::<usize>().ok(),
            ("transfer-encoding", "chunked") => chunked = true,
            ("idempotency-replayed", "true") => replayed = true,
            _ => {}
        }
    }
    let body = match length {
        Some(length) => (body.len() == length).then(|| body.to_vec())?,
        None if chunked => dechunk(body)?,
        None => panic!("a response without a length: {head}"),
    };
    Some(Reply { status, replayed, body })
}

fn dechunk(mut rest: &[u8]) -> Option<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let line = rest.windows(2).position(|two| two == b"\r\n")?;
        let size = usize::from_str_radix(std::str::from_utf8(&rest[..line]).ok()?, 16).ok()?;
        rest = &rest[line + 2..];
        if size == 0 {
            return (rest == b"\r\n").then_some(body);
        }
        body.extend_from_slice(rest.get(..size)?);
        rest = rest.get(size + 2..)?;
    }
}
