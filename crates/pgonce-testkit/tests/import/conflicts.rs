//! Rows whose key is there already: in the table, from another file, or from the same one.

use pgonce::import::{Ending, OnConflict};

use crate::desk::{Desk, ORDERS, counts};

/// Keys that come again within a batch, in the next one, and that were there before.
const TWICE: &str = "reference,amount,note\na,1,one\nb,1,\na,2,two\nold,5,new\nc,1,\na,3,three\nc,1,\nb,9,nine\n";

async fn desk() -> Desk {
    let desk = Desk::new(ORDERS).await;
    desk.client.batch_execute("INSERT INTO orders VALUES ('old', 0, 'was')").await.unwrap();
    desk
}

#[tokio::test]
async fn skip_keeps_the_first() {
    let mut seen = Vec::new();
    for rows in [1, 2, 3, 100] {
        let desk = desk().await;
        let report = desk.with(TWICE, |o| o.batch_rows = rows).await;
        assert_eq!(counts(&report), (3, 5, 0), "{rows}");
        assert_eq!(desk.orders().await, "a 1.00 one; b 1.00 NULL; c 1.00 NULL; old 0.00 was");
        seen.push(desk.results().await);
    }
    assert!(seen[0].contains("3 skipped exists") && seen[0].contains("1 applied"), "{}", seen[0]);
    assert!(seen.windows(2).all(|pair| pair[0] == pair[1]), "whatever the batches: {seen:?}");
}

#[tokio::test]
async fn update_keeps_the_last_and_writes_only_what_changes() {
    for rows in [1, 2, 3, 100] {
        let desk = desk().await;
        let report = desk
            .with(TWICE, |o| {
                o.batch_rows = rows;
                o.on_conflict = OnConflict::Update;
            })
            .await;
        assert_eq!((report.ending, report.failed), (Ending::Done, 0));
        assert_eq!(desk.orders().await, "a 3.00 three; b 9.00 nine; c 1.00 NULL; old 5.00 new", "{rows}");
        let versions = "SELECT string_agg(xmin::text || ctid::text, ' ' ORDER BY reference) FROM orders";
        let before = desk.text(versions).await;
        let same = "reference,amount,note\na,3,three\nb,9,nine\nold,5,new\n";
        let report = desk.with(same, |o| o.on_conflict = OnConflict::Update).await;
        assert_eq!(counts(&report), (0, 3, 0));
        assert_eq!(desk.result(report.job, 2).await, "skipped unchanged");
        assert_eq!(desk.text(versions).await, before, "not a row was written");
    }
}

#[tokio::test]
async fn fail_tells_each() {
    for rows in [1, 3, 100] {
        let desk = desk().await;
        let report = desk
            .with(TWICE, |o| {
                o.batch_rows = rows;
                o.on_conflict = OnConflict::Fail;
            })
            .await;
        assert_eq!(counts(&report), (3, 0, 5), "{rows}");
        assert!(report.failures.iter().all(|failure| failure.code == "23505"));
        assert_eq!(report.failures.iter().map(|f| f.row).collect::<Vec<_>>(), [3, 4, 6, 7, 8]);
        assert_eq!(desk.orders().await, "a 1.00 one; b 1.00 NULL; c 1.00 NULL; old 0.00 was");
    }
}

#[tokio::test]
async fn bad_rows_among_repeated_ones() {
    let csv = "reference,amount,note\na,1,one\na,bad,\nb,1,\nb,2,\na,4,last\n";
    for (policy, expected, numbers) in [
        (OnConflict::Skip, "a 1.00 one; b 1.00 NULL", (2, 2, 1)),
        (OnConflict::Update, "a 4.00 last; b 2.00 NULL", (4, 0, 1)),
    ] {
        let desk = Desk::new(ORDERS).await;
        let report = desk.with(csv, |o| o.on_conflict = policy).await;
        assert_eq!((counts(&report), desk.orders().await.as_str()), (numbers, expected));
    }
}

#[tokio::test]
async fn keys_of_several_columns_and_none_that_is_null() {
    let desk = Desk::new("CREATE TABLE public.orders (shop text, no int, amount numeric, UNIQUE (no, shop))").await;
    let csv = "shop,no,amount\na,1,1\na,2,1\nb,1,1\na,1,9\n,1,1\nb,,1\n";
    let report = desk
        .with(csv, |o| {
            o.natural_key = vec!["shop".into(), "no".into()];
        })
        .await;
    assert_eq!(counts(&report), (3, 1, 2), "{report:?}");
    assert!(report.failures.iter().all(|failure| failure.code == "23502"));
    // A transformation may make the null.
    let report = desk.with(csv, |o| {
        o.natural_key = vec!["shop".into(), "no".into()];
        o.transform = Some("nullif(shop, 'b') AS shop, no, amount".into());
    });
    assert_eq!(counts(&report.await), (0, 3, 3));
    assert_eq!(desk.text("SELECT count(*) FROM orders WHERE shop IS NULL OR no IS NULL").await, "0");
}

#[tokio::test]
async fn columns_without_equality_can_be_updated() {
    let desk = Desk::new("CREATE TABLE public.orders (reference text PRIMARY KEY, j json, p point)").await;
    let update = |o: &mut pgonce::import::ImportOptions| o.on_conflict = OnConflict::Update;
    let csv = "reference,j,p\na,\"{\"\"x\"\":1}\",\"(1,2)\"\n";
    desk.with(csv, update).await;
    assert_eq!(counts(&desk.with(format!("{csv}\n"), update).await), (0, 1, 0), "another file with the same rows");
    assert_eq!(counts(&desk.with(csv.replace(":1", ":2"), update).await), (1, 0, 0));
    assert_eq!(desk.text("SELECT j FROM orders").await, "{\"x\":2}");
}

#[tokio::test]
async fn files_that_overlap_bring_each_row_once() {
    let desk = Desk::new(ORDERS).await;
    let (first, second) = (crate::desk::orders(0..300), crate::desk::orders(150..450));
    // At once, and one of them backwards: batches may meet in a deadlock, and are then tried again.
    let mut lines: Vec<&str> = second.lines().collect();
    lines[1..].reverse();
    let backwards = lines.join("\n");
    let options = Desk::options();
    let (one, other) = tokio::join!(desk.import(&first, &options), desk.import(&backwards, &options));
    let (one, other) = (one.unwrap(), other.unwrap());
    assert_eq!(one.applied + other.applied, 450);
    assert_eq!(one.skipped + other.skipped, 150);
    assert_eq!(desk.text("SELECT count(*) FROM orders").await, "450");
}
