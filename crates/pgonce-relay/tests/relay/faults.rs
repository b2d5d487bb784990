//! Leases that end, a database that goes away, wire cuts around the record.

use std::sync::Arc;
use std::time::Duration;

use pgonce_testkit::{Cut, FaultProxy, TestDb, eventually};

use crate::sink::Recorder;
use crate::{Running, emit, number, relay_all};

/// The record of a batch is lost on its way, or only its answer is: sent again in the first case, not in the second.
#[tokio::test]
async fn a_record_that_is_cut_off_is_made_up_for() {
    for cut in [Cut::BeforeStatement, Cut::AnswerOfStatement] {
        let db = TestDb::new().await;
        let proxy = FaultProxy::before(db.direct_url()).await;
        let url = proxy.url(db.direct_url());
        let sink = Arc::new(Recorder::default());
        let relay = Running::with(&db, &sink, |settings| settings.database_url = url);
        emit(&db, "k", 1).await;
        eventually("it flows", async || sink.count() == 1).await;
        proxy.arm(cut);
        for n in 2..10 {
            emit(&db, "k", n).await;
        }
        eventually("all is there", async || sink.first().len() == 9).await;
        eventually("the cut happened", async || proxy.fired() == 1).await;
        relay.stop().await;
        relay_all(&db, &sink).await;
        assert_eq!(sink.first(), (1..10).collect::<Vec<_>>(), "{cut:?}");
    }
}

#[tokio::test]
async fn terminated_backends_are_replaced() {
    let db = TestDb::new().await;
    let sink = Arc::new(Recorder::default());
    let relay = Running::start(&db, &sink);
    let client = db.client().await;
    for n in 0..20 {
        emit(&db, &format!("k{n}"), n).await;
        if n % 5 == 4 {
            let kill = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()";
            client.batch_execute(kill).await.unwrap();
        }
    }
    eventually("all is there", async || sink.first().len() == 20).await;
    relay.stop().await;
    assert_eq!(
        number(&db, "SELECT count(*) FROM once.lane WHERE owner IS NOT NULL").await,
        0,
        "a goodbye gives lanes back"
    );
}

/// A relay that slept through its lease: another has its lanes, and what it still records is refused.
#[tokio::test]
async fn a_relay_that_lost_its_lease_does_no_harm() {
    let db = TestDb::new().await;
    let sink = Arc::new(Recorder::default());
    // By the database's clock its lanes run out all at once; it does not know.
    let stale = Running::with(&db, &sink, |settings| settings.lease = Duration::from_secs(1));
    eventually("it holds all lanes", async || {
        number(&db, "SELECT count(*) FROM once.lane WHERE owner IS NOT NULL").await == 8
    })
    .await;
    db.travel(Duration::from_secs(60)).await;
    let other = Running::start(&db, &sink);
    eventually("lanes change hands", async || {
        number(&db, "SELECT count(DISTINCT owner) FROM once.lane WHERE owner IS NOT NULL").await == 2
    })
    .await;
    for n in 0..20 {
        emit(&db, &format!("k{n}"), n).await;
    }
    eventually("all is there", async || sink.first().len() == 20).await;
    stale.stop().await;
    other.stop().await;
    relay_all(&db, &sink).await;
    let mut came = sink.first();
    came.sort_unstable();
    assert_eq!(came, (0..20).collect::<Vec<_>>());
}
