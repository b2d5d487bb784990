//! What must be refused: each with its documented code, nothing changed, and nothing of it told back.

use std::error::Error as _;

use pgonce_testkit::{TestDb, checksum};

use crate::desk::receive;

/// Stands in every id and body: whoever finds it in an error has found a leak.
const MARK: &str = "s3cr3t";

/// A call, and what it must answer.
fn calls() -> Vec<(String, &'static str)> {
    let long = |bytes: usize| format!("'{MARK}{}'", "x".repeat(bytes - MARK.len()));
    let hash = "sha256('x')";
    let mut all = vec![
        (format!("once.admit(NULL, 's', '{MARK}', {hash})"), "P4000"),
        (format!("once.admit('', 's', '{MARK}', {hash})"), "P4000"),
        (format!("once.admit({}, 's', 'm', {hash})", long(129)), "P4000"),
        (format!("once.admit('c', NULL, '{MARK}', {hash})"), "P4000"),
        (format!("once.admit('c', {}, 'm', {hash})", long(256)), "P4000"),
        (format!("once.admit('c', E's\\n', '{MARK}', {hash})"), "P4000"),
        (format!("once.admit('c', 's', NULL, {hash})"), "P4001"),
        (format!("once.admit('c', 's', '', {hash})"), "P4001"),
        (format!("once.admit('c', 's', {}, {hash})", long(256)), "P4001"),
        (format!("once.admit('c', 's', 'ä{}', {hash})", "x".repeat(254)), "P4001"),
        (format!("once.admit('c', 's', E'{MARK}\\t', {hash})"), "P4001"),
        (format!("once.admit('c', 's', '{MARK}', NULL)"), "P4003"),
        (format!("once.admit('c', 's', '{MARK}', '')"), "P4003"),
        (format!("once.admit('c', 's', '{MARK}', decode(repeat('00', 65), 'hex'))"), "P4003"),
        (format!("once.admit('c', 's', '{MARK}', {hash}, NULL)"), "P4004"),
        (format!("once.admit('c', 's', 'm', {hash}, {})", long(256)), "P4004"),
        (format!("once.admit('c', 's', '{MARK}', sha256('another'))"), "P4050"),
        (format!("once.admit_batch('c', 's', ARRAY['{MARK}'], NULL)"), "P4020"),
        (format!("once.admit_batch('c', 's', NULL, ARRAY[{hash}])"), "P4020"),
        (format!("once.admit_batch('c', 's', ARRAY['{MARK}', 'b'], ARRAY[{hash}])"), "P4020"),
        (format!("once.admit_batch('c', 's', ARRAY[['{MARK}'], ['b']], ARRAY[[{hash}], [{hash}]])"), "P4020"),
        (format!("once.admit_batch('c', 's', '[0:0]={{{MARK}}}'::text[], ARRAY[{hash}])"), "P4020"),
        (
            format!(
                "once.admit_batch('c', 's', array_fill('{MARK}'::text, ARRAY[10001]), array_fill({hash}, ARRAY[10001]))"
            ),
            "P4020",
        ),
        (format!("once.admit_batch('c', 's', ARRAY['{MARK} new', NULL], ARRAY[{hash}, {hash}])"), "P4001"),
        (format!("once.admit_batch('c', 's', ARRAY['{MARK} new', {}], ARRAY[{hash}, {hash}])", long(256)), "P4001"),
        (format!("once.admit_batch('c', 's', ARRAY['{MARK} new', 'b'], ARRAY[{hash}, ''])"), "P4003"),
        (format!("once.note_result('c', 's', '{MARK}', 'done')"), "P4020"),
        (format!("once.note_result('c', 's', '{MARK}', 'applied', {})", long(256)), "P4005"),
        (format!("once.note_result('c', 's', '{MARK} nobody', 'applied')"), "P4051"),
        (format!("once.advance('c', '', 1, '{MARK}')"), "P4001"),
        (format!("once.advance('c', {}, 1)", long(256)), "P4001"),
        (format!("once.advance('c', '{MARK}', -1)"), "P4020"),
        (format!("once.advance('c', '{MARK}', NULL)"), "P4020"),
        (format!("once.baseline('c', '{MARK}', -1)"), "P4020"),
        (format!("once.receive('c', 's', '{MARK} new', NULL)"), "P4005"),
        (format!("once.receive('c', 's', '{MARK} new', decode(repeat('00', 16777217), 'hex'))"), "P4005"),
        (format!("once.receive('c', 's', 'm2', 'x', p_ordering_key => {})", long(256)), "P4005"),
        (
            format!("once.receive('c', 's', 'm2', 'x', p_headers => jsonb_build_object('a', repeat('{MARK}', 20000)))"),
            "P4005",
        ),
        (format!("once.receive('c', 's', '{MARK} new', 'x', p_version => 1)"), "P4020"),
        (format!("once.receive('c', 's', '{MARK} new', 'x', p_entity => 'e', p_version => -1)"), "P4020"),
        ("once.receive('c', 's', 'stored', 'another body')".to_owned(), "P4050"),
        (format!("once.receive_batch('c', 's', ARRAY['{MARK} new', 'b'], ARRAY['x'::bytea])"), "P4020"),
        (
            format!(
                "once.receive_batch('c', 's', ARRAY['{MARK} new', 'b'], ARRAY['x', 'x']::bytea[], p_topics => ARRAY['t'])"
            ),
            "P4020",
        ),
        (format!("once.receive_batch('c', 's', ARRAY['{MARK} new', ''], ARRAY['x', 'x']::bytea[])"), "P4001"),
        ("once.inbox_take('c', 'w', 0)".to_owned(), "P4020"),
        ("once.inbox_take('c', 'w', 1001)".to_owned(), "P4020"),
        ("once.inbox_take('c', 'w', 1, '2 days')".to_owned(), "P4020"),
        (format!("once.inbox_take('c', {})", long(256)), "P4020"),
        ("once.inbox_take('', 'w')".to_owned(), "P4000"),
        ("once.inbox_finish(1, gen_random_uuid())".to_owned(), "P4051"),
        ("once.inbox_finish(NULL, NULL)".to_owned(), "P4051"),
        ("once.inbox_finish(1, gen_random_uuid(), 'failed_final')".to_owned(), "P4020"),
        ("once.inbox_fail(1, gen_random_uuid(), true, 'x')".to_owned(), "P4051"),
        ("once.inbox_wait(1, gen_random_uuid())".to_owned(), "P4051"),
        ("once.inbox_replay('c', 'me', 'why', p_states => '{processing}')".to_owned(), "P4020"),
        ("once.inbox_discard('c', NULL, 'me', 'why')".to_owned(), "P4020"),
        (format!("once.inbox_discard('c', '{{1}}', 'me', {})", long(2001)), "P4013"),
        (format!("once.define_consumer('c', '{{\"lease\": \"{MARK}\"}}')"), "P4020"),
    ];
    all.push((format!("once.admit('c', 's', U&'{MARK}\\0085', {hash})"), "P4001"));
    all
}

#[tokio::test]
async fn refused_with_its_code_and_without_a_trace() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client.execute("SELECT once.admit('c', 's', $1, sha256('x'))", &[&MARK]).await.unwrap();
    receive(&client, "stored", None, None).await;
    let before = checksum(&client).await;
    for (call, code) in calls() {
        let shown = &call[..call.len().min(120)];
        let error = client.batch_execute(&format!("SELECT {call}")).await.expect_err(shown);
        assert_eq!(crate::desk::code(&error), code, "{shown}: {error:?}");
        let said = format!(
            "{error} {:?} {:?}",
            error.source(),
            error.as_db_error().map(|db| (
                db.message().to_owned(),
                db.detail().map(str::to_owned),
                db.hint().map(str::to_owned)
            ))
        );
        assert!(!said.contains(MARK), "{shown}: {said}");
        let what = error.as_db_error().unwrap();
        assert!(what.hint().is_some() || code == "P4020", "{shown}: no hint");
    }
    assert_eq!(checksum(&client).await, before, "nothing of it stayed");
}

/// The limits themselves are allowed.
#[tokio::test]
async fn the_largest_and_the_strangest_are_taken() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = "x".repeat(255);
    for (id, hash) in
        [(id.as_str(), vec![0_u8; 64]), ("ünïcode ☃", vec![1]), ("' OR 1=1 --", vec![0; 31]), (" ", vec![0; 32])]
    {
        let sql = "SELECT once.admit('c', 's', $1, $2)";
        for expected in ["new", "duplicate"] {
            assert_eq!(client.query_one(sql, &[&id, &hash]).await.unwrap().get::<_, &str>(0), expected);
        }
    }
    let many: Vec<String> = (0..10_000).map(|n| format!("batch {n}")).collect();
    let hashes = vec![vec![7_u8; 32]; 10_000];
    let sql = "SELECT count(*) FILTER (WHERE verdict = 'new') FROM once.admit_batch('c', 's', $1, $2)";
    assert_eq!(client.query_one(sql, &[&many, &hashes]).await.unwrap().get::<_, i64>(0), 10_000);
    assert_eq!(client.query_one(sql, &[&many, &hashes]).await.unwrap().get::<_, i64>(0), 0);
    // U+0000 is not a text to PostgreSQL at all.
    let nul = client.query_one("SELECT once.admit('c', 's', $1, sha256('x'))", &[&"a\0b"]).await.unwrap_err();
    assert_eq!(crate::desk::code(&nul), "22021");
}
