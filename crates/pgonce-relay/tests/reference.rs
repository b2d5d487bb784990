//! docs/reference/sinks.md and the code know the same settings, and its URLs are URLs.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on should stop, loudly")]

use pgonce_relay::{sink, source};

const PAGE: &str = include_str!("../../../docs/reference/sinks.md");

/// The part of the page about a broker, as its sink and its source, if it is one.
fn section(title: &str) -> (&'static str, Option<&'static str>) {
    let section = PAGE.split("\n## ").find(|section| section.starts_with(title)).expect(title);
    section.split_once("\nSource: ").map_or((section, None), |(sink, source)| (sink, Some(source)))
}

/// The settings in the tables of a text.
fn documented(text: &str) -> Vec<&str> {
    let rows = text.lines().filter_map(|line| line.strip_prefix("| `")?.split_once(" |"));
    let mut told: Vec<&str> =
        rows.flat_map(|(names, _)| names.split(", ")).map(|name| name.trim_matches('`')).collect();
    // A setting of all sources and sinks, which says more here.
    told.retain(|name| *name != "topic");
    told.sort_unstable();
    told
}

fn sorted(settings: &[&'static str]) -> Vec<&'static str> {
    let mut known = settings.to_vec();
    known.sort_unstable();
    known
}

fn first_url(text: &'static str) -> &'static str {
    text.split('`').find(|part| part.contains("://") || part.ends_with(':')).expect("a URL")
}

#[test]
fn the_page_knows_what_the_code_knows() {
    for (title, of_sink, of_source) in [
        ("NATS", sink::nats::SETTINGS, Some(source::nats::SETTINGS)),
        ("RabbitMQ", sink::amqp::SETTINGS, Some(source::amqp::SETTINGS)),
        ("Kafka", sink::kafka::SETTINGS, Some(source::kafka::SETTINGS)),
        ("Redis", sink::redis::SETTINGS, Some(source::redis::SETTINGS)),
        ("Another PostgreSQL", sink::postgres::SETTINGS, None),
        ("Webhooks", sink::webhook::SETTINGS, Some(source::webhook::SETTINGS)),
        ("Standard output", &[], None),
    ] {
        let (sink_text, source_text) = section(title);
        // Webhooks are opened with their secrets, which are not there: nothing to sign with for the sink, and for the
        // source some variable that is always set.
        let (no_secret, a_secret) = if title == "Webhooks" { ("&unsigned=true", "&secret_env=PATH") } else { ("", "") };
        assert_eq!(documented(sink_text), sorted(of_sink), "the sink of {title}");
        sink::open(&format!("{}{no_secret}", first_url(sink_text))).expect(title);
        assert_eq!(source_text.map(documented), of_source.map(sorted), "the source of {title}");
        if let Some(text) = source_text {
            source::open(&format!("{}{a_secret}", first_url(text)), "billing").expect(title);
        }
    }
}

/// The table at the top names every scheme that can be opened, and no other.
#[test]
fn the_page_knows_every_scheme() {
    let table = PAGE.split("| scheme |").nth(1).expect("a table").split("\n\n").next().expect("its end");
    let unknown = |error: &str| error.contains("there is no ");
    for row in table.lines().skip(2) {
        let columns: Vec<&str> = row.split('|').map(str::trim).collect();
        for scheme in columns[1].split(", ").map(|scheme| scheme.trim_matches('`')) {
            let url = if scheme == "stdout" { "stdout:".to_owned() } else { format!("{scheme}://127.0.0.1") };
            let as_sink = sink::open(&url).err().map(|error| error.to_string()).unwrap_or_default();
            let as_source = source::open(&url, "billing").err().map(|error| error.to_string()).unwrap_or_default();
            assert_eq!(unknown(&as_sink), columns[2].is_empty(), "{scheme} as a sink: {as_sink}");
            assert_eq!(unknown(&as_source), columns[3].is_empty(), "{scheme} as a source: {as_source}");
        }
    }
}
