//! Replays in this process, bounded by bytes.

use std::sync::Arc;
use std::time::Instant;

use quick_cache::sync::{Cache, DefaultLifecycle};
use quick_cache::{DefaultHashBuilder, OptionsBuilder, Weighter};

use super::{CacheConfigError, Id, Replay};

/// What is larger than this part of the capacity is not kept: it would push out too much.
const LARGEST_PART: u64 = 8;
/// Fewer than the parts, so that the largest fits into a shard.
const SHARDS: usize = 4;
/// What the cache itself takes for an entry, about.
const ENTRY_BYTES: usize = size_of::<(Id, Entry)>() + 32;
/// For the first allocation of the table only.
const TYPICAL_BYTES: u64 = 4096;

#[derive(Debug, Clone)]
struct Entry {
    replay: Arc<Replay>,
    until: Instant,
    bytes: u64,
}

#[derive(Debug, Clone)]
struct Bytes;

impl Weighter<Id, Entry> for Bytes {
    fn weight(&self, _: &Id, entry: &Entry) -> u64 {
        entry.bytes
    }
}

/// The cache in this process.
#[derive(Debug)]
pub(super) struct Memory {
    entries: Cache<Id, Entry, Bytes>,
    bytes_max: u64,
}

impl Memory {
    pub(super) fn new(capacity: u64) -> Result<Self, CacheConfigError> {
        let options = OptionsBuilder::new()
            .shards(SHARDS)
            .estimated_items_capacity(usize::try_from(capacity / TYPICAL_BYTES).unwrap_or(usize::MAX).max(1))
            .weight_capacity(capacity)
            .build()
            .map_err(|error| CacheConfigError(format!("memory: {error}")))?;
        let entries = Cache::with_options(options, Bytes, DefaultHashBuilder::default(), DefaultLifecycle::default());
        Ok(Self { entries, bytes_max: capacity / LARGEST_PART })
    }

    pub(super) fn get(&self, id: &Id, now: Instant) -> Option<Arc<Replay>> {
        let entry = self.entries.get(id)?;
        if entry.until > now {
            return Some(entry.replay);
        }
        // Unless somebody has put a younger one meanwhile.
        self.entries.remove_if(id, |entry| entry.until <= now);
        None
    }

    pub(super) fn put(&self, id: Id, replay: Arc<Replay>, until: Instant) {
        let bytes = (replay.bytes() + ENTRY_BYTES) as u64;
        if bytes <= self.bytes_max && until > Instant::now() {
            self.entries.insert(id, Entry { replay, until, bytes });
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on should stop, loudly")]
mod tests {
    use std::time::Duration;

    use super::super::tests::replay;
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    fn id(n: usize) -> Id {
        Id::of("acme", "pay", &n.to_string())
    }

    #[test]
    fn it_forgets_when_the_time_is_over() {
        let memory = Memory::new(1 << 20).unwrap();
        let (told, now) = (Arc::new(replay(b"x", None)), Instant::now());
        memory.put(id(1), Arc::clone(&told), now + MINUTE);
        assert_eq!(memory.get(&id(1), now), Some(Arc::clone(&told)));
        assert_eq!(memory.get(&id(2), now), None);
        assert!(memory.get(&id(1), now + MINUTE - Duration::from_nanos(1)).is_some());
        assert_eq!(memory.get(&id(1), now + MINUTE), None);
        assert_eq!(memory.entries.len(), 0, "and gives its place back");
        memory.put(id(1), told, now);
        assert_eq!(memory.entries.len(), 0, "what is over is not kept at all");
    }

    #[test]
    fn it_is_bounded_by_bytes() {
        const CAPACITY: u64 = 1 << 20;
        let memory = Memory::new(CAPACITY).unwrap();
        let until = Instant::now() + MINUTE;
        for n in 0..10_000 {
            memory.put(id(n), Arc::new(replay(&[b'x'; 1000], None)), until);
            assert!(memory.entries.weight() <= CAPACITY);
        }
        let kept = memory.entries.len();
        assert!((400..1000).contains(&kept), "{kept}: a thousand bytes and its overhead each");
    }

    #[test]
    fn what_would_push_out_too_much_is_not_kept() {
        let memory = Memory::new(1 << 20).unwrap();
        let (now, until) = (Instant::now(), Instant::now() + MINUTE);
        for n in 0..16 {
            memory.put(id(n), Arc::new(replay(&vec![0; (1 << 17) - 1000], None)), until);
            assert!(memory.get(&id(n), now).is_some(), "{n}: an eighth is kept");
        }
        memory.put(id(99), Arc::new(replay(&vec![0; 1 << 17], None)), until);
        assert_eq!(memory.get(&id(99), now), None, "more is not");
        let headers = serde_json::json!([["x-large", "y".repeat(1 << 17)]]);
        let large =
            Replay { answer: pgonce::Answer { headers: Some(headers), ..Default::default() }, ..replay(b"", None) };
        memory.put(id(98), Arc::new(large), until);
        assert_eq!(memory.get(&id(98), now), None, "headers count too");
    }
}
