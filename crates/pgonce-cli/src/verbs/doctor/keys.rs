//! Keys that name an attempt and not an intent, from what is really in the table.

use std::collections::{BTreeMap, HashMap};

use tokio_postgres::Client;

use super::{Finding, Findings, Level};
use crate::database;

/// The newest of each scope.
const SAMPLE: &str = "
SELECT jsonb_build_object('tenant', s.tenant, 'scope', s.scope, 'key', s.key, 'attempts', s.attempt_count,
    'fingerprint', encode(s.fingerprint, 'hex'))
FROM (SELECT i.*, row_number() OVER (PARTITION BY i.scope ORDER BY i.created_at DESC) AS n FROM once.intents i) s
WHERE s.n <= 1000 LIMIT 20000";
/// The same for a table that cannot be sorted: the latest to expire, which an index knows.
const SAMPLE_OF_MANY: &str = "
SELECT jsonb_build_object('tenant', s.tenant, 'scope', s.scope, 'key', s.key, 'attempts', s.attempt_count,
    'fingerprint', encode(s.fingerprint, 'hex'))
FROM (SELECT i.* FROM once.intents i WHERE i.expires_at IS NOT NULL ORDER BY i.expires_at DESC LIMIT 10000) s";
/// Fewer keys than this tell nothing.
const SAMPLE_MIN: usize = 20;

#[derive(Debug)]
struct Sampled {
    tenant: String,
    key: String,
    fingerprint: String,
    attempts: i64,
}

/// Samples and judges, scope by scope.
pub async fn examine(client: &Client) -> Findings {
    let sql = if database::is_sortable(client).await? { SAMPLE } else { SAMPLE_OF_MANY };
    let mut scopes: BTreeMap<String, Vec<Sampled>> = BTreeMap::new();
    for row in database::json_rows(client, sql, &[]).await? {
        let text = |field: &str| row[field].as_str().unwrap_or_default().to_owned();
        let attempts = row["attempts"].as_i64().unwrap_or(1);
        let sampled = Sampled { tenant: text("tenant"), key: text("key"), fingerprint: text("fingerprint"), attempts };
        scopes.entry(text("scope")).or_default().push(sampled);
    }
    let looked_at: usize = scopes.values().map(Vec::len).sum();
    let findings: Vec<Finding> = scopes.iter().flat_map(|(scope, sample)| judge(scope, sample)).collect();
    if findings.is_empty() {
        return Ok(vec![Finding::ok(
            "keys",
            format!("{looked_at} keys looked at: none of a kind that names attempts"),
        )]);
    }
    Ok(findings)
}

const ONE_KEY: &str =
    "Make the key where the intent is made (the checkout, the form, the message) and repeat it in every retry.";

/// What a scope's keys look like. Never a key in the text: findings go into tickets and logs.
fn judge(scope: &str, sample: &[Sampled]) -> Vec<Finding> {
    let total = sample.len();
    if total < SAMPLE_MIN {
        return Vec::new();
    }
    let finding = |level, count: usize, what: &str, why| {
        Finding::new(level, "keys", format!("scope {scope}: {count} of {total} sampled keys {what}"), why, ONE_KEY)
    };
    let like = |is: fn(&str) -> bool| sample.iter().filter(|sampled| is(&sampled.key)).count();
    let mut findings = Vec::new();
    let times = like(has_time);
    if times * 2 >= total {
        findings.push(finding(
            Level::Warn,
            times,
            "carry a time",
            "A retry happens at another time: it gets another key, and a second effect.",
        ));
    }
    let numbers = like(is_bare_number);
    if times * 2 < total && numbers * 10 >= total * 9 {
        findings.push(if are_offsets(sample) {
            finding(
                Level::Warn,
                numbers,
                "are a running number alone, like an offset",
                "Offsets start again with a new topic, partition or file: another message then meets an old key and is dropped or refused.",
            )
        } else {
            finding(
                Level::Warn,
                numbers,
                "are a short number alone, like a user's id",
                "The same person's next command has the same key: it is answered with the old outcome, or refused.",
            )
        });
    }
    findings.extend(repeated_payloads(scope, sample));
    findings
}

/// The same payload under several keys: a fresh key for every try.
fn repeated_payloads(scope: &str, sample: &[Sampled]) -> Option<Finding> {
    let total = sample.len();
    let mut same: HashMap<(&str, &str), Vec<&Sampled>> = HashMap::new();
    for sampled in sample {
        same.entry((&sampled.tenant, &sampled.fingerprint)).or_default().push(sampled);
    }
    let largest = same.values().map(Vec::len).max().unwrap_or(0);
    if largest * 2 > total {
        return Some(Finding::new(
            Level::Info,
            "keys",
            format!("scope {scope}: {largest} of {total} sampled intents have one and the same fingerprint"),
            "Either the payload is not in the fingerprint, and a key reused with another payload is not noticed; or a fresh key is made for every try.",
            "Pass the request as the payload (once.fingerprint), and repeat the key in every retry.",
        ));
    }
    let repeated: Vec<&Sampled> = same.values().filter(|group| group.len() > 1).flatten().copied().collect();
    if repeated.len() < 5 || repeated.len() * 20 < total {
        return None;
    }
    let random = repeated.iter().filter(|sampled| is_uuid_v4(&sampled.key)).count();
    let once = repeated.iter().filter(|sampled| sampled.attempts == 1).count();
    Some(Finding::new(
        Level::Warn,
        "keys",
        format!(
            "scope {scope}: {} of {total} sampled intents share their payload with another key ({random} keys are random UUIDs, {once} were tried once)",
            repeated.len()
        ),
        "It looks like a fresh key for every try: nothing is deduplicated, and each try has its effect.",
        ONE_KEY,
    ))
}

/// A moment, not a day: 2026-11-15T10:11, 20261115101112, or seconds or milliseconds since 1970.
fn has_time(key: &str) -> bool {
    let bytes = key.as_bytes();
    let digits =
        |range: std::ops::Range<usize>| bytes.get(range).is_some_and(|part| part.iter().all(u8::is_ascii_digit));
    let at = |index: usize, any: &[u8]| bytes.get(index).is_some_and(|byte| any.contains(byte));
    let iso = (0..bytes.len()).any(|start| {
        digits(start..start + 4)
            && at(start + 4, b"-")
            && digits(start + 5..start + 7)
            && at(start + 7, b"-")
            && digits(start + 8..start + 10)
            && at(start + 10, b"T t_")
            && digits(start + 11..start + 13)
            && at(start + 13, b":-.0123456789")
    });
    iso || key.split(|c: char| !c.is_ascii_alphanumeric()).any(is_unix_or_compact_time)
}

fn is_unix_or_compact_time(part: &str) -> bool {
    let Ok(number) = part.parse::<u64>() else { return false };
    match part.len() {
        10 => (1_400_000_000..2_100_000_000).contains(&number),
        13 => (1_400_000_000_000..2_100_000_000_000).contains(&number),
        14 => (2014..2040).contains(&(number / 10_000_000_000)) && (1..=12).contains(&(number / 100_000_000 % 100)),
        _ => false,
    }
}

/// 4711, or user-4711 and offset:4711.
fn is_bare_number(key: &str) -> bool {
    const NAMES: [&str; 10] =
        ["", "user", "usr", "uid", "customer", "client", "account", "member", "offset", "partition"];
    let (name, number) = split_number(key);
    (1..=9).contains(&number.len())
        && NAMES.contains(&name.trim_end_matches(['-', '_', ':', '/', '.', '=']).to_lowercase().as_str())
}

fn split_number(key: &str) -> (&str, &str) {
    let start = key.bytes().rposition(|byte| !byte.is_ascii_digit()).map_or(0, |last| last + 1);
    // A multi-byte character ends before a digit, so this is a boundary.
    key.split_at(start)
}

/// Whether the numbers run on: most have their successor in the sample.
fn are_offsets(sample: &[Sampled]) -> bool {
    let mut numbers: Vec<u64> = sample.iter().filter_map(|sampled| split_number(&sampled.key).1.parse().ok()).collect();
    numbers.sort_unstable();
    numbers.dedup();
    let follow = numbers.windows(2).filter(|pair| pair[1] - pair[0] == 1).count();
    follow * 5 >= numbers.len().saturating_sub(1) * 4
}

fn is_uuid_v4(key: &str) -> bool {
    uuid::Uuid::try_parse(key).is_ok_and(|uuid| uuid.get_version_num() == 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(keys: impl Iterator<Item = String>) -> Vec<Sampled> {
        let sampled =
            |(n, key): (usize, String)| Sampled { tenant: String::new(), key, fingerprint: n.to_string(), attempts: 1 };
        keys.enumerate().map(sampled).collect()
    }

    fn said(sample: &[Sampled]) -> String {
        judge("s", sample).into_iter().map(|finding| finding.what).collect::<Vec<_>>().join("; ")
    }

    #[test]
    fn times_are_seen_and_days_are_not() {
        for key in
            ["o-2026-11-15T10:11:12Z", "1763201472", "order-1763201472123", "x_20261115101112", "2026-11-15 10:11"]
        {
            assert!(has_time(key), "{key}");
        }
        for key in [
            "merchant-7-2026-11-15",
            "3c51",
            "4711",
            "0000000001",
            "a1763201472",
            "9f1c7a3e-1763-4201-8472-000000000001",
        ] {
            assert!(!has_time(key), "{key}");
        }
    }

    #[test]
    fn each_kind_is_told_apart() {
        assert_eq!(said(&sample((0..50).map(|n| format!("checkout-{n:x}-z")))), "");
        assert!(said(&sample((0..50).map(|n| format!("u-{}", 1_763_201_472 + n)))).contains("carry a time"));
        assert!(said(&sample((0..50).map(|n| (1000 + n).to_string()))).contains("running number"));
        assert!(said(&sample((0..50).map(|n| format!("user-{}", n * 37)))).contains("user's id"));
        assert_eq!(said(&sample((0..10).map(|n| n.to_string()))), "", "too few to judge");
    }

    #[test]
    fn a_fresh_key_for_every_try_is_seen_by_its_payload() {
        let mut tries = sample((0..60).map(|_| uuid::Uuid::new_v4().to_string()));
        assert_eq!(said(&tries), "", "random keys alone are fine");
        for (n, sampled) in tries.iter_mut().enumerate() {
            sampled.fingerprint = (n / 3).to_string();
        }
        assert!(said(&tries).contains("60 of 60 sampled intents share their payload"), "{}", said(&tries));
        for sampled in &mut tries {
            sampled.fingerprint = "same".into();
        }
        assert!(said(&tries).contains("one and the same fingerprint"));
    }

    #[test]
    fn no_key_is_in_a_finding() {
        let findings = judge("s", &sample((0..50).map(|n| format!("user-{}", 424_200 + n))));
        assert!(findings.iter().all(|finding| !finding.what.contains("4242")));
    }
}
