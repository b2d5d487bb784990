//! Webhooks out and in: the sink signs, the source checks, the inbox knows.

use pgonce_testkit::{TestDb, eventually, free_port};

use crate::rig::{Run, number};

const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

/// One service's outbox to another's inbox, by signed webhooks; early ones wait for the state that they need.
#[tokio::test(flavor = "multi_thread")]
async fn a_webhook_is_signed_checked_stored_and_applied_once() {
    let (sender, receiver) = (TestDb::new().await, TestDb::new().await);
    let there = receiver.client().await;
    there
        .batch_execute(
            "CREATE SCHEMA app; CREATE TABLE app.known (id int PRIMARY KEY); CREATE TABLE app.applied (id int);
             SELECT once.define_consumer('hooks', '{\"backoff\": \"50ms\", \"backoff_max\": \"200ms\", \"attempts_max\": 1000}');
             CREATE FUNCTION app.on_event(m jsonb) RETURNS text LANGUAGE plpgsql AS $$
             BEGIN
                 IF NOT EXISTS (SELECT FROM app.known k WHERE k.id = (m #>> '{payload,n}')::int) THEN
                     RAISE EXCEPTION 'not known here yet' USING ERRCODE = '55P03';
                 END IF;
                 INSERT INTO app.applied VALUES ((m #>> '{payload,n}')::int);
                 PERFORM once.emit('done', 'event.applied', m -> 'payload');
                 RETURN NULL;
             END $$",
        )
        .await
        .unwrap();
    let port = free_port();
    let source = format!("webhook://127.0.0.1:{port}/hook");
    let consume = ["consume", "--source", &source, "--consumer", "hooks", "--handler", "sql:app.on_event"];
    let consumer = Run::new(receiver.direct_url(), &consume).env("PGONCE_WEBHOOK_SECRET", SECRET).start().ready().await;
    sender
        .client()
        .await
        .batch_execute("SELECT once.emit('t', 'x', jsonb_build_object('n', n), 'Größe \"' || n || '\" 100%', 'ü', '%41') FROM generate_series(1, 5) n")
        .await
        .unwrap();
    let sink = format!("http://127.0.0.1:{port}/hook?allow_private=true");
    let relay = |secret: &str| {
        Run::new(
            sender.direct_url(),
            &["relay", "--until-empty", "--attempts", "3", "--backoff-max", "10ms", "--sink", &sink],
        )
        .env("PGONCE_WEBHOOK_SECRET", secret)
    };
    // The old and the new secret at once: a receiver that knows one of them is content.
    relay(&format!("whsec_AAAAAAAAAAAAAAAAAAAAAAAA {SECRET}")).done().await;
    eventually("all are stored", async || number(&there, "SELECT count(*) FROM once.inbox").await == 5).await;
    let whole = "SELECT count(*) FROM once.inbox WHERE ordering_key LIKE 'Größe \"_\" 100\\%' AND entity = 'ü/%41'";
    assert_eq!(number(&there, whole).await, 5, "attributes come as they were");
    eventually("they are tried", async || number(&there, "SELECT max(attempts)::bigint FROM once.inbox").await > 1)
        .await;
    assert_eq!(number(&there, "SELECT count(*) FROM app.applied").await, 0, "too early, and not lost");
    there.batch_execute("INSERT INTO app.known SELECT generate_series(1, 5)").await.unwrap();
    eventually("all are applied", async || number(&there, "SELECT count(*) FROM app.applied").await == 5).await;
    assert_eq!(number(&there, "SELECT count(*) FROM once.outbox").await, 5, "effect and message in one transaction");
    // Sent again: known, and no second effect.
    let replay = ["outbox", "replay", "--sink", &sink, "--reason", "a test"];
    Run::new(sender.direct_url(), &replay).env("PGONCE_WEBHOOK_SECRET", SECRET).done().await;
    assert_eq!(number(&there, "SELECT count(*) FROM once.inbox").await, 5);
    consumer.stop().await;
    assert_eq!(number(&there, "SELECT count(*) FROM app.applied").await, 5);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_signature_stores_nothing_and_parks_the_message() {
    let (sender, receiver) = (TestDb::new().await, TestDb::new().await);
    let port = free_port();
    let source = format!("webhook://127.0.0.1:{port}/hook");
    let consumer = Run::new(receiver.direct_url(), &["consume", "--source", &source, "--consumer", "hooks"])
        .env("PGONCE_WEBHOOK_SECRET", SECRET)
        .start()
        .ready()
        .await;
    let here = sender.client().await;
    here.batch_execute("SELECT once.emit('t', 'x', '{}')").await.unwrap();
    let sink = format!("http://127.0.0.1:{port}/hook?allow_private=true");
    let relay = ["relay", "--attempts", "2", "--backoff-max", "10ms", "--sink", &sink];
    let relay =
        Run::new(sender.direct_url(), &relay).env("PGONCE_WEBHOOK_SECRET", "whsec_AAAAAAAAAAAAAAAAAAAAAAAA").start();
    eventually("it is parked", async || {
        number(&here, "SELECT coalesce(sum(parked), 0)::bigint FROM once.sinks").await == 1
    })
    .await;
    relay.stop().await;
    consumer.stop().await;
    let why: String = here.query_one("SELECT last_error FROM once.outbox_parked", &[]).await.unwrap().get(0);
    assert!(why.contains("401"), "{why}");
    assert_eq!(number(&receiver.client().await, "SELECT count(*) FROM once.inbox").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn another_database_gets_each_message_once() {
    let (sender, receiver) = (TestDb::new().await, TestDb::new().await);
    sender
        .client()
        .await
        .batch_execute(
            "SELECT once.emit('t', 'x', jsonb_build_object('n', n), 'k' || n % 3) FROM generate_series(1, 500) n",
        )
        .await
        .unwrap();
    let sink = format!(
        "{}{}consumer=books",
        receiver.direct_url(),
        if receiver.direct_url().contains('?') { "&" } else { "?" }
    );
    let relay = || Run::new(sender.direct_url(), &["relay", "--lease", "1s", "--batch", "100", "--sink", &sink]);
    relay().env("PGONCE_KILL_AT", "relay::before_record").start().killed().await;
    relay().args(&["--until-empty"]).done().await;
    let there = receiver.client().await;
    assert_eq!(number(&there, "SELECT count(*) FROM once.inbox").await, 500, "sent twice in part, stored once");
    let order = "SELECT count(*) FROM (SELECT (convert_from(body, 'UTF8')::jsonb ->> 'n')::int < lag((convert_from(body, 'UTF8')::jsonb ->> 'n')::int)
        OVER (PARTITION BY ordering_key ORDER BY id) AS wrong FROM once.inbox) o WHERE wrong";
    assert_eq!(number(&there, order).await, 0, "in each key's order");
}
