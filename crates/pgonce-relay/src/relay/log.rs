//! What the relay asks the database: the functions of `sql/functions/outbox`, typed. Nothing here is prepared, so that a
//! pooler in transaction mode may be between.

use futures_util::future::try_join;
use serde::Serialize;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Row};
use uuid::Uuid;

use crate::{Aggregate, Message};

/// A connection to the outbox.
#[derive(Debug)]
pub(crate) struct Log {
    client: Client,
    /// Progress is recorded on a connection of its own: reading goes on while a commit is flushed.
    records: Client,
}

/// How far a lane has come: everything that `delivered` sees; and of what `target` sees beyond it, up to `position`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Cursor {
    pub delivered: String,
    pub target: Option<String>,
    pub position: Option<i64>,
}

/// A lane that this relay holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Lane {
    pub lane: i16,
    pub claim_id: Uuid,
    pub cursor: Cursor,
}

/// Where a message is in the log, and in which lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub position: i64,
    pub xid: i64,
    pub lane: i16,
}

/// A message that the sink did not take.
#[derive(Debug, Clone, Serialize, PartialEq, Eq)]
pub(crate) struct Held {
    pub position: i64,
    pub xid: i64,
    pub state: &'static str,
    pub error: Option<String>,
    pub delay_ms: Option<i64>,
}

/// A held message that is to be tried again.
#[derive(Debug, Clone)]
pub(crate) struct Due {
    pub position: i64,
    pub lane: i16,
    pub attempts: u32,
    pub message: Message,
}

/// What a sink has not got.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Lag {
    /// Messages, counted up to a limit.
    pub messages: i64,
    /// The age of the oldest.
    pub seconds: f64,
    /// Messages that are tried again.
    pub failing: i64,
    /// Messages that wait for somebody.
    pub parked: i64,
    /// Messages that wait behind one of those, with the same key.
    pub behind: i64,
}

impl Lag {
    /// Whether the sink has got everything.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        self.messages + self.failing + self.parked + self.behind == 0
    }
}

type Asked<T> = Result<T, tokio_postgres::Error>;

impl Log {
    pub async fn connect(url: &str) -> Result<Self, pgonce::Error> {
        let (client, records) = try_join(pgonce::migrate::connect(url), pgonce::migrate::connect(url)).await?;
        Ok(Self { client, records })
    }

    /// Names the sink; why its work stands still, if it does.
    pub async fn open_sink(&self, sink: &super::SinkSettings) -> Asked<Option<String>> {
        let row = self
            .client
            .query_typed_one(
                "SELECT once.open_sink($1, $2, $3, $4, $5)",
                &[
                    (&sink.name, Type::TEXT),
                    (&sink.topics, Type::TEXT_ARRAY),
                    (&sink.types, Type::TEXT_ARRAY),
                    (&sink.tenants, Type::TEXT_ARRAY),
                    (&sink.from_now, Type::BOOL),
                ],
            )
            .await?;
        row.try_get(0)
    }

    /// The lanes that are this relay's from now on, and how many should be.
    pub async fn hold_lanes(&self, sink: &str, relay: &str, lease_ms: i64) -> Asked<(Vec<Lane>, usize)> {
        let sql = "SELECT lane, claim_id, delivered, target, position, share
            FROM once.hold_lanes($1, $2, $3 * interval '1 millisecond')";
        let rows =
            self.client.query_typed(sql, &[(&sink, Type::TEXT), (&relay, Type::TEXT), (&lease_ms, Type::INT8)]).await?;
        let share = rows.first().map_or(Ok(0), |row| row.try_get::<_, i32>(5))?;
        let lanes = rows.iter().map(read_lane).collect::<Asked<_>>()?;
        Ok((lanes, usize::try_from(share).unwrap_or_default()))
    }

    /// Gives lanes back; none named: all, and goodbye.
    pub async fn drop_lanes(&self, sink: &str, relay: &str, lanes: Option<&[i16]>) -> Asked<()> {
        let sql = "SELECT once.drop_lanes($1, $2, $3)";
        self.client
            .query_typed(sql, &[(&sink, Type::TEXT), (&relay, Type::TEXT), (&lanes, Type::INT2_ARRAY)])
            .await
            .map(drop)
    }

    /// The next places of a difference, and the snapshot that it goes up to.
    pub async fn difference(
        &self,
        sink: &str,
        lanes: &[i16],
        cursor: &Cursor,
        limit: i32,
    ) -> Asked<(String, Vec<Place>)> {
        let sql = "SELECT target, position, xid, lane FROM once.outbox_difference($1, $2, $3::text::pg_snapshot,
            $4::text::pg_snapshot, $5, $6)";
        let after = cursor.position.unwrap_or(-1);
        let rows = self
            .client
            .query_typed(
                sql,
                &[
                    (&sink, Type::TEXT),
                    (&lanes, Type::INT2_ARRAY),
                    (&cursor.delivered, Type::TEXT),
                    (&cursor.target, Type::TEXT),
                    (&after, Type::INT8),
                    (&limit, Type::INT4),
                ],
            )
            .await?;
        let target = rows.first().map_or_else(|| Ok(cursor.delivered.clone()), |row| row.try_get(0))?;
        let mut places = Vec::with_capacity(rows.len());
        for row in &rows {
            if let Some(position) = row.try_get(1)? {
                places.push(Place { position, xid: row.try_get(2)?, lane: row.try_get(3)? });
            }
        }
        Ok((target, places))
    }

    /// The messages at these places, in order.
    pub async fn messages(&self, places: &[Place]) -> Result<Vec<Message>, pgonce::Error> {
        let positions: Vec<i64> = places.iter().map(|place| place.position).collect();
        let xids: Vec<i64> = places.iter().map(|place| place.xid).collect();
        let sql = "SELECT message_id::text, at, tenant, topic, type, ordering_key, aggregate_type, aggregate_id,
            aggregate_version, headers, payload, position FROM once.outbox_messages($1, $2)";
        let rows = self.client.query_typed(sql, &[(&positions, Type::INT8_ARRAY), (&xids, Type::INT8_ARRAY)]).await?;
        // What is not delivered is not removed (I13): a place without its message is somebody else's doing, and not to be passed over.
        let found = rows.iter().map(|row| row.try_get(11)).collect::<Asked<Vec<i64>>>()?;
        if found != positions {
            let reason = "messages that were not delivered are missing from the outbox: somebody removed them [P4099]";
            return Err(pgonce::Error::Schema(reason.into()));
        }
        Ok(rows.iter().map(read_message).collect::<Asked<_>>()?)
    }

    /// Records progress, fenced; what the sink did not take goes with it.
    pub async fn advance(
        &self,
        sink: &str,
        lanes: &[i16],
        claims: &[Uuid],
        target: &str,
        position: Option<i64>,
        held: &[Held],
    ) -> Asked<()> {
        let held = (!held.is_empty()).then(|| serde_json::to_value(held).unwrap_or_default());
        let sql = "SELECT once.advance_lanes($1, $2, $3, $4::text::pg_snapshot, $5, $6)";
        let parameters: [(&(dyn ToSql + Sync), Type); 6] = [
            (&sink, Type::TEXT),
            (&lanes, Type::INT2_ARRAY),
            (&claims, Type::UUID_ARRAY),
            (&target, Type::TEXT),
            (&position, Type::INT8),
            (&held, Type::JSONB),
        ];
        self.records.query_typed(sql, &parameters).await.map(drop)
    }

    /// The keys of these lanes that have something held.
    pub async fn held_keys(&self, sink: &str, lanes: &[i16]) -> Asked<Vec<(String, String)>> {
        let sql = "SELECT tenant, lane_key FROM once.held_keys($1, $2)";
        let rows = self.client.query_typed(sql, &[(&sink, Type::TEXT), (&lanes, Type::INT2_ARRAY)]).await?;
        rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).collect()
    }

    /// What is to be tried again now.
    pub async fn held_due(&self, sink: &str, lanes: &[i16]) -> Asked<Vec<Due>> {
        let sql =
            "SELECT position, lane, message_id::text, tenant, attempts, message, payload FROM once.held_due($1, $2)";
        let rows = self.client.query_typed(sql, &[(&sink, Type::TEXT), (&lanes, Type::INT2_ARRAY)]).await?;
        rows.iter().map(read_due).collect()
    }

    /// What became of it; whether its key has anything left.
    pub async fn settle_held(
        &self,
        sink: &str,
        position: i64,
        claim_id: Uuid,
        state: &str,
        error: Option<&str>,
        delay_ms: Option<i64>,
    ) -> Asked<bool> {
        let parameters: [(&(dyn ToSql + Sync), Type); 6] = [
            (&sink, Type::TEXT),
            (&position, Type::INT8),
            (&claim_id, Type::UUID),
            (&state, Type::TEXT),
            (&error, Type::TEXT),
            (&delay_ms, Type::INT8),
        ];
        self.client.query_typed_one("SELECT once.settle_held($1, $2, $3, $4, $5, $6)", &parameters).await?.try_get(0)
    }

    pub async fn disable_sink(&self, sink: &str, reason: &str) -> Asked<()> {
        let sql = "SELECT once.disable_sink($1, $2)";
        self.client.query_typed(sql, &[(&sink, Type::TEXT), (&reason, Type::TEXT)]).await.map(drop)
    }

    pub async fn lag(&self, sink: &str, limit: i32) -> Asked<Lag> {
        let sql = "SELECT messages, seconds, failing, parked, behind FROM once.sink_lag($1, $2)";
        let row = self.client.query_typed_one(sql, &[(&sink, Type::TEXT), (&limit, Type::INT4)]).await?;
        Ok(Lag {
            messages: row.try_get(0)?,
            seconds: row.try_get(1)?,
            failing: row.try_get(2)?,
            parked: row.try_get(3)?,
            behind: row.try_get(4)?,
        })
    }

    /// A replay's next places, and how many a second.
    pub async fn continue_replay(&self, id: i64, sink: &str, claim_id: Uuid) -> Asked<(Vec<Place>, Option<i32>)> {
        let sql = "SELECT position, xid, rate FROM once.continue_replay($1, $2, $3)";
        let rows =
            self.client.query_typed(sql, &[(&id, Type::INT8), (&sink, Type::TEXT), (&claim_id, Type::UUID)]).await?;
        let rate = rows.first().map_or(Ok(None), |row| row.try_get(2))?;
        let places = rows.iter().map(|row| Ok(Place { position: row.try_get(0)?, xid: row.try_get(1)?, lane: 0 }));
        Ok((places.collect::<Asked<_>>()?, rate))
    }

    /// How far it has come.
    pub async fn record_replay(
        &self,
        id: i64,
        claim_id: Uuid,
        position: Option<i64>,
        sent: u64,
        done: bool,
    ) -> Asked<()> {
        let sent = i64::try_from(sent).unwrap_or(i64::MAX);
        let parameters: [(&(dyn ToSql + Sync), Type); 5] = [
            (&id, Type::INT8),
            (&claim_id, Type::UUID),
            (&position, Type::INT8),
            (&sent, Type::INT8),
            (&done, Type::BOOL),
        ];
        self.client.query_typed("SELECT once.record_replay($1, $2, $3, $4, $5)", &parameters).await.map(drop)
    }

    /// Turns and empties segments, where it is time.
    pub async fn rotate(&self) -> Asked<()> {
        self.client.query_typed("SELECT once.rotate_outbox()", &[]).await.map(drop)
    }
}

/// Whether another relay has taken over what this one thought was its.
pub(crate) fn is_lost(error: &tokio_postgres::Error) -> bool {
    error.code().is_some_and(|code| code.code() == "P4071")
}

fn read_lane(row: &Row) -> Asked<Lane> {
    Ok(Lane {
        lane: row.try_get(0)?,
        claim_id: row.try_get(1)?,
        cursor: Cursor { delivered: row.try_get(2)?, target: row.try_get(3)?, position: row.try_get(4)? },
    })
}

fn read_message(row: &Row) -> Asked<Message> {
    let kind: Option<String> = row.try_get(6)?;
    let id: Option<String> = row.try_get(7)?;
    let version = row.try_get(8)?;
    Ok(Message {
        id: row.try_get(0)?,
        time: row.try_get(1)?,
        tenant: row.try_get(2)?,
        topic: row.try_get(3)?,
        kind: row.try_get(4)?,
        ordering_key: row.try_get(5)?,
        aggregate: kind.zip(id).map(|(kind, id)| Aggregate { kind, id, version }),
        headers: headers(&row.try_get::<_, Option<serde_json::Value>>(9)?.unwrap_or_default()),
        payload: row.try_get::<_, String>(10)?.into(),
    })
}

fn read_due(row: &Row) -> Asked<Due> {
    let copy: serde_json::Value = row.try_get(5)?;
    let text = |name: &str| copy[name].as_str().map(str::to_owned);
    Ok(Due {
        position: row.try_get(0)?,
        lane: row.try_get(1)?,
        attempts: u32::try_from(row.try_get::<_, i32>(4)?).unwrap_or_default(),
        message: Message {
            id: row.try_get(2)?,
            tenant: row.try_get(3)?,
            time: text("at").unwrap_or_default(),
            topic: text("topic").unwrap_or_default(),
            kind: text("type").unwrap_or_default(),
            ordering_key: text("ordering_key"),
            aggregate: text("aggregate_type").zip(text("aggregate_id")).map(|(kind, id)| Aggregate {
                kind,
                id,
                version: copy["aggregate_version"].as_i64(),
            }),
            headers: headers(&copy["headers"]),
            payload: row.try_get::<_, String>(6)?.into(),
        },
    })
}

/// Those that belong to the event, the broker or the request stay behind: they are from before `once.emit` refused them.
fn headers(value: &serde_json::Value) -> std::collections::BTreeMap<String, String> {
    let pairs = value.as_object().into_iter().flatten().filter(|(name, _)| !crate::envelope::is_reserved(name));
    pairs.map(|(name, value)| (name.to_ascii_lowercase(), value.as_str().unwrap_or_default().to_owned())).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn headers_from_before_they_were_refused_stay_behind() {
        let read = super::headers(&serde_json::json!({"CE-Tenant": "b", "Traceparent": "00-1", "nats-msg-id": "7"}));
        assert_eq!(read, [("traceparent".to_owned(), "00-1".to_owned())].into());
    }
}
