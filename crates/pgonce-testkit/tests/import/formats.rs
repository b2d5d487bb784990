//! What files may be written in.

use std::io::Write as _;

use pgonce::import::{Ending, Format};

use crate::desk::{Desk, ORDERS, counts, orders};

#[tokio::test]
async fn csv_as_it_comes() {
    let desk = Desk::new(ORDERS).await;
    let csv = "\u{feff}reference,amount,note\r\n\"a, b\",1.5,\"two\nlines\"\r\nquotes,,\"say \"\"x\"\"\"\r\n\r\nempty,3,\"\"\r\nlast,4,\\N\ttab";
    let report = desk.with(csv, |_| {}).await;
    assert_eq!((report.ending.clone(), counts(&report)), (Ending::Done, (4, 0, 0)));
    assert_eq!(desk.orders().await, "a, b 1.50 two\nlines; empty 3.00 ; last 4.00 \\N\ttab; quotes say \"x\"");
    assert_eq!(desk.text("SELECT note = '' AND amount = 3 FROM orders WHERE reference = 'empty'").await, "true");
    assert_eq!(desk.text("SELECT amount IS NULL FROM orders WHERE reference = 'quotes'").await, "true");
}

#[tokio::test]
async fn other_delimiters_other_nulls_and_no_header() {
    let desk = Desk::new(ORDERS).await;
    desk.with("reference\tamount\tnote\nt\t1\t\n", |o| o.format = Format::Csv { delimiter: b'\t' }).await;
    desk.with("reference;amount;note\ns;1;x,y\n", |o| o.format = Format::Csv { delimiter: b';' }).await;
    desk.with("reference,amount,note\nn,NULL,\n", |o| o.null = Some("NULL".into())).await;
    let columns = || Some(vec!["reference".into(), "amount".into(), "note".into()]);
    desk.with("h,7,here\n", |o| o.columns = columns()).await;
    assert_eq!(desk.orders().await, "h 7.00 here; n ; s 1.00 x,y; t 1.00 NULL");
    let names = |o: &mut pgonce::import::ImportOptions| {
        o.map = vec![("reference".into(), "Order No".into()), ("note".into(), "amount".into())];
        o.ignore = vec!["junk".into()];
    };
    desk.with("Order No,amount,junk\nm,5,x\n", names).await;
    assert_eq!(desk.text("SELECT note FROM orders WHERE reference = 'm'").await, "5");
}

#[tokio::test]
async fn json_lines_keep_every_digit() {
    let desk =
        Desk::new("CREATE TABLE public.orders (reference text PRIMARY KEY, n numeric, j jsonb, b boolean, t text)")
            .await;
    let json = "{\"reference\":\"a\",\"n\":12345678901234567890.123456789012345678901234567890,\"j\":{\"x\": [1, 2.50]},\"b\":true,\"t\":\"\\u00e9\\n\\\"\"}\n\
        \n  {\"n\": 1e-400, \"reference\": \"b\", \"t\": null, \"b\": false, \"j\": \"text\"}\r\n{\"reference\":\"c\"}";
    let report = desk.with(json, |o| o.format = Format::JsonLines).await;
    assert_eq!(counts(&report), (2, 0, 1), "a bare text is no json: {report:?}");
    assert_eq!(report.failures[0].row, 2);
    assert_eq!(
        desk.text("SELECT n FROM orders WHERE reference = 'a'").await,
        "12345678901234567890.123456789012345678901234567890"
    );
    assert_eq!(desk.text("SELECT j || '{}' FROM orders WHERE reference = 'a'").await, "{\"x\": [1, 2.50]}");
    assert_eq!(desk.text("SELECT t FROM orders WHERE reference = 'a'").await, "é\n\"");
    assert_eq!(desk.text("SELECT n IS NULL AND b IS NULL FROM orders WHERE reference = 'c'").await, "true");
}

#[tokio::test]
async fn json_lines_that_are_none_fail_alone() {
    let desk = Desk::new(ORDERS).await;
    let json = "{\"reference\":\"a\",\"amount\":1}\nnot json\n[1]\n{\"reference\":\"b\",\"amount\":1,\"amount\":2}\n\
        {\"reference\":\"c\",\"other\":2}\n{\"reference\":\"d\\u0000\"}\n{\"reference\":\"e\"} trailing\n{\"amount\":4}\n{\"reference\":\"z\"}\n";
    let report = desk.with(json, |o| o.format = Format::JsonLines).await;
    let failed: Vec<_> = report.failures.iter().map(|f| (f.row, f.line, f.code.as_str())).collect();
    let expected = [
        (2, 2, "22P02"),
        (3, 3, "22P02"),
        (4, 4, "22030"),
        (5, 5, "22P04"),
        (6, 6, "22021"),
        (7, 7, "22P02"),
        (8, 8, "23502"),
    ];
    assert_eq!(failed, expected);
    assert_eq!(desk.orders().await, "a 1.00 NULL; z NULL");
    let report = desk.with("{\"reference\":\"f\",\"other\":1}\n", |o| {
        o.format = Format::JsonLines;
        o.columns = Some(vec!["reference".into(), "amount".into()]);
    });
    assert_eq!(counts(&report.await), (1, 0, 0), "with the fields named, others are left out");
}

#[tokio::test]
async fn packed_files_resume_in_the_middle() {
    for packing in ["gzip", "zstd"] {
        let desk = Desk::new(ORDERS).await;
        let plain = orders(0..95);
        let packed = match packing {
            "gzip" => {
                // Two members, one behind the other, are one file.
                let mut both = Vec::new();
                for part in [&plain.as_bytes()[..500], &plain.as_bytes()[500..]] {
                    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
                    encoder.write_all(part).unwrap();
                    both.extend(encoder.finish().unwrap());
                }
                both
            }
            _ => zstd::encode_all(plain.as_bytes(), 1).unwrap(),
        };
        let stopped = desk.stopped_at(&packed, &Desk::options(), 40).await;
        assert_eq!(stopped.ending, Ending::Interrupted);
        let report = desk.with(&packed, |_| {}).await;
        assert_eq!((report.ending, report.from_row, report.applied), (Ending::Done, stopped.rows + 1, 95), "{packing}");
        assert_eq!(desk.text("SELECT count(*) || ' ' || sum(amount) FROM orders").await, "95 4512.50");
        // Cut off: what is there is settled, and it is said.
        let cut = desk.import(&packed[..packed.len() - 9], &Desk::options()).await;
        let why = match cut {
            Ok(report) => format!("{:?}", report.ending),
            Err(error) => error.to_string(),
        };
        assert!(why.contains("cut off"), "{packing}: {why}");
    }
}

#[tokio::test]
async fn a_transformation_is_the_callers_sql() {
    let desk = Desk::new(ORDERS).await;
    desk.client
        .batch_execute("CREATE FUNCTION public.cents(text) RETURNS numeric LANGUAGE sql AS 'SELECT $1::numeric / 100'")
        .await
        .unwrap();
    let sql = "lower(no) AS reference, cents(price) AS amount, CASE WHEN kind = 'x' THEN 'special' END AS note -- thus";
    let csv = "no,price,kind\nA1,250,x\nB2,bad,y\nC3,99,y\n";
    let report = desk.with(csv, |o| o.transform = Some(sql.into())).await;
    assert_eq!(counts(&report), (2, 0, 1));
    assert_eq!((report.failures[0].row, report.failures[0].code.as_str()), (2, "22P02"));
    assert_eq!(desk.orders().await, "a1 2.50 special; c3 0.99 NULL");
    let mut options = Desk::options();
    options.transform = Some("no AS reference, random()::numeric AS amount".into());
    options.on_conflict = pgonce::import::OnConflict::Update;
    for moving in
        ["random()::numeric AS amount", "extract(epoch FROM now())::numeric AS amount", "current_user AS note"]
    {
        options.transform = Some(format!("no AS reference, {moving}"));
        let refused = desk.import(csv, &options).await.unwrap_err().to_string();
        assert!(refused.contains("the same of a row every time"), "{refused}");
    }
    options.transform = Some("no AS reference, nonsense(price) AS amount".into());
    let refused = desk.import(csv, &options).await.unwrap_err().to_string();
    assert!(refused.contains("42883"), "{refused}");
    assert_eq!(desk.text("SELECT count(*) FROM once.imports").await, "1", "refused before there is a job");
}
