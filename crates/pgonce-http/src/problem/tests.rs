#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;

use serde_json::json;

use super::*;

const DOCS: &str = include_str!("../../../../docs/reference/errors.md");

/// The problem after this one: a new variant does not compile until it has its place here.
fn next(problem: &Problem) -> Option<Problem> {
    let retry_after = Duration::from_millis(1500);
    Some(match problem {
        Problem::KeyMissing => Problem::KeyMalformed(KeyError::Repeated),
        Problem::KeyMalformed(_) => Problem::BodyTooLarge { limit: 1024 },
        Problem::BodyTooLarge { .. } => Problem::BodyIncomplete,
        Problem::BodyIncomplete => Problem::BodyTimeout,
        Problem::BodyTimeout => Problem::Conflict,
        Problem::Conflict => Problem::InProgress { retry_after },
        Problem::InProgress { .. } => Problem::FailedBefore { code: "no_stock".to_owned() },
        Problem::FailedBefore { .. } => Problem::TryAgain,
        Problem::TryAgain => Problem::Uncertain,
        Problem::Uncertain => Problem::InDoubt,
        Problem::InDoubt => Problem::ResultExpired,
        Problem::ResultExpired => Problem::ResponseNotStored { code: Some(201) },
        Problem::ResponseNotStored { .. } => Problem::TenantMissing,
        Problem::TenantMissing => Problem::TenantRefused,
        Problem::TenantRefused => Problem::Overloaded { retry_after },
        Problem::Overloaded { .. } => Problem::QuotaExceeded { retry_after },
        Problem::QuotaExceeded { .. } => Problem::DatabaseAway,
        Problem::DatabaseAway => Problem::HomeAway,
        Problem::HomeAway => Problem::UpstreamAway,
        Problem::UpstreamAway => Problem::UpstreamTimeout,
        Problem::UpstreamTimeout => Problem::UpstreamUncertain { upstream_status: Some(503) },
        Problem::UpstreamUncertain { .. } => Problem::UpstreamFailed { upstream_status: Some(500) },
        Problem::UpstreamFailed { .. } => Problem::LeaseLost,
        Problem::LeaseLost => Problem::HandlerFailed,
        Problem::HandlerFailed => Problem::TransactionKept,
        Problem::TransactionKept => Problem::NotGuarded,
        Problem::NotGuarded => Problem::Malformed("two lengths".to_owned()),
        Problem::Malformed(_) => Problem::Internal,
        Problem::Internal => return None,
    })
}

fn all() -> Vec<Problem> {
    std::iter::successors(Some(Problem::KeyMissing), next).collect()
}

fn body(response: &Response<Bytes>) -> Value {
    serde_json::from_slice(response.body()).unwrap()
}

#[test]
fn every_problem_has_a_slug_of_its_own() {
    let slugs: Vec<&str> = all().iter().map(Problem::slug).collect();
    assert_eq!(slugs, SLUGS);
    assert_eq!(slugs.iter().collect::<BTreeSet<_>>().len(), slugs.len());
    assert!(slugs.iter().all(|slug| slug.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'-')));
    let titles: BTreeSet<&str> = all().iter().map(Problem::title).collect();
    assert_eq!(titles.len(), slugs.len());
}

#[test]
fn the_docs_say_of_every_problem_what_the_code_says() {
    assert!(DOCS.contains(&format!("`{BASE}")), "the docs name the base of the type URIs");
    let table = DOCS.split_once("## HTTP problems").unwrap().1;
    for problem in all() {
        let retry = if problem.is_retryable() { "yes" } else { "no" };
        let row = format!(
            "| `{}` | {} | {} | {retry} |",
            problem.slug(),
            problem.default_status().as_u16(),
            problem.effect().as_str()
        );
        assert!(table.contains(&row), "docs/reference/errors.md lacks the row {row}");
    }
    let rows = table.lines().filter(|line| line.starts_with("| `") && line.matches('|').count() == 6).count();
    assert_eq!(rows, SLUGS.len(), "the docs list problems that are not there");
}

#[test]
fn every_response_says_what_a_client_needs() {
    for problem in all() {
        let response = problem.response(&StatusMap::default(), Some("urn:uuid:7"));
        let members = body(&response);
        let uri = format!("{BASE}{}", problem.slug());
        assert_eq!(response.status(), problem.default_status());
        assert_eq!(response.headers()["content-type"], "application/problem+json");
        assert_eq!(response.headers()["cache-control"], "no-store");
        assert!(!response.headers().contains_key("link"), "where help is, only whoever answers knows");
        assert_eq!(members["type"], json!(uri));
        assert_eq!(members["title"], json!(problem.title()));
        assert_eq!(members["status"], json!(problem.default_status().as_u16()));
        assert_eq!(members["detail"], json!(problem.detail()));
        assert_eq!(members["effect"], json!(problem.effect().as_str()));
        assert_eq!(members["retryable"], json!(problem.is_retryable()));
        assert_eq!(members["instance"], json!("urn:uuid:7"));
        let wait = problem.retry_after().map(|_| "2");
        assert_eq!(response.headers().get("retry-after").map(|value| value.to_str().unwrap()), wait);
        assert_eq!(members.get("retry_after"), wait.map(|_| json!(2)).as_ref());
    }
    assert!(body(&Problem::Internal.response(&StatusMap::default(), None)).get("instance").is_none());
}

#[test]
fn every_slug_has_its_help() {
    for problem in all() {
        let help = Problem::help(problem.slug()).unwrap();
        let expected = json!([format!("{BASE}{}", problem.slug()), problem.title(), problem.effect().as_str()]);
        assert_eq!(json!([help["type"], help["title"], help["effect"]]), expected);
        assert_eq!(help["retryable"], json!(problem.is_retryable()));
        assert!(help["what_to_do"].as_str().unwrap().len() > 30, "{help}");
    }
    assert_eq!(Problem::help("nothing"), None);
}

#[test]
fn what_is_done_is_never_to_be_sent_again_and_what_is_unknown_always_with_the_same_key() {
    for problem in all() {
        match problem.effect() {
            Effect::Done => assert!(!problem.is_retryable(), "{problem:?}"),
            Effect::Unknown => {
                assert!(problem.is_retryable(), "{problem:?}");
                assert!(problem.detail().contains("with the same key"), "{problem:?}");
            }
            Effect::NotDone => assert!(!problem.detail().contains("carried out, once"), "{problem:?}"),
        }
    }
}

#[test]
fn an_upstream_that_was_not_reached_is_not_one_that_did_not_answer() {
    let away = Problem::UpstreamAway;
    assert_eq!((away.default_status().as_u16(), away.effect(), away.is_retryable()), (502, Effect::NotDone, true));
    let late = Problem::UpstreamTimeout;
    assert_eq!((late.default_status().as_u16(), late.effect(), late.is_retryable()), (504, Effect::Unknown, true));
    let unsure = Problem::UpstreamUncertain { upstream_status: None };
    assert_eq!((unsure.default_status().as_u16(), unsure.effect()), (502, Effect::Unknown));
}

#[test]
fn what_is_known_besides_is_told() {
    let members = |problem: Problem| body(&problem.response(&StatusMap::default(), None));
    assert_eq!(members(Problem::BodyTooLarge { limit: 7 })["limit_bytes"], json!(7));
    assert_eq!(members(Problem::FailedBefore { code: "no_stock".into() })["failure_code"], json!("no_stock"));
    assert_eq!(members(Problem::ResponseNotStored { code: Some(201) })["original_status"], json!(201));
    assert!(members(Problem::ResponseNotStored { code: None }).get("original_status").is_none());
    for status in [Some(503), None] {
        let uncertain = members(Problem::UpstreamUncertain { upstream_status: status });
        let failed = members(Problem::UpstreamFailed { upstream_status: status });
        assert_eq!(uncertain.get("upstream_status"), status.map(|code| json!(code)).as_ref());
        assert_eq!(failed.get("upstream_status"), status.map(|code| json!(code)).as_ref());
    }
}

#[test]
fn retry_after_is_whole_seconds_rounded_up_and_at_least_one() {
    for (wait_ms, seconds) in [(0, 1), (1, 1), (999, 1), (1000, 1), (1001, 2), (59_500, 60)] {
        assert_eq!(whole_seconds(Duration::from_millis(wait_ms)), seconds);
    }
    assert_eq!(whole_seconds(Duration::MAX), u64::MAX);
}

#[test]
fn statuses_are_mapped_within_the_errors() {
    let mut statuses = StatusMap::default();
    for problem in all() {
        assert_eq!(statuses.status(&problem), problem.default_status());
    }
    statuses.set("conflict", 400).unwrap();
    statuses.set("in-progress", 599).unwrap();
    let response = Problem::Conflict.response(&statuses, None);
    assert_eq!((response.status().as_u16(), &body(&response)["status"]), (400, &json!(400)));
    assert_eq!(statuses.status(&Problem::InProgress { retry_after: Duration::ZERO }).as_u16(), 599);
    assert_eq!(statuses.status(&Problem::KeyMissing), 400);
    let before = statuses.clone();
    for status in [0, 99, 100, 200, 302, 399, 600, 999, 1000, u16::MAX] {
        assert_eq!(statuses.set("conflict", status), Err(StatusMapError::NotAnError(status)));
    }
    for slug in ["", "Conflict", "conflict ", "nothing"] {
        assert_eq!(statuses.set(slug, 409), Err(StatusMapError::UnknownSlug(slug.to_owned())));
    }
    assert_eq!(statuses, before);
}

#[test]
fn errors_of_the_library_become_problems_that_mean_the_same() {
    use pgonce::Error;
    let retry_after = Duration::from_secs(3);
    let code = || "no_stock".to_owned();
    let refused = |sqlstate: &str| Error::Refused { sqlstate: sqlstate.into(), message: "no".into() };
    let expected = [
        (Error::Conflict, Problem::Conflict),
        (Error::InProgress { retry_after }, Problem::InProgress { retry_after }),
        (Error::FailedBefore { code: code(), message: None }, Problem::FailedBefore { code: code() }),
        (Error::Failed { code: code(), message: "secret".into() }, Problem::FailedBefore { code: code() }),
        (Error::FailedRetryable { code: code(), message: "secret".into() }, Problem::TryAgain),
        (Error::Uncertain, Problem::Uncertain),
        (Error::ResultExpired, Problem::ResultExpired),
        (Error::LeaseLost, Problem::LeaseLost),
        (Error::InDoubt { reason: "cut".into() }, Problem::InDoubt),
        (Error::Overloaded { retry_after }, Problem::Overloaded { retry_after }),
        (Error::Schema("old".into()), Problem::Internal),
        (Error::Invalid("bad".into()), Problem::Internal),
        (refused("P4001"), Problem::KeyMalformed(KeyError::Refused)),
        (refused("P4003"), Problem::Internal),
        (refused("P4004"), Problem::TenantRefused),
    ];
    for (error, problem) in expected {
        assert_eq!(Problem::of_error(&error), problem);
        assert!(!error.is_retryable() || problem.is_retryable(), "{error}");
    }
}
