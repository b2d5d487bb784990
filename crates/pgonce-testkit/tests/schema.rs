//! The schema: how it gets there, who may do what in it, and what nobody may.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on should stop, loudly")]

use std::collections::BTreeMap;
use std::sync::Arc;

use pgonce::{Error, Once, migrate};
use pgonce_testkit::{TestDb, checksum, cluster};
use tokio_postgres::Client;
use uuid::Uuid;

/// A test's database without the schema. The roles are there: they are the cluster's.
async fn empty() -> TestDb {
    let db = TestDb::new().await;
    db.client().await.batch_execute("DROP SCHEMA once CASCADE").await.unwrap();
    db
}

async fn text(client: &Client, sql: &str) -> String {
    client.query_one(sql, &[]).await.unwrap().get::<_, Option<String>>(0).unwrap_or_default()
}

async fn list(client: &Client, sql: &str) -> Vec<String> {
    client.query(sql, &[]).await.unwrap().iter().map(|row| row.get(0)).collect()
}

/// Everything in the schema: what a migration makes.
async fn objects(client: &Client) -> Vec<String> {
    let sql = "SELECT 'r ' || relname FROM pg_class WHERE relnamespace = to_regnamespace('once')
        UNION ALL SELECT 'f ' || oid::regprocedure || md5(prosrc) || coalesce(proacl::text, '') FROM pg_proc WHERE pronamespace = to_regnamespace('once')
        ORDER BY 1";
    list(client, sql).await
}

/// A whole claim and what follows, as this connection's user.
async fn flow(client: &Client, key: &str) {
    client.batch_execute("BEGIN").await.unwrap();
    let claim = "SELECT kind, claim_id FROM once.claim('flow', $1, once.fingerprint('{}'), p_mode => $2)";
    let row = client.query_one(claim, &[&key, &"atomic"]).await.unwrap();
    assert_eq!(row.get::<_, &str>(0), "new_claim");
    client.execute("SELECT once.succeed('flow', $1, $2)", &[&key, &row.get::<_, Uuid>(1)]).await.unwrap();
    client.batch_execute("COMMIT").await.unwrap();
    let row = client.query_one(claim, &[&key, &"atomic"]).await.unwrap();
    assert_eq!(row.get::<_, &str>(0), "replay_success");

    let leased = format!("{key} leased");
    let id: Uuid = client.query_one(claim, &[&leased, &"leased"]).await.unwrap().get(1);
    client.execute("SELECT once.renew('flow', $1, $2)", &[&leased, &id]).await.unwrap();
    client.execute("SELECT once.fail('flow', $1, $2, true, 'code')", &[&leased, &id]).await.unwrap();
    let id: Uuid = client.query_one(claim, &[&leased, &"leased"]).await.unwrap().get(1);
    client.execute("SELECT once.release('flow', $1, $2)", &[&leased, &id]).await.unwrap();
    client.execute("SELECT once.resolve('flow', $1, $2)", &[&leased, &id]).await.unwrap();
    client
        .batch_execute(
            "SELECT once.define_scope('flow', '{}'); SELECT once.record_failure('flow', 'f', pg_catalog.sha256('x'), true, 'c');
             SELECT once.peek('flow', 'f', pg_catalog.sha256('x')); SELECT once.tally('flow', '{\"new_claim\": 1}');
             SELECT once.try_lock('r'); SELECT once.schema_version(); SELECT once.canonical_json('[]')",
        )
        .await
        .unwrap();

    // The set-based forms: claimed, renewed, looked at, completed; and one in doubt.
    let keys = vec![format!("{key} batch"), format!("{key} doubt")];
    let ids = vec![Uuid::new_v4(), Uuid::new_v4()];
    let batch = "SELECT kind FROM once.claim_batch(ARRAY['', ''], ARRAY['flow', 'flow'], $1,
        ARRAY[pg_catalog.sha256('x'), pg_catalog.sha256('x')], $2)";
    let kinds: Vec<String> = client.query(batch, &[&keys, &ids]).await.unwrap().iter().map(|row| row.get(0)).collect();
    assert_eq!(kinds, ["new_claim", "new_claim"]);
    let renew = "SELECT verdict FROM once.renew_batch(ARRAY['', ''], ARRAY['flow', 'flow'], $1, $2)";
    assert_eq!(client.query(renew, &[&keys, &ids]).await.unwrap()[1].get::<_, &str>(0), "renewed");
    let succeed =
        "SELECT verdict FROM once.succeed_batch(ARRAY[''], ARRAY['flow'], $1, $2, ARRAY[200], ARRAY['{}'::jsonb],
        ARRAY['x'::bytea], ARRAY[NULL::text], ARRAY[NULL::text])";
    let verdict = client.query_one(succeed, &[&&keys[..1], &&ids[..1]]).await.unwrap();
    assert_eq!(verdict.get::<_, &str>(0), "recorded");
    let doubt = "SELECT once.doubt('flow', $1, $2, 'code')";
    assert_eq!(client.query_one(doubt, &[&keys[1], &ids[1]]).await.unwrap().get::<_, &str>(0), "uncertain");
    let peek = "SELECT kind FROM once.peek_batch(ARRAY['', ''], ARRAY['flow', 'flow'], $1,
        ARRAY[pg_catalog.sha256('x'), pg_catalog.sha256('x')])";
    let kinds: Vec<String> = client.query(peek, &[&keys]).await.unwrap().iter().map(|row| row.get(0)).collect();
    assert_eq!(kinds, ["replay_success", "uncertain"]);
    inbox_flow(client, key).await;
    call_flow(client, key).await;
}

/// What an application does about calls of a provider; the key is in the provider's name.
async fn call_flow(client: &Client, key: &str) {
    let provider = format!("flow {key}");
    let define = "SELECT once.define_provider($1, '{\"base_url\": \"https://flow.example/v1\", \"resend\": true, \"rate_per_second\": 5}')";
    client.execute(define, &[&provider]).await.unwrap();
    let derived = "SELECT once.call_key('', $1, 'flow', 'k', 'charge', 0)::text";
    let derived: String = client.query_one(derived, &[&provider]).await.unwrap().get(0);
    let notice = "SELECT once.call_notice($1, 'n', 'confirmed', $2, 'ch_1', 'body')";
    assert_eq!(client.query_one(notice, &[&provider, &derived]).await.unwrap().get::<_, &str>(0), "stored");
    let call = "SELECT once.call($1, 'charge', '/charges', '{\"amount\": 7}', p_scope => 'flow', p_key => 'k')::text";
    for _ in 0..2 {
        assert_eq!(client.query_one(call, &[&provider]).await.unwrap().get::<_, String>(0), derived);
    }
    assert_eq!(client.query_one(notice, &[&provider, &derived]).await.unwrap().get::<_, &str>(0), "duplicate");
    client.execute("SELECT once.call($1, 'ping', '/ping')", &[&provider]).await.unwrap();
}

/// Every function that a consumer calls; the key is the consumer's name.
async fn inbox_flow(client: &Client, key: &str) {
    let admit = "SELECT once.admit($1, 's', 'm', pg_catalog.sha256('x'))";
    assert_eq!(client.query_one(admit, &[&key]).await.unwrap().get::<_, &str>(0), "new");
    client.execute("SELECT once.note_result($1, 's', 'm', 'ignored')", &[&key]).await.unwrap();
    let batch = "SELECT verdict FROM once.admit_batch($1, 's', ARRAY['m', 'n'],
        ARRAY[pg_catalog.sha256('x'), pg_catalog.sha256('x')]) ORDER BY ordinal";
    let verdicts: Vec<String> = client.query(batch, &[&key]).await.unwrap().iter().map(|row| row.get(0)).collect();
    assert_eq!(verdicts, ["duplicate", "new"]);
    for sql in [
        "SELECT once.define_consumer($1, '{\"lease\": \"1m\"}')",
        "SELECT once.baseline($1, 'e', 1)",
        "SELECT once.receive($1, 's', 'm1', 'x', p_entity => 'e', p_version => 4)",
        "SELECT once.receive_batch($1, 's', ARRAY['m2', 'm3'], ARRAY['x', 'x']::bytea[])",
    ] {
        client.execute(sql, &[&key]).await.unwrap();
    }
    let take = "SELECT id, claim_id FROM once.inbox_take($1, 'w', 10)";
    let held: Vec<(i64, Uuid)> =
        client.query(take, &[&key]).await.unwrap().iter().map(|row| (row.get(0), row.get(1))).collect();
    assert_eq!(held.len(), 3);
    let wait = "SELECT once.inbox_wait($1, $2)";
    assert_eq!(client.query_one(wait, &[&held[0].0, &held[0].1]).await.unwrap().get::<_, &str>(0), "waiting");
    client.execute("SELECT once.inbox_finish($1, $2)", &[&held[1].0, &held[1].1]).await.unwrap();
    client.execute("SELECT once.inbox_fail($1, $2, true, 'later')", &[&held[2].0, &held[2].1]).await.unwrap();
    client.execute("SELECT once.advance($1, 'e', 2)", &[&key]).await.unwrap();
    client.execute("SELECT once.inbox_recover()", &[]).await.unwrap();
}

#[tokio::test]
async fn any_number_may_migrate_at_once() {
    // A cluster without the roles, and two databases: the roles are raced for across them.
    let cluster = tokio::task::spawn_blocking(cluster).await.unwrap();
    let admin = migrate::connect(&cluster.url("postgres")).await.unwrap();
    admin.batch_execute("CREATE DATABASE other").await.unwrap();
    let barrier = Arc::new(tokio::sync::Barrier::new(8));
    let mut running = tokio::task::JoinSet::new();
    for place in 0..8 {
        let (barrier, url) = (Arc::clone(&barrier), cluster.url(if place % 2 == 0 { "postgres" } else { "other" }));
        running.spawn(async move {
            let mut client = migrate::connect(&url).await.unwrap();
            barrier.wait().await;
            migrate::apply(&mut client, false).await.unwrap().applied.len()
        });
    }
    let applied = running.join_all().await;
    assert_eq!(applied.iter().filter(|count| **count > 0).count(), 2, "one each: {applied:?}");
    for database in ["postgres", "other"] {
        flow(&migrate::connect(&cluster.url(database)).await.unwrap(), "key").await;
    }
}

#[tokio::test]
async fn dry_run_status_and_a_second_time() {
    let db = empty().await;
    let mut client = db.client().await;
    let states = async |client: &Client| -> Vec<&'static str> {
        migrate::status(client).await.unwrap().iter().map(|status| status.state).collect()
    };
    let all = migrate::migrations().len();
    assert_eq!(states(&client).await, vec!["pending"; all]);
    assert!(matches!(Once::connect(db.url()).await, Err(Error::Schema(_))), "nothing there yet");

    let report = migrate::apply(&mut client, true).await.unwrap();
    assert!(report.dry_run && report.applied.len() == all && report.functions > 40);
    assert_eq!(objects(&client).await, Vec::<String>::new());
    assert_eq!(text(&client, "SELECT to_regnamespace('once')::text").await, "");
    assert_eq!(states(&client).await, vec!["pending"; all]);

    assert_eq!(migrate::apply(&mut client, false).await.unwrap().applied.len(), all);
    assert_eq!(states(&client).await, vec!["applied"; all]);
    flow(&client, "key").await;
    let (rows, made) = (checksum(&client).await, objects(&client).await);
    assert_eq!(migrate::apply(&mut client, false).await.unwrap().applied, Vec::<String>::new());
    assert_eq!(checksum(&client).await, rows, "no data is touched");
    assert_eq!(objects(&client).await, made);
    // A function that somebody changed is put right.
    client.batch_execute("CREATE OR REPLACE FUNCTION once.try_lock(p_resource text, p_tenant text DEFAULT '') RETURNS boolean LANGUAGE sql AS 'SELECT true'").await.unwrap();
    assert_ne!(objects(&client).await, made);
    migrate::apply(&mut client, false).await.unwrap();
    assert_eq!(objects(&client).await, made);
    Once::connect(db.url()).await.unwrap();
}

#[tokio::test]
async fn a_newer_schema_is_left_alone() {
    for breaking in [false, true] {
        let db = TestDb::new().await;
        let mut client = db.client().await;
        let newer = "INSERT INTO once.migration (version, name, checksum, breaking) VALUES (9999, 'future', 'x', $1)";
        client.execute(newer, &[&breaking]).await.unwrap();
        client.batch_execute("CREATE OR REPLACE FUNCTION once.try_lock(p_resource text, p_tenant text DEFAULT '') RETURNS boolean LANGUAGE sql AS 'SELECT true'").await.unwrap();
        let (rows, made) = (checksum(&client).await, objects(&client).await);
        for dry_run in [true, false] {
            let refused = migrate::apply(&mut client, dry_run).await;
            assert!(matches!(&refused, Err(Error::Schema(message)) if message.contains("9999")), "{refused:?}");
        }
        assert_eq!((checksum(&client).await, objects(&client).await), (rows, made), "not even a function was replaced");
        assert!(
            migrate::status(&client)
                .await
                .unwrap()
                .iter()
                .any(|status| status.version == 9999 && status.state == "newer")
        );
        match Once::connect(db.url()).await {
            Ok(_) => assert!(!breaking, "an old binary must not work with what it does not know"),
            Err(Error::Schema(message)) => assert!(breaking && message.contains("9999"), "{message}"),
            Err(other) => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn a_changed_migration_is_refused() {
    let db = TestDb::new().await;
    let mut client = db.client().await;
    client.batch_execute("UPDATE once.migration SET checksum = 'other' WHERE version = 1").await.unwrap();
    let before = checksum(&client).await;
    let refused = migrate::apply(&mut client, false).await;
    assert!(matches!(refused, Err(Error::Schema(_))), "{refused:?}");
    assert_eq!(checksum(&client).await, before);
    assert_eq!(migrate::status(&client).await.unwrap()[0].state, "changed");
    client.batch_execute("DELETE FROM once.migration").await.unwrap();
    assert!(matches!(Once::connect(db.url()).await, Err(Error::Schema(_))), "older than this binary needs");
}

/// Becomes this user, for the rest of the connection.
async fn become_user(url: &str, user: &str) -> Client {
    let client = migrate::connect(url).await.unwrap();
    client.batch_execute(&format!("SET SESSION AUTHORIZATION \"{user}\"")).await.unwrap();
    assert_eq!(text(&client, "SELECT current_setting('is_superuser')").await, "off");
    client
}

#[tokio::test]
async fn no_superuser_is_needed() {
    let cluster = tokio::task::spawn_blocking(cluster).await.unwrap();
    let admin = migrate::connect(&cluster.url("postgres")).await.unwrap();
    let owner = "SELECT nspowner::regrole::text FROM pg_namespace WHERE nspname = 'once'";
    // Names that need quoting, too.
    for (user, rights) in [("plain", ""), ("My-User", ""), ("maker", "CREATEROLE"), ("late", "")] {
        let database = format!("db_{}", user.replace('-', "_").to_lowercase());
        for sql in [
            format!("CREATE DATABASE {database}"),
            format!("CREATE ROLE \"{user}\" LOGIN {rights}"),
            format!("GRANT CREATE ON DATABASE {database} TO \"{user}\""),
        ] {
            admin.batch_execute(&sql).await.unwrap();
        }
        let url = cluster.url(&database);
        for _ in 0..2 {
            let mut client = become_user(&url, user).await;
            migrate::apply(&mut client, false).await.unwrap_or_else(|error| panic!("{user}: {error}"));
        }
        let client = become_user(&url, user).await;
        let roles = list(&admin, "SELECT rolname::text FROM pg_roles WHERE rolname LIKE 'once%' ORDER BY 1").await;
        let owned_by = text(&client, owner).await.replace('"', "");
        match user {
            "plain" | "My-User" => {
                assert!(roles.is_empty(), "{user} may not make roles");
                assert_eq!(owned_by, user);
                flow(&client, "key").await;
            }
            "maker" => {
                assert_eq!(roles, ["once_app", "once_direct", "once_ops", "once_owner", "once_reader", "once_relay"]);
                assert_eq!(owned_by, "once_owner");
                client.batch_execute("SET ROLE once_owner").await.unwrap();
                flow(&client, "key").await;
            }
            _ => assert_eq!(owned_by, user, "the roles are there, and this user is no member"),
        }
        let migrated_by =
            text(&migrate::connect(&url).await.unwrap(), "SELECT applied_by FROM once.migrations LIMIT 1").await;
        assert_eq!(migrated_by, user);
        if user == "maker" || user == "late" {
            admin.batch_execute(&format!("CREATE ROLE app_{user} LOGIN IN ROLE once_app")).await.unwrap();
            flow(&become_user(&url, &format!("app_{user}")).await, "app's").await;
        }
    }
}

#[tokio::test]
async fn what_runs_with_the_owners_rights_is_pinned() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let definers = "SELECT count(*) FILTER (WHERE prosecdef), count(*) FILTER (WHERE prosecdef AND EXISTS (
        SELECT 1 FROM unnest(proconfig) c WHERE c = 'search_path=pg_catalog, pg_temp'))
        FROM pg_proc WHERE pronamespace = 'once'::regnamespace";
    let row = client.query_one(definers, &[]).await.unwrap();
    assert!(row.get::<_, i64>(0) > 15);
    assert_eq!(
        row.get::<_, i64>(0),
        row.get::<_, i64>(1),
        "every SECURITY DEFINER function has its search_path pinned"
    );
    // Whatever an application can call is pinned, or reads nothing by an unqualified name.
    let open = "SELECT proname::text FROM pg_proc WHERE pronamespace = 'once'::regnamespace
        AND has_function_privilege('once_app', oid, 'EXECUTE')
        AND NOT coalesce('search_path=pg_catalog, pg_temp' = ANY (proconfig), false)";
    assert_eq!(list(&client, open).await, ["clock"]);

    let to_public =
        "SELECT 'function ' || proname FROM pg_proc, aclexplode(coalesce(proacl, acldefault('f', proowner))) a
            WHERE pronamespace = 'once'::regnamespace AND a.grantee = 0
        UNION ALL SELECT relkind::text || ' ' || relname FROM pg_class,
            aclexplode(coalesce(relacl, acldefault(CASE relkind WHEN 'S' THEN 's' ELSE 'r' END::\"char\", relowner))) a
            WHERE relnamespace = 'once'::regnamespace AND relkind IN ('r', 'p', 'v', 'S', 'm') AND a.grantee = 0
        UNION ALL SELECT 'schema' FROM pg_namespace, aclexplode(coalesce(nspacl, acldefault('n', nspowner))) a
            WHERE nspname = 'once' AND a.grantee = 0
        UNION ALL SELECT 'column ' || attname FROM pg_attribute, aclexplode(attacl) a
            WHERE attrelid IN (SELECT oid FROM pg_class WHERE relnamespace = 'once'::regnamespace) AND a.grantee = 0";
    assert_eq!(list(&client, to_public).await, Vec::<String>::new(), "PUBLIC has nothing");
    let owners = "SELECT DISTINCT o::regrole::text FROM (
        SELECT relowner FROM pg_class WHERE relnamespace = 'once'::regnamespace UNION
        SELECT proowner FROM pg_proc WHERE pronamespace = 'once'::regnamespace) x (o)";
    assert_eq!(list(&client, owners).await, ["once_owner"]);
}

/// What a role may do, by the catalog: functions, and relations with any right.
async fn rights(client: &Client, role: &str) -> (Vec<String>, Vec<String>) {
    let functions = format!(
        "SELECT DISTINCT proname::text FROM pg_proc WHERE pronamespace = 'once'::regnamespace
         AND has_function_privilege('{role}', oid, 'EXECUTE') ORDER BY 1"
    );
    let relations = format!(
        "SELECT relname::text FROM pg_class WHERE relnamespace = 'once'::regnamespace AND relkind IN ('r', 'p', 'v')
         AND has_table_privilege('{role}', oid, 'SELECT, INSERT, UPDATE, DELETE, TRUNCATE, REFERENCES, TRIGGER')
         UNION ALL SELECT relname::text FROM pg_class WHERE relnamespace = 'once'::regnamespace 
         AND CASE relkind WHEN 'S' THEN has_sequence_privilege('{role}', oid, 'USAGE, SELECT, UPDATE') END ORDER BY 1"
    );
    (list(client, &functions).await, list(client, &relations).await)
}

async fn denied(client: &Client, sql: &str) {
    let error = client.batch_execute(sql).await.expect_err(sql);
    assert_eq!(error.code().unwrap().code(), "42501", "{sql}: {error:?}");
}

#[tokio::test]
async fn each_role_may_do_its_own_and_no_more() {
    let db = TestDb::new().await;
    let admin = db.client().await;
    let mut users = BTreeMap::new();
    for role in ["once_app", "once_ops", "once_reader"] {
        let user = format!("{role}_{}", db.name());
        admin.batch_execute(&format!("CREATE ROLE {user} LOGIN IN ROLE {role}")).await.unwrap();
        users.insert(role, become_user(db.direct_url(), &user).await);
    }
    let views = list(
        &admin,
        "SELECT relname::text FROM pg_class WHERE relnamespace = 'once'::regnamespace AND relkind = 'v' ORDER BY 1",
    )
    .await;
    let tables = list(
        &admin,
        "SELECT oid::regclass::text FROM pg_class WHERE relnamespace = 'once'::regnamespace AND relkind IN ('r', 'p')",
    )
    .await;
    assert!(views.len() > 10 && tables.len() > 6);

    let app = [
        "admit",
        "admit_batch",
        "advance",
        "baseline",
        "bury",
        "bury_batch",
        "call",
        "call_key",
        "call_notice",
        "cancel_batch",
        "cancel_job",
        "canonical_json",
        "claim",
        "claim_alone",
        "claim_batch",
        "clock",
        "count_jobs",
        "count_uncertain",
        "define_consumer",
        "define_provider",
        "define_queue",
        "define_schedule",
        "define_scope",
        "doubt",
        "drop_schedule",
        "due_schedules",
        "emit",
        "emit_batch",
        "enqueue",
        "enqueue_batch",
        "fail",
        "fault_schedule",
        "fingerprint",
        "fingerprint_bytes",
        "finish",
        "finish_batch",
        "fire_schedule",
        "give_back",
        "heartbeat",
        "heartbeat_batch",
        "import_apply",
        "import_begin",
        "import_end",
        "import_failures",
        "import_header",
        "import_open",
        "import_record",
        "import_result",
        "inbox_fail",
        "inbox_finish",
        "inbox_recover",
        "inbox_take",
        "inbox_wait",
        "look_job",
        "note_result",
        "peek",
        "peek_batch",
        "receive",
        "receive_batch",
        "record_failure",
        "release",
        "renew",
        "renew_batch",
        "resolve",
        "retry",
        "retry_batch",
        "schema_version",
        "scope_rules",
        "succeed",
        "succeed_alone",
        "succeed_batch",
        "take",
        "take_unsorted",
        "tally",
        "try_lock",
    ];
    assert_eq!(rights(&admin, "once_app").await, (app.map(String::from).to_vec(), Vec::new()));
    let ops = [
        "abandon_replay",
        "adopt_outbox",
        "ask_replay",
        "baseline",
        "call_settle",
        "cancel_batch",
        "cancel_job",
        "clock",
        "continue_replay",
        "count_jobs",
        "define_consumer",
        "define_provider",
        "define_queue",
        "define_schedule",
        "define_scope",
        "discard_buried",
        "drop_schedule",
        "enqueue",
        "import_abandon",
        "import_result",
        "inbox_discard",
        "inbox_recover",
        "inbox_replay",
        "keep_outbox",
        "outbox_messages",
        "purge",
        "purge_calls",
        "purge_imports",
        "purge_inbox",
        "purge_jobs",
        "purge_rows",
        "record_replay",
        "recover",
        "resume_held",
        "resume_sink",
        "retry_buried",
        "rotate_outbox",
        "schema_version",
        "scope_rules",
        "settle",
        "sink_lag",
    ];
    assert_eq!(rights(&admin, "once_ops").await, (ops.map(String::from).to_vec(), views.clone()));
    let reader = ["clock", "schema_version", "sink_lag"].map(String::from).to_vec();
    assert_eq!(rights(&admin, "once_reader").await, (reader, views.clone()));
    let relay = [
        "advance_lanes",
        "call_ask_sql",
        "call_asked",
        "call_doubts",
        "call_heard",
        "call_open",
        "call_recover",
        "call_sweep",
        "call_take",
        "clock",
        "disable_sink",
        "drop_lanes",
        "held_due",
        "held_keys",
        "hold_lanes",
        "open_sink",
        "outbox_difference",
        "outbox_messages",
        "provider_heard",
        "rotate_outbox",
        "schema_version",
        "settle_held",
        "sink_lag",
    ];
    assert_eq!(rights(&admin, "once_relay").await, (relay.map(String::from).to_vec(), Vec::new()));

    // The opt-in for the straight path: three tables, and nothing there but to read and to add.
    let direct = ["clock", "lock_key", "policy"].map(String::from).to_vec();
    assert_eq!(
        rights(&admin, "once_direct").await,
        (direct, ["intent", "outbox", "outbox_position", "scope"].map(String::from).to_vec())
    );
    let more = "SELECT relname::text FROM pg_class WHERE relnamespace = 'once'::regnamespace AND relkind IN ('r', 'p')
        AND (has_table_privilege('once_direct', oid, 'UPDATE, DELETE, TRUNCATE, REFERENCES, TRIGGER')
             OR has_table_privilege('once_direct', oid, 'INSERT') AND relname NOT IN ('intent', 'outbox'))";
    assert_eq!(list(&admin, more).await, Vec::<String>::new());

    flow(&users["once_app"], "app's").await;
    for (role, client) in &users {
        for table in &tables {
            denied(client, &format!("SELECT * FROM {table}")).await;
            denied(client, &format!("DELETE FROM {table}")).await;
            denied(client, &format!("INSERT INTO {table} DEFAULT VALUES")).await;
        }
        for view in &views {
            let sql = format!("SELECT * FROM once.{view}");
            if *role == "once_app" {
                denied(client, &sql).await;
            } else {
                client.batch_execute(&sql).await.unwrap();
            }
        }
        let writes = format!(
            "SELECT relname::text FROM pg_class WHERE relnamespace = 'once'::regnamespace AND relkind IN ('r', 'p', 'v')
             AND has_table_privilege('{role}', oid, 'INSERT, UPDATE, DELETE, TRUNCATE, REFERENCES, TRIGGER')"
        );
        assert_eq!(list(&admin, &writes).await, Vec::<String>::new(), "{role} writes nowhere, not even through a view");
        denied(client, "DELETE FROM once.intents").await;
        denied(client, "CREATE TABLE once.mine ()").await;
        denied(client, "CREATE OR REPLACE FUNCTION once.clock() RETURNS timestamptz LANGUAGE sql AS 'SELECT now()'")
            .await;
        if *role != "once_ops" {
            denied(client, "SELECT once.purge()").await;
            denied(client, "SELECT once.recover()").await;
            denied(client, "SELECT once.purge_inbox()").await;
            denied(client, "SELECT once.inbox_replay('flow', 'a', 'r')").await;
            denied(client, "SELECT once.inbox_discard('flow', '{1}', 'a', 'r')").await;
            denied(client, "SELECT once.settle('flow', 'f', 'failed', 'a', 'r')").await;
        }
    }
    denied(&users["once_reader"], "SELECT once.claim('s', 'k', sha256('x'))").await;
    denied(&users["once_ops"], "SELECT once.claim('s', 'k', sha256('x'))").await;
    let operate =
        "SELECT once.settle('flow', 'f', 'failed', 'a', 'r'); SELECT once.recover(); SELECT once.purge(10, true);
         SELECT once.inbox_replay('flow', 'a', 'r'); SELECT once.inbox_discard('flow', '{1}', 'a', 'r');
         SELECT once.purge_inbox()";
    users["once_ops"].batch_execute(operate).await.unwrap();
    assert_eq!(db.status("flow", "f").await.as_deref(), Some("failed_final"));
}

/// Functions and operators named like the catalog's, in a schema of the caller's, before everything else: each
/// would note who ran it. Temporary tables named like pgonce's, too.
const EVIL: &str = r#"
CREATE TABLE evil.ran (what text, as_whom text);
GRANT ALL ON evil.ran TO PUBLIC;
GRANT USAGE ON SCHEMA evil TO PUBLIC;
CREATE FUNCTION evil.note(what text) RETURNS void LANGUAGE sql AS 'INSERT INTO evil.ran VALUES (what, current_user)';
DO $do$
DECLARE
    v_signature text;
BEGIN
    FOREACH v_signature IN ARRAY ARRAY[
        'clock_timestamp() RETURNS timestamptz', 'now() RETURNS timestamptz', 'gen_random_uuid() RETURNS uuid',
        'octet_length(text) RETURNS int', 'octet_length(bytea) RETURNS int', 'strpos(text, text) RETURNS int',
        'substr(text, int) RETURNS text', 'current_setting(text, boolean) RETURNS text', 'current_setting(text) RETURNS text',
        'set_config(text, text, boolean) RETURNS text', 'hashtextextended(text, bigint) RETURNS bigint',
        'to_hex(bigint) RETURNS text', 'lpad(text, int, text) RETURNS text', 'encode(bytea, text) RETURNS text',
        'pg_try_advisory_xact_lock(bigint) RETURNS boolean', 'split_part(text, text, int) RETURNS text',
        'sha256(bytea) RETURNS bytea', 'convert_to(text, name) RETURNS bytea', 'left(text, int) RETURNS text',
        'nextval(regclass) RETURNS bigint', 'jsonb_typeof(jsonb) RETURNS text', 'to_regproc(text) RETURNS regproc',
        'texteq_evil(text, text) RETURNS boolean', 'byteaeq_evil(bytea, bytea) RETURNS boolean',
        'uuideq_evil(uuid, uuid) RETURNS boolean', 'tsle_evil(timestamptz, timestamptz) RETURNS boolean']
    LOOP
        EXECUTE format('CREATE FUNCTION evil.%s LANGUAGE plpgsql AS %L', v_signature,
            format('BEGIN PERFORM evil.note(%L); RETURN NULL; END', v_signature));
    END LOOP;
    CREATE OPERATOR evil.= (LEFTARG = text, RIGHTARG = text, FUNCTION = evil.texteq_evil);
    CREATE OPERATOR evil.<> (LEFTARG = bytea, RIGHTARG = bytea, FUNCTION = evil.byteaeq_evil);
    CREATE OPERATOR evil.= (LEFTARG = bytea, RIGHTARG = bytea, FUNCTION = evil.byteaeq_evil);
    CREATE OPERATOR evil.= (LEFTARG = uuid, RIGHTARG = uuid, FUNCTION = evil.uuideq_evil);
    CREATE OPERATOR evil.<= (LEFTARG = timestamptz, RIGHTARG = timestamptz, FUNCTION = evil.tsle_evil);
    CREATE OPERATOR evil.> (LEFTARG = timestamptz, RIGHTARG = timestamptz, FUNCTION = evil.tsle_evil);
END $do$;
CREATE TABLE evil.intent (key text);
CREATE TABLE evil.pg_proc (oid oid)"#;

#[tokio::test]
async fn a_hostile_search_path_changes_nothing() {
    let db = TestDb::new().await;
    let admin = db.client().await;
    let user = format!("mallory_{}", db.name());
    admin
        .batch_execute(&format!(
            "CREATE ROLE {user} LOGIN IN ROLE once_app, once_ops, once_relay; CREATE SCHEMA evil AUTHORIZATION {user};
             CREATE FUNCTION public.probe(key text) RETURNS boolean LANGUAGE sql AS 'SELECT NULL::boolean'"
        ))
        .await
        .unwrap();
    let client = become_user(db.direct_url(), &user).await;
    client.batch_execute(EVIL).await.unwrap();
    client
        .batch_execute("SET search_path = evil, pg_temp, pg_catalog; CREATE TEMP TABLE scope (scope text); CREATE TEMP TABLE pg_roles (rolname text)")
        .await
        .unwrap();
    // The trap is armed: an unqualified call of this session does fall into it.
    client.batch_execute("SELECT now(), 'a'::text = 'b'::text").await.unwrap();
    assert_eq!(list(&admin, "SELECT as_whom FROM evil.ran").await, [user.clone(), user]);
    client.batch_execute("TRUNCATE evil.ran").await.unwrap();

    flow(&client, "key").await;
    client
        .batch_execute(
            "SELECT once.define_scope('probed', '{\"stale\": \"probe\", \"probe\": \"public.probe\", \"lease\": \"1s\", \"key_pattern\": \"k\"}');
             SELECT once.claim('probed', 'key', pg_catalog.sha256('x'), p_mode => 'leased');
             SELECT once.fingerprint('{\"a\": 1e22, \"é\": [null]}')",
        )
        .await
        .unwrap();
    db.travel(std::time::Duration::from_secs(60)).await;
    let operate =
        "SELECT once.recover(); SELECT once.purge(10, true); SELECT once.settle('probed', 'key', 'failed', 'a', 'r');
         SELECT once.inbox_replay('flow', 'a', 'r'); SELECT once.inbox_discard('flow', '{1}', 'a', 'r');
         SELECT once.purge_inbox(); SELECT once.call_take('w', 10); SELECT once.call_recover(); SELECT once.call_doubts('w', 10);
         SELECT once.call_sweep(); SELECT once.call_open(); SELECT once.provider_heard('flow key', true); SELECT once.purge_calls()";
    client.batch_execute(operate).await.unwrap();
    assert_eq!(db.status("probed", "key").await.as_deref(), Some("failed_final"));
    let ran = list(&admin, "SELECT what || ' as ' || as_whom FROM evil.ran").await;
    assert!(ran.is_empty(), "{ran:?}");
}

/// Functions that had fewer parameters in the first version: a `CREATE OR REPLACE` would leave them beside the new
/// ones, and calls with the old number of arguments would be ambiguous.
const FIRST_VERSION: &str = "
    DELETE FROM once.migration WHERE version > 1;
    DROP TABLE once.outbox_home, once.outbox, once.sink, once.lane, once.relay, once.held, once.outbox_replay CASCADE;
    DROP SEQUENCE once.outbox_position;
    DROP TYPE once.claim_answer, once.completion_answer, once.renewal_answer CASCADE;
    DROP FUNCTION once.claim_any, once.own, once.own_existing, once.sort_stale;
    DROP TABLE once.inbox, once.admitted, once.admitted_range, once.inbox_stream, once.entity_version, once.consumer CASCADE;
    DROP TYPE once.message_result, once.inbox_state CASCADE;
    DROP TABLE once.import_row, once.import_batch, once.import_job CASCADE; DROP TYPE once.import_state CASCADE;
    DROP TABLE once.call_notice, once.call_evidence, once.call, once.provider_state, once.provider CASCADE;
    DROP TYPE once.call_state CASCADE;
    DROP TABLE once.job, once.job_ended, once.job_unique, once.job_wake, once.job_take, once.queue, once.queue_mark, once.queue_hint, once.schedule CASCADE;
    DROP SEQUENCE once.job_id; DROP TYPE once.job_state, once.job_end, once.unique_scope CASCADE;
    CREATE FUNCTION once.claim_any(p_scope text, p_key text, p_fingerprint bytea, p_mode text, p_claimed_by text, p_lease interval,
        p_wait interval, p_tenant text) RETURNS once.claim_result LANGUAGE sql AS 'SELECT NULL::once.claim_result';
    CREATE FUNCTION once.own(p_row once.intent, p_policy once.scope, p_tenant text, p_scope text, p_key text, p_fingerprint bytea,
        p_lock bigint, p_claimed_by text) RETURNS once.claim_result LANGUAGE sql AS 'SELECT NULL::once.claim_result';
    CREATE FUNCTION once.own_existing(p_seen once.intent, p_policy once.scope, p_claimed_by text)
        RETURNS once.claim_result LANGUAGE sql AS 'SELECT NULL::once.claim_result';
    CREATE FUNCTION once.sort_stale(p_row once.intent, p_policy once.scope, p_actor text) RETURNS text LANGUAGE sql AS 'SELECT NULL::text'";

#[tokio::test]
async fn the_first_version_is_brought_up_to_date() {
    let db = TestDb::new().await;
    let mut client = db.client().await;
    let made = objects(&client).await;
    client.batch_execute(FIRST_VERSION).await.unwrap();
    assert_ne!(objects(&client).await, made);
    let applied = migrate::apply(&mut client, false).await.unwrap().applied;
    assert_eq!(applied.len(), migrate::migrations().len() - 1, "{applied:?}");
    assert_eq!(objects(&client).await, made, "nothing of the old is left, and everything of the new is there");
    flow(&client, "key").await;
}

#[tokio::test]
async fn drift_can_be_told() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let sql = "SELECT proname::text, prosrc FROM pg_proc WHERE pronamespace = 'once'::regnamespace";
    let rows = client.query(sql, &[]).await.unwrap();
    let installed: BTreeMap<String, String> = rows.iter().map(|row| (row.get(0), row.get(1))).collect();
    assert_eq!(installed.len(), rows.len(), "no function is overloaded");
    let known: BTreeMap<String, String> = migrate::function_bodies().into_iter().collect();
    assert_eq!(known.keys().collect::<Vec<_>>(), installed.keys().collect::<Vec<_>>());
    for (name, body) in &known {
        assert_eq!(&installed[name], body, "{name}");
    }
}
