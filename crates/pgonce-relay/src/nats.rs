//! What the sink and the source of NATS share: connecting, and knowing whether one is connected.

use std::time::Duration;

use async_nats::{Client, ConnectOptions, Event, ServerAddr};
use tokio::sync::watch;

use crate::{Target, TargetError};

/// How to connect.
#[derive(Debug, Clone)]
pub(crate) struct Connector {
    servers: Vec<ServerAddr>,
    credentials: Option<String>,
    tls: bool,
    name: String,
}

/// A connection that comes back by itself, and whether it is there.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) client: Client,
    state: watch::Receiver<State>,
}

/// `losses` counts, so that a connection that was lost and came back between two looks is seen to be another one.
#[derive(Debug, Default)]
struct State {
    connected: bool,
    losses: u64,
    /// What went wrong last: a wrong password, say.
    said: String,
}

impl Connector {
    pub(crate) fn of(target: &Target) -> Result<Self, TargetError> {
        crate::tls::choose_provider();
        let servers = target.hosts.iter().map(|host| target.with_host(host).parse()).collect::<Result<_, _>>();
        let servers = servers.map_err(|_| TargetError("NATS cannot read the URL".into()))?;
        let credentials = match target.setting("creds") {
            Some(path) => Some(
                std::fs::read_to_string(path)
                    .map_err(|error| TargetError(format!("the file of creds cannot be read: {error}")))?,
            ),
            None => None,
        };
        Ok(Self { servers, credentials, tls: target.flag("tls")?, name: format!("pgonce {}", target.name()) })
    }

    /// A client, at once: it connects in the background.
    pub(crate) async fn connect(&self) -> Result<Link, String> {
        let (sender, state) = watch::channel(State::default());
        let mut options = match &self.credentials {
            Some(text) => ConnectOptions::with_credentials(text).map_err(|_| "the creds cannot be read".to_owned())?,
            None => ConnectOptions::new(),
        };
        options = options
            .name(&self.name)
            .require_tls(self.tls)
            .retry_on_initial_connect()
            // A server that does not answer is noticed while others wait, not after a minute.
            .ping_interval(Duration::from_secs(10))
            .connection_timeout(Duration::from_secs(5))
            .reconnect_delay_callback(|attempts| Duration::from_millis(if attempts < 2 { 20 } else { 250 }.min(1_000)))
            .event_callback(move |event| {
                sender.send_if_modified(|state| match event {
                    Event::ServerError(error) => {
                        state.said = error.to_string();
                        false
                    }
                    Event::ClientError(error) => {
                        state.said = error.to_string();
                        false
                    }
                    Event::Connected => !std::mem::replace(&mut state.connected, true),
                    Event::Disconnected | Event::Closed => {
                        state.losses += 1;
                        state.connected = false;
                        true
                    }
                    _ => false,
                });
                std::future::ready(())
            });
        let client = options.connect(self.servers.clone()).await.map_err(|error| error.to_string())?;
        Ok(Link { client, state })
    }
}

impl Link {
    /// Waits until it is connected.
    pub(crate) async fn connected(&self, limit: Duration) -> Result<(), String> {
        let mut state = self.state.clone();
        match tokio::time::timeout(limit, state.wait_for(|state| state.connected)).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(_)) => Err("the connection is closed".into()),
            Err(_) => {
                let said = &self.state.borrow().said;
                let because = if said.is_empty() { String::new() } else { format!(": {said}") };
                Err(format!("not connected after {} s{because}", limit.as_secs()))
            }
        }
    }

    /// Ends when the connection that is there now is lost.
    pub(crate) fn lost(&self) -> impl Future<Output = ()> + use<> {
        let mut state = self.state.clone();
        let losses = state.borrow().losses;
        async move {
            let _ = state.wait_for(|state| state.losses != losses).await;
        }
    }
}
