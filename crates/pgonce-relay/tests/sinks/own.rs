//! What only one of the sinks has.

use pgonce_relay::{Sink, Verdict, sink};

use crate::brokers::{Broker, Kind, fresh, message};

fn open(broker: &Broker, settings: &str) -> Box<dyn Sink> {
    sink::open(&format!("{}?timeout=30s&{settings}", broker.url())).unwrap().1
}

#[tokio::test]
async fn nats_a_full_stream_is_asked_again_and_a_message_too_large_for_it_is_refused() {
    let Some(broker) = Broker::start(Kind::Nats, false).await else { return };
    let config = async_nats::jetstream::stream::Config {
        name: "FULL".into(),
        subjects: vec!["shop.*.full".into()],
        max_messages: 2,
        max_message_size: 2_000,
        discard: async_nats::jetstream::stream::DiscardPolicy::New,
        ..Default::default()
    };
    broker.jetstream().await.create_stream(config).await.unwrap();
    let sink = open(&broker, "subject=shop.{topic}.full");
    let mut large = message("orders", 0);
    large.payload = format!("\"{}\"", "x".repeat(3_000)).into();
    let sent = [large, message("orders", 1), message("orders", 2), message("orders", 3)];
    let verdicts = sink.send(&sent).await;
    assert!(
        matches!(
            &verdicts[..],
            [Verdict::Refused { .. }, Verdict::Delivered, Verdict::Delivered, Verdict::Retry { .. }]
        ),
        "{verdicts:?}"
    );
}

#[tokio::test]
async fn amqp_an_exchange_routes_and_one_that_is_missing_is_nobodys_fault() {
    use lapin::options::{ExchangeDeclareOptions, QueueBindOptions};
    let Some(broker) = Broker::start(Kind::Amqp, false).await else { return };
    let (exchange, queue) = (fresh("exchange"), fresh("queue"));
    broker.prepare(&queue).await;

    let sink = open(&broker, &format!("exchange={exchange}&routing_key=shop.{{topic}}"));
    let verdicts = sink.send(&[message("orders", 1), message("orders", 2)]).await;
    for verdict in verdicts {
        assert!(matches!(&verdict, Verdict::Away { reason } if reason.contains(&exchange)), "{verdict:?}");
    }
    let (_connection, channel) = broker.channel().await;
    let options = ExchangeDeclareOptions::default();
    channel
        .exchange_declare(exchange.as_str().into(), lapin::ExchangeKind::Topic, options, Default::default())
        .await
        .unwrap();
    channel
        .queue_bind(
            queue.as_str().into(),
            exchange.as_str().into(),
            "shop.orders".into(),
            QueueBindOptions::default(),
            Default::default(),
        )
        .await
        .unwrap();
    let verdicts = sink.send(&[message("orders", 1), message("payments", 2), message("orders", 3)]).await;
    assert!(
        matches!(&verdicts[..], [Verdict::Delivered, Verdict::Refused { reason }, Verdict::Delivered] if reason.contains("NO_ROUTE")),
        "{verdicts:?}"
    );
    assert_eq!(broker.stored(&queue).await.len(), 2);
}

#[tokio::test]
async fn amqp_returned_messages_are_told_apart_in_a_large_batch() {
    let Some(broker) = Broker::start(Kind::Amqp, false).await else { return };
    let (topic, nowhere) = (fresh("there"), fresh("nowhere"));
    broker.prepare(&topic).await;
    let sink = open(&broker, "");
    let sent: Vec<_> = (0..900).map(|at| message(if at % 7 == 3 { &nowhere } else { &topic }, at)).collect();
    for (at, verdict) in sink.send(&sent).await.into_iter().enumerate() {
        assert_eq!(verdict == Verdict::Delivered, at % 7 != 3, "{at}: {verdict:?}");
    }
}

async fn redis(broker: &Broker, command: &[&str]) -> redis::Value {
    let mut connection = broker.redis().await;
    redis::cmd(command[0]).arg(&command[1..]).query_async(&mut connection).await.unwrap()
}

#[tokio::test]
async fn redis_says_what_is_wrong() {
    let broker = Broker::start(Kind::Redis, false).await.unwrap();
    let sink = open(&broker, "stream=out:{topic}&maxlen=1000");
    assert_eq!(sink.send(&[message("orders", 1)]).await, [Verdict::Delivered]);
    assert_eq!(broker.stored("out:orders").await.len(), 1);

    redis(&broker, &["SET", "out:text", "x"]).await;
    let verdicts = sink.send(&[message("text", 1), message("orders", 2)]).await;
    assert!(matches!(verdicts[..], [Verdict::Refused { .. }, Verdict::Delivered]), "{verdicts:?}");

    redis(&broker, &["SCRIPT", "FLUSH"]).await;
    assert_eq!(sink.send(&[message("orders", 3)]).await, [Verdict::Delivered], "the script is loaded again");

    redis(&broker, &["CONFIG", "SET", "maxmemory", "1"]).await;
    let verdicts = sink.send(&[message("orders", 4)]).await;
    assert!(matches!(&verdicts[..], [Verdict::Away { reason }] if reason.contains("OOM")), "{verdicts:?}");
    redis(&broker, &["CONFIG", "SET", "maxmemory", "0"]).await;

    // No replica is there: nothing is delivered until one is.
    let replicated = open(&broker, "replicas=1&timeout=2s");
    let verdicts = replicated.send(&[message("orders", 5)]).await;
    assert!(matches!(&verdicts[..], [Verdict::Away { reason }] if reason.contains("0 of 1")), "{verdicts:?}");

    redis(&broker, &["REPLICAOF", "127.0.0.1", "1"]).await;
    let verdicts = sink.send(&[message("orders", 6)]).await;
    assert!(matches!(&verdicts[..], [Verdict::Away { .. }]), "{verdicts:?}");
}

#[tokio::test]
async fn tls_with_a_broker_that_speaks_none_is_away() {
    for kind in [Kind::Redis, Kind::Nats, Kind::Amqp] {
        let Some(broker) = Broker::start(kind, false).await else { continue };
        let url = match kind {
            Kind::Redis => broker.url().replace("redis:", "rediss:") + "?timeout=5s",
            Kind::Amqp => broker.url().replace("amqp:", "amqps:") + "?timeout=5s",
            _ => broker.url() + "?tls=true&timeout=5s",
        };
        let verdicts = sink::open(&url).unwrap().1.send(&[message("orders", 1)]).await;
        assert!(matches!(verdicts[..], [Verdict::Away { .. }]), "{kind:?}: {verdicts:?}");
    }
}
