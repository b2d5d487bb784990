//! What the sink and the source of RabbitMQ share: connecting.

use std::time::Duration;

use lapin::{Connection, ConnectionProperties};

use crate::{Target, TargetError};

/// How to connect.
#[derive(Clone)]
pub(crate) struct Connector {
    uri: String,
    timeout: Duration,
    name: String,
}

impl std::fmt::Debug for Connector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The URI may hold a password.
        f.debug_struct("Connector").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Connector {
    pub(crate) fn of(target: &Target) -> Result<Self, TargetError> {
        crate::tls::choose_provider();
        let timeout = target.timeout()?;
        // `amqp://host/` would be a virtual host without a name; nobody means that.
        let uri = target.url.strip_suffix('/').unwrap_or(&target.url);
        let uri = format!("{uri}?heartbeat=10&connection_timeout={}", timeout.as_millis());
        if uri.parse::<lapin::uri::AMQPUri>().is_err() {
            return Err(TargetError("RabbitMQ cannot read the URL: amqp://host:5672/vhost".into()));
        }
        Ok(Self { uri, timeout, name: format!("pgonce {}", target.name()) })
    }

    pub(crate) async fn connect(&self) -> Result<Connection, String> {
        let properties = ConnectionProperties::default().with_connection_name(self.name.as_str().into());
        match tokio::time::timeout(self.timeout, Connection::connect(&self.uri, properties)).await {
            Ok(Ok(connection)) => Ok(connection),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err("no connection in time".into()),
        }
    }
}
