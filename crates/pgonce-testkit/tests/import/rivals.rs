//! Two at one file, connections that are lost, and importers that are taken over.

use std::time::Duration;

use pgonce::import::{Ending, ImportOptions};
use pgonce::{Error, Settings};
use pgonce_testkit::{Cut, FaultProxy, lock_waiters};

use crate::desk::{Desk, ORDERS, counts, orders, unstopped};

/// Rows named in `gate` wait for the advisory lock 42.
const GATE: &str = "CREATE TABLE gate (reference text);
    CREATE FUNCTION at_gate() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF EXISTS (SELECT FROM public.gate g WHERE g.reference = NEW.reference) THEN PERFORM pg_advisory_xact_lock_shared(42); END IF;
        RETURN NEW; END $$;
    CREATE TRIGGER gate BEFORE INSERT ON orders FOR EACH ROW EXECUTE FUNCTION at_gate()";

fn lease(seconds: u64) -> ImportOptions {
    let mut options = Desk::options();
    options.lease = Duration::from_secs(seconds);
    options
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_at_one_file_one_imports_it() {
    let desk = Desk::new(&format!("{ORDERS}; {GATE}; INSERT INTO gate VALUES ('r00025')")).await;
    desk.client.batch_execute("SELECT pg_advisory_lock(42)").await.unwrap();
    let csv = orders(0..60);
    let (once, file) = (desk.once.clone(), Desk::file(&csv));
    let first = tokio::spawn(async move { once.import(file, &lease(1), unstopped(), |_| {}).await });
    let observer = desk.db.client().await;
    lock_waiters(&observer, 1).await;
    // Its lease runs out meanwhile; its batch is under way, and keeps everybody away.
    let second = desk.import(&csv, &lease(1)).await.unwrap();
    assert!(
        matches!(&second.ending, Ending::Busy(owner) if owner.contains(&std::process::id().to_string())),
        "{second:?}"
    );
    assert_eq!(desk.text("SELECT leased_until < once.clock() FROM once.imports").await, "true");
    desk.client.batch_execute("SELECT pg_advisory_unlock(42)").await.unwrap();
    let first = first.await.unwrap().unwrap();
    assert_eq!((first.ending.clone(), counts(&first)), (Ending::Done, (60, 0, 0)));
    assert_eq!(desk.text("SELECT count(*) FROM orders").await, "60");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_importer_that_was_taken_over_writes_nothing_more() {
    let desk = Desk::new(ORDERS).await;
    let csv = orders(0..100);
    let (once, file) = (desk.once.clone(), Desk::file(&csv));
    // It pauses between two batches, for as long as somebody needs to take its import and bring it to an end.
    let (paused, mut is_paused) = tokio::sync::mpsc::channel(1);
    let (go_on, wait) = std::sync::mpsc::channel::<()>();
    let stale = tokio::spawn(async move {
        let pause = move |progress: pgonce::import::Progress| {
            if progress.rows == 30 {
                paused.try_send(()).unwrap();
                tokio::task::block_in_place(|| wait.recv().unwrap());
            }
        };
        once.import(file, &lease(60), unstopped(), pause).await
    });
    is_paused.recv().await.unwrap();
    // Taken, and not moved: only the claim id tells the two apart.
    let take = "SELECT o.verdict FROM once.import_job j, once.import_open(j.content, j.size, j.options, j.target, j.name, 'rival', 'rival',
        '1 minute', j.claim_id) o";
    assert_eq!(desk.text(take).await, "resumed");
    go_on.send(()).unwrap();
    let lost = stale.await.unwrap().unwrap_err();
    assert!(matches!(lost, Error::ImportLost), "{lost}");
    assert_eq!(desk.text("SELECT rows || ' ' || state || ' ' || owner FROM once.imports").await, "30 running rival");
    let mut options = lease(60);
    options.take_over = true;
    let report = desk.import(&csv, &options).await.unwrap();
    assert_eq!((report.ending.clone(), report.from_row, counts(&report)), (Ending::Done, 31, (100, 0, 0)));
    assert_eq!(
        desk.text("SELECT count(*) || ' ' || (SELECT sum(applied) FROM once.import_batches) FROM orders").await,
        "100 100"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_importers_file_is_taken_over_when_its_lease_is_over() {
    let desk = Desk::new(ORDERS).await;
    let csv = orders(0..50);
    desk.stopped_at(&csv, &Desk::options(), 20).await;
    // As one leaves it that was killed, on a machine that nobody can see from here.
    let vanish = |ahead: &str| {
        format!(
            "UPDATE once.import_job SET state = 'running', owner = 'elsewhere/00000000/1/1', leased_until = once.clock() + interval '{ahead}'"
        )
    };
    desk.client.batch_execute(&vanish("1 hour")).await.unwrap();
    let mut options = Desk::options();
    let hour = tokio::time::timeout(Duration::from_millis(600), desk.import(&csv, &options)).await;
    assert!(hour.is_err(), "it waits for the lease");
    desk.client.batch_execute(&vanish("500 ms")).await.unwrap();
    let report = desk.import(&csv, &options).await.unwrap();
    assert_eq!((report.ending.clone(), counts(&report)), (Ending::Done, (50, 0, 0)));
    // One of this machine that is gone is seen to be gone.
    desk.stopped_at(orders(100..150), &options, 20).await;
    let this = desk.text("SELECT owner FROM once.imports ORDER BY id DESC LIMIT 1").await;
    let gone = this.rsplit_once('/').unwrap().0;
    desk.client.batch_execute(&format!("UPDATE once.import_job SET state = 'running', owner = '{gone}/1', leased_until = once.clock() + interval '1 hour' WHERE state = 'stopped'")).await.unwrap();
    options.batch_rows = 7;
    let report = desk.import(orders(100..150), &options).await.unwrap();
    assert_eq!((report.ending.clone(), counts(&report)), (Ending::Done, (50, 0, 0)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_whose_answer_is_lost_is_known_by_the_next_row() {
    for (cut, csv) in [
        (Cut::BeforeCommit, orders(0..60)),
        (Cut::AnswerOfCommit, orders(0..60)),
        // By way of the stage, too.
        (Cut::AnswerOfCommit, orders(0..60).replace(",5.50", ",bad").replace("r00007", "r00001")),
        (Cut::BeforeCommit, orders(0..60).replace(",5.50", ",bad").replace("r00007", "r00001")),
    ] {
        let desk = Desk::new(ORDERS).await;
        let proxy = FaultProxy::before(desk.db.direct_url()).await;
        let mut settings = Settings::from_url(&proxy.url(desk.db.direct_url()));
        settings.tally_every = Duration::ZERO;
        let once = pgonce::Once::with_settings(settings).await.unwrap();
        let arm = |progress: pgonce::import::Progress| {
            if !progress.is_hashing && progress.rows == 0 {
                proxy.arm(cut);
            }
        };
        let report = once.import(Desk::file(&csv), &Desk::options(), unstopped(), arm).await.unwrap();
        assert_eq!(proxy.fired(), 1, "{cut:?}");
        let (failed, skipped) = if csv.contains("bad") { (1, 1) } else { (0, 0) };
        assert_eq!(
            (report.ending.clone(), counts(&report)),
            (Ending::Done, (60 - failed - skipped, skipped, failed)),
            "{cut:?}"
        );
        assert_eq!(desk.text("SELECT count(*) FROM orders").await, (60 - failed - skipped).to_string());
        assert_eq!(desk.text("SELECT sum(last_row - first_row + 1) FROM once.import_batches").await, "60");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_terminated_connection_is_made_again() {
    let desk = Desk::new(&format!("{ORDERS}; {GATE}; INSERT INTO gate VALUES ('r00025')")).await;
    desk.client.batch_execute("SELECT pg_advisory_lock(42)").await.unwrap();
    let (once, file) = (desk.once.clone(), Desk::file(orders(0..60)));
    let import = tokio::spawn(async move { once.import(file, &Desk::options(), unstopped(), |_| {}).await });
    let observer = desk.db.client().await;
    lock_waiters(&observer, 1).await;
    let kill = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
        WHERE datname = current_database() AND wait_event_type = 'Lock'";
    assert_eq!(desk.text(kill).await, "1");
    desk.client.batch_execute("DELETE FROM gate; SELECT pg_advisory_unlock(42)").await.unwrap();
    let report = import.await.unwrap().unwrap();
    assert_eq!((report.ending.clone(), counts(&report)), (Ending::Done, (60, 0, 0)));
    assert_eq!(desk.text("SELECT count(*) FROM orders").await, "60");
}
