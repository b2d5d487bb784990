//! Faults on the wire: a proxy that knows where COMMIT is.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;

/// Where the proxy cuts the next connection that sends COMMIT, or a statement that commits by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Cut {
    /// Nowhere.
    Never = 0,
    /// COMMIT does not arrive at the server.
    BeforeCommit = 1,
    /// COMMIT arrives and is carried out; only its answer is lost.
    AnswerOfCommit = 2,
    /// The next prepared statement does not arrive at the server.
    BeforeStatement = 3,
    /// It arrives and is carried out; only its answer is lost.
    AnswerOfStatement = 4,
}

/// A proxy before PostgreSQL, on loopback, armed with one cut at a time.
#[derive(Debug)]
pub struct FaultProxy {
    port: u16,
    armed: Arc<AtomicU8>,
    fired: Arc<AtomicUsize>,
    requests: Arc<AtomicUsize>,
}

impl FaultProxy {
    /// A proxy before the server of a URL.
    pub async fn before(url: &str) -> Self {
        let config: tokio_postgres::Config = url.parse().unwrap();
        let upstream = config.get_ports()[0];
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let proxy = Self { port, armed: Arc::default(), fired: Arc::default(), requests: Arc::default() };
        let counted = (Arc::clone(&proxy.armed), Arc::clone(&proxy.fired), Arc::clone(&proxy.requests));
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (armed, fired, requests) = counted.clone();
                tokio::spawn(async move {
                    let Ok(server) = TcpStream::connect(("127.0.0.1", upstream)).await else { return };
                    let (client_read, client_write) = client.into_split();
                    let (server_read, server_write) = server.into_split();
                    // Either side's end is the end of both: the halves are dropped with the select.
                    let cut = Notify::new();
                    tokio::select! {
                        () = to_server(client_read, server_write, (&armed, &fired, &requests), &cut) => {}
                        () = to_client(server_read, client_write, &cut) => {}
                    }
                });
            }
        });
        proxy
    }

    /// The URL, through the proxy.
    #[must_use]
    pub fn url(&self, url: &str) -> String {
        let config: tokio_postgres::Config = url.parse().unwrap();
        let through = url.replacen(&format!(":{}/", config.get_ports()[0]), &format!(":{}/", self.port), 1);
        assert_ne!(through, url, "the URL names its port");
        format!("{through}{}sslmode=disable", if through.contains('?') { "&" } else { "?" })
    }

    /// Arms one cut.
    pub fn arm(&self, cut: Cut) {
        self.armed.store(cut as u8, Ordering::SeqCst);
    }

    /// How many cuts happened. A fault that was armed and never fired fails its test.
    #[must_use]
    pub fn fired(&self) -> usize {
        self.fired.load(Ordering::SeqCst)
    }

    /// How many requests the server has been sent that it answers by a packet of its own: queries and Syncs.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.requests.load(Ordering::SeqCst)
    }
}

/// Forwards message by message, so that COMMIT is found wherever it stands in a chunk.
async fn to_server(
    mut client: OwnedReadHalf,
    mut server: OwnedWriteHalf,
    (armed, fired, requests): (&AtomicU8, &AtomicUsize, &AtomicUsize),
    answers: &Notify,
) {
    // The startup packet has no type byte.
    let Ok(length) = client.read_u32().await else { return };
    let mut startup = vec![0; length as usize - 4];
    if client.read_exact(&mut startup).await.is_err() || server.write_u32(length).await.is_err() {
        return;
    }
    if server.write_all(&startup).await.is_err() {
        return;
    }
    let (mut executes, mut commits) = (false, false);
    loop {
        let Ok(kind) = client.read_u8().await else { return };
        let Ok(length) = client.read_u32().await else { return };
        let mut body = vec![0; length as usize - 4];
        if client.read_exact(&mut body).await.is_err() {
            return;
        }
        requests.fetch_add(usize::from(matches!(kind, b'Q' | b'S')), Ordering::SeqCst);
        let commit = kind == b'Q' && body == b"COMMIT\0";
        // The crate joins COMMIT with what comes before it: then it is a statement of its own, whole at the Sync.
        let bound = kind == b'B' && body.starts_with(b"\0pgonce COMMIT\0");
        commits |= bound;
        executes |= kind == b'E';
        // A statement is whole at its Sync; one that was only prepared does not count.
        let statement = kind == b'S' && std::mem::take(&mut executes);
        let committed = statement && std::mem::take(&mut commits);
        let meant: &[Cut] = match () {
            () if commit => &[Cut::BeforeCommit, Cut::AnswerOfCommit],
            () if bound => &[Cut::BeforeCommit],
            () if committed => &[Cut::AnswerOfCommit],
            () if statement => &[Cut::BeforeStatement, Cut::AnswerOfStatement],
            () => &[],
        };
        let cut = meant
            .iter()
            .map(|cut| *cut as u8)
            .find(|cut| armed.compare_exchange(*cut, Cut::Never as u8, Ordering::SeqCst, Ordering::SeqCst).is_ok());
        if cut == Some(Cut::BeforeCommit as u8) || cut == Some(Cut::BeforeStatement as u8) {
            fired.fetch_add(1, Ordering::SeqCst);
            return;
        }
        let mut message = vec![kind];
        message.extend_from_slice(&length.to_be_bytes());
        message.extend_from_slice(&body);
        if cut.is_some() {
            fired.fetch_add(1, Ordering::SeqCst);
            // The client is cut off at once. The server's side stays open until it has answered: one that cannot tell the
            // answer of what came before would give up, and never read what was sent behind it.
            drop(client);
            answers.notify_one();
            let _ = server.write_all(&message).await;
            let _ = server.shutdown().await;
            return std::future::pending().await;
        }
        if server.write_all(&message).await.is_err() {
            return;
        }
    }
}

/// Forwards answers; from the cut on, reads them to the server's end and tells nobody.
async fn to_client(mut server: OwnedReadHalf, mut client: OwnedWriteHalf, cut: &Notify) {
    tokio::select! {
        biased;
        () = cut.notified() => {}
        _ = tokio::io::copy(&mut server, &mut client) => return,
    }
    drop(client);
    let _ = tokio::io::copy(&mut server, &mut tokio::io::sink()).await;
}
