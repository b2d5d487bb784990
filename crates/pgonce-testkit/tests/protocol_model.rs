//! The intent protocol as a model that stateright explores in every order of steps.
//!
//! Covered: two or three callers of one key, atomic, leased and mixed. Atomic: look, advisory try-lock
//! without a second look, effect and terminal row in one transaction. Leased: a claim that commits
//! first, a lease that the database's clock ends at any moment, takeover (rerun) or uncertain (hold),
//! effect and fenced completion in one transaction. Both: rollback, crash at any step, a COMMIT whose
//! reply is lost, failures recorded, `recover`, `resolve`, expiry, purge, and the key's next life.
//!
//! A paused owner (SIGSTOP) has no action of its own: it is a caller that the checker does not choose
//! for a while, and every such while is explored, past the end of the lease and past a purge too.
//! Renewal has none either: a renewed lease is one that has not ended yet.
//!
//! Not covered: fingerprints, waiting callers, tombstones, probes, `attempts_max`, `release`, `settle`,
//! REPEATABLE READ, durability. The claim of leased mode is one step: its own short transaction, under
//! the advisory lock and the row's lock. Claim ids come from a counter: that random ones never repeat
//! is assumed. The SQL itself is tested elsewhere; this is its design.
//!
//! Each trap of the protocol is a [`Naive`] variant of the same model, and a test that the checker
//! finds the invariant it breaks. A property that no variant breaks would prove nothing.

use Answer::*;
use Stale::*;
use Status::*;
use stateright::{Checker, HasDiscoveries, Model, Property};

/// Enough for a claim, its takeover, a purge and the key's next life; more only takes longer.
const CLAIMS_MAX: u8 = 4;
const EXPIRIES_MAX: u8 = 1;

const I1: &str = "I1 at most one effect until the key has expired";
const I2: &str = "I2 ok means exactly one effect";
const I3: &str = "I3 fail means no effect of that claim";
const I6: &str = "I6 terminal states stay until expiry";
const I7_UNIQUE: &str = "I7 claim ids are unique for ever";
const I7_FENCE: &str = "I7 no effect commits under a superseded claim";
const I8: &str = "I8 a takeover only after the lease has ended";
const I9: &str = "I9 faults gone and a lease later, one caller alone gets an answer";

#[derive(Clone, Copy, Debug, PartialEq)]
enum Mode {
    Atomic,
    Leased,
}

/// The scope's policy for a claim whose lease is over.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Stale {
    Rerun,
    Hold,
}

/// What somebody would write who does not know the trap.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Naive {
    /// Trap 1: `UPDATE … WHERE status = 'processing'`, the row count checked.
    UnfencedCompletion,
    /// Trap 1 in full: and zero rows updated taken for success.
    UncheckedRowCount,
    /// Trap 2: the row's attempt counter is the fence, and starts again after a purge.
    AttemptFence,
    /// Trap 3: the completion is fenced, but the effect has committed in a transaction before it.
    SeparateEffect,
    ImpatientTakeover,
    /// Trap 24 without its guard: the terminal row is written whatever is there by now.
    UnguardedInsert,
    PurgeProcessing,
    PurgeUnexpired,
    /// Trap 10: COMMIT of an aborted transaction answers ROLLBACK, and nobody reads that.
    UncheckedCommitTag,
    NoTakeover,
    /// Trap 11: "no outcome yet" is reported as "never", while the lost transaction still runs.
    HastyResolve,
}

#[derive(Clone, Debug)]
struct Protocol {
    callers: &'static [Mode],
    stale: Stale,
    naive: Option<Naive>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Status {
    Processing,
    Succeeded,
    FailedRetryable,
    FailedFinal,
    Uncertain,
}

/// The committed row. `token` is what the fence compares; `claim` is whose row it really is. They
/// differ only where a naive fence is modelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Row {
    claim: u8,
    token: u8,
    attempt: u8,
    status: Status,
    expired: bool,
}

/// The default one is recovery's: its id is given to nobody.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Claim {
    id: u8,
    token: u8,
    attempt: u8,
    /// The claim of the row that this one stands on, as its transaction saw it. None: no row.
    over: Option<u8>,
    /// The status of the row that it took; None: a new claim.
    from: Option<Status>,
}

impl Claim {
    fn row(self, status: Status) -> Row {
        Row { claim: self.id, token: self.token, attempt: self.attempt, status, expired: false }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Answer {
    Nothing,
    Ok,
    Replay,
    FinalFailure,
    HeldUncertain,
    /// Rolled back or recorded as failed, by the caller's own decision.
    Failed,
    /// P4010: the claim is somebody else's.
    LostClaim,
    /// 40001: a rival committed between the look and the lock.
    Overtaken,
    Unknown,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Phase {
    /// Between calls, with the last answer. May call (again) at any time.
    Outside(Answer),
    /// Has seen a row, or none, that can be owned. Whatever happens now is the race.
    Looked(Option<Row>),
    /// Owns a claim; the effect is written and not committed.
    Working(Claim),
    /// The completion was executed; the row as it will be after COMMIT is not visible yet.
    Completing(Claim, Option<Row>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Effect {
    claim: u8,
    /// How often the key had expired by then: its life.
    life: u8,
    superseded: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct State {
    row: Option<Row>,
    row_lock: Option<usize>,
    advisory_lock: Option<usize>,
    /// By the database's clock, for the latest leased claim, whatever became of its row.
    lease_running: bool,
    callers: Vec<Phase>,
    claims: u8,
    life: u8,
    // What the history checker would know: not readable by the protocol. Sets of ids are bit masks.
    effects: Vec<Effect>,
    tokens_issued: u16,
    token_reused: bool,
    told_ok: u16,
    told_fail: u16,
    settled: Option<Row>,
    early_takeover: bool,
}

/// A caller's action names the caller, and what it acts on.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Action {
    Look(usize),
    Own(usize, Option<Row>),
    /// Only where the effect commits on its own (trap 3).
    CommitEffect(Claim),
    Complete(usize, Claim),
    /// The answer is Unknown where the reply is lost.
    Commit(usize, Claim, Option<Row>, Answer),
    Fail(usize, Claim, Status),
    RecordFailure(usize, Status),
    Crash(usize),
    /// Resolved as "did not commit and never will".
    ResolveNever(Claim),
    LeaseEnds,
    Recover,
    Expire,
    Purge,
}
use Action::*;

impl State {
    /// A new claim over what was seen; the attempts of a row that has expired do not count.
    fn issue(&mut self, protocol: &Protocol, seen: Option<Row>) -> Claim {
        let live = seen.filter(|row| !row.expired);
        let attempt = live.map_or(1, |row| row.attempt + 1);
        let by_attempt = protocol.is(Naive::AttemptFence);
        self.claims += 1;
        let token = if by_attempt { attempt } else { self.claims };
        self.token_reused |= self.tokens_issued & (1 << token) != 0;
        self.tokens_issued |= 1 << token;
        Claim { id: self.claims, token, attempt, over: seen.map(|row| row.claim), from: live.map(|row| row.status) }
    }

    fn write_row(&mut self, row: Row) {
        self.row = Some(row);
        self.lease_running = row.status == Processing;
        // Only the first outcome is noted: a second one without expiry between is what I6 forbids.
        if matches!(row.status, Succeeded | FailedFinal) && self.settled.is_none() {
            self.settled = self.row;
        }
    }

    fn commit_effect(&mut self, claim: Claim) {
        self.effects.push(Effect {
            claim: claim.id,
            life: self.life,
            superseded: self.row.map(|row| row.claim) != claim.over,
        });
    }

    fn has_effect_of(&self, claim: Claim) -> bool {
        self.effects.iter().any(|e| e.claim == claim.id)
    }

    fn expire(&mut self) {
        let expired = true;
        self.row = self.row.map(|row| Row { expired, ..row });
        self.life += 1;
        self.settled = None;
    }

    /// The end of a transaction, whichever: its locks go.
    fn end(&mut self, caller: usize, answer: Answer) {
        self.row_lock = self.row_lock.filter(|&holder| holder != caller);
        self.advisory_lock = self.advisory_lock.filter(|&holder| holder != caller);
        self.callers[caller] = Phase::Outside(answer);
    }

    fn end_told(&mut self, caller: usize, claim: Claim, answer: Answer) {
        match answer {
            Ok => self.told_ok |= 1 << claim.id,
            Failed | LostClaim | Overtaken => self.told_fail |= 1 << claim.id,
            _ => {}
        }
        self.end(caller, answer);
    }
}

impl Protocol {
    fn is(&self, naive: Naive) -> bool {
        self.naive == Some(naive)
    }

    /// once.observe: the answer of a row, or what there is to be owned.
    fn look(&self, s: &mut State, caller: usize) {
        let over = !s.lease_running || self.is(Naive::ImpatientTakeover);
        s.callers[caller] = match s.row {
            None => Phase::Looked(None),
            Some(row) if row.expired => Phase::Looked(s.row),
            Some(row) => match row.status {
                Succeeded => Phase::Outside(Replay),
                FailedFinal => Phase::Outside(FinalFailure),
                Uncertain => Phase::Outside(HeldUncertain),
                FailedRetryable => Phase::Looked(s.row),
                Processing if over && !self.is(Naive::NoTakeover) => Phase::Looked(s.row),
                Processing => s.callers[caller],
            },
        };
    }

    /// once.own: under the advisory lock, compare with what was seen, and take it or look again.
    fn own(&self, s: &mut State, caller: usize, seen: Option<Row>) {
        let mode = self.callers[caller];
        // With nothing seen, atomic mode does not look again: that race is left to the completion.
        let blind = seen.is_none() && mode == Mode::Atomic;
        let row_busy = seen.is_some() && s.row_lock.is_some(); // SKIP LOCKED: somebody is completing
        if s.advisory_lock.is_some() || row_busy || (!blind && s.row != seen) {
            s.callers[caller] = Phase::Outside(Nothing);
            return;
        }
        let stale = seen.is_some_and(|row| row.status == Processing);
        if stale && self.stale == Hold {
            self.sort_stale(s);
            s.callers[caller] = Phase::Outside(Nothing);
            return;
        }
        // A blind claim is no takeover yet: whatever it did not see will make its completion raise.
        s.early_takeover |= s.lease_running && !blind;
        let mut claim = s.issue(self, seen);
        if mode == Mode::Atomic {
            s.advisory_lock = Some(caller);
            s.row_lock = seen.map_or(s.row_lock, |_| Some(caller));
        } else {
            claim.over = Some(claim.id);
            s.write_row(claim.row(Processing));
        }
        s.callers[caller] = Phase::Working(claim);
    }

    /// once.sort_stale, with an id that the old owner does not have: its completion will raise.
    fn sort_stale(&self, s: &mut State) {
        let status = match self.stale {
            Hold => Uncertain,
            Rerun => FailedRetryable,
        };
        if let Some(Row { attempt, .. }) = s.row {
            let verdict = Claim { attempt, ..Claim::default() };
            s.write_row(verdict.row(status));
        }
    }

    fn fence_matches(&self, row: Row, claim: Claim) -> bool {
        let unfenced = self.is(Naive::UnfencedCompletion) || self.is(Naive::UncheckedRowCount);
        row.status == Processing && (unfenced || row.token == claim.token)
    }

    fn complete(&self, s: &mut State, caller: usize, claim: Claim) {
        if self.callers[caller] == Mode::Atomic {
            // A row that the claim did not see means that a rival overtook it (trap 24).
            let overtaken = claim.over.is_none() && s.row.is_some();
            if overtaken && !self.is(Naive::UnguardedInsert) {
                return self.raise(s, caller, claim, Overtaken);
            }
            s.row_lock = Some(caller);
            s.callers[caller] = Phase::Completing(claim, Some(claim.row(Succeeded)));
        } else if let Some(row) = s.row.filter(|&row| self.fence_matches(row, claim)) {
            let status = Succeeded;
            s.row_lock = Some(caller);
            s.callers[caller] = Phase::Completing(claim, Some(Row { status, ..row }));
        } else if self.is(Naive::UncheckedRowCount) {
            s.callers[caller] = Phase::Completing(claim, None);
        } else {
            self.raise(s, caller, claim, LostClaim);
        }
    }

    /// The transaction is aborted, and the effect gone: unless the caller goes by COMMIT not raising.
    fn raise(&self, s: &mut State, caller: usize, claim: Claim, answer: Answer) {
        let deceived = self.is(Naive::UncheckedCommitTag);
        s.end_told(caller, claim, if deceived { Ok } else { answer });
    }

    fn commit(&self, s: &mut State, claim: Claim, row: Option<Row>) {
        if !self.is(Naive::SeparateEffect) {
            s.commit_effect(claim);
        }
        if let Some(row) = row {
            s.write_row(row);
        }
    }

    /// The effect is rolled back first. Leased: once.fail under the fence. Atomic: the claim is gone
    /// with its transaction, and what remains is once.record_failure in a new one.
    fn fail(&self, s: &mut State, caller: usize, claim: Claim, status: Status) {
        let row = s.row.filter(|&row| self.fence_matches(row, claim));
        let leased = self.callers[caller] == Mode::Leased;
        if let Some(row) = row.filter(|_| leased) {
            s.write_row(Row { status, ..row });
        }
        let lost = leased && row.is_none();
        s.end_told(caller, claim, if lost { LostClaim } else { Failed });
    }

    /// once.record_failure: claim and fail in one transaction, unless there is a rival or an outcome.
    fn record_failure(&self, s: &mut State, caller: usize, status: Status) {
        self.look(s, caller);
        if let Phase::Looked(seen) = s.callers[caller] {
            self.own(s, caller, seen);
        }
        if let Phase::Working(claim) = s.callers[caller] {
            s.write_row(claim.row(status));
            s.end(caller, Nothing);
        }
    }

    fn step(&self, s: &mut State, action: Action) {
        match action {
            Look(i) => self.look(s, i),
            Own(i, seen) => self.own(s, i, seen),
            CommitEffect(claim) => s.commit_effect(claim),
            Complete(i, claim) => self.complete(s, i, claim),
            Commit(i, claim, row, answer) => {
                self.commit(s, claim, row);
                s.end_told(i, claim, answer);
            }
            Fail(i, claim, status) => self.fail(s, i, claim, status),
            RecordFailure(i, status) => self.record_failure(s, i, status),
            Crash(i) => s.end(i, Unknown),
            ResolveNever(claim) => s.told_fail |= 1 << claim.id,
            LeaseEnds => s.lease_running = false,
            Recover => self.sort_stale(s),
            Expire => s.expire(),
            Purge => s.row = None,
        }
    }

    fn caller_actions(&self, s: &State, i: usize, actions: &mut Vec<Action>) {
        let may_claim = s.claims < CLAIMS_MAX;
        // A write to a row that somebody else has locked waits.
        let may_write = s.row_lock.is_none_or(|holder| holder == i);
        match s.callers[i] {
            Phase::Outside(answer) => {
                actions.push(Look(i));
                if answer == Failed && self.callers[i] == Mode::Atomic && may_claim {
                    actions.extend([FailedRetryable, FailedFinal].map(|f| RecordFailure(i, f)));
                }
            }
            Phase::Looked(seen) if may_claim => actions.push(Own(i, seen)),
            Phase::Looked(_) => {}
            Phase::Working(claim) => {
                actions.push(Crash(i));
                if may_write {
                    actions.push(self.after_work(s, i, claim));
                }
                if may_write && !s.has_effect_of(claim) {
                    actions.extend([FailedRetryable, FailedFinal].map(|f| Fail(i, claim, f)));
                }
                if self.resolves_to_never(s, claim) {
                    actions.push(ResolveNever(claim));
                }
            }
            Phase::Completing(claim, row) => {
                actions.extend([Ok, Unknown].map(|answer| Commit(i, claim, row, answer)));
                actions.push(Crash(i));
            }
        }
    }

    fn after_work(&self, s: &State, caller: usize, claim: Claim) -> Action {
        if self.is(Naive::SeparateEffect) && !s.has_effect_of(claim) {
            return CommitEffect(claim);
        }
        Complete(caller, claim)
    }

    /// once.resolve, asked by a caller that lost its connection while the transaction still runs:
    /// whether it answers "did not commit and never will". It waits for both locks first.
    fn resolves_to_never(&self, s: &State, claim: Claim) -> bool {
        let still_owned = s.row.is_some_and(|row| row.claim == claim.id);
        s.advisory_lock.is_none() && s.row_lock.is_none() && (!still_owned || self.is(Naive::HastyResolve))
    }

    fn purgeable(&self, row: Row) -> bool {
        row.expired
            || (self.is(Naive::PurgeProcessing) && row.status == Processing)
            || (self.is(Naive::PurgeUnexpired) && row.status == Succeeded)
    }

    fn database_actions(&self, s: &State, actions: &mut Vec<Action>) {
        if s.lease_running {
            actions.push(LeaseEnds);
        }
        let Some(row) = s.row else { return };
        let has_expiry = !matches!(row.status, Processing | Uncertain);
        if has_expiry && !row.expired && s.life < EXPIRIES_MAX {
            actions.push(Expire);
        }
        if s.row_lock.is_some() {
            return; // purge and recover skip locked rows
        }
        if self.purgeable(row) {
            actions.push(Purge);
        }
        if row.status == Processing && !s.lease_running && !self.is(Naive::NoTakeover) {
            actions.push(Recover);
        }
    }

    /// I9: every caller dies, a lease goes by, and one that comes alone must be told something.
    fn answers_alone(&self, s: &State) -> bool {
        let mut s = s.clone();
        (0..s.callers.len()).for_each(|i| s.end(i, Nothing));
        s.lease_running = false;
        for _ in 0..8 {
            let next = match s.callers[0] {
                Phase::Outside(Ok | Replay | FinalFailure | HeldUncertain) => return true,
                Phase::Outside(_) => Look(0),
                Phase::Looked(seen) => Own(0, seen),
                Phase::Working(claim) => self.after_work(&s, 0, claim),
                Phase::Completing(claim, row) => Commit(0, claim, row, Ok),
            };
            self.step(&mut s, next);
        }
        false
    }

    fn invariants() -> Vec<Property<Self>> {
        vec![
            Property::always(I1, |_, s: &State| {
                let in_life = |life| s.effects.iter().filter(|e| e.life == life).count();
                (0..=s.life).all(|life| in_life(life) <= 1)
            }),
            Property::always(I2, |_, s: &State| {
                let of = |id| s.effects.iter().filter(|e| e.claim == id).count();
                (1..=s.claims).all(|id| s.told_ok & (1 << id) == 0 || of(id) == 1)
            }),
            Property::always(I3, |_, s: &State| s.effects.iter().all(|e| s.told_fail & (1 << e.claim) == 0)),
            Property::always(I6, |_, s: &State| s.settled.is_none() || s.row == s.settled),
            Property::always(I7_UNIQUE, |_, s: &State| !s.token_reused),
            Property::always(I7_FENCE, |_, s: &State| !s.effects.iter().any(|e| e.superseded)),
            Property::always(I8, |_, s: &State| !s.early_takeover),
            Property::always(I9, Self::answers_alone),
        ]
    }

    /// What the model must be able to reach: an invariant over nothing holds as well.
    fn reached(&self) -> Vec<Property<Self>> {
        let atomic = self.callers.contains(&Mode::Atomic);
        let leased = self.callers.contains(&Mode::Leased);
        let rerun = self.stale == Rerun;
        let all: [(bool, &str, Condition); 9] = [
            (true, "success", |_, s| answered(s, Ok)),
            (true, "replay", |_, s| answered(s, Replay)),
            (true, "final failure", |_, s| answered(s, FinalFailure)),
            (true, "retry", |_, s| works_on(s, FailedRetryable)),
            (true, "purge and rerun", |_, s| (0..=1).all(|life| s.effects.iter().any(|e| e.life == life))),
            (atomic, "overtaken", |_, s| answered(s, Overtaken)),
            (leased, "stale owner refused", |_, s| answered(s, LostClaim)),
            (leased && rerun, "takeover", |_, s| works_on(s, Processing)),
            (leased && !rerun, "uncertain", |_, s| answered(s, HeldUncertain)),
        ];
        let mine = all.into_iter().filter(|(applies, ..)| *applies);
        mine.map(|(_, name, reaches)| Property::sometimes(name, reaches)).collect()
    }
}

type Condition = fn(&Protocol, &State) -> bool;

fn answered(s: &State, answer: Answer) -> bool {
    s.callers.contains(&Phase::Outside(answer))
}

fn works_on(s: &State, from: Status) -> bool {
    let took = |phase: &Phase| matches!(phase, Phase::Working(c) if c.from == Some(from));
    s.callers.iter().any(took)
}

impl Model for Protocol {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![State { callers: vec![Phase::Outside(Nothing); self.callers.len()], ..State::default() }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        (0..self.callers.len()).for_each(|i| self.caller_actions(state, i, actions));
        self.database_actions(state, actions);
    }

    fn next_state(&self, state: &State, action: Action) -> Option<State> {
        let mut next = state.clone();
        self.step(&mut next, action);
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut properties = Self::invariants();
        if self.naive.is_none() {
            properties.extend(self.reached());
        }
        properties
    }
}

const ATOMIC: &[Mode] = &[Mode::Atomic; 2];
const LEASED: &[Mode] = &[Mode::Leased; 2];
const MIXED: &[Mode] = &[Mode::Leased, Mode::Atomic];

fn must_hold(callers: &'static [Mode], stale: Stale) {
    let protocol = Protocol { callers, stale, naive: None };
    let checker = protocol.checker().spawn_bfs().join();
    let states = checker.unique_state_count();
    eprintln!("{callers:?} {stale:?}: {states} states");
    checker.assert_properties();
}

/// The checker must find a way to break each of these properties.
fn must_break(callers: &'static [Mode], stale: Stale, naive: Naive, broken: &[&'static str]) {
    let protocol = Protocol { callers, stale, naive: Some(naive) };
    let wanted = HasDiscoveries::AllOf(broken.iter().copied().collect());
    let checker = protocol.checker().finish_when(wanted).spawn_bfs().join();
    let states = checker.unique_state_count(); // shown by --nocapture, with the way to the fault
    eprintln!("{naive:?} {callers:?} {stale:?}: {states} states");
    for name in broken {
        let path = checker.assert_any_discovery(name);
        eprintln!("  {name}: {:?}", path.into_actions());
    }
}

#[test]
fn atomic_holds() {
    must_hold(&[Mode::Atomic; 3], Hold);
}

#[test]
fn leased_rerun_holds() {
    must_hold(LEASED, Rerun);
}

#[test]
fn leased_hold_holds() {
    must_hold(&[Mode::Leased; 3], Hold);
}

/// A call may name another mode than its scope's; record_failure does.
#[test]
fn mixed_modes_hold() {
    must_hold(MIXED, Rerun);
    must_hold(MIXED, Hold);
}

#[test]
fn unfenced_completion_commits_under_a_superseded_claim() {
    must_break(LEASED, Rerun, Naive::UnfencedCompletion, &[I7_FENCE]);
    must_break(LEASED, Rerun, Naive::UncheckedRowCount, &[I1, I7_FENCE]);
}

#[test]
fn attempt_counter_is_no_fence_after_a_purge() {
    must_break(LEASED, Rerun, Naive::AttemptFence, &[I7_UNIQUE, I7_FENCE]);
}

#[test]
fn effect_in_a_transaction_of_its_own_runs_twice() {
    must_break(LEASED, Rerun, Naive::SeparateEffect, &[I1, I3, I7_FENCE]);
    must_break(LEASED, Hold, Naive::SeparateEffect, &[I3, I7_FENCE]);
}

#[test]
fn takeover_before_the_lease_has_ended_is_seen() {
    must_break(LEASED, Rerun, Naive::ImpatientTakeover, &[I8]);
}

#[test]
fn terminal_insert_without_its_guard_runs_twice() {
    must_break(ATOMIC, Hold, Naive::UnguardedInsert, &[I1, I6]);
}

#[test]
fn purge_of_processing_rows_cuts_a_running_lease() {
    must_break(LEASED, Rerun, Naive::PurgeProcessing, &[I8]);
}

#[test]
fn purge_before_expiry_runs_twice() {
    must_break(ATOMIC, Hold, Naive::PurgeUnexpired, &[I1, I6]);
    must_break(LEASED, Rerun, Naive::PurgeUnexpired, &[I1, I6]);
}

#[test]
fn commit_tag_not_read_reports_an_effect_that_is_not_there() {
    must_break(ATOMIC, Hold, Naive::UncheckedCommitTag, &[I2]);
    must_break(LEASED, Rerun, Naive::UncheckedCommitTag, &[I2]);
}

#[test]
fn lease_that_nobody_takes_over_is_stuck() {
    must_break(LEASED, Rerun, Naive::NoTakeover, &[I9]);
}

#[test]
fn resolving_a_running_completion_as_never_is_a_lie() {
    must_break(LEASED, Rerun, Naive::HastyResolve, &[I3]);
}
