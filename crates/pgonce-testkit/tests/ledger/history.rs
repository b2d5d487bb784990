//! What was written stays, and what was changed all the same is found.

use crate::book::{book, code, is_sound, post, transfer, verify};

#[tokio::test]
async fn history_cannot_be_changed_not_even_by_its_owner() {
    let db = book().await;
    let client = db.client().await;
    transfer(&client, "o", "a0", "a1", 5).await.unwrap();
    for as_replica in [false, true] {
        let role = if as_replica { "replica" } else { "origin" };
        client.batch_execute(&format!("SET session_replication_role = {role}")).await.unwrap();
        for sql in [
            "UPDATE once_ledger.entry SET amount = 6",
            "DELETE FROM once_ledger.entry",
            "TRUNCATE once_ledger.entry",
            "UPDATE once_ledger.posting SET operation = 'x'",
            "DELETE FROM once_ledger.posting",
            "TRUNCATE once_ledger.posting",
            "UPDATE once_ledger.account SET currency = 'USD'",
            "UPDATE once_ledger.account SET account = 'x' WHERE account = 'a0'",
            "DELETE FROM once_ledger.account",
            "TRUNCATE once_ledger.account",
            "UPDATE once_ledger.currency SET digits = 3",
            "DELETE FROM once_ledger.currency",
            "INSERT INTO once_ledger.entry VALUES (1, 1, 1, 1, 1, 1) ON CONFLICT (posting_id, line) DO UPDATE SET amount = 7",
        ] {
            assert_eq!(code(&client.batch_execute(sql).await.unwrap_err()), "P4096", "{role}: {sql}");
        }
    }
    is_sound(&client).await;
}

#[tokio::test]
async fn verify_finds_what_was_tampered_with() {
    for (tamper, found) in [
        ("UPDATE once_ledger.account SET balance = balance + 1 WHERE account = 'a0'", vec!["balance"]),
        ("UPDATE once_ledger.account SET entries = entries + 1 WHERE account = 'a0'", vec!["entries"]),
        (
            "UPDATE once_ledger.entry SET amount = amount + 1 WHERE posting_id = 1 AND line = 1",
            vec!["balance", "hash", "running balance", "sum"],
        ),
        // Sums are right in every way, but not what was posted.
        (
            "UPDATE once_ledger.entry SET amount = amount * 2, balance = balance + amount WHERE posting_id = 3;
             UPDATE once_ledger.account SET balance = 2 * balance WHERE account IN ('a2', 'a3')",
            vec!["hash"],
        ),
        ("UPDATE once_ledger.entry SET balance = 77 WHERE posting_id = 3 AND line = 1", vec!["running balance"]),
        ("UPDATE once_ledger.posting SET entries_hash = sha256('x') WHERE id = 1", vec!["hash"]),
        ("DELETE FROM once_ledger.posting WHERE id = 3", vec!["group missing", "group missing"]),
        (
            "DELETE FROM once_ledger.entry WHERE posting_id = 3",
            vec!["balance", "balance", "entries", "entries", "no entries"],
        ),
        ("DELETE FROM once_ledger.account WHERE account = 'a3'", vec!["account missing", "hash", "sum"]),
    ] {
        let db = book().await;
        let client = db.client().await;
        transfer(&client, "1", "a0", "a1", 5).await.unwrap();
        post(&client, "2", &["a0", "a1", "a0"], &[3, -4, 1], &["EUR"]).await.unwrap();
        transfer(&client, "3", "a2", "a3", 9).await.unwrap();
        is_sound(&client).await;
        let off = "ALTER TABLE once_ledger.entry DISABLE TRIGGER immutable; ALTER TABLE once_ledger.posting DISABLE TRIGGER immutable;
            ALTER TABLE once_ledger.account DISABLE TRIGGER immutable";
        client.batch_execute(&format!("{off}; {tamper}")).await.unwrap();
        assert_eq!(verify(&client).await, found, "{tamper}");
    }
}

#[tokio::test]
async fn verify_of_one_account_sees_its_own_trouble_only() {
    let db = book().await;
    let client = db.client().await;
    transfer(&client, "1", "a0", "a1", 5).await.unwrap();
    client.batch_execute("UPDATE once_ledger.account SET balance = balance + 1 WHERE account = 'a0'").await.unwrap();
    for (account, count) in [("a0", 1), ("a1", 0)] {
        let rows = client.query("SELECT finding FROM once_ledger.verify($1)", &[&account]).await.unwrap();
        assert_eq!(rows.len(), count, "{account}");
    }
}
