//! HTTP/2 by its frames, for what no library does to another: a stream that is reset in the middle, without an error.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

pub const DATA: u8 = 0;
pub const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const ACK: u8 = 1;
pub const END_STREAM: u8 = 1;
pub const END_HEADERS: u8 = 4;
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// `:status: 200`, as HPACK's static table has it.
pub const STATUS_200: &[u8] = &[0x88];

/// One side of a connection.
pub struct Frames(TcpStream);

pub struct Frame {
    pub kind: u8,
    pub flags: u8,
    pub stream: u32,
    pub payload: Vec<u8>,
}

impl Frames {
    /// The server's side: takes the preface and says its settings.
    pub async fn accepted(mut stream: TcpStream) -> Self {
        let mut preface = [0; PREFACE.len()];
        stream.read_exact(&mut preface).await.unwrap();
        assert_eq!(preface, PREFACE);
        let mut frames = Self(stream);
        frames.write(SETTINGS, 0, 0, &[]).await;
        frames
    }

    /// The client's side.
    pub async fn connected(mut stream: TcpStream) -> Self {
        stream.write_all(PREFACE).await.unwrap();
        let mut frames = Self(stream);
        frames.write(SETTINGS, 0, 0, &[]).await;
        frames
    }

    pub async fn write(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        let mut frame = vec![length[1], length[2], length[3], kind, flags];
        frame.extend_from_slice(&stream.to_be_bytes());
        frame.extend_from_slice(payload);
        self.0.write_all(&frame).await.unwrap();
    }

    /// The next frame that is about a stream; none at the connection's end. Settings are acknowledged.
    pub async fn next(&mut self) -> Option<Frame> {
        loop {
            let frame = self.read().await?;
            match (frame.kind, frame.flags & ACK) {
                (SETTINGS, 0) => self.write(SETTINGS, ACK, 0, &[]).await,
                (PING, 0) => self.write(PING, ACK, 0, &frame.payload).await,
                _ if frame.stream != 0 => return Some(frame),
                _ => {}
            }
        }
    }

    async fn read(&mut self) -> Option<Frame> {
        let mut head = [0; 9];
        self.0.read_exact(&mut head).await.ok()?;
        let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
        self.0.read_exact(&mut payload).await.ok()?;
        let stream = u32::from_be_bytes([head[5] & 0x7f, head[6], head[7], head[8]]);
        Some(Frame { kind: head[3], flags: head[4], stream, payload })
    }

    /// Waits until the other side has taken everything that was written: it answers in order.
    pub async fn all_is_there(&mut self) {
        self.write(PING, 0, 0, b"is-there").await;
        loop {
            let frame = self.read().await.expect("an answer to PING");
            match (frame.kind, frame.flags & ACK) {
                (PING, ACK) if frame.payload == b"is-there" => return,
                (SETTINGS, 0) => self.write(SETTINGS, ACK, 0, &[]).await,
                (PING, 0) => self.write(PING, ACK, 0, &frame.payload).await,
                _ => {}
            }
        }
    }

    /// RST_STREAM with NO_ERROR.
    pub async fn reset(&mut self, stream: u32) {
        self.write(RST_STREAM, 0, stream, &0_u32.to_be_bytes()).await;
    }
}

/// The head of a POST, with literal headers.
pub fn post(path: &str, headers: &[(&str, &str)]) -> Vec<u8> {
    let text = |text: &str| [&[u8::try_from(text.len()).unwrap()], text.as_bytes()].concat();
    let mut block = vec![0x83, 0x86]; // :method: POST, :scheme: http
    block.extend([&[0x04], text(path).as_slice()].concat()); // :path
    block.extend([&[0x01], text("shop.example").as_slice()].concat()); // :authority
    for (name, value) in headers {
        block.extend([&[0x00], text(name).as_slice(), text(value).as_slice()].concat());
    }
    block
}
