//! What an effect decides, and what became of its intent.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::claim::Answer;
use crate::error::Error;

/// What became of an intent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome<T> {
    /// This call ran the effect and committed it.
    Executed(T),
    /// An earlier attempt did; this is what it answered.
    Replayed(T),
}

impl<T> Outcome<T> {
    /// The answer, whoever produced it.
    pub fn into_inner(self) -> T {
        match self {
            Self::Executed(value) | Self::Replayed(value) => value,
        }
    }

    /// Whether an earlier attempt produced it.
    pub fn is_replay(&self) -> bool {
        matches!(self, Self::Replayed(_))
    }
}

/// What an effect decided: whether its writes stay, and what later attempts are answered. `T` is what this
/// call's caller gets, which need not be what is stored.
#[derive(Debug, Clone, PartialEq)]
pub enum Decision<T> {
    /// It is done: the writes commit with this answer.
    Done(Answer, T),
    /// It is refused, and stays refused: the writes are rolled back, and this answer is stored all the same.
    Refused(Answer, T),
    /// It is not done, and may be later: the writes are rolled back and nothing is stored, so the next attempt
    /// runs. A leased claim is given back.
    NotDone(T),
    /// Whether it is done is not known. Writes are rolled back, so in atomic mode this is `NotDone`; a leased
    /// claim's lease is ended at once, and the scope's `stale` policy decides about the next attempt.
    Unknown(T),
}

/// What became of an intent whose effect decided about its answer itself.
#[derive(Debug, Clone, PartialEq)]
pub enum Answered<T> {
    /// This call ran the effect, and its answer is stored: done, or refused.
    Executed(T),
    /// An earlier attempt settled it; this is what is stored.
    Replayed(Answer),
    /// This call ran the effect, and nothing is stored.
    NotStored(T),
}

/// A value as an effect's answer: its JSON. What cannot be written as JSON is decided by `unwritable`.
pub(crate) fn as_json<T: Serialize>(
    value: T,
    unwritable: impl FnOnce(Result<T, serde_json::Error>) -> Decision<Result<T, serde_json::Error>>,
) -> Decision<Result<T, serde_json::Error>> {
    match serde_json::to_vec(&value) {
        Ok(body) => Decision::Done(Answer { body: Some(body), ..Answer::default() }, Ok(value)),
        Err(error) => unwritable(Err(error)),
    }
}

/// The reverse.
pub(crate) fn from_json<T: DeserializeOwned>(
    answered: Answered<Result<T, serde_json::Error>>,
) -> Result<Outcome<T>, Error> {
    let answer = match answered {
        // Not stored is only what could not be written.
        Answered::Executed(value) | Answered::NotStored(value) => return Ok(Outcome::Executed(value?)),
        Answered::Replayed(answer) => answer,
    };
    let value = match &answer.body {
        Some(body) => serde_json::from_slice(body).map_err(|error| error.to_string()),
        None => Err("the scope's policy does not keep it".to_owned()),
    };
    value.map(Outcome::Replayed).map_err(|reason| Error::AnswerUnreadable {
        reason,
        result_type: answer.result_type,
        result_id: answer.result_id,
    })
}
