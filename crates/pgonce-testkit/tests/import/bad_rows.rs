//! A bad row costs itself, and nobody else.

use std::time::Duration;

use pgonce::import::{Ending, OnConflict};

use crate::desk::{Desk, ORDERS, counts, orders};

#[tokio::test]
async fn each_bad_row_is_found_and_its_neighbours_are_applied() {
    let desk = Desk::new(ORDERS).await;
    let mut csv = b"reference,amount,note\n".to_vec();
    for row in 0..100 {
        let line: &[u8] = match row {
            0 => b"first,wrong,x\n",
            13 => b"big,99999999999,x\n",
            14 => b"minus,-1,x\n",
            40 => b"long,1,12345678901\n",
            41 => b"few,1\n",
            42 => b"many,1,2,3\n",
            60 => b"latin,1,\xe9\n",
            61 => b",1,x\n",
            62 => b"zero,1,a\0b\n",
            99 => b"last,wrong,\n",
            _ => &format!("r{row:02},{row},n\n").into_bytes(),
        };
        csv.extend(line);
    }
    let errors = desk.dir.path().join("errors.jsonl");
    for rows in [7, 10, 100, 1000] {
        desk.client.batch_execute("TRUNCATE orders").await.unwrap();
        let report = desk.with(&csv, |o| {
            o.batch_rows = rows;
            o.again = true;
            o.errors = Some(errors.clone());
        });
        let report = report.await;
        assert_eq!((report.ending.clone(), counts(&report)), (Ending::Done, (90, 0, 10)), "{rows}: {report:?}");
        let found: Vec<_> = report.failures.iter().map(|f| (f.row, f.line, f.code.as_str())).collect();
        let expected = [
            (1, 2, "22P02"),
            (14, 15, "22003"),
            (15, 16, "23514"),
            (41, 42, "22001"),
            (42, 43, "22P04"),
            (43, 44, "22P04"),
            (61, 62, "22021"),
            (62, 63, "23502"),
            (63, 64, "22021"),
            (100, 101, "22P02"),
        ];
        assert_eq!(found, expected, "{rows}");
        assert_eq!(desk.text("SELECT count(*) FROM orders").await, "90");
        assert_eq!(desk.result(report.job, 14).await, "failed 22003");
        assert_eq!(desk.result(report.job, 16).await, "applied");
        let lines: Vec<serde_json::Value> =
            std::fs::read_to_string(&errors).unwrap().lines().map(|l| serde_json::from_str(l).unwrap()).collect();
        assert_eq!(lines.len(), 10);
        assert_eq!((lines[0]["input"].as_str(), lines[0]["code"].as_str()), (Some("first,wrong,x"), Some("22P02")));
        assert_eq!(lines[6]["input_bytes"][8], 0xe9, "what is no text is kept by its bytes");
    }
}

#[tokio::test]
async fn many_bad_rows_are_all_found() {
    let desk = Desk::new(ORDERS).await;
    let mut csv = "reference,amount,note\n".to_owned();
    for row in 0..600 {
        let amount = if row % 3 == 0 { "bad".to_owned() } else { row.to_string() };
        csv.push_str(&format!("r{row},{amount},\n"));
    }
    let report = desk.with(&csv, |o| o.batch_rows = 300).await;
    assert_eq!(counts(&report), (400, 0, 200));
    assert_eq!(desk.text("SELECT count(*) FROM orders WHERE substr(reference, 2)::int % 3 = 0").await, "0");
    assert_eq!(
        desk.text("SELECT count(*) || ' ' || min(row) || ' ' || max(row) FROM once.import_errors").await,
        "200 1 598"
    );
}

#[tokio::test]
async fn too_many_failures_stop_it_and_leave_the_batch_out() {
    let desk = Desk::new(ORDERS).await;
    let csv = orders(0..60).replace(",25.50", ",x").replace(",35.50", ",y").replace(",36.50", ",z");
    let report = desk.with(&csv, |o| o.failures_max = 2).await;
    assert!(matches!(&report.ending, Ending::Stopped(why) if why.contains("more than 2 rows")), "{report:?}");
    assert_eq!((report.rows, counts(&report)), (30, (29, 0, 1)), "the batch with the second and third is not there");
    assert_eq!(report.failures.iter().map(|f| f.row).collect::<Vec<_>>(), [36, 37]);
    assert_eq!(
        desk.text("SELECT state || ' ' || last_error FROM once.imports").await,
        "stopped more than 2 rows failed; the batch that begins with row 31 was rolled back"
    );
    assert_eq!(desk.text("SELECT count(*) FROM orders").await, "29");
    // As it is, it stops there again; with the limit raised it goes on.
    let again = desk.with(&csv, |o| o.failures_max = 2).await;
    assert_eq!((again.from_row, again.rows), (31, 30));
    let report = desk.with(&csv, |o| o.failures_max = 3).await;
    assert_eq!((report.ending.clone(), report.from_row, counts(&report)), (Ending::Done, 31, (57, 0, 3)));
    let none = desk.with("reference,amount\nq,bad\n", |o| o.failures_max = 0).await;
    assert!(matches!(none.ending, Ending::Stopped(_)), "{none:?}");
}

#[tokio::test]
async fn constraints_triggers_and_policies_of_the_target_hold_for_each_row() {
    let sql = "CREATE TABLE public.customer (id int PRIMARY KEY); INSERT INTO customer VALUES (1), (2);
        CREATE TABLE public.orders (reference text PRIMARY KEY, customer int REFERENCES customer DEFERRABLE INITIALLY DEFERRED,
            code text UNIQUE);
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            IF NEW.code = 'drop' THEN RETURN NULL; END IF;
            IF NEW.code = 'raise' THEN RAISE EXCEPTION 'refused by a trigger'; END IF;
            RETURN NEW; END $$;
        CREATE TRIGGER refuse BEFORE INSERT ON orders FOR EACH ROW EXECUTE FUNCTION refuse()";
    let desk = Desk::new(sql).await;
    let csv = "reference,customer,code\na,1,x\nb,9,y\nc,2,x\nd,1,drop\ne,1,raise\nf,2,z\n";
    let report = desk.with(csv, |_| {}).await;
    assert_eq!(counts(&report), (2, 1, 3), "{report:?}");
    let found: Vec<_> = report.failures.iter().map(|f| (f.row, f.code.as_str())).collect();
    assert_eq!(
        found,
        [(2, "23503"), (3, "23505"), (5, "P0001")],
        "a foreign key that is looked at late is looked at in time"
    );
    assert_eq!(desk.result(report.job, 4).await, "skipped dropped", "not told as one that is there");
    assert_eq!(desk.text("SELECT string_agg(reference, '' ORDER BY reference) FROM orders").await, "af");
}

#[tokio::test]
async fn a_row_that_the_databases_encoding_lacks_fails_alone() {
    let desk = Desk::new(ORDERS).await;
    let name = format!("{}_win1252", desk.db.name());
    let make = format!("CREATE DATABASE {name} TEMPLATE template0 ENCODING 'WIN1252' LC_COLLATE 'C' LC_CTYPE 'C'");
    desk.client.batch_execute(&make).await.unwrap();
    let url = desk.db.direct_url().replace(desk.db.name(), &name);
    let mut client = pgonce::migrate::connect(&url).await.unwrap();
    pgonce::migrate::apply(&mut client, false).await.unwrap();
    client.batch_execute(ORDERS).await.unwrap();
    let once = pgonce::Once::connect(&url).await.unwrap();
    let csv = orders(0..25).replace(",n7\n", ",漢\n").replace(",n8\n", ",é\n").replace("r00020,20.50", "r00020,bad");
    let report = once.import(Desk::file(&csv), &Desk::options(), crate::desk::unstopped(), |_| {}).await.unwrap();
    assert_eq!(counts(&report), (23, 0, 2), "{report:?}");
    let found: Vec<_> = report.failures.iter().map(|f| (f.row, f.code.as_str())).collect();
    assert_eq!(found, [(8, "22P05"), (21, "22P02")]);
    let rows = client.query_one("SELECT count(*), count(*) FILTER (WHERE note = 'é') FROM orders", &[]).await.unwrap();
    assert_eq!((rows.get::<_, i64>(0), rows.get::<_, i64>(1)), (23, 1));
}

/// A statement that is wrong is nobody's row: the import stops, and nothing is recorded as failed.
#[tokio::test]
async fn a_table_that_changes_underneath_is_not_the_rows_fault() {
    let desk = Desk::new(ORDERS).await;
    let options = {
        let mut o = Desk::options();
        o.wait_max = Duration::from_secs(1);
        o.on_conflict = OnConflict::Update;
        o
    };
    desk.stopped_at(orders(0..50), &options, 20).await;
    desk.client.batch_execute("CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM no_such_function(); RETURN NEW; END';
        CREATE TRIGGER broken BEFORE INSERT ON orders FOR EACH ROW EXECUTE FUNCTION broken()").await.unwrap();
    let error = desk.import(orders(0..50), &options).await.unwrap_err();
    assert_eq!(error.sqlstate(), Some("42883"), "{error}");
    assert_eq!(
        desk.text("SELECT state || ' ' || failed || ' ' || last_error FROM once.imports").await,
        "stopped 0 the database said no [42883]"
    );
    desk.client.batch_execute("DROP TRIGGER broken ON orders").await.unwrap();
    let report = desk.import(orders(0..50), &options).await.unwrap();
    assert_eq!(counts(&report), (50, 0, 0));
}
