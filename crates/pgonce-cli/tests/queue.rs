//! `pgonce work` and `pgonce queue`, by the real binary, on a real database.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod common;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpListener;
use std::process::Stdio;
use std::sync::mpsc;
use std::time::Duration;

use common::{command, pgonce, temp_dir};
use pgonce_testkit::TestDb;
use serde_json::{Value, json};
use tokio_postgres::Client;

const APP: &str = "CREATE SCHEMA app; CREATE TABLE app.sent (job bigint, address text);
    CREATE FUNCTION app.send_email(job jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO app.sent VALUES ((job ->> 'id')::bigint, job -> 'payload' ->> 'to');
        IF job -> 'payload' ->> 'to' = 'nobody' THEN
            RAISE EXCEPTION 'no such address' USING ERRCODE = 'P4030';
        END IF;
        IF job -> 'payload' ->> 'to' = 'away' THEN
            RAISE EXCEPTION 'the mail server is away';
        END IF;
        RETURN jsonb_build_object('to', job -> 'payload' ->> 'to', 'attempt', job -> 'attempt');
    END $$";

async fn one<T: for<'a> tokio_postgres::types::FromSql<'a>>(client: &Client, sql: &str) -> T {
    client.query_one(sql, &[]).await.unwrap().get(0)
}

fn add(url: &str, more: &[&str]) -> i64 {
    let ran = pgonce(url, &[&["queue", "add", "emails"][..], more].concat()).done();
    ran.stdout.trim().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_are_added_worked_on_and_decided_about() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let url = db.direct_url();
    client.batch_execute(APP).await.unwrap();
    assert!(pgonce(url, &["queue", "status"]).done().stderr.contains("No job is there"));
    assert!(pgonce(url, &["queue", "buried"]).done().stderr.contains("Nothing is buried"));
    let good = add(url, &[r#"{"to": "ada"}"#, "--key", "k", "--priority", "-1"]);
    let refused = add(url, &[r#"{"to": "nobody"}"#, "--key", "k"]);
    let away = add(url, &[r#"{"to": "away"}"#]);
    let later = add(url, &["--after", "1h", "--unique", "u", "--attempts-max", "3"]);
    assert_eq!(add(url, &["--unique", "u"]), later);
    let handler = ["--queue", "emails", "--handler", "sql:app.send_email"];
    // A handler that is not there is told before any job is taken.
    let misspelt = ["work", "--queue", "emails", "--handler", "sql:app.sendemail", "--until-empty"];
    let ran = pgonce(url, &misspelt);
    assert_eq!((ran.code, ran.stderr.contains("app.sendemail cannot be called")), (1, true), "{ran:#?}");
    assert_eq!(one::<i64>(&client, "SELECT sum(attempts) FROM once.jobs").await, 0);
    let ran = pgonce(url, &[&["work"], &handler[..], &["--until-empty"]].concat()).done();
    assert!(ran.stderr.starts_with("ready working on emails"), "{ran:#?}");

    assert_eq!(one::<i64>(&client, "SELECT count(*) FROM app.sent").await, 1, "what failed left nothing");
    let result: Value = client.query_one("SELECT result FROM once.look_job($1)", &[&good]).await.unwrap().get(0);
    assert_eq!(result, json!({"to": "ada", "attempt": 1}));
    let status = pgonce(url, &["queue", "status", "--queue", "emails", "--json"]).done().json();
    let states: Vec<&str> = status.as_array().unwrap().iter().map(|row| row["state"].as_str().unwrap()).collect();
    assert_eq!(states, ["buried", "delayed", "succeeded"], "{status}");
    let retried: String = one(&client, &format!("SELECT last_error FROM once.jobs WHERE id = {away}")).await;
    assert!(retried.contains("the mail server is away"), "{retried}");
    let buried = pgonce(url, &["queue", "buried"]).done();
    assert!(buried.stdout.contains("no such address") && buried.stdout.starts_with("ID  QUEUE"), "{buried:#?}");

    assert_eq!(pgonce(url, &["queue", "retry", "--queue", "emails"]).code, 2, "no reason");
    assert_eq!(pgonce(url, &["queue", "retry", "--queue", "emails", "--reason", " "]).code, 2);
    let back = pgonce(url, &["queue", "retry", "--queue", "emails", "--reason", "there now", "--json"]).done().json();
    assert_eq!(back["put_back"][0]["id"], refused, "{back}");
    pgonce(url, &[&["work"], &handler[..], &["--until-empty", "--group", "1"]].concat()).done();
    let gone =
        pgonce(url, &["queue", "discard", "--queue", "emails", "--reason", "nobody", "--id", &refused.to_string()])
            .done();
    assert!(gone.stderr.contains("1 discarded"), "{gone:#?}");
    assert_eq!(one::<i64>(&client, "SELECT count(*) FROM once.audit_trail WHERE actor = 'tester'").await, 2);

    let cancelled = pgonce(url, &["queue", "cancel", &later.to_string(), "--json"]).done().json();
    assert_eq!(cancelled, json!({"id": later, "state": "cancelled"}));
    pgonce(url, &["queue", "cancel", &later.to_string()]).failed();
    assert_eq!(pgonce(url, &["queue", "add", "emails", "{no json"]).code, 2);
    assert_eq!(pgonce(url, &["work", "--queue", "emails", "--handler", "ftp://x"]).code, 2);
    assert_eq!(pgonce(url, &["queue", "schedules", "--json"]).done().json(), json!([]));

    client
        .batch_execute("UPDATE once.job_ended SET expires_at = now() - interval '1 day' WHERE state <> 'buried'")
        .await
        .unwrap();
    let purged = pgonce(url, &["purge", "--json"]).done().json();
    assert_eq!(purged["jobs_purged"], 2, "the success and the cancelled one: {purged}");
}

/// A service that answers what it is told to, and tells what it got.
fn service(answers: &[(u16, &'static str)]) -> (String, mpsc::Receiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/jobs", listener.local_addr().unwrap());
    let (sender, receiver) = mpsc::channel();
    let answers = answers.to_vec();
    std::thread::spawn(move || {
        for (status, body) in answers {
            let (mut stream, _) = listener.accept().unwrap();
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            let (mut head, mut length) = (String::new(), 0);
            loop {
                let mut line = String::new();
                reader.read_line(&mut line).unwrap();
                if line == "\r\n" {
                    break;
                }
                let line = line.to_lowercase();
                if let Some(value) = line.strip_prefix("content-length: ") {
                    length = value.trim().parse().unwrap();
                }
                head += &line;
            }
            let mut payload = vec![0; length];
            reader.read_exact(&mut payload).unwrap();
            sender.send(head + &String::from_utf8(payload).unwrap()).unwrap();
            let answer =
                format!("HTTP/1.1 {status} X\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}", body.len());
            stream.write_all(answer.as_bytes()).unwrap();
        }
    });
    (url, receiver)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_handles_jobs() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let url = db.direct_url();
    let good = add(url, &[r#"{"to": "ada"}"#, "--key", "k"]);
    let busy = add(url, &[r#"{"to": "bob"}"#]);
    let refused = add(url, &[r#"{"to": "eve"}"#]);
    let (address, got) = service(&[(200, r#"{"sent": true}"#), (503, ""), (422, "")]);
    let arguments = ["work", "--queue", "emails", "--handler", &address, "--until-empty", "--at-once", "1"];
    pgonce(url, &arguments).done();
    let first = got.recv_timeout(Duration::from_secs(30)).unwrap();
    for part in [
        "post /jobs",
        &format!("idempotency-key: \"job-{good}\""),
        &format!("pgonce-job: {good}"),
        "pgonce-queue: emails",
        "pgonce-attempt: 1",
        "pgonce-key: k",
        "pgonce-claim: ",
        r#"{"to":"ada"}"#,
    ] {
        assert!(first.contains(part), "{part}: {first}");
    }
    let state = async |id: i64| -> (String, Option<Value>) {
        let row = client.query_one("SELECT state, result FROM once.look_job($1)", &[&id]).await.unwrap();
        (row.get(0), row.get(1))
    };
    assert_eq!(state(good).await, ("succeeded".into(), Some(json!({"sent": true}))));
    assert_eq!(state(busy).await, ("delayed".into(), None));
    assert_eq!(state(refused).await, ("buried".into(), None));
}

/// Goes on until it is told to stop, fires schedules meanwhile, and counts for Prometheus.
#[tokio::test(flavor = "multi_thread")]
async fn it_serves_until_told_to_stop() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client.batch_execute(APP).await.unwrap();
    client
        .execute("SELECT once.define_schedule('s', 'emails', '* * * * * *', '{\"to\": \"all\"}')", &[])
        .await
        .unwrap();
    let port = pgonce_testkit::free_port();
    let dir = temp_dir();
    let mut child = command(dir.path())
        .env("DATABASE_URL", db.direct_url())
        .args([
            "work",
            "--queue",
            "emails",
            "--handler",
            "sql:app.send_email",
            "--metrics",
            &format!("127.0.0.1:{port}"),
        ])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "ready working on emails\n");
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    let scrape = || {
        let mut stream = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    };
    loop {
        let text = scrape();
        let counted = text.contains("pgonce_queue_jobs{queue=\"emails\",state=\"ready\"}");
        if counted && text.contains("pgonce_jobs_total{queue=\"emails\",end=\"finished\"}") {
            break;
        }
        assert!(std::time::Instant::now() < deadline, "{text}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(one::<i64>(&client, "SELECT count(*) FROM app.sent").await > 0);
    let id = child.id().to_string();
    assert!(std::process::Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
    assert!(child.wait().unwrap().success());
    assert_eq!(one::<i64>(&client, "SELECT count(*) FROM once.jobs WHERE state = 'running'").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_sees_jobs_that_stand_still() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let findings = |check: &str| -> Vec<(String, String)> {
        let ran = pgonce(db.direct_url(), &["doctor", "--json"]);
        let all = ran.json();
        let found = all.as_array().unwrap().iter().filter(|one| one["check"] == check);
        found.map(|one| (one["level"].as_str().unwrap().to_owned(), one["what"].as_str().unwrap().to_owned())).collect()
    };
    assert_eq!((findings("queue")[0].0.as_str(), findings("schedules")[0].0.as_str()), ("ok", "ok"));
    let sql = "SELECT once.enqueue('emails', '{}') FROM generate_series(1, 3);
        SELECT once.bury(id, claim_id, 'no') FROM once.take('emails', 'w', 1);
        SELECT * FROM once.take('emails', 'w', 1);
        UPDATE once.job SET enqueued_at = now() - interval '20 minutes';
        UPDATE once.job SET leased_until = now() - interval '30 minutes' WHERE state = 'running';
        SELECT once.define_schedule('late', 'emails', '* * * * *'), once.define_schedule('wrong', 'emails', '61 * * * *');
        UPDATE once.schedule SET next_at = now() - interval '1 hour' WHERE schedule = 'late';
        SELECT once.fault_schedule('wrong', 1, 'the cron expression cannot be read')";
    client.batch_execute(sql).await.unwrap();
    let found = findings("queue");
    for words in [
        "1 jobs are buried",
        "1 jobs are ready, the oldest for 20 minutes",
        "1 jobs are due, or their worker's lease is over",
    ] {
        assert!(found.iter().any(|(level, what)| level == "warn" && what.contains(words)), "{words}: {found:?}");
    }
    let found = findings("schedules");
    assert!(found[0].1.contains("late: its time has passed") && found[1].1.contains("cannot be read"), "{found:?}");
}
