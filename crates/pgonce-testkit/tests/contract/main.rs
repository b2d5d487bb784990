//! The contract of a claim, from every door: plain SQL text, the crate's pieces, the sqlx adapter. One list
//! of cases; each runs once a door, in a database of its own.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on should stop, loudly")]

mod answers;
mod direct;
mod doors;
mod fences;
mod plain;
mod states;
mod transactions;
mod world;

macro_rules! cases_by_door {
    ($($module:ident: $($case:ident),+;)+) => {
        cases_by_door!(@door text, crate::doors::Text, $($module: $($case),+;)+);
        cases_by_door!(@door pieces, crate::doors::Pieces, $($module: $($case),+;)+);
        cases_by_door!(@door sqlx, crate::doors::Sqlx, $($module: $($case),+;)+);
    };
    (@door $name:ident, $door:ty, $($module:ident: $($case:ident),+;)+) => {
        mod $name {
            $($(
                #[tokio::test]
                async fn $case() {
                    crate::$module::$case(crate::world::World::<$door>::new().await).await;
                }
            )+)+
        }
    };
}

cases_by_door! {
    states: every_state_in_both_modes, stale_claims_by_policy, probes_of_every_shape, verdicts_of_operators;
    answers: exact_bytes, response_strategies, limits, tenants_never_meet, attempts_are_counted;
    fences: others_cannot_write, an_ended_lease_is_not_renewed, release_gives_back;
    transactions: several_claims_in_one, claimed_again_in_the_same, rolled_back_to_a_savepoint,
        outside_of_one, committed_without_an_outcome, aborted_before_commit;
}
