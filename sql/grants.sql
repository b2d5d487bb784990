-- Who may do what: run last by every migrate. PUBLIC has nothing; applications call functions, operators
-- also decide, readers read views; tables are nobody's but the owner's.
DO $$
DECLARE
    v_app text[] := ARRAY['claim', 'peek', 'succeed', 'fail', 'record_failure', 'renew', 'release', 'resolve', 'doubt',
        'claim_batch', 'claim_alone', 'peek_batch', 'succeed_batch', 'succeed_alone', 'renew_batch',
        'canonical_json', 'fingerprint', 'fingerprint_bytes', 'define_scope', 'scope_rules', 'try_lock', 'tally', 'schema_version', 'emit', 'emit_batch',
        'count_uncertain',
        'admit', 'admit_batch', 'note_result', 'advance', 'baseline', 'define_consumer', 'receive', 'receive_batch',
        'inbox_take', 'inbox_finish', 'inbox_fail', 'inbox_wait', 'inbox_recover',
        'define_queue', 'enqueue', 'enqueue_batch', 'take', 'take_unsorted', 'finish', 'finish_batch', 'retry', 'retry_batch', 'bury', 'bury_batch',
        'give_back', 'heartbeat', 'heartbeat_batch', 'cancel_job', 'cancel_batch', 'look_job', 'count_jobs',
        'define_schedule', 'drop_schedule', 'due_schedules', 'fire_schedule', 'fault_schedule',
        'call', 'call_key', 'call_notice', 'define_provider',
        'import_open', 'import_begin', 'import_apply', 'import_record', 'import_header', 'import_end', 'import_result', 'import_failures'];
    v_ops text[] := ARRAY['settle', 'recover', 'purge', 'purge_rows', 'schema_version', 'define_scope', 'scope_rules', 'sink_lag',
        'resume_held', 'resume_sink', 'rotate_outbox', 'keep_outbox', 'adopt_outbox', 'ask_replay', 'continue_replay',
        'record_replay', 'abandon_replay', 'outbox_messages', 'define_consumer', 'baseline', 'inbox_recover', 'inbox_replay', 'inbox_discard',
        'purge_inbox',
        'define_queue', 'enqueue', 'cancel_job', 'cancel_batch', 'retry_buried', 'discard_buried', 'purge_jobs', 'count_jobs',
        'define_schedule', 'drop_schedule',
        'define_provider', 'call_settle', 'purge_calls',
        'import_result', 'import_abandon', 'purge_imports'];
    -- Reads every message, whatever its tenant: for relays, and nobody else.
    v_relay text[] := ARRAY['open_sink', 'hold_lanes', 'drop_lanes', 'outbox_difference', 'outbox_messages', 'advance_lanes',
        'held_keys', 'held_due', 'settle_held', 'disable_sink', 'rotate_outbox', 'sink_lag',
        'call_take', 'call_heard', 'call_doubts', 'call_asked', 'call_ask_sql', 'call_recover', 'call_sweep', 'provider_heard',
        'call_open'];
    v_views text[] := ARRAY['intents', 'scopes', 'stale_claims', 'uncertain', 'most_retried', 'suppression', 'sizes',
        'growth', 'audit_trail', 'history', 'migrations', 'sinks', 'outbox_parked', 'outbox_segments', 'outbox_replays', 'outbox_log',
        'consumers', 'admitted_messages', 'inbox_messages', 'inbox_status', 'inbox_parked',
        'queues', 'jobs', 'jobs_ended', 'jobs_buried', 'queue_status', 'schedules',
        'calls', 'calls_unknown', 'calls_evidence', 'calls_notices', 'calls_open', 'providers',
        'imports', 'import_batches', 'import_errors'];
    v_role text;
    v_signature text;
    v_view text;
BEGIN
    REVOKE ALL ON SCHEMA once FROM PUBLIC;
    REVOKE ALL ON ALL FUNCTIONS IN SCHEMA once FROM PUBLIC;
    REVOKE ALL ON ALL TABLES IN SCHEMA once FROM PUBLIC;
    REVOKE ALL ON ALL SEQUENCES IN SCHEMA once FROM PUBLIC;
    FOR v_role IN SELECT r.rolname FROM pg_catalog.pg_roles r WHERE r.rolname IN ('once_app', 'once_ops', 'once_reader', 'once_relay') LOOP
        EXECUTE format('GRANT USAGE ON SCHEMA once TO %I', v_role);
        EXECUTE format('GRANT EXECUTE ON FUNCTION once.clock() TO %I', v_role); -- views are read with the reader's rights
        FOR v_signature IN
            SELECT p.oid::regprocedure::text FROM pg_catalog.pg_proc p
            WHERE p.pronamespace = 'once'::regnamespace
              AND ((v_role = 'once_app' AND p.proname = ANY (v_app)) OR (v_role = 'once_ops' AND p.proname = ANY (v_ops))
                   OR (v_role = 'once_relay' AND p.proname = ANY (v_relay)) OR (v_role = 'once_reader' AND p.proname = 'sink_lag')
                   OR p.proname = 'schema_version')
        LOOP
            EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %I', v_signature, v_role);
        END LOOP;
        IF v_role IN ('once_ops', 'once_reader') THEN
            FOREACH v_view IN ARRAY v_views LOOP
                EXECUTE format('GRANT SELECT ON once.%I TO %I', v_view, v_role);
            END LOOP;
        END IF;
    END LOOP;
    -- The opt-in for the direct statements (sql/direct): the straight path without function calls.
    IF EXISTS (SELECT 1 FROM pg_catalog.pg_roles r WHERE r.rolname = 'once_direct') THEN
        GRANT USAGE ON SCHEMA once TO once_direct;
        GRANT SELECT, INSERT ON once.intent TO once_direct;
        GRANT SELECT ON once.scope TO once_direct;
        GRANT INSERT ON once.outbox TO once_direct;
        GRANT USAGE ON SEQUENCE once.outbox_position TO once_direct;
        GRANT EXECUTE ON FUNCTION once.clock(), once.lock_key(text, text, text), once.policy(text, text) TO once_direct;
    END IF;
END $$;
