//! Who may write under a claim, and who may not.

use std::time::Duration;

use pgonce::{IntentName, Mode};
use serde_json::json;
use uuid::Uuid;

use crate::doors::{Door, Told};
use crate::world::{DAY, HOUR, MODES, World, answer, at_once, name};

/// Every write that carries a claim id, and the code of its refusal.
#[derive(Debug, Clone, Copy)]
enum Write {
    Succeed,
    FailRetryable,
    FailFinal,
    Renew,
    Release,
}

const WRITES: [(Write, &str); 5] = [
    (Write::Succeed, "P4010"),
    (Write::FailRetryable, "P4011"),
    (Write::FailFinal, "P4011"),
    (Write::Renew, "P4012"),
    (Write::Release, "P4012"),
];

impl Write {
    async fn run<D: Door>(self, door: &mut D, name: &IntentName, claim: Uuid) -> Told<()> {
        match self {
            Self::Succeed => door.succeed(name, claim, &answer("mine")).await,
            Self::FailRetryable => door.fail(name, claim, true, "mine", "mine").await,
            Self::FailFinal => door.fail(name, claim, false, "mine", "mine").await,
            Self::Renew => door.renew(name, claim, Duration::from_secs(60)).await,
            Self::Release => door.release(name, claim).await,
        }
    }
}

impl<D: Door> World<D> {
    async fn locked_out(&mut self, situation: &str, name: &IntentName, claim: Uuid) {
        for (write, code) in WRITES {
            let what = format!("{write:?} {situation}");
            self.refused(&what, code, async |door| write.run(door, name, claim).await).await;
        }
    }
}

pub async fn others_cannot_write<D: Door>(mut world: World<D>) {
    world.define("rerun", json!({"stale": "rerun", "lease": "1h", "retention": "1d"})).await;
    world.define("hold", json!({"stale": "hold", "lease": "1h", "retention": "1d"})).await;

    let free = name("rerun", "never claimed");
    world.locked_out("of an intent that is not there", &free, Uuid::new_v4()).await;

    let held = name("rerun", "held");
    let mine = world.lease(&held).await;
    world.locked_out("with a claim id of nobody", &held, Uuid::new_v4()).await;
    let neighbour = name("rerun", "neighbour");
    let theirs = world.lease(&neighbour).await;
    world.locked_out("with the claim id of another intent", &held, theirs).await;
    let elsewhere = IntentName { tenant: "b".into(), ..held.clone() };
    world.locked_out("under another tenant", &elsewhere, mine).await;
    world.lease(&elsewhere).await;
    world.locked_out("under another tenant that has the key too", &elsewhere, mine).await;
    let other_scope = IntentName { scope: "hold".into(), ..held.clone() };
    world.locked_out("under another scope", &other_scope, mine).await;

    for (write, terminal) in [
        (Write::Succeed, "succeeded"),
        (Write::FailFinal, "failed_final"),
        (Write::FailRetryable, "failed_retryable"),
        (Write::Release, ""),
    ] {
        for mode in MODES {
            let done = name("rerun", &format!("{write:?} {mode:?}"));
            world.door.begin().await;
            let claim = world.door.claim(&done, &at_once(mode)).await.unwrap().claim_id.unwrap();
            write.run(&mut world.door, &done, claim).await.unwrap();
            world.door.commit().await.unwrap();
            assert_eq!(world.row(&done).await.map_or(String::new(), |row| row.0), terminal);
            world.locked_out(&format!("after {write:?}, {mode:?}"), &done, claim).await;
        }
    }
    let done = name("rerun", "done");
    let spent = world.lease(&done).await;
    Write::Succeed.run(&mut world.door, &done, spent).await.unwrap();
    let stale = name("hold", "stale");
    let lost = world.lease(&stale).await;

    world.db.travel(2 * HOUR).await;
    let rival = world.lease(&held).await;
    assert_ne!(rival, mine);
    world.locked_out("after a takeover", &held, mine).await;
    assert_eq!(world.claim(&stale, &at_once(Mode::Leased)).await.unwrap().kind, "uncertain");
    world.locked_out("after uncertain", &stale, lost).await;
    Write::Succeed.run(&mut world.door, &held, rival).await.unwrap();

    world.db.travel(3 * DAY).await;
    assert!(world.admin.query_one("SELECT once.purge()", &[]).await.unwrap().get::<_, i64>(0) > 0);
    assert_eq!(world.row(&done).await, None);
    world.locked_out("after purge", &done, spent).await;
    let reborn = world.lease(&done).await;
    world.locked_out("after purge and a new life", &done, spent).await;
    Write::Succeed.run(&mut world.door, &done, reborn).await.unwrap();
}

pub async fn an_ended_lease_is_not_renewed<D: Door>(mut world: World<D>) {
    world.define("rerun", json!({"stale": "rerun", "lease": "1h"})).await;
    let until = async |world: &World<D>, name: &IntentName| -> f64 {
        let sql = "SELECT extract(epoch FROM locked_until - once.clock())::float8 FROM once.intents WHERE key = $1";
        world.admin.query_one(sql, &[&name.key]).await.unwrap().get(0)
    };
    let kept = name("rerun", "renewed");
    let claim = world.lease(&kept).await;
    world.door.renew(&kept, claim, 5 * HOUR).await.unwrap();
    assert!((until(&world, &kept).await - 18_000.0).abs() < 60.0, "five hours from now");
    let ended = name("rerun", "ended");
    let late = world.lease(&ended).await;

    world.db.travel(2 * HOUR).await;
    assert_eq!(world.claim(&kept, &at_once(Mode::Leased)).await.unwrap().kind, "processing_active");
    world.refused("renewing what is over", "P4012", async |door| door.renew(&ended, late, HOUR).await).await;
    // Nobody has taken it: the outcome of the late owner is still the outcome.
    world.door.succeed(&ended, late, &answer("late")).await.unwrap();
    let seen = world.claim(&ended, &at_once(Mode::Leased)).await.unwrap();
    assert_eq!(seen.answer, Some(answer("late")));
    world.door.renew(&kept, claim, HOUR).await.unwrap(); // a renewal may also shorten
    assert!(until(&world, &kept).await <= 3600.0);
}

pub async fn release_gives_back<D: Door>(mut world: World<D>) {
    world.define("rerun", json!({"stale": "rerun", "lease": "1h"})).await;
    for mode in MODES {
        let fresh = name("rerun", &format!("new {mode:?}"));
        let failed = name("rerun", &format!("retryable {mode:?}"));
        let stale = name("rerun", &format!("stale {mode:?}"));
        world.failed(&failed, mode, true).await;
        world.lease(&stale).await;
        world.db.travel(2 * HOUR).await;
        let mut claims = Vec::new();
        for (name, attempt) in [(&fresh, 1), (&failed, 2), (&stale, 2)] {
            world.door.begin().await;
            let seen = world.door.claim(name, &at_once(mode)).await.unwrap();
            assert_eq!(seen.attempt, Some(attempt), "{}", name.key);
            let claim = seen.claim_id.unwrap();
            world.door.release(name, claim).await.unwrap();
            world.door.commit().await.unwrap();
            claims.push(claim);
        }
        assert_eq!(world.row(&fresh).await, None);
        assert_eq!(world.row(&failed).await, Some(("failed_retryable".into(), 1)));
        assert_eq!(world.row(&stale).await.unwrap().1, 1);
        for ((name, kind, attempt), spent) in
            [(&fresh, "new_claim", 1), (&failed, "retryable_failure", 2), (&stale, "", 2)].into_iter().zip(claims)
        {
            let seen = world.claim(name, &at_once(mode)).await.unwrap();
            assert_eq!(seen.attempt, Some(attempt), "{}: {seen:?}", name.key);
            assert!(kind.is_empty() || seen.kind == kind, "{}: {seen:?}", name.key);
            assert_ne!(seen.claim_id, Some(spent), "a claim id is never given twice");
        }
        world.db.travel(Duration::ZERO).await;
    }
    // An atomic claim that was given back can be had again in the same transaction.
    let name = name("rerun", "again");
    world.door.begin().await;
    let first = world.door.claim(&name, &at_once(Mode::Atomic)).await.unwrap().claim_id.unwrap();
    world.door.release(&name, first).await.unwrap();
    let second = world.door.claim(&name, &at_once(Mode::Atomic)).await.unwrap();
    assert_eq!(second.kind, "new_claim");
    world.door.succeed(&name, second.claim_id.unwrap(), &answer("second")).await.unwrap();
    world.door.commit().await.unwrap();
    assert_eq!(world.row(&name).await, Some(("succeeded".into(), 1)));
}
