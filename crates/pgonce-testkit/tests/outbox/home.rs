//! A log belongs to the database that numbered it.

use std::process::Command;

use pgonce_testkit::TestDb;

use crate::{Reader, number, refused, text};

fn pg(program: &str) -> Command {
    let binaries = pgonce_cluster::Binaries::find().unwrap();
    let beside = binaries.dir().join(program);
    Command::new(if beside.exists() { beside } else { program.into() })
}

/// A real dump, restored beside it: the numbers of the new database have nothing to do with the cursors.
#[tokio::test]
async fn a_restored_dump_is_refused_until_it_is_adopted() {
    let db = TestDb::new().await;
    let mut reader = Reader::new(&db).await;
    let client = db.client().await;
    let emit = |n: i32| format!("SELECT once.emit('t', 'x', '{{\"n\": {n}}}', 'k')");
    client.batch_execute(&emit(1)).await.unwrap();
    assert_eq!(reader.next().await, [1]);
    client.batch_execute(&format!("UPDATE once.lane SET delivered = '{}'", reader.delivered)).await.unwrap();
    client.batch_execute(&emit(2)).await.unwrap();
    client.batch_execute("SELECT once.hold_lanes('s', 'before')").await.unwrap();

    let copy = format!("{}_copy", db.name());
    let dump = pg("pg_dump").args(["--format=plain", db.direct_url()]).output().expect("pg_dump");
    assert!(dump.status.success(), "{}", String::from_utf8_lossy(&dump.stderr));
    client.batch_execute(&format!("CREATE DATABASE {copy}")).await.unwrap();
    let copy_url = db.direct_url().replace(db.name(), &copy);
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), &dump.stdout).unwrap();
    let restored =
        pg("psql").args(["-q", "-v", "ON_ERROR_STOP=1", "-f"]).arg(file.path()).arg(&copy_url).output().expect("psql");
    assert!(restored.status.success(), "{}", String::from_utf8_lossy(&restored.stderr));

    let there = pgonce::migrate::connect(&copy_url).await.unwrap();
    // Effects go on: only the relay has to wait.
    there.batch_execute(&emit(3)).await.unwrap();
    for sql in ["SELECT once.open_sink('s')", "SELECT once.hold_lanes('s', 'r')", "SELECT once.rotate_outbox()"] {
        let error = there.batch_execute(sql).await.expect_err(sql);
        let error = error.as_db_error().unwrap();
        assert_eq!(error.code().code(), "P4070", "{sql}");
        assert!(error.hint().unwrap().contains("pgonce outbox adopt"), "it says what to do");
    }
    assert_eq!(refused(&there, "SELECT once.adopt_outbox('ann', '')").await, "P4013");
    let again = number(&there, "SELECT once.adopt_outbox('ann', 'restored for a test')").await;
    assert!((2..=3).contains(&again), "2 and 3 were not delivered; 1 may be provable: {again}");
    let delivered = text(&there, "SELECT DISTINCT delivered::text FROM once.lane").await;
    let mut reader = Reader { client: there, delivered };
    let came = reader.next().await;
    assert!(came.ends_with(&[2, 3]), "{came:?}");
    reader.client.batch_execute("SELECT once.hold_lanes('s', 'r')").await.unwrap();
    reader.client.batch_execute(&emit(4)).await.unwrap();
    assert_eq!(reader.next().await, [4]);
    // The database that it was taken from is not disturbed.
    client.batch_execute("SELECT once.hold_lanes('s', 'before')").await.unwrap();
}
