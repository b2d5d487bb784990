//! `Consumer` on every broker: one effect a message, whatever is delivered how often; acknowledged after the commit.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

#[path = "../common/brokers.rs"]
#[allow(dead_code, reason = "shared with suites that need more of it")]
mod brokers;
#[path = "../common/undone.rs"]
mod undone;

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pgonce::{Event, Failure};
use pgonce_relay::{Consumer, Intake, Message, Source, Verdict, sink, source};
use pgonce_testkit::TestDb;
use serde_json::json;
use tokio::sync::Notify;

use crate::brokers::{Broker, Kind, fresh, in_the_end, message};

const KINDS: [Kind; 4] = [Kind::Nats, Kind::Amqp, Kind::Kafka, Kind::Redis];

struct World {
    db: TestDb,
    broker: Broker,
    topic: String,
}

impl World {
    async fn new(kind: Kind) -> Option<Self> {
        let broker = Broker::start(kind, false).await?;
        let (db, topic) = (TestDb::new().await, fresh("consumed"));
        broker.prepare(&topic).await;
        db.client()
            .await
            .batch_execute("CREATE TABLE public.did (message_id text NOT NULL, attempt int)")
            .await
            .unwrap();
        Some(Self { db, broker, topic })
    }

    fn source(&self, name: &str) -> Box<dyn Source> {
        let (url, topic) = (self.broker.url(), &self.topic);
        let url = match self.broker.kind() {
            Kind::Nats => format!("{url}/{topic}?ack_wait=1s"),
            Kind::Amqp => format!("{url}?queue={topic}"),
            Kind::Kafka => format!("{url}?topic={topic}&from=earliest"),
            Kind::Redis => format!("{url}?stream={topic}&ack_wait=1s"),
        };
        source::open(&url, name).unwrap().1
    }

    fn consumer(&self) -> Consumer {
        let name = if self.broker.kind() == Kind::Kafka { fresh("billing") } else { "billing".to_owned() };
        Consumer::of(self.source(&name)).named("billing").retry_max(Duration::from_millis(100))
    }

    /// Past the sink and its deduplication, as another producer's would come.
    async fn forge(&self, message: &Message) {
        let key = message.ordering_key.as_deref().unwrap();
        let headers = [("id", message.id.as_str()), ("tenant", &message.tenant), ("partitionkey", key)];
        let (topic, payload) = (&self.topic, message.payload.clone());
        match &self.broker {
            Broker::Nats(_) => {
                let mut all = async_nats::HeaderMap::new();
                headers.iter().for_each(|(name, value)| all.insert(format!("ce-{name}"), *value));
                let context = self.broker.jetstream().await;
                context.publish_with_headers(topic.clone(), all, payload).await.unwrap().await.unwrap();
            }
            Broker::Amqp(_) => {
                let (_connection, channel) = self.broker.channel().await;
                channel.confirm_select(Default::default()).await.unwrap();
                let mut all = lapin::types::FieldTable::default();
                for (name, value) in headers {
                    all.insert(format!("cloudEvents:{name}").into(), lapin::types::AMQPValue::LongString(value.into()));
                }
                let properties = lapin::BasicProperties::default().with_headers(all);
                let published =
                    channel.basic_publish("".into(), topic.as_str().into(), Default::default(), &payload, properties);
                assert!(published.await.unwrap().await.unwrap().is_ack());
            }
            Broker::Kafka(_) => {
                let producer: rdkafka::producer::FutureProducer = self.broker.kafka().create().unwrap();
                let mut all = rdkafka::message::OwnedHeaders::new();
                for (name, value) in headers {
                    let name = format!("ce_{name}");
                    all = all.insert(rdkafka::message::Header { key: &name, value: Some(value) });
                }
                let record = rdkafka::producer::FutureRecord::to(topic).payload(&*payload).key(key).headers(all);
                producer.send(record, Duration::from_secs(30)).await.unwrap();
            }
            Broker::Redis(_) => {
                let mut connection = self.broker.redis().await;
                let mut add = redis::cmd("XADD");
                add.arg(topic).arg("*").arg("payload").arg(&*payload);
                headers.iter().for_each(|(name, value)| {
                    add.arg(format!("ce-{name}")).arg(value);
                });
                let _: String = add.query_async(&mut connection).await.unwrap();
            }
        }
    }

    async fn publish(&self, messages: &[Message]) {
        let sink = sink::open(&format!("{}?timeout=30s", self.broker.url())).unwrap().1;
        assert_eq!(sink.send(messages).await, vec![Verdict::Delivered; messages.len()]);
    }

    async fn number(&self, sql: &str) -> i64 {
        self.db.client().await.query_one(sql, &[]).await.unwrap().get(0)
    }
}

/// Every third message fails once, one is refused for good, some are published twice; each effect is there once, with what it
/// emitted.
#[tokio::test(flavor = "multi_thread")]
async fn each_message_has_one_effect_on_every_broker() {
    for kind in KINDS {
        let Some(world) = World::new(kind).await else { continue };
        let messages: Vec<Message> = (0..30).map(|number| message(&world.topic, number)).collect();
        world.publish(&messages).await;
        world.publish(&messages[..10]).await;
        let (once, stop) = (world.db.once().await, Arc::new(Notify::new()));
        let (consumer, stopped) = (world.consumer(), Arc::clone(&stop));
        let failed = Arc::new(Mutex::new(HashSet::new()));
        let seen = Arc::clone(&failed);
        let running = tokio::spawn(async move {
            let handler = |tx: pgonce::MessageTx, message: Arc<Message>| {
                let failed = Arc::clone(&failed);
                async move {
                    let number: serde_json::Value = serde_json::from_slice(&message.payload)?;
                    let number = number["number"].as_i64().unwrap();
                    tx.execute("INSERT INTO public.did VALUES ($1, 1)", &[&message.id]).await?;
                    tx.emit(Event::new("done", "order.billed", &json!({"number": number}))).await?;
                    if number == 7 {
                        return Err(Failure::refuse("no", "seven is refused"));
                    }
                    if number % 3 == 0 && failed.lock().unwrap().insert(number) {
                        return Err(Failure::retry("later", "the first time"));
                    }
                    Ok(())
                }
            };
            consumer.run(&once, stopped.notified(), handler).await;
        });
        in_the_end(&format!("{kind:?}: all have their effects"), async || {
            world.number("SELECT count(DISTINCT message_id) FROM public.did").await == 29
        })
        .await;
        in_the_end(&format!("{kind:?}: the refused one is set aside"), async || {
            world.number("SELECT count(*) FROM once.admitted_messages WHERE result = 'failed_final'").await == 1
        })
        .await;
        stop.notify_one();
        running.await.unwrap();
        assert_eq!(seen.lock().unwrap().len(), 10, "{kind:?}: what failed was tried again");
        assert_eq!(world.number("SELECT count(*) FROM public.did").await, 29, "{kind:?}: one effect each");
        assert_eq!(world.number("SELECT count(*) FROM once.outbox WHERE topic = 'done'").await, 29, "{kind:?}");
    }
}

/// A consumer that dies after its commit and before its acknowledgement: the message comes again, and is known.
#[tokio::test(flavor = "multi_thread")]
async fn what_comes_again_after_a_crash_has_no_second_effect() {
    for kind in KINDS {
        let Some(world) = World::new(kind).await else { continue };
        world.publish(&[message(&world.topic, 1)]).await;
        let once = world.db.once().await;
        // The handler commits nothing and never ends: the consumer is dropped with the delivery in its hands.
        let (consumer, first) = (world.consumer(), world.db.once().await);
        let stuck = tokio::spawn(async move {
            consumer.run(&first, std::future::pending(), async |_, _| std::future::pending().await).await;
        });
        in_the_end("the first one has it", async || {
            world.number("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction'").await == 1
        })
        .await;
        stuck.abort();
        let _ = stuck.await;
        let stop = Arc::new(Notify::new());
        let (consumer, stopped) = (world.consumer(), Arc::clone(&stop));
        let running = tokio::spawn(async move {
            let handler = async |tx: pgonce::MessageTx, message: Arc<Message>| {
                tx.execute("INSERT INTO public.did VALUES ($1, 1)", &[&message.id]).await?;
                Ok(())
            };
            consumer.run(&once, stopped.notified(), handler).await;
        });
        in_the_end(&format!("{kind:?}: it comes again"), async || {
            world.number("SELECT count(*) FROM public.did").await == 1
        })
        .await;
        stop.notify_one();
        running.await.unwrap();
        assert_eq!(world.number("SELECT count(*) FROM public.did").await, 1, "{kind:?}");
    }
}

/// The same id with another body is no duplicate: it is not applied, and does not stand before those behind it. Nobody gets it
/// again: a broker with a place for such messages puts it there.
#[tokio::test(flavor = "multi_thread")]
async fn another_body_under_the_same_id_is_refused() {
    for kind in KINDS {
        for stored in [false, true] {
            let Some(world) = World::new(kind).await else { continue };
            let first = message(&world.topic, 1);
            world.publish(std::slice::from_ref(&first)).await;
            world.forge(&Message { payload: r#"{"number":2}"#.into(), ..first.clone() }).await;
            // One that no inbox can name, and one that is right, of the same key.
            world.forge(&Message { id: "x".repeat(300), ..first.clone() }).await;
            let last = Message { id: fresh("last"), ..first.clone() };
            world.forge(&last).await;
            let (once, stop) = (world.db.once().await, Arc::new(Notify::new()));
            let (stopped, name) = (Arc::clone(&stop), fresh("billing"));
            let source = world.source(&name);
            let running = tokio::spawn(async move {
                if stored {
                    Intake::new(source, "billing").run(&once, stopped.notified()).await;
                    return;
                }
                let handler = async |tx: pgonce::MessageTx, message: Arc<Message>| {
                    tx.execute("INSERT INTO public.did VALUES ($1, 1)", &[&message.id]).await?;
                    Ok(())
                };
                Consumer::of(source).named("billing").run(&once, stopped.notified(), handler).await;
            });
            let ids = if stored {
                "SELECT string_agg(message_id, ' ' ORDER BY id) FROM once.inbox"
            } else {
                "SELECT string_agg(message_id, ' ') FROM public.did"
            };
            let wanted = format!("{} {}", first.id, last.id);
            in_the_end(&format!("{kind:?}: the one behind them is applied"), async || {
                let all: Option<String> = world.db.client().await.query_one(ids, &[]).await.unwrap().get(0);
                all.as_deref() == Some(&wanted)
            })
            .await;
            stop.notify_one();
            running.await.unwrap();
            in_the_end(&format!("{kind:?}: the broker has nothing more to give"), async || {
                world.broker.undone_by(&world.topic, &name).await == 0
            })
            .await;
            in_the_end(&format!("{kind:?}: dead letters"), async || {
                world.broker.dead_letters(&world.topic).await.is_none_or(|count| count == 2)
            })
            .await;
        }
    }
}
