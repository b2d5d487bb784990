//! Schedules: when the next time is, and the firing of those that have come, which one worker of all does.

use std::str::FromStr as _;
use std::time::{Duration, SystemTime};

use chrono::{DateTime, Utc};
use chrono_tz::Tz;
use croner::Cron;
use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};

use crate::sql::Call;
use crate::{Error, Once};

/// How often it is asked which are due.
const EVERY: Duration = Duration::from_secs(1);

/// Fires what is due, every second, until dropped.
pub(super) async fn fire_all(once: Once) {
    loop {
        if let Err(error) = fire_due(&once).await {
            tracing::warn!(%error, "schedules could not be fired; trying again");
        }
        tokio::time::sleep(EVERY).await;
    }
}

/// Fires what is due now.
async fn fire_due(once: &Once) -> Result<(), Error> {
    let rows = once.connection().await?.rows(Call::DueSchedules, &[]).await?;
    for row in rows {
        let due = Due::read(&row)?;
        match due.plan() {
            Ok((next, fire)) => due.fire(once, next, fire).await?,
            Err(reason) => due.fault(once, &reason).await?,
        }
    }
    Ok(())
}

struct Due {
    schedule: String,
    revision: i32,
    cron: String,
    timezone: String,
    skips: bool,
    next_at: Option<SystemTime>,
    now: SystemTime,
}

impl Due {
    fn read(row: &Row) -> Result<Self, tokio_postgres::Error> {
        Ok(Self {
            schedule: row.try_get(0)?,
            revision: row.try_get(1)?,
            cron: row.try_get(2)?,
            timezone: row.try_get(3)?,
            skips: row.try_get::<_, &str>(4)? == "skip",
            next_at: row.try_get(5)?,
            now: row.try_get(6)?,
        })
    }

    /// The first time after now, and whether the one that has come is fired. Times that were missed are made up for by
    /// one job, or not at all: one is missed where a further one has passed since.
    fn plan(&self) -> Result<(SystemTime, bool), String> {
        let next = next(&self.cron, &self.timezone, self.now)?;
        let Some(due) = self.next_at else { return Ok((next, false)) };
        let missed = self::next(&self.cron, &self.timezone, due)? <= self.now;
        Ok((next, !(missed && self.skips)))
    }

    /// Moves it on, and enqueues its job: by compare and set, so that of all workers one does.
    async fn fire(&self, once: &Once, next: SystemTime, fire: bool) -> Result<(), Error> {
        let parameters: [(&(dyn ToSql + Sync), Type); 5] = [
            (&self.schedule, Type::TEXT),
            (&self.revision, Type::INT4),
            (&self.next_at, Type::TIMESTAMPTZ),
            (&next, Type::TIMESTAMPTZ),
            (&fire, Type::BOOL),
        ];
        once.connection().await?.call(Call::FireSchedule, &parameters).await?;
        Ok(())
    }

    async fn fault(&self, once: &Once, reason: &str) -> Result<(), Error> {
        tracing::error!(schedule = %self.schedule, reason, "no next time can be computed; the schedule rests until it is defined anew");
        let parameters: [(&(dyn ToSql + Sync), Type); 3] =
            [(&self.schedule, Type::TEXT), (&self.revision, Type::INT4), (&reason, Type::TEXT)];
        once.connection().await?.call(Call::FaultSchedule, &parameters).await?;
        Ok(())
    }
}

/// The first time of a cron expression after another.
fn next(cron: &str, timezone: &str, after: SystemTime) -> Result<SystemTime, String> {
    let cron = Cron::from_str(cron).map_err(|error| format!("the cron expression cannot be read: {error}"))?;
    let zone = Tz::from_str(timezone).map_err(|error| format!("the time zone is not known: {error}"))?;
    let after = DateTime::<Utc>::from(after).with_timezone(&zone);
    let next = cron.find_next_occurrence(&after, false).map_err(|error| format!("it never comes: {error}"))?;
    Ok(next.into())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    fn time(text: &str) -> SystemTime {
        DateTime::parse_from_rfc3339(text).unwrap().into()
    }

    fn due(next_at: Option<&str>, now: &str, skips: bool) -> Due {
        let next_at = next_at.map(time);
        Due {
            schedule: "s".into(),
            revision: 1,
            cron: "30 6 * * *".into(),
            timezone: "Europe/Berlin".into(),
            skips,
            next_at,
            now: time(now),
        }
    }

    #[test]
    fn in_its_time_zone_over_the_change_of_clocks() {
        let next = |after| next("30 6 * * *", "Europe/Berlin", time(after)).unwrap();
        assert_eq!(next("2026-03-28T12:00:00Z"), time("2026-03-29T04:30:00Z"));
        assert_eq!(next("2026-03-27T12:00:00Z"), time("2026-03-28T05:30:00Z"));
        assert_eq!(next("2026-03-28T05:30:00Z"), time("2026-03-29T04:30:00Z"), "not the same time again");
    }

    #[test]
    fn one_that_came_fires_and_missed_ones_by_their_rule() {
        assert_eq!(due(None, "2026-03-27T12:00:00Z", false).plan(), Ok((time("2026-03-28T05:30:00Z"), false)));
        let came = Some("2026-03-27T05:30:00Z");
        assert_eq!(due(came, "2026-03-27T05:30:01Z", true).plan(), Ok((time("2026-03-28T05:30:00Z"), true)));
        assert_eq!(due(came, "2026-03-30T12:00:00Z", false).plan(), Ok((time("2026-03-31T04:30:00Z"), true)));
        assert_eq!(due(came, "2026-03-30T12:00:00Z", true).plan(), Ok((time("2026-03-31T04:30:00Z"), false)));
    }

    #[test]
    fn what_never_comes_is_told() {
        assert!(next("0 0 30 2 *", "UTC", time("2026-01-01T00:00:00Z")).is_err());
        assert!(next("61 * * * *", "UTC", time("2026-01-01T00:00:00Z")).is_err());
        assert!(next("* * * * *", "Mars/Olympus", time("2026-01-01T00:00:00Z")).is_err());
    }
}
