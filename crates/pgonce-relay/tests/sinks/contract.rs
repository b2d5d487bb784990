//! What holds for every sink.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use pgonce_relay::{Message, Sink, Verdict, sink};
use pgonce_testkit::eventually;

use crate::brokers::{Broker, Kind, fresh, in_the_end, message};

/// Where the broker is to be away. Elsewhere waits are long: a busy machine is no fault of the sink's.
const SOON: &str = "&timeout=4s";

/// A sink; `more` are further settings.
fn open(broker: &Broker, more: &str) -> Box<dyn Sink> {
    let url = format!("{}?timeout=30s{more}", broker.url());
    sink::open(&url).unwrap().1
}

fn ids(messages: &[Message]) -> BTreeSet<String> {
    messages.iter().map(|message| message.id.clone()).collect()
}

async fn stored_ids(broker: &Broker, topic: &str) -> Vec<String> {
    broker.stored(topic).await.into_iter().map(|stored| stored.message.id).collect()
}

pub async fn every_envelope_arrives_whole(broker: Broker) {
    let prefix = match broker.kind() {
        Kind::Nats | Kind::Redis => "ce-",
        Kind::Kafka => "ce_",
        Kind::Amqp => "cloudEvents:",
    };
    for envelope in ["binary", "structured", "plain"] {
        let topic = fresh("orders");
        broker.prepare(&topic).await;
        let sent = message(&topic, 7);
        let sink = open(&broker, &format!("&envelope={envelope}"));
        assert_eq!(sink.send(std::slice::from_ref(&sent)).await, [Verdict::Delivered], "{envelope}");

        let all = broker.stored(&topic).await;
        let [stored] = &all[..] else { panic!("{envelope}: {all:?}") };
        if envelope == "structured" {
            assert_eq!(stored.content_type, "application/cloudevents+json");
            let event: serde_json::Value = serde_json::from_slice(&stored.body).unwrap();
            assert_eq!(event["specversion"], "1.0");
            assert_eq!(event["id"], *sent.id);
            assert_eq!(event["type"], "order.created");
            assert!(event["source"].as_str().is_some_and(|source| !source.is_empty()));
            assert_eq!(event["time"], *sent.time);
            assert_eq!(event["datacontenttype"], "application/json");
            assert_eq!(event["data"], serde_json::from_slice::<serde_json::Value>(&sent.payload).unwrap());
        } else {
            assert_eq!(stored.content_type, "application/json");
            assert_eq!(stored.body, sent.payload, "the payload is not touched");
            let prefix = if envelope == "plain" { "pgonce-" } else { prefix };
            assert_eq!(stored.headers[&format!("{prefix}id")], sent.id);
            assert_eq!(stored.headers[&format!("{prefix}type")], sent.kind);
        }
        match broker.kind() {
            Kind::Nats => assert_eq!(stored.headers["Nats-Msg-Id"], sent.id),
            Kind::Kafka => assert_eq!(stored.key, sent.ordering_key),
            Kind::Amqp => assert_eq!(stored.headers["message-id"], sent.id),
            Kind::Redis => {}
        }
        assert_eq!(stored.headers["traceparent"], sent.headers["traceparent"]);
        assert_eq!(stored.message.id, sent.id);
        assert_eq!(stored.message.ordering_key, sent.ordering_key);
        assert_eq!(stored.message.tenant, sent.tenant);
        sink.close().await;
    }
}

pub async fn a_batch_arrives(broker: Broker) {
    let topic = fresh("batch");
    broker.prepare(&topic).await;
    let sink = open(&broker, "");
    assert_eq!(sink.send(&[]).await, []);
    let sent: Vec<Message> = (0..500).map(|number| message(&topic, number)).collect();
    assert_eq!(sink.send(&sent).await, vec![Verdict::Delivered; 500]);
    let stored = stored_ids(&broker, &topic).await;
    assert_eq!(stored.len(), 500);
    assert_eq!(stored.into_iter().collect::<BTreeSet<_>>(), ids(&sent));

    // Calls at the same time do not disturb each other.
    let sink: Arc<dyn Sink> = Arc::from(sink);
    let calls: Vec<_> = (0..8)
        .map(|call| {
            let (sink, batch): (_, Vec<Message>) =
                (Arc::clone(&sink), (0..50).map(|number| message(&topic, call * 50 + number)).collect());
            tokio::spawn(async move { sink.send(&batch).await })
        })
        .collect();
    for call in calls {
        assert_eq!(call.await.unwrap(), vec![Verdict::Delivered; 50]);
    }
    assert_eq!(stored_ids(&broker, &topic).await.len(), 900);
}

pub async fn the_same_message_twice(broker: Broker) {
    let topic = fresh("twice");
    broker.prepare(&topic).await;
    let sent = [message(&topic, 1)];
    for _ in 0..2 {
        // Another sink, as after a restart of the relay.
        let sink = open(&broker, "");
        assert_eq!(sink.send(&sent).await, [Verdict::Delivered]);
        sink.close().await;
    }
    let stored = stored_ids(&broker, &topic).await;
    let times = if matches!(broker.kind(), Kind::Nats | Kind::Redis) { 1 } else { 2 };
    assert_eq!(stored, vec![sent[0].id.clone(); times]);
}

pub async fn one_that_is_too_large_is_refused_alone(broker: Broker) {
    let topic = fresh("large");
    broker.prepare(&topic).await;
    let sink = open(&broker, if broker.kind() == Kind::Redis { "&bytes_max=1000000" } else { "" });
    let mut sent: Vec<Message> = (0..7).map(|number| message(&topic, number)).collect();
    for large in [2, 5] {
        sent[large].payload = format!("\"{}\"", "x".repeat(1_200_000)).into();
    }
    let verdicts = sink.send(&sent).await;
    for (at, verdict) in verdicts.iter().enumerate() {
        match at {
            2 | 5 => assert!(matches!(verdict, Verdict::Refused { .. }), "{at}: {verdict:?}"),
            _ => assert_eq!(*verdict, Verdict::Delivered, "{at}"),
        }
    }
    let stored: BTreeSet<String> = stored_ids(&broker, &topic).await.into_iter().collect();
    let small: Vec<Message> = sent.into_iter().filter(|message| message.payload.len() < 1_000).collect();
    assert_eq!(stored, ids(&small));
    // And the sink goes on.
    assert_eq!(sink.send(&[message(&topic, 9)]).await, [Verdict::Delivered]);
}

pub async fn nowhere_to_go(broker: Broker) {
    let (topic, nowhere) = (fresh("somewhere"), fresh("nowhere"));
    broker.prepare(&topic).await;
    // Kafka takes half of it to be sure.
    let sink = open(&broker, "&timeout=8s");
    let sent: Vec<Message> =
        (0..6).map(|number| message(if number % 2 == 0 { &topic } else { &nowhere }, number)).collect();
    let verdicts = sink.send(&sent).await;
    for (at, verdict) in verdicts.iter().enumerate() {
        match (at % 2, broker.kind()) {
            // A stream of Redis begins with its first entry.
            (0, _) | (_, Kind::Redis) => assert_eq!(*verdict, Verdict::Delivered, "{at}"),
            (_, Kind::Nats) => {
                assert!(matches!(verdict, Verdict::Away { reason } if reason.contains(&nowhere)), "{at}: {verdict:?}");
            }
            _ => assert!(matches!(verdict, Verdict::Refused { .. }), "{at}: {verdict:?}"),
        }
    }
    // A name that no broker takes; Redis takes any.
    if broker.kind() != Kind::Redis {
        let bad = message(&format!("a b\n{}", "x".repeat(300)), 1);
        assert!(matches!(sink.send(&[bad]).await[..], [Verdict::Refused { .. }]));
    }
    assert_eq!(stored_ids(&broker, &topic).await.len(), 3);
}

pub async fn a_closed_sink_is_away(broker: Broker) {
    let topic = fresh("closed");
    broker.prepare(&topic).await;
    for used in [false, true] {
        let sink = open(&broker, "");
        if used {
            assert_eq!(sink.send(&[message(&topic, 1)]).await, [Verdict::Delivered]);
        }
        sink.close().await;
        let verdicts = sink.send(&[message(&topic, 2), message(&topic, 3)]).await;
        assert!(matches!(verdicts[..], [Verdict::Away { .. }, Verdict::Away { .. }]), "{verdicts:?}");
        sink.close().await;
    }
    assert_eq!(stored_ids(&broker, &topic).await.len(), 1);
}

pub async fn a_killed_broker_is_away_and_comes_back(mut broker: Broker) {
    let topic = fresh("killed");
    broker.prepare(&topic).await;
    let sink = open(&broker, SOON);
    let sent: Vec<Message> = (0..20).map(|number| message(&topic, number)).collect();
    assert_eq!(sink.send(&sent[..10]).await, vec![Verdict::Delivered; 10]);

    broker.kill();
    let verdicts = sink.send(&sent[10..]).await;
    assert!(verdicts.iter().all(|verdict| matches!(verdict, Verdict::Away { .. })), "{verdicts:?}");
    let shown = format!("{verdicts:?} {sink:?}");
    assert!(!shown.contains("guest"), "credentials: {shown}");

    tokio::task::block_in_place(|| broker.restart());
    in_the_end("the sink finds the broker again", async || {
        sink.send(&sent[10..]).await.iter().all(|verdict| *verdict == Verdict::Delivered)
    })
    .await;
    let stored: BTreeSet<String> = stored_ids(&broker, &topic).await.into_iter().collect();
    assert_eq!(stored, ids(&sent), "nothing that was delivered is lost");
}

pub async fn a_broker_that_does_not_answer_is_away_in_time(broker: Broker) {
    let topic = fresh("silent");
    broker.prepare(&topic).await;
    let sink = open(&broker, SOON);
    assert_eq!(sink.send(&[message(&topic, 0)]).await, [Verdict::Delivered]);
    let sent: Vec<Message> = (1..30).map(|number| message(&topic, number)).collect();
    broker.stop_answering(true);
    // Over a connection that was there, then over none.
    for _ in 0..2 {
        let began = Instant::now();
        let verdicts = sink.send(&sent).await;
        assert!(verdicts.iter().all(|verdict| matches!(verdict, Verdict::Away { .. })), "{verdicts:?}");
        assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    }
    broker.stop_answering(false);
    in_the_end("the sink goes on", async || {
        sink.send(&sent).await.iter().all(|verdict| *verdict == Verdict::Delivered)
    })
    .await;
    let stored: BTreeSet<String> = stored_ids(&broker, &topic).await.into_iter().collect();
    assert!(stored.is_superset(&ids(&sent)));
}

pub async fn what_was_delivered_outlives_a_kill(mut broker: Broker) {
    let topic = fresh("stream");
    broker.prepare(&topic).await;
    let sink: Arc<dyn Sink> = Arc::from(open(&broker, SOON));
    let (stop, delivered_count) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let sender = {
        let (sink, topic, stop, count) =
            (Arc::clone(&sink), topic.clone(), Arc::clone(&stop), Arc::clone(&delivered_count));
        tokio::spawn(async move {
            let mut delivered = BTreeSet::new();
            while !stop.load(Ordering::Acquire) {
                let batch: Vec<Message> = (0..40).map(|number| message(&topic, number)).collect();
                for (message, verdict) in batch.iter().zip(sink.send(&batch).await) {
                    match verdict {
                        Verdict::Delivered => drop(delivered.insert(message.id.clone())),
                        Verdict::Away { .. } | Verdict::Retry { .. } => {}
                        other => panic!("{other:?}"),
                    }
                }
                count.store(delivered.len(), Ordering::Release);
            }
            delivered
        })
    };
    let more_than = async |count: usize| {
        in_the_end("messages flow", async || delivered_count.load(Ordering::Acquire) > count).await;
    };
    more_than(200).await;
    tokio::task::block_in_place(|| broker.kill());
    tokio::task::block_in_place(|| broker.restart());
    more_than(delivered_count.load(Ordering::Acquire) + 200).await;
    stop.store(true, Ordering::Release);
    let delivered = sender.await.unwrap();

    eventually("all that was delivered is there", async || {
        let stored: BTreeSet<String> = stored_ids(&broker, &topic).await.into_iter().collect();
        delivered.is_subset(&stored)
    })
    .await;
}
