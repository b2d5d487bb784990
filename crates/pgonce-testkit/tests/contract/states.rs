//! Every kind of answer from every prior state.

use pgonce::{Answer, IntentName, Mode};
use serde_json::json;

use crate::doors::{Door, Refused, Seen};
use crate::world::{DAY, HOUR, MODES, World, answer, at_once, name, other};

/// What a claim must be told; the claim id is whatever it is.
#[derive(Clone)]
enum Expect {
    Owned(&'static str, u32),
    Replay(Answer),
    Failed(&'static str, Option<&'static str>),
    Told(&'static str),
}

impl Expect {
    fn check(&self, key: &str, seen: &Seen) {
        let expected = match self.clone() {
            Self::Owned(kind, attempt) => {
                assert!(seen.claim_id.is_some(), "{key}: {seen:?}");
                Seen { kind: kind.into(), claim_id: seen.claim_id, attempt: Some(attempt), ..Seen::default() }
            }
            Self::Replay(answer) => Seen { kind: "replay_success".into(), answer: Some(answer), ..Seen::default() },
            Self::Failed(code, message) => Seen {
                kind: "final_failure".into(),
                answer: Some(Answer::default()),
                failure: Some((code.into(), message.map(Into::into))),
                ..Seen::default()
            },
            Self::Told(kind) => Seen { kind: kind.into(), ..Seen::default() },
        };
        assert_eq!(*seen, expected, "{key}");
    }
}

impl<D: Door> World<D> {
    /// Another payload is refused without a trace while the row counts; then the claim is told what is
    /// expected; what could be owned is completed and replayed: the ownership was real.
    async fn check(&mut self, name: &IntentName, mode: Mode, gone: bool, expected: &Expect) {
        let key = &name.key;
        let before = self.checksum().await;
        self.door.begin().await;
        let told = self.door.claim(&other(name), &at_once(mode)).await;
        self.door.rollback().await;
        if gone {
            Expect::Owned("new_claim", 1).check(key, &told.unwrap());
        } else {
            assert_eq!(told, Err(Refused("P4002".into())), "{key}: another payload");
        }
        assert_eq!(self.checksum().await, before, "{key}: another payload left a trace");

        self.door.begin().await;
        let seen = self.door.claim(name, &at_once(mode)).await.unwrap();
        expected.check(key, &seen);
        if let Some(claim) = seen.claim_id {
            if mode == Mode::Leased {
                self.door.commit().await.unwrap();
                let rival = self.claim(name, &at_once(mode)).await.unwrap();
                Expect::Told("processing_active").check(key, &rival);
                self.door.begin().await;
            }
            self.door.succeed(name, claim, &answer(key)).await.unwrap();
            self.door.commit().await.unwrap();
            let replayed = self.claim(name, &at_once(mode)).await.unwrap();
            Expect::Replay(answer(key)).check(key, &replayed);
        } else {
            self.door.commit().await.unwrap();
            // What was told stays so.
            let again = self.claim(name, &at_once(mode)).await.unwrap();
            expected.check(key, &again);
        }
    }
}

fn keyed(scope: &str, state: &str, made: Mode, claimed: Mode) -> IntentName {
    name(scope, &format!("{state}, made {made:?}, claimed {claimed:?}"))
}

pub async fn every_state_in_both_modes<D: Door>(mut world: World<D>) {
    world.define("day", json!({"retention": "1d", "lease": "1h"})).await;
    world.define("tomb", json!({"retention": "1d", "tombstone": "30d"})).await;
    world.define("tomb_short", json!({"retention": "1h", "tombstone": "1h"})).await;
    let pairs: Vec<(Mode, Mode)> = MODES.into_iter().flat_map(|made| MODES.map(|claimed| (made, claimed))).collect();

    for &(made, claimed) in &pairs {
        world.succeeded(&keyed("tomb", "stripped", made, claimed), made, &answer("old")).await;
    }
    world.db.travel(2 * DAY).await;
    let stripped: i64 = world.admin.query_one("SELECT once.purge()", &[]).await.unwrap().get(0);
    assert_eq!(stripped, 4);
    for &(made, claimed) in &pairs {
        world.succeeded(&keyed("day", "succeeded, expired", made, claimed), made, &answer("old")).await;
        world.succeeded(&keyed("tomb", "succeeded, expired, tombstone", made, claimed), made, &answer("old")).await;
        world.succeeded(&keyed("tomb_short", "tombstone over", made, claimed), made, &answer("old")).await;
        world.failed(&keyed("day", "retryable, expired", made, claimed), made, true).await;
        world.failed(&keyed("day", "final, expired", made, claimed), made, false).await;
    }
    world.db.travel(4 * DAY).await;
    for &(made, claimed) in &pairs {
        world.succeeded(&keyed("day", "succeeded", made, claimed), made, &answer("live")).await;
        world.failed(&keyed("day", "retryable", made, claimed), made, true).await;
        world.failed(&keyed("day", "final", made, claimed), made, false).await;
        world.lease(&keyed("day", "processing", made, claimed)).await;
    }

    for (made, claimed) in pairs {
        let fresh = Expect::Owned("new_claim", 1);
        let failed = Expect::Failed("no_stock", Some("sold out"));
        for (scope, state, gone, expected) in [
            ("day", "absent", true, fresh.clone()),
            ("undefined", "absent", true, fresh.clone()),
            ("day", "succeeded", false, Expect::Replay(answer("live"))),
            ("day", "succeeded, expired", true, fresh.clone()),
            ("tomb", "succeeded, expired, tombstone", false, Expect::Told("result_expired")),
            ("tomb", "stripped", false, Expect::Told("result_expired")),
            ("tomb_short", "tombstone over", true, fresh.clone()),
            ("day", "retryable", false, Expect::Owned("retryable_failure", 2)),
            ("day", "retryable, expired", true, fresh.clone()),
            ("day", "final", false, failed),
            ("day", "final, expired", true, fresh),
            ("day", "processing", false, Expect::Told("processing_active")),
        ] {
            world.check(&keyed(scope, state, made, claimed), claimed, gone, &expected).await;
        }
    }
}

pub async fn stale_claims_by_policy<D: Door>(mut world: World<D>) {
    world.define("rerun", json!({"stale": "rerun", "lease": "1h"})).await;
    world.define("hold", json!({"stale": "hold", "lease": "1h"})).await;
    world.define("twice", json!({"stale": "rerun", "lease": "1h", "attempts_max": 2})).await;
    world.define("hold_twice", json!({"stale": "hold", "lease": "1h", "attempts_max": 1})).await;
    let scopes = ["rerun", "hold", "undefined", "hold_twice"];
    for scope in scopes {
        for mode in MODES {
            world.lease(&name(scope, &format!("{scope} {mode:?}"))).await;
        }
    }
    for mode in MODES {
        let key = name("twice", &format!("twice {mode:?}"));
        world.failed(&key, Mode::Leased, true).await;
        world.lease(&key).await;
    }
    world.db.travel(2 * HOUR).await;
    for mode in MODES {
        for (scope, expected) in [
            ("rerun", Expect::Owned("processing_stale", 2)),
            ("hold", Expect::Told("uncertain")),
            ("undefined", Expect::Told("uncertain")), // the default is the careful one
            ("hold_twice", Expect::Told("uncertain")), // attempts used up are no knowledge either
            (
                "twice",
                Expect::Failed(
                    "abandoned",
                    Some("the lease ended and the attempts are used up; no outcome was recorded"),
                ),
            ),
        ] {
            let name = name(scope, &format!("{scope} {mode:?}"));
            world.check(&name, mode, false, &expected).await;
        }
    }
    // Each takeover and each verdict is on the record, under the claim ids that it moved between.
    let sql = "SELECT action, count(*) FROM once.audit_trail WHERE action <> 'define_scope' AND from_claim <> to_claim
               GROUP BY 1 ORDER BY 1";
    let audit: Vec<(String, i64)> =
        world.admin.query(sql, &[]).await.unwrap().iter().map(|row| (row.get(0), row.get(1))).collect();
    assert_eq!(audit, [("abandoned".into(), 2), ("manual_review".into(), 6), ("takeover".into(), 2)]);
}

/// Probes of every return type and number of arguments: each answers by the key's first word, and only if it
/// was given the right arguments.
const PROBES: &str = r#"
DO $do$
DECLARE
    v_type text;
    v_count int;
BEGIN
    FOREACH v_type IN ARRAY ARRAY['boolean', 'text', 'jsonb'] LOOP
        FOR v_count IN 1 .. 3 LOOP
            EXECUTE format($f$
                CREATE FUNCTION public.probe_%s_%s(%s) RETURNS %s LANGUAGE plpgsql AS $body$
                DECLARE
                    v_word text := split_part(%s, ' ', 1);
                BEGIN
                    IF NOT (%s) THEN
                        v_word := 'unknown';
                    ELSIF v_word = 'raises' THEN
                        RAISE EXCEPTION 'probe is broken';
                    END IF;
                    RETURN %s;
                END $body$ $f$,
                v_type, v_count,
                (ARRAY['k text', 's text, k text', 't text, s text, k text'])[v_count], v_type, 'k',
                (ARRAY['true', format('s = %L', 'probe_' || v_type || '_2'),
                       format('t = %L AND s = %L', 'acme', 'probe_' || v_type || '_3')])[v_count],
                CASE v_type
                WHEN 'boolean' THEN $r$CASE v_word WHEN 'succeeded' THEN true WHEN 'not_done' THEN false END$r$
                WHEN 'text' THEN 'v_word'
                ELSE $r$jsonb_build_object('verdict', v_word, 'result_type', 'order', 'result_id', k, 'response_code', 201)$r$ END);
        END LOOP;
    END LOOP;
END $do$;
CREATE FUNCTION public.probe_nonsense(k text) RETURNS jsonb LANGUAGE sql AS
    $$ SELECT '{"verdict": "succeeded", "response_code": "two hundred"}'::jsonb $$;
CREATE FUNCTION public.probe_scalar(k text) RETURNS jsonb LANGUAGE sql AS $$ SELECT '"succeeded"'::jsonb $$;
CREATE FUNCTION public.probe_dropped(k text) RETURNS boolean LANGUAGE sql AS $$ SELECT false $$"#;

pub async fn probes_of_every_shape<D: Door>(mut world: World<D>) {
    world.admin.batch_execute(PROBES).await.unwrap();
    let shapes: Vec<String> = ["boolean", "text", "jsonb"]
        .iter()
        .flat_map(|kind| (1..=3).map(move |n| format!("probe_{kind}_{n}")))
        .collect();
    let odd = ["probe_nonsense", "probe_scalar", "probe_dropped"].map(String::from);
    for shape in shapes.iter().chain(&odd) {
        let policy = json!({"stale": "probe", "probe": format!("public.{shape}"), "lease": "1h", "attempts_max": 2});
        world.define(shape, policy).await;
    }
    world.admin.batch_execute("DROP FUNCTION public.probe_dropped").await.unwrap();

    let words = ["succeeded", "not_done", "unknown", "raises"];
    let intent = |scope: &str, word: &str, mode: Mode| IntentName {
        tenant: "acme".into(),
        ..name(scope, &format!("{word} {mode:?}"))
    };
    for mode in MODES {
        for shape in &shapes {
            for word in words {
                world.lease(&intent(shape, word, mode)).await;
            }
            for word in ["succeeded", "not_done"] {
                // A second attempt is the last that attempts_max allows.
                let last = intent(shape, &format!("{word} last"), mode);
                world.failed(&last, Mode::Leased, true).await;
                world.lease(&last).await;
            }
        }
        for shape in &odd {
            world.lease(&intent(shape, "any", mode)).await;
        }
    }
    world.db.travel(2 * HOUR).await;
    for mode in MODES {
        for shape in &shapes {
            let replay = |key: &str| {
                Expect::Replay(if shape.contains("jsonb") {
                    let (kind, id) = (Some("order".into()), Some(key.to_owned()));
                    Answer { code: Some(201), result_type: kind, result_id: id, ..Answer::default() }
                } else {
                    Answer::default()
                })
            };
            for word in words {
                let name = intent(shape, word, mode);
                let expected = match word {
                    "succeeded" => replay(&name.key),
                    "not_done" => Expect::Owned("processing_stale", 2),
                    _ => Expect::Told("uncertain"),
                };
                world.check(&name, mode, false, &expected).await;
            }
            let last = intent(shape, "succeeded last", mode);
            world.check(&last, mode, false, &replay(&last.key)).await; // it is done, however many attempts it took
            let abandoned = "the lease ended and the attempts are used up; no outcome was recorded";
            let last = intent(shape, "not_done last", mode);
            world.check(&last, mode, false, &Expect::Failed("abandoned", Some(abandoned))).await;
        }
        for shape in &odd {
            world.check(&intent(shape, "any", mode), mode, false, &Expect::Told("uncertain")).await;
        }
    }
}

pub async fn verdicts_of_operators<D: Door>(mut world: World<D>) {
    world.define("held", json!({"stale": "hold", "lease": "1h", "retention": "30d"})).await;
    let verdicts = ["succeeded", "retry", "failed", "abandoned"];
    let froms = ["uncertain", "stale", "retryable"];
    let intents: Vec<(IntentName, &str, &str, Mode)> = MODES
        .into_iter()
        .flat_map(|mode| froms.into_iter().flat_map(move |from| verdicts.map(|verdict| (from, verdict, mode))))
        .map(|(from, verdict, mode)| (name("held", &format!("{from} {verdict} {mode:?}")), from, verdict, mode))
        .collect();
    for (name, from, ..) in &intents {
        match *from {
            "retryable" => world.failed(name, Mode::Leased, true).await,
            _ => _ = world.lease(name).await,
        }
    }
    world.db.travel(2 * HOUR).await;
    let settle = "SELECT once.settle($1, $2, $3, 'alice', 'saw it', p_result_type => 'order', p_result_id => '9')";
    for (name, from, verdict, mode) in &intents {
        if *from == "uncertain" {
            world.check(name, *mode, false, &Expect::Told("uncertain")).await;
        }
        world.admin.execute(settle, &[&name.scope, &name.key, verdict]).await.unwrap();
        let made = Answer { result_type: Some("order".into()), result_id: Some("9".into()), ..Answer::default() };
        match *verdict {
            "succeeded" => world.check(name, *mode, false, &Expect::Replay(made)).await,
            "retry" => world.check(name, *mode, false, &Expect::Owned("retryable_failure", 2)).await,
            code => {
                let seen = world.claim(name, &at_once(*mode)).await.unwrap();
                assert_eq!(seen.kind, "final_failure");
                assert_eq!(seen.failure, Some((format!("settled_{code}"), Some("saw it".into()))));
            }
        }
        // What is terminal stays.
        let error = world.admin.execute(settle, &[&name.scope, &name.key, &"retry"]).await.unwrap_err();
        assert_eq!(error.code().unwrap().code(), "P4013");
    }
    let sql = "SELECT count(*) FROM once.audit_trail WHERE actor = 'alice' AND action LIKE 'settle:%'
               AND reason = 'saw it' AND from_claim <> to_claim";
    let audited: i64 = world.admin.query_one(sql, &[]).await.unwrap().get(0);
    assert_eq!(audited, i64::try_from(intents.len()).unwrap());
}
