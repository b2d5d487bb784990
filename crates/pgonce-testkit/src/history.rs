//! What clients saw, and the checker that holds it against what the database says in the end.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;

use tokio_postgres::Client;

/// What a client was told about one attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Seen {
    /// Success, with the answer's bytes.
    Ok(Vec<u8>),
    /// A definite failure: no effect of this attempt.
    Fail,
    /// Nothing, or "in progress", or "not known".
    Unknown,
}

/// One attempt of one client, as the client saw it.
#[derive(Debug, Clone)]
pub struct Event {
    /// The intent's scope.
    pub scope: String,
    /// The intent's key.
    pub key: String,
    /// What the client was told.
    pub seen: Seen,
}

/// A history that many clients write.
#[derive(Debug, Default)]
pub struct History(Mutex<Vec<Event>>);

impl History {
    /// Records an attempt's end.
    pub fn record(&self, scope: &str, key: &str, seen: Seen) {
        self.0.lock().unwrap().push(Event { scope: scope.to_owned(), key: key.to_owned(), seen });
    }

    /// Everything recorded so far.
    #[must_use]
    pub fn events(&self) -> Vec<Event> {
        self.0.lock().unwrap().clone()
    }
}

/// A violated invariant, by its number in the protocol.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Violation {
    /// For example `I1`.
    pub invariant: &'static str,
    /// What was found.
    pub what: String,
}

/// The final state that a history is held against.
#[derive(Debug, Default)]
pub struct Final {
    /// Claim ids of the effects, by scope and key.
    pub effects: BTreeMap<(String, String), Vec<String>>,
    /// Rows by scope and key.
    pub rows: BTreeMap<(String, String), Row>,
    /// Claims that were replaced, by scope, key and claim.
    pub superseded: BTreeMap<(String, String, String), Successor>,
}

/// What came after a claim, by the audit trail.
#[derive(Debug, Clone)]
pub struct Successor {
    /// The claim id that the row has from then on.
    pub claim_id: String,
    /// Whether nothing ran in between: the row was held as uncertain, or said to be done because the effect was
    /// found. An effect of the claim before is then the row's own.
    pub adopts: bool,
}

/// What the checker needs of an intent's row.
#[derive(Debug, Clone)]
pub struct Row {
    /// Its status.
    pub status: String,
    /// Its claim id.
    pub claim_id: String,
    /// Its stored answer.
    pub body: Option<Vec<u8>>,
    /// Whether its lease has ended, where it is processing.
    pub stale: bool,
}

impl Final {
    /// Reads the final state from the database.
    pub async fn read(client: &Client) -> Self {
        let mut state = Self::default();
        for row in client.query("SELECT scope, key, claim_id::text FROM public.effect", &[]).await.unwrap() {
            state.effects.entry((row.get(0), row.get(1))).or_default().push(row.get(2));
        }
        let sql = "SELECT scope, key, status, claim_id::text, response_body, coalesce(locked_until <= once.clock(), false) FROM once.intents";
        for row in client.query(sql, &[]).await.unwrap() {
            let value = Row { status: row.get(2), claim_id: row.get(3), body: row.get(4), stale: row.get(5) };
            state.rows.insert((row.get(0), row.get(1)), value);
        }
        let sql = "SELECT scope, key, from_claim::text, to_claim::text, to_status IN ('uncertain', 'succeeded')
            FROM once.audit_trail WHERE from_claim <> to_claim";
        for row in client.query(sql, &[]).await.unwrap() {
            let successor = Successor { claim_id: row.get(3), adopts: row.get(4) };
            state.superseded.insert((row.get(0), row.get(1), row.get(2)), successor);
        }
        state
    }

    /// Whether an effect of this claim is the row's: made under its claim, or under one whose effect it stands for.
    fn is_of(&self, (scope, key): &(String, String), claim: &str, row: &Row) -> bool {
        let mut claim = claim.to_owned();
        while claim != row.claim_id {
            match self.superseded.get(&(scope.clone(), key.clone(), claim)) {
                Some(Successor { claim_id, adopts: true }) => claim = claim_id.clone(),
                _ => return false,
            }
        }
        true
    }
}

/// Judges a history: I1 (at most one effect), I2 (ok means an effect and a row that says so), I3 (only
/// failures means no effect, as long as nobody was told ok or unknown), I4 (all answers equal the stored
/// one), I7 (every effect carries the row's claim; none a superseded one), I9 (nothing is stuck) and, with
/// I2, I16 (success was reported only for what committed).
#[must_use]
pub fn check(events: &[Event], state: &Final) -> Vec<Violation> {
    let mut found = BTreeSet::new();
    let mut violated = |invariant, what: String| {
        found.insert(Violation { invariant, what });
    };
    for (intent, claims) in &state.effects {
        if claims.len() > 1 {
            violated("I1", format!("{intent:?} has {} effects", claims.len()));
        }
        match state.rows.get(intent) {
            Some(row) if row.status == "succeeded" && claims.iter().any(|claim| !state.is_of(intent, claim, row)) => {
                violated("I7", format!("{intent:?} has an effect of a claim that its row does not name"));
            }
            Some(row) if row.status != "succeeded" => {
                violated("I2", format!("{intent:?} has an effect, and its row says {}", row.status));
            }
            Some(_) => {}
            None => violated("I2", format!("{intent:?} has an effect and no row")),
        }
        for ((scope, key, claim), successor) in &state.superseded {
            if (scope, key) == (&intent.0, &intent.1) && claims.contains(claim) && !successor.adopts {
                violated("I7", format!("{intent:?} has an effect of a superseded claim"));
            }
        }
    }
    let mut by_intent: BTreeMap<(String, String), Vec<&Seen>> = BTreeMap::new();
    for event in events {
        by_intent.entry((event.scope.clone(), event.key.clone())).or_default().push(&event.seen);
    }
    for (intent, seen) in &by_intent {
        let effects = state.effects.get(intent).map_or(0, Vec::len);
        let row = state.rows.get(intent);
        for one in seen {
            if let Seen::Ok(body) = one {
                if effects != 1 || row.is_none_or(|row| row.status != "succeeded") {
                    violated("I2", format!("{intent:?} was reported as done, with {effects} effects"));
                }
                if row.and_then(|row| row.body.as_ref()).is_some_and(|stored| stored != body) {
                    violated("I4", format!("{intent:?} was answered with other bytes than are stored"));
                }
            }
        }
        if effects > 0 && seen.iter().all(|one| **one == Seen::Fail) {
            violated("I3", format!("{intent:?} failed for everybody, and its effect is there"));
        }
        if row.is_some_and(|row| row.status == "processing" && !row.stale) {
            violated("I9", format!("{intent:?} is still processing"));
        }
    }
    found.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn intent() -> (String, String) {
        ("s".into(), "k".into())
    }

    fn row(status: &str, claim: &str) -> Row {
        Row { status: status.into(), claim_id: claim.into(), body: Some(b"1".to_vec()), stale: false }
    }

    fn judged(seen: &[Seen], effects: &[&str], row: Option<Row>) -> Vec<&'static str> {
        let events: Vec<Event> =
            seen.iter().map(|seen| Event { scope: "s".into(), key: "k".into(), seen: seen.clone() }).collect();
        let mut state = Final::default();
        if !effects.is_empty() {
            state.effects.insert(intent(), effects.iter().map(|claim| (*claim).to_owned()).collect());
        }
        if let Some(row) = row {
            state.rows.insert(intent(), row);
        }
        check(&events, &state).into_iter().map(|violation| violation.invariant).collect()
    }

    #[test]
    fn a_good_history_passes() {
        assert!(judged(&[Seen::Ok(b"1".to_vec()), Seen::Unknown], &["a"], Some(row("succeeded", "a"))).is_empty());
        assert!(judged(&[Seen::Fail, Seen::Unknown], &[], None).is_empty());
    }

    #[test]
    fn each_violation_is_found() {
        let ok = Seen::Ok(b"1".to_vec());
        assert_eq!(judged(std::slice::from_ref(&ok), &["a", "a"], Some(row("succeeded", "a"))), ["I1", "I2"]);
        assert_eq!(judged(std::slice::from_ref(&ok), &[], Some(row("succeeded", "a"))), ["I2"]);
        assert_eq!(judged(&[Seen::Fail], &["a"], Some(row("succeeded", "a"))), ["I3"]);
        assert_eq!(judged(&[Seen::Ok(b"2".to_vec())], &["a"], Some(row("succeeded", "a"))), ["I4"]);
        assert_eq!(judged(&[ok], &["b"], Some(row("succeeded", "a"))), ["I7"]);
        assert_eq!(judged(&[Seen::Unknown], &[], Some(row("processing", "a"))), ["I9"]);
    }

    #[test]
    fn an_effect_that_was_found_is_the_rows_own() {
        let judged = |adopts| {
            let mut state = Final::default();
            state.effects.insert(intent(), vec!["a".into()]);
            state.rows.insert(intent(), row("succeeded", "c"));
            for (from, to, adopts) in [("a", "b", true), ("b", "c", adopts)] {
                let successor = Successor { claim_id: to.into(), adopts };
                state.superseded.insert(("s".into(), "k".into(), from.into()), successor);
            }
            check(&[], &state).len()
        };
        assert_eq!((judged(true), judged(false)), (0, 1));
    }
}
