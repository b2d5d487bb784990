//! Which offsets of which partitions are out, and up to where all of them are dealt with. Kafka remembers one
//! number a partition: committing more than the lowest that is still out would lose it.

use std::collections::{BTreeSet, HashMap};

/// A place in a topic.
pub(crate) type Place = (String, i32);

/// An offset that is out. `epoch` says under which assignment: after a rebalance the partition is another's, or
/// begins again, and an old acknowledgement means nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ticket {
    pub(crate) place: Place,
    pub(crate) offset: i64,
    pub(crate) epoch: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Tracker {
    partitions: HashMap<Place, Partition>,
    epochs: u64,
}

#[derive(Debug)]
struct Partition {
    epoch: u64,
    /// After the highest that was given out.
    next: i64,
    out: BTreeSet<i64>,
    committed: i64,
}

impl Partition {
    /// Everything before it is dealt with.
    fn done(&self) -> i64 {
        self.out.first().copied().unwrap_or(self.next)
    }
}

impl Tracker {
    /// An offset goes out.
    pub(crate) fn give(&mut self, place: Place, offset: i64) -> Ticket {
        let epochs = &mut self.epochs;
        let partition = self.partitions.entry(place.clone()).or_insert_with(|| {
            *epochs += 1;
            Partition { epoch: *epochs, next: offset, out: BTreeSet::new(), committed: offset }
        });
        partition.out.insert(offset);
        partition.next = partition.next.max(offset + 1);
        Ticket { place, offset, epoch: partition.epoch }
    }

    /// It is dealt with: what to commit now, where that has moved. `Err` where the partition was taken away.
    pub(crate) fn end(&mut self, ticket: &Ticket) -> Result<Option<i64>, ()> {
        let partition = self.partitions.get_mut(&ticket.place).filter(|known| known.epoch == ticket.epoch).ok_or(())?;
        partition.out.remove(&ticket.offset);
        let done = partition.done();
        let moved = done > partition.committed;
        partition.committed = partition.committed.max(done);
        Ok(moved.then_some(done))
    }

    /// Whether its partition is still ours, under the same assignment.
    pub(crate) fn holds(&self, ticket: &Ticket) -> bool {
        self.partitions.get(&ticket.place).is_some_and(|known| known.epoch == ticket.epoch)
    }

    /// A partition goes: what was dealt with of it.
    pub(crate) fn forget(&mut self, place: &Place) -> Option<i64> {
        self.partitions.remove(place).map(|partition| partition.done())
    }

    /// What is dealt with, of all.
    pub(crate) fn done(&self) -> Vec<(Place, i64)> {
        self.partitions.iter().map(|(place, partition)| (place.clone(), partition.done())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place() -> Place {
        ("orders".into(), 0)
    }

    #[test]
    fn nothing_beyond_the_lowest_that_is_out_is_committed() {
        let mut tracker = Tracker::default();
        let tickets: Vec<Ticket> = [10, 11, 13].into_iter().map(|offset| tracker.give(place(), offset)).collect();
        assert_eq!(tracker.end(&tickets[1]), Ok(None));
        assert_eq!(tracker.done(), [(place(), 10)]);
        assert_eq!(tracker.end(&tickets[0]), Ok(Some(13)), "12 was never there: a transaction's marker");
        assert_eq!(tracker.end(&tickets[0]), Ok(None), "twice is once");
        assert_eq!(tracker.end(&tickets[2]), Ok(Some(14)));
    }

    #[test]
    fn after_a_rebalance_old_tickets_mean_nothing() {
        let mut tracker = Tracker::default();
        let old = tracker.give(place(), 5);
        assert_eq!(tracker.forget(&place()), Some(5));
        assert_eq!(tracker.end(&old), Err(()));
        let new = tracker.give(place(), 5);
        assert!(!tracker.holds(&old) && tracker.holds(&new));
        assert_eq!(tracker.end(&old), Err(()));
        assert_eq!(tracker.end(&new), Ok(Some(6)));
    }
}
