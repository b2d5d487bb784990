-- Sorts claims whose lease is over, oldest first: what their owners will never tell any more.
-- Each is decided by its scope's policy (once.sort_stale); what policy says to hold is held, never rerun.
CREATE OR REPLACE FUNCTION once.recover(p_limit int DEFAULT 100, p_actor text DEFAULT 'recover')
RETURNS TABLE (tenant text, scope text, key text, class text, action text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_row once.intent;
    v_policy once.scope;
BEGIN
    FOR v_row IN
        SELECT i.* FROM once.intent i
        WHERE i.status = 'processing' AND i.locked_until <= once.clock()
        ORDER BY i.created_at LIMIT greatest(0, least(p_limit, 10000)) FOR UPDATE SKIP LOCKED
    LOOP
        SELECT * INTO v_policy FROM once.policy(v_row.tenant, v_row.scope);
        tenant := v_row.tenant;
        scope := v_row.scope;
        key := v_row.key;
        class := once.sort_stale(v_row, v_policy, p_actor);
        IF class = 'safe_to_retry' THEN
            PERFORM once.finish_row(v_row, v_policy, 'failed_retryable', p_actor, class, NULL,
                p_failure_code => 'lease_expired',
                p_failure_message => 'the lease ended without an outcome; policy says that it may run again');
        END IF;
        action := CASE class
            WHEN 'already_succeeded' THEN 'marked succeeded: the probe found the effect'
            WHEN 'safe_to_retry' THEN 'made claimable again'
            WHEN 'abandoned' THEN 'marked failed: the attempts are used up'
            ELSE 'held as uncertain: settle it' END;
        RETURN NEXT;
    END LOOP;
END $$;
