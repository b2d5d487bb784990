//! Sends a batch so that each key's order is kept: a round has at most one message of a key, and the next of a key goes
//! out when the one before it has arrived. Keys do not wait for each other: one that fails is set aside with
//! everything behind it.

use std::borrow::Cow;
use std::collections::{HashMap, VecDeque};

use super::log::{Held, Place};
use crate::{Message, Verdict};

/// A batch on its way.
#[derive(Debug)]
pub(super) struct Rounds {
    messages: Vec<Message>,
    places: Vec<Place>,
    /// What is left of each key, by index; keys in order of their first message.
    queues: VecDeque<VecDeque<usize>>,
    held: Vec<Held>,
    blocked: Vec<(String, String)>,
    delivered: u64,
}

/// What one round came to.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Round {
    /// Go on.
    Next,
    /// The sink is away: the same again after a pause.
    Away(String),
    /// The sink wants nothing any more.
    Disabled(String),
    /// The sink has ended.
    Closed(String),
}

impl Rounds {
    /// `is_blocked` knows the keys that have something held from before: whatever comes for them queues behind it.
    pub fn new(messages: Vec<Message>, places: &[Place], is_blocked: impl Fn(&str, &str) -> bool) -> Self {
        let mut rounds = Self {
            places: places.to_vec(),
            queues: VecDeque::new(),
            held: Vec::new(),
            blocked: Vec::new(),
            delivered: 0,
            messages: Vec::new(),
        };
        let mut by_key: HashMap<(&str, &str), usize> = HashMap::with_capacity(messages.len());
        for (index, message) in messages.iter().enumerate() {
            let (tenant, key) = message.lane_key();
            if is_blocked(tenant, key) {
                rounds.held.push(rounds.hold(index, "behind", None, None));
                continue;
            }
            let queue = *by_key.entry((tenant, key)).or_insert_with(|| {
                rounds.queues.push_back(VecDeque::with_capacity(1));
                rounds.queues.len() - 1
            });
            rounds.queues[queue].push_back(index);
        }
        rounds.messages = messages;
        rounds
    }

    pub fn is_done(&self) -> bool {
        self.queues.is_empty()
    }

    /// The next messages: the first of each key. Mostly that is all there are, and then they are not copied.
    pub fn next(&self) -> Cow<'_, [Message]> {
        if self.queues.len() == self.messages.len() {
            return Cow::Borrowed(&self.messages);
        }
        let first = self.queues.iter().filter_map(|queue| queue.front());
        Cow::Owned(first.map(|index| self.messages[*index].clone()).collect())
    }

    /// Takes the verdicts of what `next` gave; `fate` says what becomes of a failed message: its state, and the pause.
    pub fn settle(
        &mut self,
        verdicts: Vec<Verdict>,
        mut fate: impl FnMut(&Verdict) -> (&'static str, Option<i64>),
    ) -> Round {
        let mut round = Round::Next;
        let mut queues = std::mem::take(&mut self.queues);
        for (mut queue, verdict) in
            queues.drain(..).zip(verdicts.into_iter().map(Some).chain(std::iter::repeat_with(|| None)))
        {
            match verdict {
                Some(Verdict::Delivered) => {
                    queue.pop_front();
                    self.delivered += 1;
                }
                // A sink that forgot a message has said nothing of it.
                None => round = Round::Away("the sink gave no answer".into()),
                Some(Verdict::Away { reason }) => round = Round::Away(reason),
                Some(Verdict::Disabled { reason }) => return self.put_back(queue, Round::Disabled(reason)),
                Some(Verdict::Closed { reason }) => return self.put_back(queue, Round::Closed(reason)),
                Some(failed @ (Verdict::Retry { .. } | Verdict::Refused { .. })) => {
                    let (state, delay_ms) = fate(&failed);
                    let (Verdict::Retry { reason, .. } | Verdict::Refused { reason }) = failed else { continue };
                    self.set_aside(&mut queue, state, reason, delay_ms);
                }
            }
            if !queue.is_empty() {
                self.queues.push_back(queue);
            }
        }
        round
    }

    fn put_back(&mut self, queue: VecDeque<usize>, round: Round) -> Round {
        self.queues.push_back(queue);
        round
    }

    /// The failed one, and everything of its key behind it.
    fn set_aside(&mut self, queue: &mut VecDeque<usize>, state: &'static str, reason: String, delay_ms: Option<i64>) {
        let Some(first) = queue.pop_front() else { return };
        let (tenant, key) = self.messages[first].lane_key();
        self.blocked.push((tenant.to_owned(), key.to_owned()));
        self.held.push(self.hold(first, state, Some(reason), delay_ms));
        for index in queue.drain(..) {
            self.held.push(self.hold(index, "behind", None, None));
        }
    }

    fn hold(&self, index: usize, state: &'static str, error: Option<String>, delay_ms: Option<i64>) -> Held {
        let Place { position, xid, .. } = self.places[index];
        Held { position, xid, state, error, delay_ms }
    }

    /// What is to be recorded: the held messages, the keys that they block from now on, and how many were delivered.
    pub fn end(self) -> (Vec<Held>, Vec<(String, String)>, u64) {
        (self.held, self.blocked, self.delivered)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(id: &str, key: Option<&str>) -> Message {
        Message { id: id.into(), ordering_key: key.map(str::to_owned), ..Message::default() }
    }

    fn rounds(messages: &[(&str, Option<&str>)], blocked: &[&str]) -> Rounds {
        let places: Vec<Place> = (0..messages.len()).map(|n| Place { position: n as i64, xid: 1, lane: 0 }).collect();
        let is_blocked = |_: &str, key: &str| blocked.contains(&key);
        Rounds::new(messages.iter().map(|(id, key)| message(id, *key)).collect(), &places, is_blocked)
    }

    fn ids(rounds: &Rounds) -> Vec<String> {
        rounds.next().iter().map(|message| message.id.clone()).collect()
    }

    fn parked(_: &Verdict) -> (&'static str, Option<i64>) {
        ("parked", None)
    }

    #[test]
    fn a_key_is_sent_one_by_one_and_other_keys_flow_past_a_failing_one() {
        let all =
            [("a1", Some("a")), ("b1", Some("b")), ("a2", Some("a")), ("x", None), ("b2", Some("b")), ("y", None)];
        let mut rounds = rounds(&all, &[]);
        assert_eq!(ids(&rounds), ["a1", "b1", "x", "y"]);
        let refused = Verdict::Refused { reason: "too large".into() };
        let verdicts = vec![refused, Verdict::Delivered, Verdict::Delivered, Verdict::Delivered];
        assert_eq!(rounds.settle(verdicts, parked), Round::Next);
        assert_eq!(ids(&rounds), ["b2"]);
        assert_eq!(rounds.settle(vec![Verdict::Delivered], parked), Round::Next);
        assert!(rounds.is_done());
        let (held, blocked, delivered) = rounds.end();
        assert_eq!(
            held.iter().map(|held| (held.position, held.state)).collect::<Vec<_>>(),
            [(0, "parked"), (2, "behind")]
        );
        assert_eq!((blocked, delivered), (vec![(String::new(), "a".to_owned())], 4));
    }

    #[test]
    fn what_is_away_is_sent_again_and_what_arrived_is_not() {
        let mut rounds = rounds(&[("a1", Some("a")), ("b1", Some("b")), ("c1", Some("c"))], &[]);
        let away = Verdict::Away { reason: "gone".into() };
        assert_eq!(
            rounds.settle(vec![Verdict::Delivered, away], parked),
            Round::Away("the sink gave no answer".into())
        );
        assert_eq!(ids(&rounds), ["b1", "c1"]);
    }

    #[test]
    fn what_comes_for_a_blocked_key_queues_behind_it() {
        let rounds = rounds(&[("a1", Some("a")), ("b1", Some("b"))], &["a"]);
        assert_eq!(ids(&rounds), ["b1"]);
        assert_eq!(rounds.end().0[0].state, "behind");
    }
}
