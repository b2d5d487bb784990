//! The job: the same file resumes or is done; what it leaves, and what a rehearsal does not.

use std::time::Duration;

use pgonce::import::Ending;
use pgonce_testkit::checksum;

use crate::desk::{Desk, ORDERS, counts, orders, unstopped};

#[tokio::test]
async fn the_same_file_again_is_done_and_with_other_options_another_job() {
    let desk = Desk::new(ORDERS).await;
    let csv = orders(0..25);
    let first = desk.with(&csv, |_| {}).await;
    assert_eq!((first.ending.clone(), counts(&first), first.from_row), (Ending::Done, (25, 0, 0), 1));
    let before = checksum(&desk.client).await;
    let again = desk.with(&csv, |o| o.batch_rows = 3).await;
    assert_eq!((again.ending.clone(), again.job, counts(&again)), (Ending::AlreadyDone, first.job, (25, 0, 0)));
    assert_eq!(checksum(&desk.client).await, before, "nothing was written");
    let other = desk.with(&csv, |o| o.on_conflict = pgonce::import::OnConflict::Update).await;
    assert_eq!((other.ending.clone(), counts(&other)), (Ending::Done, (0, 25, 0)));
    assert_ne!(other.job, first.job);
    let tenant = desk.with(&csv, |o| o.tenant = "acme".into()).await;
    assert_eq!(counts(&tenant), (0, 25, 0), "another tenant's job, the same table");
    let once_more = desk.with(&csv, |o| o.again = true).await;
    assert_eq!((once_more.ending.clone(), counts(&once_more)), (Ending::Done, (0, 25, 0)));
    assert_eq!(desk.text("SELECT max(run) FROM once.imports").await, "2");
    assert_eq!(desk.with(&csv, |_| {}).await.job, once_more.job, "the last run is what counts");
}

#[tokio::test]
async fn stopped_and_resumed_equals_never_stopped() {
    let csv = orders(0..200).replace(",33.50", ",bad").replace(",150.50", ",bad").replace("r00077", "r00003");
    let whole = Desk::new(ORDERS).await;
    let whole_report = whole.with(&csv, |_| {}).await;
    let desk = Desk::new(ORDERS).await;
    let errors = desk.dir.path().join("errors.jsonl");
    let mut options = Desk::options();
    options.errors = Some(errors.clone());
    let mut rows = 0;
    for stop in [1, 25, 60, 90, 155] {
        let report = desk.stopped_at(&csv, &options, stop).await;
        assert_eq!((report.ending.clone(), report.from_row), (Ending::Interrupted, rows + 1), "{stop}");
        assert!(report.rows > rows);
        rows = report.rows;
        // Whatever was in the file of errors: what is committed is in it when the import goes on.
        std::fs::write(&errors, "torn").unwrap();
    }
    let report = desk.import(&csv, &options).await.unwrap();
    assert_eq!((report.ending.clone(), counts(&report)), (Ending::Done, counts(&whole_report)));
    assert_eq!(desk.orders().await, whole.orders().await);
    assert_eq!(desk.results().await, whole.results().await);
    let lines = std::fs::read_to_string(&errors).unwrap();
    assert_eq!(lines.lines().count(), 2, "{lines}");
    assert!(lines.contains("\"row\":34") && lines.contains("\"row\":151"));
}

#[tokio::test]
async fn a_rehearsal_leaves_nothing() {
    let desk = Desk::new(ORDERS).await;
    desk.client.batch_execute("INSERT INTO orders VALUES ('r00005', 0, 'was')").await.unwrap();
    let before = checksum(&desk.client).await;
    let csv = orders(0..45).replace(",33.50", ",bad").replace("r00040", "r00001");
    let mut options = Desk::options();
    options.errors = Some(desk.dir.path().join("none.jsonl"));
    let report = desk.once.rehearse_import(Desk::file(&csv), &options, unstopped(), |_| {}).await.unwrap();
    assert_eq!((report.ending.clone(), counts(&report), report.job), (Ending::Rehearsed, (42, 2, 1), None));
    assert_eq!((report.failures[0].row, report.failures[0].line), (34, 35));
    assert_eq!(checksum(&desk.client).await, before);
    assert_eq!(desk.text("SELECT count(*) FROM orders").await, "1");
    assert!(!desk.dir.path().join("none.jsonl").exists());
    // And then it is as rehearsed.
    assert_eq!(counts(&desk.import(&csv, &options).await.unwrap()), (42, 2, 1));
}

#[tokio::test]
async fn a_file_that_changes_meanwhile_is_not_done() {
    let desk = Desk::new(ORDERS).await;
    let path = desk.dir.path().join("orders.csv");
    std::fs::write(&path, orders(0..300)).unwrap();
    let file = std::fs::File::open(&path).unwrap();
    let mut grown = false;
    let grow = |progress: pgonce::import::Progress| {
        if !progress.is_hashing && !std::mem::replace(&mut grown, true) {
            use std::io::Write as _;
            let mut file = std::fs::OpenOptions::new().append(true).open(&path).unwrap();
            file.write_all(b"more,1,\n").unwrap();
        }
    };
    let report = desk.once.import(file, &Desk::options(), unstopped(), grow).await.unwrap();
    assert!(matches!(&report.ending, Ending::Stopped(why) if why.contains("changed")), "{report:?}");
    assert_eq!(desk.text("SELECT state FROM once.imports").await, "stopped");
}

#[tokio::test]
async fn imports_are_forgotten_in_time_and_let_go() {
    let desk = Desk::new(ORDERS).await;
    let csv = orders(0..60).replace(",33.50", ",bad").replace(",34.50", ",bad");
    desk.with(&csv, |_| {}).await;
    let stopped = desk.stopped_at(orders(100..200), &Desk::options(), 20).await;
    assert_eq!(desk.text("SELECT once.purge_imports()").await, "0", "too young");
    desk.db.travel(Duration::from_secs(91 * 86_400)).await;
    assert_eq!(desk.text("SELECT once.purge_imports(3)").await, "3", "a part of it at a time");
    assert_eq!(desk.text("SELECT count(*) FROM once.imports").await, "2");
    assert_eq!(desk.text("SELECT once.purge_imports()").await, "6", "five more batches, and the job");
    assert_eq!(
        desk.text("SELECT string_agg(state, ' ') FROM once.imports").await,
        "stopped",
        "what was never done is kept"
    );
    assert_eq!(desk.text("SELECT count(*) FROM once.import_errors").await, "0");
    assert_eq!(desk.with(&csv, |_| {}).await.skipped, 58, "a file that was forgotten is new, and its rows are known");

    let abandon = |job: i64| format!("SELECT once.import_abandon({job}, 'me', 'no longer needed')");
    assert_eq!(desk.text(&abandon(stopped.job.unwrap())).await, "true");
    assert_eq!(desk.text(&abandon(stopped.job.unwrap())).await, "false");
    assert_eq!(desk.text("SELECT actor || ' ' || action FROM once.audit_trail").await, "me import:abandon");
    let anew = desk.with(orders(100..200), |_| {}).await;
    assert_eq!((anew.from_row, anew.applied, anew.skipped), (1, 100 - stopped.rows, stopped.rows));
}

#[tokio::test]
async fn what_cannot_be_is_refused_by_the_functions() {
    let desk = Desk::new(ORDERS).await;
    let open = |content: &str, lease: &str| {
        format!("SELECT verdict FROM once.import_open({content}, 1, '{{}}', 't', 'f', 'o', 'a', '{lease}')")
    };
    let code = async |sql: &str| desk.client.batch_execute(sql).await.unwrap_err().code().unwrap().code().to_owned();
    assert_eq!(code(&open("'x'", "1 minute")).await, "P4080");
    assert_eq!(code(&open("sha256('x')", "1 ms")).await, "P4080");
    assert_eq!(
        code("SELECT once.import_open(sha256('x'), 1, '{}', 't', 'f', 'o', 'a', p_tenant => NULL)").await,
        "P4004"
    );
    assert_eq!(desk.text(&open("sha256('x')", "1 minute")).await, "new");
    let claim = desk.text("SELECT claim_id FROM once.imports").await;
    let record = |first: i64, last: i64, rest: &str| {
        format!("SELECT once.import_record(1, '{claim}', {first}, {last}, 10, 2, '1 minute'{rest})")
    };
    assert_eq!(code(&record(2, 3, "")).await, "P4081", "not where the job stands");
    assert_eq!(code(&record(1, 0, "")).await, "P4080");
    assert_eq!(code(&record(1, 2, ", p_existing => '{3}'")).await, "P4080");
    assert_eq!(code(&record(1, 2, ", p_existing => '{1}', p_dropped => '{1}'")).await, "P4080");
    desk.client.batch_execute(&record(1, 5, ", p_existing => '{1,2,4}', p_unchanged => '{3}'")).await.unwrap();
    assert_eq!(desk.text("SELECT existing FROM once.import_batches").await, "{[1,3),[4,5)}");
    assert_eq!(code(&record(1, 5, "")).await, "P4081", "a second time");
    assert_eq!(code(&format!("SELECT once.import_end(1, '{claim}', 'abandoned')")).await, "P4080");
    assert_eq!(code("SELECT once.import_end(1, gen_random_uuid(), 'done')").await, "P4081");
    assert_eq!(code("SELECT once.purge_imports(0)").await, "P4080");
    assert_eq!(desk.text("SELECT applied || ' ' || skipped || ' ' || rows FROM once.imports").await, "1 4 5");
}
