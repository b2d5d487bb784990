//! The relay against a real PostgreSQL, with a sink that records what it gets and does what a test tells it: the faults
//! that no real broker has on demand. Real brokers are in the suites `sinks` and, killed, in the command line's.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod faults;
mod order;
mod parking;
mod replay;
mod sink;

use std::sync::Arc;
use std::time::Duration;

use pgonce_relay::relay::{self, Finished, RelaySettings, SinkSettings};
use pgonce_testkit::TestDb;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::sink::Recorder;

/// A relay in this process.
struct Running {
    stop: watch::Sender<bool>,
    task: JoinHandle<Finished>,
}

impl Running {
    fn start(db: &TestDb, sink: &Arc<Recorder>) -> Self {
        Self::with(db, sink, |_| {})
    }

    fn with(db: &TestDb, sink: &Arc<Recorder>, change: impl FnOnce(&mut RelaySettings)) -> Self {
        let mut settings = RelaySettings::new(db.url());
        settings.lease = Duration::from_secs(3);
        settings.backoff_max = Duration::from_millis(50);
        change(&mut settings);
        let (stop, stopped) = watch::channel(false);
        let sink: Arc<dyn pgonce_relay::Sink> = Arc::clone(sink) as _;
        let wanted = SinkSettings { name: "s".into(), ..SinkSettings::default() };
        let task = tokio::spawn(async move { relay::run(&settings, &wanted, sink, stopped, || {}).await.unwrap() });
        Self { stop, task }
    }

    /// Ends it as it should end.
    async fn stop(self) -> Finished {
        self.stop.send_replace(true);
        self.task.await.unwrap()
    }

    /// Ends it as a crash does: whatever it held stays held until its lease is over.
    fn crash(self) {
        self.task.abort();
    }
}

/// Relays until nothing is left.
async fn relay_all(db: &TestDb, sink: &Arc<Recorder>) -> Finished {
    Running::with(db, sink, |settings| settings.until_empty = true).task.await.unwrap()
}

async fn emit(db: &TestDb, key: &str, n: i64) {
    let sql = "SELECT once.emit('t', 'x', jsonb_build_object('n', $2::bigint), $1)";
    db.client().await.query_one(sql, &[&key, &n]).await.unwrap();
}

async fn number(db: &TestDb, sql: &str) -> i64 {
    db.client().await.query_one(sql, &[]).await.unwrap().get(0)
}
