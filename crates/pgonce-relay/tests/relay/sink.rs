//! A sink that records, and fails as it is told.

use std::collections::{BTreeMap, HashMap};
use std::sync::Mutex;

use futures_util::future::BoxFuture;
use pgonce_relay::{Message, Sink, Verdict};

/// What is to be said of a message before it is recorded; `None`: it is taken.
type Rule = Box<dyn FnMut(&Message) -> Option<Verdict> + Send>;

#[derive(Default)]
pub struct Recorder {
    got: Mutex<Vec<Message>>,
    rule: Mutex<Option<Rule>>,
}

impl std::fmt::Debug for Recorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Recorder")
    }
}

impl Sink for Recorder {
    fn send<'a>(&'a self, messages: &'a [Message]) -> BoxFuture<'a, Vec<Verdict>> {
        Box::pin(async move {
            let mut keys: Vec<_> = messages.iter().map(Message::lane_key).collect();
            keys.sort_unstable();
            assert!(keys.windows(2).all(|pair| pair[0] != pair[1]), "a round has one message of a key");
            tokio::task::yield_now().await;
            let mut rule = self.rule.lock().unwrap();
            let judge = |message: &Message| {
                let verdict = rule.as_mut().and_then(|rule| rule(message)).unwrap_or(Verdict::Delivered);
                if verdict == Verdict::Delivered {
                    self.got.lock().unwrap().push(message.clone());
                }
                verdict
            };
            messages.iter().map(judge).collect()
        })
    }
}

impl Recorder {
    pub fn rule(&self, rule: impl FnMut(&Message) -> Option<Verdict> + Send + 'static) {
        *self.rule.lock().unwrap() = Some(Box::new(rule));
    }

    pub fn count(&self) -> usize {
        self.got.lock().unwrap().len()
    }

    /// The payloads' `n` in the order of arrival, each id's first arrival only.
    pub fn first(&self) -> Vec<i64> {
        let mut seen = std::collections::HashSet::new();
        let got = self.got.lock().unwrap();
        got.iter().filter(|message| seen.insert(message.id.clone())).map(n).collect()
    }

    /// The same by ordering key.
    pub fn by_key(&self) -> BTreeMap<String, Vec<i64>> {
        let mut seen = HashMap::new();
        let mut keys: BTreeMap<String, Vec<i64>> = BTreeMap::new();
        for message in self.got.lock().unwrap().iter() {
            if let Some(before) = seen.insert(message.id.clone(), message.payload.clone()) {
                assert_eq!(before, message.payload, "an id has one body");
                continue;
            }
            keys.entry(message.ordering_key.clone().unwrap_or_default()).or_default().push(n(message));
        }
        keys
    }
}

pub fn n(message: &Message) -> i64 {
    let payload: serde_json::Value = serde_json::from_slice(&message.payload).unwrap();
    payload["n"].as_i64().unwrap()
}
