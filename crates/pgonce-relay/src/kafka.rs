//! What the sink and the source of Kafka share: where the brokers are, and how one logs in.

use rdkafka::ClientContext;
use rdkafka::config::{ClientConfig, RDKafkaLogLevel};
use rdkafka::error::KafkaError;

use crate::{Target, TargetError};

/// The settings of a client that every use of it needs.
pub(crate) fn config(target: &Target) -> Result<ClientConfig, TargetError> {
    if target.hosts.is_empty() {
        return Err(TargetError("a Kafka URL names its brokers: kafka://host:9092".into()));
    }
    let port = |host: &String| {
        let named = host.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        if named { host.clone() } else { format!("{host}:9092") }
    };
    let mut config = ClientConfig::new();
    config
        .set("bootstrap.servers", target.hosts.iter().map(port).collect::<Vec<_>>().join(","))
        .set("client.id", "pgonce")
        // A broker that is back is found within a second.
        .set("reconnect.backoff.ms", "50")
        .set("reconnect.backoff.max.ms", "1000")
        .set_log_level(RDKafkaLogLevel::Error);
    if let Some((user, password)) = target.login() {
        config
            .set("security.protocol", "sasl_plaintext")
            .set("sasl.mechanism", "PLAIN")
            .set("sasl.username", user)
            .set("sasl.password", password);
    }
    Ok(config)
}

/// Sends what librdkafka says to our own log.
#[derive(Debug, Clone)]
pub(crate) struct Quiet;

impl ClientContext for Quiet {
    fn log(&self, _level: RDKafkaLogLevel, facility: &str, message: &str) {
        tracing::debug!(facility, "{message}");
    }

    fn error(&self, error: KafkaError, reason: &str) {
        tracing::debug!(%error, "{reason}");
    }
}
