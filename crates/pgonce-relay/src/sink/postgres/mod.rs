//! Another PostgreSQL's inbox: the message is there once, whatever dies, because its row is its own deduplication.

use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::sync::Mutex;
use tokio_postgres::Client;
use tokio_postgres::types::{ToSql, Type};

use super::{Sink, Verdict};
use crate::{Message, Target, TargetError};

/// Settings beside the common ones: whose inbox, and what this outbox is called there.
pub const SETTINGS: &[&str] = &["consumer", "source"];

/// The sink.
#[derive(Debug)]
pub struct Postgres {
    url: String,
    consumer: String,
    source: String,
    timeout: Duration,
    client: Mutex<Option<Client>>,
}

/// Opens it; the connection is made when something is sent.
///
/// # Errors
/// Where a setting cannot be read.
pub fn open(target: &Target) -> Result<Postgres, TargetError> {
    Ok(Postgres {
        url: target.url.clone(),
        consumer: target.setting("consumer").unwrap_or("pgonce").to_owned(),
        source: target.setting("source").unwrap_or("outbox").to_owned(),
        timeout: target.timeout()?,
        client: Mutex::new(None),
    })
}

const RECEIVE: &str =
    "SELECT verdict FROM once.receive_batch($1, $2, p_message_ids => $3, p_bodies => $4, p_topics => $5,
    p_types => $6, p_ordering_keys => $7, p_entities => $8, p_versions => $9, p_headers => $10, p_content_types => $11,
    p_tenant => $12) ORDER BY ordinal";

impl Sink for Postgres {
    fn send<'a>(&'a self, messages: &'a [Message]) -> BoxFuture<'a, Vec<Verdict>> {
        Box::pin(async move {
            let mut verdicts = vec![None; messages.len()];
            let mut tenants: Vec<&str> = messages.iter().map(|message| message.tenant.as_str()).collect();
            tenants.sort_unstable();
            tenants.dedup();
            for tenant in tenants {
                let (places, group): (Vec<usize>, Vec<&Message>) =
                    messages.iter().enumerate().filter(|(_, message)| message.tenant == tenant).unzip();
                for (place, verdict) in places.into_iter().zip(self.send_group(tenant, &group).await) {
                    verdicts[place] = Some(verdict);
                }
            }
            let unsaid = || Verdict::Away { reason: "the inbox gave no answer".into() };
            verdicts.into_iter().map(|verdict| verdict.unwrap_or_else(unsaid)).collect()
        })
    }
}

impl Postgres {
    /// Messages of one tenant. One that the inbox refuses would take the others with it: then each goes alone.
    async fn send_group(&self, tenant: &str, group: &[&Message]) -> Vec<Verdict> {
        match self.receive(tenant, group).await {
            Ok(verdicts) => verdicts,
            Err(Trouble::Refused(reason)) if group.len() == 1 => vec![Verdict::Refused { reason }],
            Err(Trouble::Refused(_)) => {
                let mut verdicts = Vec::with_capacity(group.len());
                for message in group {
                    verdicts.extend(Box::pin(self.send_group(tenant, &[*message])).await);
                }
                verdicts
            }
            Err(Trouble::Away(reason)) => vec![Verdict::Away { reason }; group.len()],
        }
    }

    async fn receive(&self, tenant: &str, group: &[&Message]) -> Result<Vec<Verdict>, Trouble> {
        let mut connection = self.client.lock().await;
        let client = match connection.take().filter(|client| !client.is_closed()) {
            Some(client) => client,
            None => self.connect().await?,
        };
        let columns = Columns::new(group);
        let parameters = columns.parameters(&self.consumer, &self.source, &tenant);
        // A client that is dropped in the middle of a statement is not used again: it was taken out before.
        let rows = tokio::time::timeout(self.timeout, client.query_typed(RECEIVE, &parameters))
            .await
            .map_err(|_| Trouble::Away("no answer in time".into()))??;
        *connection = Some(client);
        rows.iter()
            .map(|row| {
                Ok(match row.try_get::<_, &str>(0)? {
                    "conflict" => {
                        Verdict::Refused { reason: "the id is in the inbox with another body (P4050)".into() }
                    }
                    _ => Verdict::Delivered,
                })
            })
            .collect()
    }

    async fn connect(&self) -> Result<Client, Trouble> {
        match tokio::time::timeout(self.timeout, pgonce::migrate::connect(&self.url)).await {
            Ok(Ok(client)) => Ok(client),
            Ok(Err(error)) => Err(Trouble::Away(error.to_string())),
            Err(_) => Err(Trouble::Away("no connection in time".into())),
        }
    }
}

enum Trouble {
    Away(String),
    Refused(String),
}

impl From<tokio_postgres::Error> for Trouble {
    /// What pgonce itself refuses is the message's fault; anything else, a missing schema included, is not.
    fn from(error: tokio_postgres::Error) -> Self {
        let code = error.code().map(|code| code.code().to_owned()).unwrap_or_default();
        let reason = pgonce::Error::from(error).to_string();
        if code.starts_with("P40") || code.starts_with("22") { Self::Refused(reason) } else { Self::Away(reason) }
    }
}

/// Messages as the arrays that `once.receive_batch` takes.
struct Columns<'a> {
    ids: Vec<&'a str>,
    bodies: Vec<&'a [u8]>,
    topics: Vec<&'a str>,
    types: Vec<&'a str>,
    keys: Vec<Option<&'a str>>,
    entities: Vec<Option<String>>,
    versions: Vec<Option<i64>>,
    headers: Vec<serde_json::Value>,
    content_types: Vec<&'static str>,
}

impl<'a> Columns<'a> {
    fn new(group: &[&'a Message]) -> Self {
        let of = |message: &&'a Message| message.aggregate.as_ref();
        Self {
            ids: group.iter().map(|message| message.id.as_str()).collect(),
            bodies: group.iter().map(|message| &message.payload[..]).collect(),
            topics: group.iter().map(|message| message.topic.as_str()).collect(),
            types: group.iter().map(|message| message.kind.as_str()).collect(),
            keys: group.iter().map(|message| message.ordering_key.as_deref()).collect(),
            entities: group.iter().map(|message| of(message).map(|it| format!("{}/{}", it.kind, it.id))).collect(),
            versions: group.iter().map(|message| of(message).and_then(|it| it.version)).collect(),
            headers: group.iter().map(|message| serde_json::json!(message.headers)).collect(),
            content_types: vec!["application/json"; group.len()],
        }
    }

    fn parameters<'b>(
        &'b self,
        consumer: &'b String,
        source: &'b String,
        tenant: &'b &str,
    ) -> [(&'b (dyn ToSql + Sync), Type); 12] {
        [
            (consumer, Type::TEXT),
            (source, Type::TEXT),
            (&self.ids, Type::TEXT_ARRAY),
            (&self.bodies, Type::BYTEA_ARRAY),
            (&self.topics, Type::TEXT_ARRAY),
            (&self.types, Type::TEXT_ARRAY),
            (&self.keys, Type::TEXT_ARRAY),
            (&self.entities, Type::TEXT_ARRAY),
            (&self.versions, Type::INT8_ARRAY),
            (&self.headers, Type::JSONB_ARRAY),
            (&self.content_types, Type::TEXT_ARRAY),
            (tenant, Type::TEXT),
        ]
    }
}
