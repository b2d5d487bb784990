//! Nothing of it is there until somebody asks; from then on migrate keeps it.

use pgonce::migrate;
use pgonce_testkit::TestDb;

use crate::book::{book, is_sound, number, text, transfer};

#[tokio::test]
async fn it_is_there_when_asked_for_and_kept_by_migrate() {
    let db = TestDb::new().await;
    let mut client = migrate::connect(db.direct_url()).await.unwrap();
    let there = "SELECT count(*) FROM pg_namespace WHERE nspname = 'once_ledger'";
    migrate::apply(&mut client, false).await.unwrap();
    assert_eq!(number(&client, there).await, 0);
    assert!(migrate::status(&client).await.unwrap().iter().all(|status| status.schema == "once"));
    assert_eq!(migrate::install_ledger(&mut client, true).await.unwrap().applied, ["ledger/0001_ledger"]);
    assert_eq!(number(&client, there).await, 0, "a dry run leaves nothing");
    migrate::install_ledger(&mut client, false).await.unwrap();
    assert_eq!(migrate::install_ledger(&mut client, false).await.unwrap().applied, Vec::<String>::new());
    let of_ledger = migrate::status(&client).await.unwrap().into_iter().filter(|status| status.schema == "once_ledger");
    assert_eq!(of_ledger.map(|status| status.state).collect::<Vec<_>>(), ["applied"]);
    // A function that is gone comes back with the next migrate.
    client.batch_execute("DROP FUNCTION once_ledger.verify").await.unwrap();
    migrate::apply(&mut client, false).await.unwrap();
    is_sound(&client).await;
    let owner = "SELECT DISTINCT pg_get_userbyid(relowner)::text FROM pg_class WHERE relnamespace = 'once_ledger'::regnamespace";
    assert_eq!(text(&client, owner).await.unwrap(), "once_owner");
}

/// Bodies in the database are those of the files: what doctor compares.
#[tokio::test]
async fn every_function_is_one_of_the_files() {
    let db = book().await;
    let client = db.client().await;
    let sql = "SELECT proname::text, prosrc FROM pg_proc WHERE pronamespace = 'once_ledger'::regnamespace AND proname <> 'immutable'
        ORDER BY 1";
    let installed: Vec<(String, String)> =
        client.query(sql, &[]).await.unwrap().iter().map(|row| (row.get(0), row.get(1))).collect();
    let mut known = migrate::ledger_function_bodies();
    known.sort();
    assert_eq!(installed, known);
    assert_eq!(transfer(&client, "o", "a0", "a1", 1).await.unwrap(), "posted");
}
