//! What cannot be imported is refused before anything is done, or where it shows.

use pgonce::import::{Ending, Format, ImportOptions};

use crate::desk::{Desk, ORDERS, counts, orders};

async fn refused(desk: &Desk, content: impl AsRef<[u8]>, change: impl FnOnce(&mut ImportOptions), says: &str) {
    let mut options = Desk::options();
    change(&mut options);
    let error = desk.import(content, &options).await.expect_err(says).to_string();
    assert!(error.contains(says), "{error}");
    assert_eq!(desk.text("SELECT count(*) FROM once.imports").await, "0", "{says}");
}

#[tokio::test]
async fn refused_before_anything_is_done() {
    let desk = Desk::new(ORDERS).await;
    let good = orders(0..3);
    refused(&desk, &good, |o| o.into = "public.nowhere".into(), "there is no table").await;
    refused(&desk, &good, |o| o.into = "a b; drop".into(), "there is no table").await;
    refused(&desk, &good, |o| o.into = "pg_catalog.pg_tables".into(), "is not a table").await;
    refused(&desk, &good, |o| o.natural_key = vec!["nope".into()], "no column nope").await;
    refused(&desk, &good, |o| o.natural_key = vec!["amount".into()], "CREATE UNIQUE INDEX").await;
    refused(&desk, &good, |o| o.natural_key.clear(), "needs a natural key").await;
    refused(&desk, &good, |o| o.natural_key = vec!["reference".into(), "reference".into()], "twice").await;
    refused(&desk, "amount,note\n1,x\n", |_| {}, "which the natural key needs").await;
    refused(&desk, "reference,amount,extra\na,1,x\n", |_| {}, "--ignore extra").await;
    refused(&desk, "reference,amount,amount\na,1,2\n", |_| {}, "in the header twice").await;
    refused(&desk, &good, |o| o.map = vec![("amount".into(), "price".into())], "the file has no field \"price\"").await;
    refused(&desk, &good, |o| o.map = vec![("price".into(), "amount".into())], "no column \"price\"").await;
    refused(&desk, &good, |o| o.map = vec![("note".into(), "amount".into())], "two fields go into").await;
    refused(&desk, "", |_| {}, "empty").await;
    refused(&desk, b"\xff\xfer\0e\0", |_| {}, "UTF-16").await;
    refused(&desk, b"ref\xe9rence,amount\na,1\n", |_| {}, "not UTF-8").await;
    refused(&desk, "[]\n", |o| o.format = Format::JsonLines, "not a JSON object").await;
    refused(&desk, "\"reference,amount\na,1\n", |_| {}, "never closed").await;
    refused(&desk, b"\x1f\x8b\x08nonsense", |_| {}, "nothing was imported").await;
}

#[tokio::test]
async fn a_key_needs_an_index_that_tells_every_row_apart() {
    let sql = "CREATE TABLE public.orders (reference text, amount numeric, note text, UNIQUE (amount) DEFERRABLE);
        CREATE UNIQUE INDEX ON orders (reference) WHERE amount > 0; CREATE UNIQUE INDEX ON orders (lower(reference));
        CREATE UNIQUE INDEX ON orders (reference, note)";
    let desk = Desk::new(sql).await;
    refused(&desk, orders(0..3), |_| {}, "CREATE UNIQUE INDEX CONCURRENTLY ON public.orders (\"reference\")").await;
    refused(&desk, orders(0..3), |o| o.natural_key = vec!["amount".into()], "not deferrable").await;
    desk.client.batch_execute("CREATE UNIQUE INDEX ON orders (reference) INCLUDE (amount)").await.unwrap();
    assert_eq!(counts(&desk.with(orders(0..3), |_| {}).await), (3, 0, 0));
}

#[tokio::test]
async fn a_quote_that_is_never_closed_ends_it_where_it_is() {
    let desk = Desk::new(ORDERS).await;
    let csv = orders(0..25) + "x,1,\"open\nand so on\n";
    let report = desk.with(&csv, |_| {}).await;
    assert!(
        matches!(&report.ending, Ending::Stopped(why) if why.starts_with("row 26, line 27: a quote is opened")),
        "{report:?}"
    );
    assert_eq!(desk.text("SELECT count(*) FROM orders").await, "25", "what is before it is settled");
    // Mended it is another file; what is there is known by its key.
    let report = desk.with(csv.replace("\"open", "open").replace("and so on\n", ""), |_| {}).await;
    assert_eq!(counts(&report), (1, 25, 0));
    let endless = orders(0..2) + "x,1,\"" + &"a".repeat(17 << 20) + "\ny,2,z\n";
    let report = desk.with(endless, |_| {}).await;
    assert!(matches!(&report.ending, Ending::Stopped(why) if why.contains("16 MiB")), "{report:?}");
}

#[tokio::test]
async fn malformed_at_the_first_row_and_at_the_millionth() {
    let desk = Desk::new("CREATE UNLOGGED TABLE public.orders (reference int PRIMARY KEY, note text)").await;
    let mut csv = String::from("reference,note\nonly one\n");
    for row in 2..1_000_000 {
        csv.push_str(&row.to_string());
        csv.push_str(",\n");
    }
    csv.push_str("1000000,a,b\n1000001,\n");
    let report = desk.with(&csv, |o| o.batch_rows = 20_000).await;
    assert_eq!(counts(&report), (999_999, 0, 2));
    let found: Vec<_> = report.failures.iter().map(|f| (f.row, f.line, f.code.as_str())).collect();
    assert_eq!(found, [(1, 2, "22P04"), (1_000_000, 1_000_001, "22P04")]);
    assert_eq!(desk.text("SELECT count(*) || ' ' || max(reference) FROM orders").await, "999999 1000001");
}

#[tokio::test]
async fn rights_are_the_callers() {
    let desk = Desk::new(ORDERS).await;
    let user = format!("importer_{}", desk.db.name());
    desk.client
        .batch_execute(&format!("CREATE ROLE {user} LOGIN IN ROLE once_app; GRANT SELECT ON orders TO {user}"))
        .await
        .unwrap();
    let url = desk.db.direct_url().replace("postgres@", &format!("{user}@"));
    assert_ne!(url, desk.db.direct_url());
    let once = pgonce::Once::connect(&url).await.unwrap();
    let options = Desk::options();
    let error = once
        .import(Desk::file(orders(0..30)), &options, crate::desk::unstopped(), |_| {})
        .await
        .unwrap_err()
        .to_string();
    assert!(error.contains("42501") && error.contains("orders"), "{error}");
    assert_eq!(desk.text("SELECT count(*) FROM once.imports").await, "0");
    desk.client.batch_execute(&format!("GRANT INSERT ON orders TO {user}")).await.unwrap();
    let csv = orders(0..30).replace(",9.50", ",bad");
    let report = once.import(Desk::file(csv), &options, crate::desk::unstopped(), |_| {}).await.unwrap();
    assert_eq!(counts(&report), (29, 0, 1));
    // Policies choose rows: COPY cannot, the stage can.
    desk.client.batch_execute(&format!(
        "ALTER TABLE orders ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON orders TO {user} USING (true) WITH CHECK (amount < 105)"
    )).await.unwrap();
    let report = once.import(Desk::file(orders(100..110)), &options, crate::desk::unstopped(), |_| {}).await.unwrap();
    assert_eq!(counts(&report), (5, 0, 5), "{report:?}");
    assert!(report.failures.iter().all(|failure| failure.code == "42501"));
}
