//! `once.emit` and `Tx::emit`.

use pgonce::{Error, Event, Failure};
use pgonce_testkit::TestDb;
use serde_json::json;

use crate::{number, refused, text};

#[tokio::test]
async fn a_message_is_there_if_and_only_if_its_transaction_committed() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client.batch_execute("BEGIN; SELECT once.emit('t', 'x', '{}'); ROLLBACK").await.unwrap();
    client.batch_execute("BEGIN; SAVEPOINT a; SELECT once.emit('t', 'x', '{}'); ROLLBACK TO a; COMMIT").await.unwrap();
    assert_eq!(number(&client, "SELECT count(*) FROM once.outbox").await, 0);
    client.batch_execute("BEGIN; SAVEPOINT a; SELECT once.emit('t', 'x', '{}'); RELEASE a; COMMIT").await.unwrap();
    assert_eq!(number(&client, "SELECT count(*) FROM once.outbox").await, 1);
    // One row version, whatever happens later.
    assert_eq!(
        text(&client, "SELECT (xid = xmin::text::xid8)::text FROM once.outbox").await,
        "false",
        "a savepoint's own number is not what a snapshot is asked about"
    );
}

#[tokio::test]
async fn an_intent_emits_one_message_of_a_type() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let emit =
        |more: &str| format!("SELECT once.emit('t', 'x', '{{\"a\": 1}}', p_scope => 's', p_key => 'k'{more})::text");
    let first = text(&client, &emit("")).await;
    assert_eq!(text(&client, &emit("")).await, first, "saying it again is no second message");
    assert_eq!(number(&client, "SELECT count(*) FROM once.outbox").await, 1);
    assert_eq!(
        refused(&client, "SELECT once.emit('t', 'x', '{\"a\": 2}', p_scope => 's', p_key => 'k')").await,
        "P4041"
    );
    let second = text(&client, &emit(", p_ordinal => 1")).await;
    let other_tenant = text(&client, &emit(", p_tenant => 'b'")).await;
    let other_type = text(&client, "SELECT once.emit('t', 'y', '{}', p_scope => 's', p_key => 'k')::text").await;
    let mut ids = vec![first, second, other_tenant, other_type];
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 4);
    // The parts are told apart, however they are cut.
    let cut = "SELECT once.message_id('', 'ab', 'c', 'x', 0) = once.message_id('', 'a', 'bc', 'x', 0)";
    assert_eq!(text(&client, &format!("SELECT ({cut})::text")).await, "false");
}

#[tokio::test]
async fn the_crate_emits_in_the_intents_transaction_through_both_doors() {
    for direct in [false, true] {
        let db = TestDb::new().await.through(direct);
        let (once, client) = (db.once().await, db.client().await);
        let created = |n: i32| {
            Event::new("orders", "order.created", &json!({"n": n})).ordered_by(7).about("order", 7, Some(i64::from(n)))
        };
        let run = || {
            once.intent("create", "key-é").tenant("ten").payload(&json!(1)).run(async |tx| {
                let id = tx.emit(created(1)).await?;
                assert_eq!(tx.emit(created(1)).await?, id);
                tx.emit(created(2).ordinal(1).header("traceparent", "00-1")).await?;
                Ok(id.to_string())
            })
        };
        let id = run().await.unwrap().into_inner();
        assert_eq!(run().await.unwrap().into_inner(), id, "a replay emits nothing");
        let derived = "SELECT once.message_id('ten', 'create', 'key-é', 'order.created', 0)::text";
        assert_eq!(text(&client, derived).await, id, "direct {direct}: the id is the same from Rust and from SQL");
        let shape = "SELECT string_agg(concat_ws(' ', topic, type, ordering_key, aggregate_type, aggregate_id, aggregate_version,
            tenant, scope, key, headers, payload), '; ' ORDER BY position) FROM once.outbox";
        assert_eq!(
            text(&client, shape).await,
            "orders order.created 7 order 7 1 ten create key-é {\"n\": 1}; \
             orders order.created 7 order 7 2 ten create key-é {\"traceparent\": \"00-1\"} {\"n\": 2}"
        );
        // Another content under the same id does not get lost in silence: the effect fails, finally.
        let twice = once.intent("create", "other").payload(&json!(1)).run(async |tx| {
            tx.emit(created(1)).await?;
            tx.emit(created(2)).await?;
            Ok(())
        });
        match twice.await {
            Err(Error::Failed { code, .. }) => assert_eq!(code, "P4041", "direct {direct}"),
            other => panic!("{other:?}"),
        }
        let refused = once.intent("create", "third").payload(&json!(1)).run(async |tx| {
            tx.emit(created(1)).await?;
            Err::<(), _>(Failure::refuse("no", "no"))
        });
        assert!(matches!(refused.await, Err(Error::Failed { .. })));
        assert_eq!(number(&client, "SELECT count(*) FROM once.outbox").await, 2, "direct {direct}");
    }
}

#[tokio::test]
async fn what_cannot_be_emitted_is_refused_with_its_reason() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let long = "x".repeat(256);
    for arguments in [
        "NULL, 'x', '{}'".to_owned(),
        "'', 'x', '{}'".into(),
        format!("'{long}', 'x', '{{}}'"),
        "'t', NULL, '{}'".into(),
        format!("'t', '{long}', '{{}}'"),
        "'t', 'x', NULL".into(),
        "'t', 'x', to_jsonb(repeat('x', 16777216))".into(),
        "'t', 'x', '{}', repeat('k', 256)".into(),
        "'t', 'x', '{}', ''".into(),
        "'t', 'x', '{}', p_tenant => NULL".into(),
        "'t', 'x', '{}', p_tenant => repeat('k', 256)".into(),
        "'t', 'x', '{}', p_aggregate_type => 'order'".into(),
        "'t', 'x', '{}', p_aggregate_type => 'order', p_aggregate_id => repeat('k', 250)".into(),
        "'t', 'x', '{}', p_headers => '[]'".into(),
        "'t', 'x', '{}', p_headers => '{\"a\": 1}'".into(),
        "'t', 'x', '{}', p_headers => '{\"a b\": \"c\"}'".into(),
        "'t', 'x', '{}', p_headers => '{\"a\": \"b\\nc\"}'".into(),
        "'t', 'x', '{}', p_headers => '{\"fine\": \"x\", \"Nats-Msg-Id\": \"7\"}'".into(),
        "'t', 'x', '{}', p_headers => '{\"CE-Tenant\": \"another\"}'".into(),
        "'t', 'x', '{}', p_headers => '{\"Content-Length\": \"1\"}'".into(),
    ] {
        assert_eq!(refused(&client, &format!("SELECT once.emit({arguments})")).await, "P4040", "{arguments}");
    }
    assert_eq!(number(&client, "SELECT count(*) FROM once.outbox").await, 0);
    let once = db.once().await;
    for direct in [false, true] {
        let db = TestDb::new().await.through(direct);
        let once = db.once().await;
        let event = Event::new("", "x", &json!({}));
        let refused = once.intent("s", "k").payload(&json!(1)).run(async |tx| Ok(tx.emit(event.clone()).await?));
        assert!(matches!(refused.await, Err(Error::Failed { code, .. }) if code == "P4040"));
    }
    drop(once);
}

#[tokio::test]
async fn whoever_owns_the_transaction_emits_there() {
    let db = TestDb::new().await;
    let mut client = db.client().await;
    let transaction = client.transaction().await.unwrap();
    let event = Event::new("t", "x", &json!({"n": 1}));
    let id = pgonce::emit(&transaction, "", Some(("s", "k")), &event).await.unwrap();
    pgonce::emit(&transaction, "", None, &event).await.unwrap();
    transaction.commit().await.unwrap();
    assert_eq!(text(&client, "SELECT once.message_id('', 's', 'k', 'x', 0)::text").await, id.to_string());
    assert_eq!(number(&client, "SELECT count(*) FROM once.outbox").await, 2);
}

/// Trace context and names of one's own are the emitter's.
#[tokio::test]
async fn headers_of_ones_own_are_taken() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let headers =
        r#"{"traceparent": "00-1", "tracestate": "a=b", "x-request": "1", "certificate": "c", "tenant": "t"}"#;
    client.batch_execute(&format!("SELECT once.emit('t', 'x', '{{}}', p_headers => '{headers}')")).await.unwrap();
    assert_eq!(number(&client, "SELECT count(*) FROM once.outbox").await, 1);
}

/// An id that was made up cannot be said again, so no index guards it; one that was given or derived is guarded.
#[tokio::test]
async fn only_ids_that_can_be_said_again_are_guarded() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let given = uuid::Uuid::from_u128(7);
    let said = |payload: &str| format!("SELECT once.emit('t', 'said', '{payload}', p_message_id => '{given}')");
    let sql = format!(
        "{}; {0}; SELECT once.emit('t', 'derived', '1', p_scope => 's', p_key => 'k');
         SELECT once.emit('t', 'made', '1'), once.emit('t', 'made', '1');
         SELECT once.emit_batch('{{t,t}}', '{{made,said}}', '{{1,1}}', p_message_ids => ARRAY[NULL, gen_random_uuid()]);
         SELECT once.emit_batch('{{t}}', '{{derived}}', '{{1}}', p_scope => 's', p_key => 'another')",
        said("1")
    );
    client.batch_execute(&sql).await.unwrap();
    let guards = "SELECT string_agg(concat_ws(' ', type, coalesce(made_up, false), n), ', ' ORDER BY type)
        FROM (SELECT type, made_up, count(*) AS n FROM once.outbox GROUP BY type, made_up) g";
    assert_eq!(text(&client, guards).await, "derived f 2, made t 3, said f 2");
    assert_eq!(refused(&client, &said("2")).await, "P4041");
    // What it is for: many of them leave the index as small as it was.
    let entries = "SELECT sum(pg_relation_size(i.indexrelid))::bigint FROM pg_index i JOIN pg_inherits h ON h.inhrelid = i.indexrelid
        WHERE h.inhparent = 'once.outbox_message'::regclass";
    let before = number(&client, entries).await;
    client.batch_execute("SELECT count(once.emit('t', 'made', '1')) FROM generate_series(1, 2000)").await.unwrap();
    assert_eq!(number(&client, entries).await, before);
    client
        .batch_execute(
            "SELECT count(once.emit('t', 'x', '1', p_message_id => gen_random_uuid())) FROM generate_series(1, 2000)",
        )
        .await
        .unwrap();
    assert!(number(&client, entries).await > before, "or this would not show it");
}

/// A batch says what its messages alone would say: the same ids, rows and refusals.
#[tokio::test]
async fn a_batch_is_the_same_as_its_messages() {
    let (alone, batch) = (TestDb::new().await, TestDb::new().await);
    let events = || -> Vec<Event> {
        let created = |n: i32| Event::new("orders", "order.created", &json!({"n": n})).ordered_by(n % 3);
        vec![
            created(1).about("order", 1, Some(1)).header("traceparent", "00-1"),
            created(2).ordinal(1),
            Event::new("mail", "mail.wanted", &json!([])),
            created(3).ordinal(7).id(uuid::Uuid::from_u128(3)),
        ]
    };
    let run = async |db: &TestDb, in_batch: bool| {
        let once = db.once().await;
        let intent = once.intent("create", "k").tenant("ten").payload(&json!(1));
        let ids = intent.run(async |tx| {
            if in_batch {
                return Ok(tx.emit_batch(&events()).await?);
            }
            let mut ids = Vec::new();
            for event in events() {
                ids.push(tx.emit(event).await?);
            }
            Ok(ids)
        });
        ids.await.unwrap().into_inner()
    };
    assert_eq!(run(&alone, false).await, run(&batch, true).await);
    let rows = "SELECT string_agg(concat_ws(' ', position, message_id, topic, type, ordering_key, aggregate_type, aggregate_id,
        aggregate_version, tenant, scope, key, headers, payload), '; ' ORDER BY position) FROM once.outbox";
    let (alone, batch) = (alone.client().await, batch.client().await);
    assert_eq!(text(&alone, rows).await, text(&batch, rows).await);
    // Said again in part: nothing is added. Another content: nothing of the batch is.
    let again = pgonce::emit_batch(&batch, "ten", Some(("create", "k")), &events()[..2]).await.unwrap();
    assert_eq!(again.len(), 2);
    let mut other = events();
    other[2] = Event::new("mail", "mail.wanted", &json!(["another"]));
    other.insert(0, Event::new("t", "new", &json!(1)));
    let refused_batch = pgonce::emit_batch(&batch, "ten", Some(("create", "k")), &other).await;
    assert_eq!(refused_batch.unwrap_err().sqlstate(), Some("P4041"));
    let bad = [Event::new("t", "x", &json!(1)), Event::new("t", "x", &json!(1)).header("ce-tenant", "b")];
    assert_eq!(pgonce::emit_batch(&batch, "ten", None, &bad).await.unwrap_err().sqlstate(), Some("P4040"));
    assert_eq!(number(&batch, "SELECT count(*) FROM once.outbox").await, 4);
    assert!(pgonce::emit_batch(&batch, "", None, &[]).await.unwrap().is_empty());
    for arguments in [
        "NULL, '{}', '{}'",
        "'{t,t}', '{x}', '{1,2}'",
        "'{t}', '{x}', NULL",
        "array_fill('t'::text, '{10001}'), array_fill('x'::text, '{10001}'), array_fill('1'::jsonb, '{10001}')",
    ] {
        assert_eq!(refused(&batch, &format!("SELECT once.emit_batch({arguments})")).await, "P4020", "{arguments}");
    }
}

/// Without ordinals the messages of a type are numbered in their order.
#[tokio::test]
async fn a_batch_numbers_the_messages_of_a_type() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let events: Vec<Event> =
        (0..6).map(|n| Event::new("t", if n % 2 == 0 { "even" } else { "odd" }, &json!(n))).collect();
    let ids = pgonce::emit_batch(&client, "", Some(("s", "k")), &events).await.unwrap();
    let derived = "SELECT string_agg(once.message_id('', 's', 'k', t, n)::text, ' ' ORDER BY n, t) FROM (VALUES ('even'), ('odd')) k (t),
        generate_series(0, 2) n";
    let said: Vec<String> = ids.iter().map(ToString::to_string).collect();
    assert_eq!(text(&client, derived).await, said.join(" "));
    assert_eq!(pgonce::emit_batch(&client, "", Some(("s", "k")), &events).await.unwrap(), ids);
    assert_eq!(
        text(&client, "SELECT string_agg(payload::text, '' ORDER BY position) FROM once.outbox").await,
        "012345"
    );
}

/// Batches with the same messages, in orders of their own: they wait for each other, and nobody is a deadlock's victim.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_with_the_same_messages_do_not_deadlock() {
    let db = TestDb::new().await;
    let mut tasks = tokio::task::JoinSet::new();
    for writer in 0..6_usize {
        let client = db.client().await;
        tasks.spawn(async move {
            for round in 0..20_u128 {
                let mut events: Vec<Event> = (0..40_u128)
                    .map(|n| Event::new("t", "x", &json!(n.to_string())).id(uuid::Uuid::from_u128(round * 1000 + n)))
                    .collect();
                events.rotate_left(writer * 7);
                if writer % 2 == 1 {
                    events.reverse();
                }
                pgonce::emit_batch(&client, "", None, &events).await.unwrap();
            }
        });
    }
    tasks.join_all().await;
    assert_eq!(number(&db.client().await, "SELECT count(*) FROM once.outbox").await, 800);
}

/// The same, step by step: one batch waits in the middle of its own messages, the other for the first of them.
#[tokio::test]
async fn messages_of_a_batch_are_added_in_the_order_of_their_ids() {
    let db = TestDb::new().await;
    let (holder, first, second, observer) =
        (db.client().await, db.client().await, db.client().await, db.client().await);
    let event = |id: u128| Event::new("t", "x", &json!(id.to_string())).id(uuid::Uuid::from_u128(id));
    holder.batch_execute("BEGIN").await.unwrap();
    pgonce::emit_batch(&holder, "", None, &[event(5)]).await.unwrap();
    let (of_first, of_second) = ([event(9), event(5), event(1)], [event(1), event(9)]);
    let first = tokio::spawn(async move { pgonce::emit_batch(&first, "", None, &of_first).await });
    pgonce_testkit::lock_waiters(&observer, 1).await;
    let second = tokio::spawn(async move { pgonce::emit_batch(&second, "", None, &of_second).await });
    pgonce_testkit::lock_waiters(&observer, 2).await;
    holder.batch_execute("ROLLBACK").await.unwrap();
    assert_eq!((first.await.unwrap().unwrap().len(), second.await.unwrap().unwrap().len()), (3, 2));
    assert_eq!(number(&observer, "SELECT count(*) FROM once.outbox").await, 3);
}
