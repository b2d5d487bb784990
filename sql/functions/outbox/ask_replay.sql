-- Asks for messages to be sent to a sink again: chosen by position, time, type, topic, ordering key, tenant. Only what it got
-- before: what is still to come would be overtaken. Dry run: only the count. Audited.
CREATE OR REPLACE FUNCTION once.ask_replay(p_sink text, p_selection jsonb, p_actor text, p_reason text,
    p_rate int DEFAULT NULL, p_dry_run boolean DEFAULT false)
RETURNS TABLE (id bigint, messages bigint, oldest text, newest text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_unknown text := (SELECT string_agg(k, ', ') FROM jsonb_object_keys(p_selection) k
        WHERE k NOT IN ('from_position', 'to_position', 'from_time', 'to_time', 'topic', 'type', 'ordering_key', 'tenant', 'message_id'));
    v_last bigint;
BEGIN
    PERFORM once.check_home();
    PERFORM once.check_flags(p_dry_run);
    IF v_unknown IS NOT NULL OR NOT EXISTS (SELECT FROM once.sink s WHERE s.sink = p_sink) THEN
        RAISE EXCEPTION 'the replay cannot be made: % ', CASE WHEN v_unknown IS NULL THEN 'no such sink' ELSE 'unknown selection ' || v_unknown END
            USING ERRCODE = 'P4020', HINT = 'See once.sinks, and docs/guides/outbox.md.';
    END IF;
    SELECT count(*), min(once.message_time(r.at)), max(once.message_time(r.at)), max(r.position)
        INTO messages, oldest, newest, v_last FROM once.replayable(p_sink, p_selection, -1) r;
    IF NOT p_dry_run THEN
        PERFORM once.check_operator(p_actor, p_reason);
        INSERT INTO once.outbox_replay (sink, actor, reason, selection, rate, upto)
        VALUES (p_sink, p_actor, p_reason, p_selection, p_rate, coalesce(v_last, -1)) RETURNING once.outbox_replay.id INTO id;
        INSERT INTO once.audit (actor, action, tenant, scope, key, reason)
        VALUES (p_actor, 'outbox:replay', '', 'outbox', p_sink || ' replay ' || id || ': ' || messages || ' messages', p_reason);
    END IF;
    RETURN NEXT;
END $$;
