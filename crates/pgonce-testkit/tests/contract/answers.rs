//! What later attempts observe, and who may.

use pgonce::{Answer, IntentName, Mode};
use serde_json::json;

use crate::doors::{Door, payload};
use crate::world::{MODES, World, answer, at_once, name};

pub async fn exact_bytes<D: Door>(mut world: World<D>) {
    let every_byte: Vec<u8> = (0..=255).chain((0..=255).rev()).collect();
    let headers = json!({"content-type": "application/octet-stream", "x-odd": "quote ' backslash \\ é \u{1f980}",
        "list": ["a", "b"], "number": 1.5});
    for mode in MODES {
        for (key, body) in [("bytes", Some(every_byte.clone())), ("empty", Some(Vec::new())), ("none", None)] {
            let name = name("exact", &format!("{key} {mode:?}"));
            let stored = Answer { headers: Some(headers.clone()), body, ..answer("") };
            world.succeeded(&name, mode, &stored).await;
            for _ in 0..2 {
                let seen = world.claim(&name, &at_once(mode)).await.unwrap();
                assert_eq!(seen.answer.as_ref(), Some(&stored), "{key}");
            }
            let sql = "SELECT response_body FROM once.intents WHERE key = $1";
            let row: Option<Vec<u8>> = world.admin.query_one(sql, &[&name.key]).await.unwrap().get(0);
            assert_eq!(row, stored.body, "{key}");
        }
    }
}

pub async fn response_strategies<D: Door>(mut world: World<D>) {
    for response in ["full", "reference", "status", "error"] {
        world.define(response, json!({"response": response})).await;
        for mode in MODES {
            let sent = answer("body");
            let kept = match response {
                "full" => sent.clone(),
                "reference" => Answer { headers: None, body: None, ..sent.clone() },
                "status" => Answer { code: sent.code, ..Answer::default() },
                _ => Answer::default(),
            };
            let done = name(response, &format!("done {mode:?}"));
            world.succeeded(&done, mode, &sent).await;
            let seen = world.claim(&done, &at_once(mode)).await.unwrap();
            assert_eq!(
                (seen.kind.as_str(), seen.answer),
                ("replay_success", Some(kept.clone())),
                "{response} {mode:?}"
            );

            // The slow path of succeed, over a row that is there.
            let retried = name(response, &format!("retried {mode:?}"));
            world.failed(&retried, mode, true).await;
            world.succeeded(&retried, mode, &sent).await;
            let seen = world.claim(&retried, &at_once(mode)).await.unwrap();
            assert_eq!((seen.kind.as_str(), seen.answer), ("replay_success", Some(kept)), "{response} {mode:?}");

            let failed = name(response, &format!("failed {mode:?}"));
            world.failed(&failed, mode, false).await;
            let seen = world.claim(&failed, &at_once(mode)).await.unwrap();
            let message = (response != "error").then(|| "sold out".to_owned());
            assert_eq!(seen.failure, Some(("no_stock".into(), message)), "{response} {mode:?}");
        }
    }
}

pub async fn limits<D: Door>(mut world: World<D>) {
    let text = |bytes: usize| Some("x".repeat(bytes));
    for mode in MODES {
        for (what, over, within) in [
            (
                "headers",
                Answer { headers: Some(json!({"h": text(262_144)})), ..answer("") },
                Answer { headers: Some(json!({"h": text(262_000)})), ..answer("") },
            ),
            (
                "result type",
                Answer { result_type: text(256), ..answer("") },
                Answer { result_type: text(255), ..answer("") },
            ),
            (
                "result id",
                Answer { result_id: text(1025), ..answer("") },
                Answer { result_id: text(1024), ..answer("") },
            ),
        ] {
            let name = name("limits", &format!("{what} {mode:?}"));
            world.door.begin().await;
            let claim = world.door.claim(&name, &at_once(mode)).await.unwrap().claim_id.unwrap();
            let told = world.door.succeed(&name, claim, &over).await;
            assert_eq!(told.unwrap_err().0, "P4005", "{what} {mode:?}");
            world.door.rollback().await;
            world.succeeded(&name, mode, &within).await;
            let seen = world.claim(&name, &at_once(mode)).await.unwrap();
            assert_eq!(seen.answer, Some(within), "{what} {mode:?}");
        }
    }
}

pub async fn tenants_never_meet<D: Door>(mut world: World<D>) {
    // One key: with one payload, so that an answer could leak; and each with its own, so that it could conflict.
    let of = |tenant: &str, key: &str| IntentName {
        tenant: tenant.into(),
        fingerprint: payload(if key.contains("own") { tenant } else { "one" }),
        ..name("shared", key)
    };
    for (mode, what) in MODES.into_iter().flat_map(|mode| ["one", "own"].map(|what| (mode, what))) {
        let key = format!("{what} payload {mode:?}");
        for tenant in ["", "a", "b", "A"] {
            world.succeeded(&of(tenant, &key), mode, &answer(tenant)).await;
        }
        for tenant in ["", "a", "b", "A"] {
            let seen = world.claim(&of(tenant, &key), &at_once(mode)).await.unwrap();
            assert_eq!(seen.answer, Some(answer(tenant)));
        }
        let rows: i64 =
            world.admin.query_one("SELECT count(*) FROM once.intents WHERE key = $1", &[&key]).await.unwrap().get(0);
        assert_eq!(rows, 4);
        // Both at once, in one transaction: neither waits for the other.
        let key = format!("open {what} {mode:?}");
        world.door.begin().await;
        for tenant in ["a", "b"] {
            let seen = world.door.claim(&of(tenant, &key), &at_once(mode)).await.unwrap();
            assert_eq!(seen.kind, "new_claim");
        }
        world.door.rollback().await;
    }
    // A tenant's own rules, and only that tenant's.
    let own = "SELECT once.define_scope('shared', '{\"response\": \"status\"}', 'a')";
    world.admin.batch_execute(own).await.unwrap();
    for (tenant, body) in [("a", None), ("b", Some(b"text".to_vec())), ("", Some(b"text".to_vec()))] {
        let name = of(tenant, "own rules");
        world.succeeded(&name, Mode::Atomic, &answer("text")).await;
        let seen = world.claim(&name, &at_once(Mode::Atomic)).await.unwrap();
        assert_eq!(seen.answer.unwrap().body, body, "tenant {tenant:?}");
    }
}

pub async fn attempts_are_counted<D: Door>(mut world: World<D>) {
    world.define("three", json!({"attempts_max": 3})).await;
    for mode in MODES {
        let name = name("three", &format!("{mode:?}"));
        for attempt in 1..=3_u32 {
            world.door.begin().await;
            let seen = world.door.claim(&name, &at_once(mode)).await.unwrap();
            let kind = if attempt == 1 { "new_claim" } else { "retryable_failure" };
            assert_eq!((seen.kind.as_str(), seen.attempt), (kind, Some(attempt)));
            world.door.fail(&name, seen.claim_id.unwrap(), true, "flaky", "not now").await.unwrap();
            world.door.commit().await.unwrap();
            let status = if attempt == 3 { "failed_final" } else { "failed_retryable" };
            assert_eq!(world.row(&name).await, Some((status.into(), i32::try_from(attempt).unwrap())));
        }
        let seen = world.claim(&name, &at_once(mode)).await.unwrap();
        assert_eq!(seen.failure, Some(("flaky".into(), Some("not now".into()))), "the third failure was final");
    }
}
