//! `pgonce ledger`, by the real binary, on a real database.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod common;

use common::pgonce;
use pgonce_testkit::TestDb;

const POSTINGS: &str =
    "SELECT once_ledger.open_account('cash', 'EUR'), once_ledger.open_account('sales', 'EUR', p_side => 'credit');
    SELECT once_ledger.post('billing', 'invoice-1', '{cash,sales}', '{1250,-1250}', '{EUR}', 'the first');
    SELECT once_ledger.post('billing', 'invoice-2', '{cash,sales}', '{5,-5}', '{EUR}')";

#[tokio::test(flavor = "multi_thread")]
async fn the_ledger_is_installed_shown_proven_and_taken_back() {
    let db = TestDb::new().await;
    let url = db.direct_url();
    let without = pgonce(url, &["ledger", "verify"]);
    assert_eq!(without.code, 2, "{without:?}");
    assert!(without.stderr.contains("pgonce ledger install"), "{without:?}");
    assert_eq!(pgonce(url, &["ledger", "install", "--dry-run"]).done().stdout, "would apply ledger/0001_ledger\n");
    assert_eq!(pgonce(url, &["ledger", "install"]).done().stdout, "applied ledger/0001_ledger\n");
    assert_eq!(pgonce(url, &["ledger", "install"]).done().stdout, "");
    assert!(pgonce(url, &["migrate", "--status"]).done().stdout.contains("once_ledger"));
    let client = db.client().await;
    client.batch_execute(POSTINGS).await.unwrap();

    let accounts = pgonce(url, &["ledger", "accounts"]).done().stdout;
    assert!(accounts.lines().any(|line| line.contains("cash") && line.contains("12.55")), "{accounts}");
    let shown = pgonce(url, &["ledger", "show", "sales", "--json"]).done().json();
    assert_eq!(shown["entries"][0]["balance"], -1255);
    assert_eq!(shown["entries"][1]["description"], "the first");
    assert!(pgonce(url, &["ledger", "show", "cash"]).done().stdout.contains("invoice-2"));
    pgonce(url, &["ledger", "show", "nobody"]).failed();

    let take_back = ["ledger", "reverse", "billing", "invoice-2", "--reason", "paid twice", "--json"];
    let taken = pgonce(url, &take_back).done().json();
    assert_eq!((&taken["kind"], &taken["balances"]["cash"]), (&"posted".into(), &1250.into()));
    assert_eq!(pgonce(url, &take_back).done().json()["kind"], "already");
    pgonce(url, &["ledger", "reverse", "billing", "invoice-2", "--reason", "again", "--as", "other"]).failed();
    assert_eq!(pgonce(url, &["ledger", "reverse", "billing", "invoice-1", "--reason", " "]).code, 2);

    let sound = pgonce(url, &["ledger", "verify", "--json"]).done().json();
    assert_eq!((&sound["accounts"], &sound["entries"]), (&2.into(), &6.into()));
    assert!(pgonce(url, &["ledger", "verify"]).done().stderr.contains("every posting balances"));
    let findings = |report: serde_json::Value| {
        let all = report.as_array().unwrap().iter().filter(|finding| finding["check"] == "ledger").cloned();
        all.map(|finding| finding["level"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(findings(pgonce(url, &["doctor", "--json"]).json()), ["ok"]);
    let tamper = "ALTER TABLE once_ledger.entry DISABLE TRIGGER immutable;
        UPDATE once_ledger.entry SET amount = amount + 1 WHERE posting_id = 1 AND line = 1";
    client.batch_execute(tamper).await.unwrap();
    let found = pgonce(url, &["ledger", "verify", "--json"]).failed().json();
    let kinds: Vec<&str> =
        found["differences"].as_array().unwrap().iter().filter_map(|one| one["finding"].as_str()).collect();
    assert!(kinds.contains(&"balance") && kinds.contains(&"sum") && kinds.contains(&"hash"), "{found}");
    pgonce(url, &["ledger", "verify", "--account", "cash"]).failed();
    assert_eq!(findings(pgonce(url, &["doctor", "--json"]).json()), ["fail"]);
}
