//! `Consumer` on every broker: one effect a message, whatever is delivered how often; acknowledged after the commit.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

#[path = "../common/brokers.rs"]
#[allow(dead_code, reason = "shared with suites that need more of it")]
mod brokers;

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pgonce::{Event, Failure};
use pgonce_relay::{Consumer, Message, Verdict, sink, source};
use pgonce_testkit::{TestDb, eventually};
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

    fn consumer(&self) -> Consumer {
        let url = self.broker.url();
        let (url, name) = match self.broker.kind() {
            Kind::Nats => (format!("{url}/{}?ack_wait=1s", self.topic), "billing".to_owned()),
            Kind::Amqp => (format!("{url}?queue={}", self.topic), "billing".to_owned()),
            Kind::Kafka => (format!("{url}?topic={}&from=earliest", self.topic), fresh("billing")),
            Kind::Redis => (format!("{url}?stream={}&ack_wait=1s", self.topic), "billing".to_owned()),
        };
        Consumer::of(source::open(&url, &name).unwrap().1).named("billing").retry_max(Duration::from_millis(100))
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

/// The same id with another body is no duplicate: it is not applied, and not acknowledged.
#[tokio::test(flavor = "multi_thread")]
async fn another_body_under_the_same_id_is_not_applied() {
    let world = World::new(Kind::Redis).await.unwrap();
    let first = message(&world.topic, 1);
    world.publish(std::slice::from_ref(&first)).await;
    let (once, stop) = (world.db.once().await, Arc::new(Notify::new()));
    let (consumer, stopped) = (world.consumer(), Arc::clone(&stop));
    let running = tokio::spawn(async move {
        let handler = async |tx: pgonce::MessageTx, message: Arc<Message>| {
            tx.execute("INSERT INTO public.did VALUES ($1, 1)", &[&message.id]).await?;
            Ok(())
        };
        consumer.run(&once, stopped.notified(), handler).await;
    });
    eventually("the first is applied", async || world.number("SELECT count(*) FROM public.did").await == 1).await;
    // Past the sink's own deduplication, as another producer's would be.
    let client = redis::Client::open(world.broker.url()).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();
    let entry: Vec<(String, Vec<(String, String)>)> =
        redis::cmd("XRANGE").arg(&world.topic).arg("-").arg("+").query_async(&mut connection).await.unwrap();
    let mut add = redis::cmd("XADD");
    add.arg(&world.topic).arg("*");
    for (name, value) in &entry[0].1 {
        let is_body = value.contains("\"number\"");
        add.arg(name).arg(if is_body { "{\"number\": 2}" } else { value });
    }
    let _: String = add.query_async(&mut connection).await.unwrap();
    let pending = async || {
        let mut connection = client.get_multiplexed_async_connection().await.unwrap();
        let answer: Vec<redis::Value> =
            redis::cmd("XPENDING").arg(&world.topic).arg("billing").query_async(&mut connection).await.unwrap();
        redis::from_redis_value::<u64>(answer[0].clone()).unwrap()
    };
    eventually("it stays with the broker", async || pending().await == 1).await;
    stop.notify_one();
    running.await.unwrap();
    assert_eq!(world.number("SELECT count(*) FROM public.did").await, 1);
}
