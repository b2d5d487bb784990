//! What holds for every source.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use pgonce_relay::Message;
use pgonce_testkit::eventually;

use crate::brokers::{Broker, Kind, fresh, in_the_end, message};
use crate::world::{ack_all, ids, next, receive};

fn some(topic: &str, count: usize) -> Vec<Message> {
    (0..count).map(|number| message(topic, number)).collect()
}

fn sent_ids(messages: &[Message]) -> Vec<String> {
    messages.iter().map(|message| message.id.clone()).collect()
}

pub async fn what_a_sink_sends_is_received_and_acknowledged(broker: Broker) {
    let topic = fresh("orders");
    broker.prepare(&topic).await;
    let sent = some(&topic, 300);
    broker.publish(&sent).await;

    let mut source = broker.source(&topic, "");
    let mut seen = Vec::new();
    while seen.len() < sent.len() {
        for delivery in next(&mut source, 64).await {
            assert!(!delivery.redelivered);
            assert!(delivery.source.ends_with(&topic), "{}", delivery.source);
            seen.push(delivery.message);
            delivery.receipt.ack().await.unwrap();
        }
    }
    assert_eq!(seen, sent, "whole, and in order");
    source.close().await;
    eventually("all is done", async || broker.undone(&topic).await == 0).await;

    // Another one goes on after them.
    let last = [message(&topic, 1_000)];
    broker.publish(&last).await;
    let mut source = broker.source(&topic, "");
    let deliveries = receive(&mut source, 1).await;
    assert_eq!(ids(&deliveries), sent_ids(&last));
    ack_all(deliveries).await;
    source.close().await;
}

pub async fn what_was_not_acknowledged_comes_again(broker: Broker) {
    let topic = fresh("unacked");
    broker.prepare(&topic).await;
    let sent = some(&topic, 6);
    broker.publish(&sent).await;

    let mut source = broker.source(&topic, broker.soon_again());
    let mut deliveries = receive(&mut source, 6).await;
    // The second and the last are acknowledged, the others not: then it is gone.
    for at in [5, 1] {
        deliveries.remove(at).receipt.ack().await.unwrap();
    }
    drop(deliveries);
    source.close().await;
    drop(source);

    let wanted: BTreeSet<String> = [0, 2, 3, 4].map(|at: usize| sent[at].id.clone()).into();
    let mut source = broker.source(&topic, broker.soon_again());
    let mut again = BTreeSet::new();
    while !again.is_superset(&wanted) {
        for delivery in next(&mut source, 10).await {
            // Kafka keeps one number: what was acknowledged after it comes again too, and it does not say so.
            if broker.kind() != Kind::Kafka {
                assert!(delivery.redelivered);
                assert!(wanted.contains(&delivery.message.id));
            }
            again.insert(delivery.message.id.clone());
            delivery.receipt.ack().await.unwrap();
        }
    }
    assert!(!again.contains(&sent[1].id) || broker.kind() == Kind::Kafka);
    source.close().await;
    eventually("all is done", async || broker.undone(&topic).await == 0).await;
}

pub async fn a_retry_comes_again_after_its_delay(broker: Broker) {
    let topic = fresh("retry");
    broker.prepare(&topic).await;
    let sent = some(&topic, 3);
    broker.publish(&sent).await;
    let mut source = broker.source(&topic, "");
    let mut deliveries = receive(&mut source, 3).await;
    let delay = Duration::from_millis(400);
    let began = Instant::now();
    deliveries.remove(1).receipt.retry(delay).await.unwrap();
    ack_all(deliveries).await;

    let again = receive(&mut source, 1).await;
    assert_eq!(ids(&again), [sent[1].id.clone()]);
    assert!(again[0].redelivered);
    assert_eq!(again[0].message, sent[1]);
    assert!(began.elapsed() >= delay - Duration::from_millis(50), "{:?}", began.elapsed());
    for delivery in again {
        delivery.receipt.retry(Duration::ZERO).await.unwrap();
    }
    let again = receive(&mut source, 1).await;
    assert_eq!(ids(&again), [sent[1].id.clone()]);
    ack_all(again).await;
    source.close().await;
    eventually("all is done", async || broker.undone(&topic).await == 0).await;
}

pub async fn what_is_refused_does_not_come_again(broker: Broker) {
    let topic = fresh("refused");
    broker.prepare(&topic).await;
    let sent = some(&topic, 3);
    broker.publish(&sent).await;
    let mut source = broker.source(&topic, broker.soon_again());
    let mut deliveries = receive(&mut source, 3).await;
    let refused = deliveries.remove(1);
    assert!(refused.place.contains(&topic), "{}", refused.place);
    refused.receipt.refuse().await.unwrap();
    ack_all(deliveries).await;
    // The next one is the next that comes: what was refused is not among what the broker has for us.
    let last = [message(&topic, 1_000)];
    broker.publish(&last).await;
    let deliveries = receive(&mut source, 1).await;
    assert_eq!(ids(&deliveries), sent_ids(&last));
    ack_all(deliveries).await;
    source.close().await;
    eventually("all is done", async || broker.undone(&topic).await == 0).await;
    eventually("a dead letter, where there is a place for it", async || {
        broker.dead_letters(&topic).await.is_none_or(|count| count == 1)
    })
    .await;
}

pub async fn no_more_than_prefetch_are_out(broker: Broker) {
    let topic = fresh("prefetch");
    broker.prepare(&topic).await;
    let sent = some(&topic, 40);
    broker.publish(&sent).await;
    let mut source = broker.source(&topic, "&prefetch=5");
    let mut out = receive(&mut source, 5).await;
    let more = tokio::time::timeout(Duration::from_millis(700), source.next(10)).await;
    assert!(more.is_err(), "a sixth came: {more:?}");

    let mut seen = ids(&out);
    while seen.len() < sent.len() {
        out.remove(0).receipt.ack().await.unwrap();
        let got = next(&mut source, 10).await;
        seen.extend(ids(&got));
        out.extend(got);
        assert!(out.len() <= 5, "{} are out", out.len());
    }
    assert_eq!(seen, sent_ids(&sent), "each once, in order");
    ack_all(out).await;
    source.close().await;
    eventually("all is done", async || broker.undone(&topic).await == 0).await;
}

pub async fn a_call_that_is_dropped_loses_nothing(broker: Broker) {
    let topic = fresh("dropped");
    broker.prepare(&topic).await;
    let sent = some(&topic, 30);
    let mut source = broker.source(&topic, "");
    // Connected, and waiting.
    broker.publish(&sent[..1]).await;
    ack_all(receive(&mut source, 1).await).await;
    assert!(source.next(1).now_or_never().is_none());
    broker.publish(&sent[1..]).await;

    let mut seen = Vec::new();
    while seen.len() < 29 {
        // Given up now and then, at a moment that is not ours to choose.
        let Ok(got) = tokio::time::timeout(Duration::from_micros(300), source.next(3)).await else { continue };
        for delivery in got.unwrap() {
            assert!(!delivery.redelivered, "it was lost, and came again");
            seen.push(delivery.message.id.clone());
            delivery.receipt.ack().await.unwrap();
        }
    }
    assert_eq!(seen, sent_ids(&sent[1..]));
    source.close().await;
}

pub async fn a_message_of_a_stranger_has_an_id(broker: Broker) {
    let topic = fresh("stranger");
    broker.prepare(&topic).await;
    match &broker {
        Broker::Nats(_) => {
            let context = broker.jetstream().await;
            context.publish(topic.clone(), "hello".into()).await.unwrap().await.unwrap();
        }
        Broker::Amqp(_) => {
            let (_connection, channel) = broker.channel().await;
            let options = lapin::options::ConfirmSelectOptions::default();
            channel.confirm_select(options).await.unwrap();
            let published = channel
                .basic_publish("".into(), topic.as_str().into(), Default::default(), b"hello", Default::default())
                .await
                .unwrap();
            assert!(published.await.unwrap().is_ack());
        }
        Broker::Kafka(_) => {
            let producer: rdkafka::producer::FutureProducer = broker.kafka().create().unwrap();
            let record = rdkafka::producer::FutureRecord::to(&topic).payload("hello").key("k");
            producer.send(record, Duration::from_secs(10)).await.unwrap();
        }
        Broker::Redis(_) => {
            let mut connection = broker.redis().await;
            let mut add = redis::cmd("XADD");
            add.arg(&topic).arg("7-1").arg("payload").arg("hello").exec_async(&mut connection).await.unwrap();
        }
    }
    let mut source = broker.source(&topic, if broker.kind() == Kind::Amqp { "&id=digest" } else { "" });
    let deliveries = receive(&mut source, 1).await;
    let message = &deliveries[0].message;
    assert_eq!(message.payload, "hello");
    assert_eq!(message.topic, topic);
    match broker.kind() {
        Kind::Nats => assert_eq!(message.id, "1"),
        Kind::Kafka => assert_eq!((message.id.as_str(), message.ordering_key.as_deref()), ("0:0", Some("k"))),
        Kind::Redis => assert_eq!(message.id, "7-1"),
        Kind::Amqp => assert_eq!(message.id.len(), 64),
    }
    ack_all(deliveries).await;
    source.close().await;
}

pub async fn a_killed_broker_goes_on_where_it_was(mut broker: Broker) {
    let topic = fresh("killed");
    broker.prepare(&topic).await;
    let sent = some(&topic, 60);
    broker.publish(&sent).await;
    let mut source = broker.source(&topic, &format!("&prefetch=20{}", broker.soon_again()));
    let mut done = BTreeSet::new();
    for delivery in receive(&mut source, 10).await {
        done.insert(delivery.message.id.clone());
        delivery.receipt.ack().await.unwrap();
    }
    let out = receive(&mut source, 5).await;
    tokio::task::block_in_place(|| broker.kill());
    // The broker may hear of them yet, from a client that has them in its queue; or they come again.
    let mut unknown = BTreeSet::new();
    for delivery in out {
        unknown.insert(delivery.message.id.clone());
        let _ = delivery.receipt.ack().now_or_never();
    }
    tokio::task::block_in_place(|| broker.restart());
    let everything: BTreeSet<String> = sent_ids(&sent).into_iter().collect();
    in_the_end("all is done", async || {
        if let Ok(Ok(deliveries)) = tokio::time::timeout(Duration::from_millis(200), source.next(10)).await {
            for delivery in deliveries {
                let id = delivery.message.id.clone();
                if delivery.receipt.ack().await.is_ok() {
                    done.insert(id);
                }
            }
        }
        done.union(&unknown).eq(&everything) && broker.undone(&topic).await == 0
    })
    .await;
    source.close().await;
}
