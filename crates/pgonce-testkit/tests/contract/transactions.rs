//! What an atomic claim has to do with its transaction.

use pgonce::Mode;
use serde_json::json;

use crate::doors::{Door, Refused};
use crate::world::{HOUR, MODES, World, answer, at_once, name, refusal};

const ATOMIC: Mode = Mode::Atomic;

pub async fn several_claims_in_one<D: Door>(mut world: World<D>) {
    world.define("atomic", json!({})).await;
    let old = name("atomic", "failed before");
    world.failed(&old, ATOMIC, true).await;
    let names = [name("atomic", "a"), name("atomic", "b"), name("undefined", "a"), old, name("atomic", "leased")];
    world.door.begin().await;
    let mut claims = Vec::new();
    for (place, name) in names.iter().enumerate() {
        let mode = if place == 4 { Mode::Leased } else { ATOMIC };
        let seen = world.door.claim(name, &at_once(mode)).await.unwrap();
        claims.push(seen.claim_id.unwrap());
    }
    // In another order than they were claimed in, each with its own outcome.
    for place in [2, 0, 4, 3] {
        world.door.succeed(&names[place], claims[place], &answer(&names[place].key)).await.unwrap();
    }
    world.door.fail(&names[1], claims[1], false, "no", "no").await.unwrap();
    world.door.commit().await.unwrap();
    for (place, name) in names.iter().enumerate() {
        let seen = world.claim(name, &at_once(ATOMIC)).await.unwrap();
        if place == 1 {
            assert_eq!(seen.kind, "final_failure");
        } else {
            assert_eq!(seen.answer, Some(answer(&name.key)), "{name:?}");
        }
    }
    // A claim id does not open another intent of the same transaction.
    let (c, d) = (name("atomic", "c"), name("atomic", "d"));
    world.door.begin().await;
    let of_c = world.door.claim(&c, &at_once(ATOMIC)).await.unwrap().claim_id.unwrap();
    world.door.claim(&d, &at_once(ATOMIC)).await.unwrap();
    assert_eq!(world.door.succeed(&d, of_c, &answer("")).await, Err(refusal::<D>("P4010")));
    world.door.rollback().await;
    assert_eq!((world.row(&c).await, world.row(&d).await), (None, None));
}

pub async fn claimed_again_in_the_same<D: Door>(mut world: World<D>) {
    for mode in MODES {
        let name = name("again", &format!("{mode:?}"));
        world.door.begin().await;
        let first = world.door.claim(&name, &at_once(mode)).await.unwrap();
        assert_eq!(first.kind, "new_claim");
        for again in MODES {
            // It is being processed: by this very transaction. Also with a wait that could never end.
            let patient = pgonce::ClaimOptions { mode: Some(again), ..Default::default() };
            let second = world.door.claim(&name, &patient).await.unwrap();
            assert_eq!((second.kind.as_str(), second.claim_id), ("processing_active", None));
        }
        world.door.succeed(&name, first.claim_id.unwrap(), &answer("one")).await.unwrap();
        let replay = world.door.claim(&name, &at_once(mode)).await.unwrap();
        assert_eq!(replay.answer, Some(answer("one")));
        let twice = world.door.succeed(&name, first.claim_id.unwrap(), &answer("two")).await;
        assert_eq!(twice, Err(refusal::<D>("P4010")));
        world.door.rollback().await;
        assert_eq!(world.row(&name).await, None, "the second completion took the first with it");
    }
}

pub async fn rolled_back_to_a_savepoint<D: Door>(mut world: World<D>) {
    for mode in MODES {
        let (kept, undone) =
            (name("savepoint", &format!("kept {mode:?}")), name("savepoint", &format!("undone {mode:?}")));
        world.door.begin().await;
        let mine = world.door.claim(&kept, &at_once(mode)).await.unwrap().claim_id.unwrap();
        world.door.execute("SAVEPOINT s").await.unwrap();
        let lost = world.door.claim(&undone, &at_once(mode)).await.unwrap().claim_id.unwrap();
        world.door.execute("ROLLBACK TO SAVEPOINT s").await.unwrap();
        assert_eq!(world.door.succeed(&undone, lost, &answer("")).await, Err(refusal::<D>("P4010")));
        world.door.execute("ROLLBACK TO SAVEPOINT s").await.unwrap();
        let again = world.door.claim(&undone, &at_once(mode)).await.unwrap();
        assert_eq!(again.kind, "new_claim", "the rolled-back claim is as if it had not been");
        world.door.execute("ROLLBACK TO SAVEPOINT s").await.unwrap();
        world.door.succeed(&kept, mine, &answer("kept")).await.unwrap();
        world.door.commit().await.unwrap();
        assert_eq!(world.row(&kept).await, Some(("succeeded".into(), 1)));
        assert_eq!(world.row(&undone).await, None);

        // An outcome in a savepoint that is rolled back is no outcome, and can be given again.
        let name = name("savepoint", &format!("outcome {mode:?}"));
        world.door.begin().await;
        let mine = world.door.claim(&name, &at_once(mode)).await.unwrap().claim_id.unwrap();
        world.door.execute("SAVEPOINT s").await.unwrap();
        world.door.fail(&name, mine, false, "no", "no").await.unwrap();
        world.door.execute("ROLLBACK TO SAVEPOINT s").await.unwrap();
        world.door.succeed(&name, mine, &answer("yes")).await.unwrap();
        world.door.commit().await.unwrap();
        assert_eq!(world.row(&name).await, Some(("succeeded".into(), 1)));
    }
}

/// An atomic claim lives as long as its transaction: without one, it is over when the answer comes.
pub async fn outside_of_one<D: Door>(mut world: World<D>) {
    let name = name("outside", "key");
    let seen = world.door.claim(&name, &at_once(ATOMIC)).await.unwrap();
    assert_eq!(seen.kind, "new_claim");
    assert_eq!(world.row(&name).await, None, "an atomic claim writes nothing");
    let told = world.door.succeed(&name, seen.claim_id.unwrap(), &answer("")).await;
    assert_eq!(told, Err(refusal::<D>("P4010")));
    assert_eq!(world.row(&name).await, None);
    // Neither does one that committed without an outcome leave anything, for its successor or by it.
    let next = world.claim(&name, &at_once(ATOMIC)).await.unwrap();
    assert_eq!((next.kind.as_str(), next.attempt), ("new_claim", Some(1)));
    let lock_timeout: String = world.admin.query_one("SHOW lock_timeout", &[]).await.unwrap().get(0);
    assert_eq!(lock_timeout, "0");
    // A leased claim does not need the transaction it was made in.
    let claim = world.lease(&name).await;
    world.door.succeed(&name, claim, &answer("")).await.unwrap();
    assert_eq!(world.row(&name).await, Some(("succeeded".into(), 1)));
}

pub async fn aborted_before_commit<D: Door>(mut world: World<D>) {
    let name = name("aborted", "key");
    world.door.begin().await;
    let claim = world.door.claim(&name, &at_once(ATOMIC)).await.unwrap().claim_id.unwrap();
    assert_eq!(world.door.execute("SELECT 1 / 0").await, Err(Refused("22012".into())));
    // The failure cannot be recorded where it happened (trap 9), and the COMMIT is none (trap 10).
    assert_eq!(world.door.fail(&name, claim, true, "x", "x").await, Err(Refused("25P02".into())));
    assert_eq!(world.door.commit().await, Err(Refused("25P02".into())));
    assert_eq!(world.row(&name).await, None);
}

/// A claim that committed and said nothing: what can be run again is not stuck, and the silent one is out.
pub async fn committed_without_an_outcome<D: Door>(mut world: World<D>) {
    world.define("rerun", json!({"stale": "rerun", "lease": "1h"})).await;
    let (failed, stale) = (name("rerun", "failed"), name("rerun", "stale"));
    world.failed(&failed, ATOMIC, true).await;
    world.lease(&stale).await;
    world.db.travel(2 * HOUR).await;
    for (name, kind) in [(&failed, "retryable_failure"), (&stale, "processing_stale")] {
        let mut silent = None;
        for attempt in 2..=4 {
            let seen = world.claim(name, &at_once(ATOMIC)).await.unwrap();
            assert_eq!((seen.kind.as_str(), seen.attempt), (kind, Some(attempt)));
            if let Some(before) = silent.replace(seen.claim_id.unwrap()) {
                world
                    .refused("a silent claim", "P4010", async |door| door.succeed(name, before, &answer("")).await)
                    .await;
            }
        }
        world.succeeded(name, ATOMIC, &answer("at last")).await;
        assert_eq!(world.row(name).await, Some(("succeeded".into(), 5)));
    }
}
