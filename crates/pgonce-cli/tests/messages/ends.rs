//! How relays and consumers begin where something is missing, and what they say when they end.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpListener;
use std::process::Stdio;

use pgonce_testkit::{TestDb, eventually, free_port};

use crate::common::{Ran, command, temp_dir};
use crate::rig::{Run, number};

/// A receiver of webhooks that answers as it is told, by the body; gone with the process. Its URL.
fn receiver(answer: fn(&str) -> u16) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            std::thread::spawn(move || {
                let mut reader = BufReader::new(stream.try_clone().unwrap());
                let (mut line, mut length) = (String::new(), 0);
                while reader.read_line(&mut line).unwrap_or(0) > 0 {
                    let lower = line.to_ascii_lowercase();
                    length = lower.strip_prefix("content-length:").map_or(length, |text| text.trim().parse().unwrap());
                    if line == "\r\n" {
                        let mut body = vec![0; length];
                        reader.read_exact(&mut body).unwrap();
                        let status = answer(std::str::from_utf8(&body).unwrap());
                        write!(&stream, "HTTP/1.1 {status} x\r\ncontent-length: 0\r\n\r\n").unwrap();
                        length = 0;
                    }
                    line.clear();
                }
            });
        }
    });
    format!("http://127.0.0.1:{port}/in?allow_private=true&unsigned=true&name=hooks")
}

async fn emit(db: &TestDb, key: &str, payload: &str) {
    let sql = "SELECT once.emit('t', 'x', $2::text::jsonb, $1)";
    db.client().await.query_one(sql, &[&key, &payload]).await.unwrap();
}

async fn relay(db: &TestDb, args: &[&str]) -> Ran {
    let (url, args) = (db.direct_url().to_owned(), args.iter().map(|arg| (*arg).to_owned()).collect::<Vec<_>>());
    let ran = tokio::task::spawn_blocking(move || {
        let args: Vec<&str> = std::iter::once("relay").chain(args.iter().map(String::as_str)).collect();
        crate::common::pgonce(&url, &args)
    });
    ran.await.unwrap()
}

/// What is left is told in full, and the exit code says whether anything is.
#[tokio::test(flavor = "multi_thread")]
async fn until_empty_tells_all_that_is_left() {
    let db = TestDb::new().await;
    let sink = receiver(|body| if body.contains("poison") { 500 } else { 204 });
    let ends = ["--until-empty", "--attempts", "1", "--sink", &sink];
    emit(&db, "b", "{}").await;
    let ran = relay(&db, &ends).await.done();
    assert!(ran.stderr.contains("hooks: 1 delivered; nothing is left"), "{}", ran.stderr);
    emit(&db, "a", r#"{"is": "poison"}"#).await;
    for key in ["a", "b", "a"] {
        emit(&db, key, "{}").await;
    }
    let ran = relay(&db, &ends).await.failed();
    let told = "hooks: 1 delivered; left: 0 not sent, 0 to be tried again, 1 parked, 2 behind those";
    assert!(ran.stderr.contains(told), "{}", ran.stderr);
    let ran = relay(&db, &["--json", "--until-empty", "--sink", &sink]).await.failed();
    let told =
        serde_json::json!([{"sink": "hooks", "delivered": 0, "left": 0, "failing": 0, "parked": 1, "behind": 2}]);
    assert_eq!(ran.json(), told);
}

/// A receiver that wants no more is told as that: the database has nothing to do with it.
#[tokio::test(flavor = "multi_thread")]
async fn a_receiver_that_wants_no_more_is_told_as_that() {
    let db = TestDb::new().await;
    emit(&db, "a", "{}").await;
    let sink = receiver(|_| 410);
    let ran = relay(&db, &["--until-empty", "--sink", &sink]).await.failed();
    assert!(ran.stderr.contains("the sink is disabled") && ran.stderr.contains("410"), "{}", ran.stderr);
    assert!(ran.stderr.contains("left: 1 not sent"), "{}", ran.stderr);
    assert!(!ran.stderr.contains("database"), "{}", ran.stderr);
    // One that goes on says it once, and waits.
    let waiting = Run::new(db.direct_url(), &["relay", "--sink", &sink]).start();
    eventually("it says so", async || waiting.says("the sink is disabled")).await;
    db.client().await.batch_execute("SELECT once.resume_sink('hooks', 'ann', 'it is back')").await.unwrap();
    eventually("disabled again, after it was asked again", async || {
        number(&db.client().await, "SELECT count(*) FROM once.sinks WHERE disabled LIKE '%410%'").await == 1
    })
    .await;
    assert!(!waiting.says("database"));
    waiting.stop().await;
}

/// `pgonce relay --sink stdout: | head -1`: its reader has enough. It ends, as others do, and what was not read is not
/// recorded.
#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_leaves_ends_the_relay() {
    let db = TestDb::new().await;
    // More than a pipe holds.
    let many = "SELECT once.emit('t', 'x', jsonb_build_object('n', n, 'text', repeat('x', 100))) FROM generate_series(1, 5000) n";
    db.client().await.batch_execute(many).await.unwrap();
    for (ends, code) in [(&[][..], 0), (&["--until-empty"][..], 1)] {
        let dir = temp_dir();
        let mut relay = command(dir.path());
        relay.env("DATABASE_URL", db.direct_url()).args(["relay", "--sink", "stdout:"]).args(ends);
        let ran = tokio::task::spawn_blocking(move || {
            let mut child = relay.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
            let mut line = String::new();
            BufReader::with_capacity(100, child.stdout.take().unwrap()).read_line(&mut line).unwrap();
            assert!(line.starts_with('{'), "{line}");
            Ran::from(child.wait_with_output().unwrap())
        });
        let ran = ran.await.unwrap();
        assert_eq!(ran.code, code, "{ran:?}");
        assert!(!ran.stderr.contains("panicked") && !ran.stderr.contains("trying again"), "{}", ran.stderr);
        assert!(
            ran.stderr.contains("0 delivered; left: 5000 not sent"),
            "nothing of the first batch counts: {}",
            ran.stderr
        );
    }
}

/// A mistake in the handler's name, shape or rights is told at the start.
#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_cannot_be_called_is_told_at_the_start() {
    let db = TestDb::new().await;
    let login = format!("app_{}", db.name());
    let sql = format!(
        "CREATE SCHEMA app; CREATE ROLE {login} LOGIN IN ROLE once_app; GRANT USAGE ON SCHEMA app TO {login};
         CREATE FUNCTION app.right(m jsonb) RETURNS void LANGUAGE plpgsql AS 'BEGIN RAISE ''not to be run''; END';
         CREATE FUNCTION app.fixed(m jsonb) RETURNS text LANGUAGE plpgsql IMMUTABLE AS 'BEGIN RAISE ''not to be run''; END';
         CREATE FUNCTION app.other(m int) RETURNS text LANGUAGE sql AS 'SELECT NULL::text';
         CREATE FUNCTION app.many(m jsonb) RETURNS SETOF text LANGUAGE sql AS 'SELECT NULL::text';
         CREATE FUNCTION app.closed(m jsonb) RETURNS text LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
         REVOKE EXECUTE ON FUNCTION app.closed FROM PUBLIC"
    );
    db.client().await.batch_execute(&sql).await.unwrap();
    let consume = |handler: &str| {
        let source = format!("webhook://127.0.0.1:{}/in?name=x", free_port());
        let handler = format!("sql:{handler}");
        Run::new(
            &db.direct_url().replace("postgres@", &format!("{login}@")),
            &["consume", "--source", &source, "--consumer", "c", "--handler", &handler],
        )
        .env("PGONCE_WEBHOOK_SECRET", "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    };
    for (handler, why) in [
        ("app.nothing", "does not exist"),
        ("nowhere.right", "does not exist"),
        ("app.other", "does not exist"),
        ("app.many", "returns a set"),
        ("app.closed", "permission denied"),
    ] {
        let ran = consume(handler).ran().await.failed();
        assert!(ran.stderr.contains(handler) && ran.stderr.contains(why), "{handler}: {}", ran.stderr);
        assert!(!ran.stderr.contains("ready "), "{}", ran.stderr);
    }
    for handler in ["app.right", "app.fixed"] {
        consume(handler).start().ready().await.stop().await;
    }
    db.client().await.batch_execute(&format!("DROP OWNED BY {login}; DROP ROLE {login}")).await.unwrap();
}

/// All digits of a number reach a SQL handler.
#[tokio::test(flavor = "multi_thread")]
async fn a_number_keeps_its_digits() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let body = r#"{"n": 12345678901234567890.12345678901234567890, "m": 0.10, "big": 1e400}"#;
    let sql = "CREATE SCHEMA app; CREATE TABLE app.got (message jsonb);
        CREATE FUNCTION app.keep(m jsonb) RETURNS void LANGUAGE sql AS 'INSERT INTO app.got VALUES (m)'";
    client.batch_execute(sql).await.unwrap();
    let receive = "SELECT once.receive('c', 's', $1, convert_to($2, 'UTF8'))";
    client.query_one(receive, &[&"1", &body.replace(", \"big\": 1e400", "")]).await.unwrap();
    client.query_one(receive, &[&"2", &body]).await.unwrap();
    let source = format!("webhook://127.0.0.1:{}/in?name=x", free_port());
    let consumer =
        Run::new(db.direct_url(), &["consume", "--source", &source, "--consumer", "c", "--handler", "sql:app.keep"])
            .env("PGONCE_WEBHOOK_SECRET", "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
            .start();
    eventually("both are handled", async || number(&client, "SELECT count(*) FROM app.got").await == 2).await;
    consumer.stop().await;
    let got = "SELECT message #>> '{payload,n}', message #>> '{payload,m}' FROM app.got WHERE message ->> 'id' = '1'";
    let row = client.query_one(got, &[]).await.unwrap();
    assert_eq!((row.get(0), row.get(1)), ("12345678901234567890.12345678901234567890", "0.10"));
    let got = "SELECT count(*) FROM app.got WHERE message ->> 'id' = '2'
        AND convert_from(decode(message ->> 'body_base64', 'base64'), 'UTF8') = $1";
    assert_eq!(
        client.query_one(got, &[&body]).await.unwrap().get::<_, i64>(0),
        1,
        "what jsonb may not hold comes as bytes"
    );
}

/// What is away at the start is waited for, and told; not longer than somebody wants to.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_away_at_the_start_is_waited_for() {
    let db = TestDb::new().await;
    let nowhere = format!("postgres://postgres@127.0.0.1:{}/nowhere", free_port());
    let nats = format!("nats://127.0.0.1:{}/ORDERS?timeout=1s", free_port());
    let consume = ["consume", "--wait-max", "1s", "--consumer", "c", "--source", nats.as_str()];
    let ran = Run::new(&nowhere, &consume).ran().await.failed();
    assert!(ran.stderr.contains("waiting for the database"), "{}", ran.stderr);
    let ran = Run::new(&nowhere, &["relay", "--wait-max", "1s", "--sink", "stdout:"]).ran().await.failed();
    assert!(ran.stderr.contains("waiting for the database"), "{}", ran.stderr);
    for source in [
        nats.clone(),
        format!("kafka://127.0.0.1:{}?topic=t&timeout=1s", free_port()),
        format!("redis://127.0.0.1:{}?stream=s&timeout=1s", free_port()),
        format!("amqp://127.0.0.1:{}?queue=q&timeout=1s", free_port()),
    ] {
        let consume = ["consume", "--wait-max", "1s", "--consumer", "c", "--source", source.as_str()];
        let ran = Run::new(db.direct_url(), &consume).ran().await.failed();
        assert!(ran.stderr.contains("was not reached within 1s"), "{source}: {}", ran.stderr);
    }
    // Longer: somebody stops it first.
    let consume = ["consume", "--consumer", "c", "--source", nats.as_str()];
    let waiting = Run::new(db.direct_url(), &consume).start();
    eventually("it waits", async || waiting.says("waiting for the source")).await;
    waiting.stop().await;
    let waiting = Run::new(&nowhere, &consume).start();
    eventually("it waits", async || waiting.says("waiting for the database")).await;
    waiting.stop().await;
}
