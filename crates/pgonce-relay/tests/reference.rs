//! docs/reference/sinks.md and the code know the same settings, and its URLs are URLs.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on should stop, loudly")]

use pgonce_relay::{sink, source};

const PAGE: &str = include_str!("../../../docs/reference/sinks.md");

/// The part of the page about a broker, as its sink and its source.
fn section(title: &str) -> (&'static str, &'static str) {
    let section = PAGE.split("\n## ").find(|section| section.starts_with(title)).expect(title);
    section.split_once("\nSource: ").expect("a source")
}

/// The settings in the tables of a text.
fn documented(text: &str) -> Vec<&str> {
    let rows = text.lines().filter_map(|line| line.strip_prefix("| `")?.split_once(" |"));
    rows.flat_map(|(names, _)| names.split(", ")).map(|name| name.trim_matches('`')).collect()
}

fn first_url(text: &'static str) -> &'static str {
    text.split('`').find(|part| part.contains("://")).expect("a URL")
}

#[test]
fn the_page_knows_what_the_code_knows() {
    for (title, of_sink, of_source) in [
        ("NATS", sink::nats::SETTINGS, source::nats::SETTINGS),
        ("RabbitMQ", sink::amqp::SETTINGS, source::amqp::SETTINGS),
        ("Kafka", sink::kafka::SETTINGS, source::kafka::SETTINGS),
        ("Redis", sink::redis::SETTINGS, source::redis::SETTINGS),
    ] {
        let (sink_text, source_text) = section(title);
        for (text, settings) in [(sink_text, of_sink), (source_text, of_source)] {
            let mut known: Vec<&str> = settings.to_vec();
            let mut told = documented(text);
            // A setting of all sources and sinks, which says more here.
            told.retain(|name| *name != "topic");
            known.sort_unstable();
            told.sort_unstable();
            assert_eq!(told, known, "{title}");
        }
        sink::open(first_url(sink_text)).expect(title);
        source::open(first_url(source_text), "billing").expect(title);
    }
}
