-- Applies what was told about a call before it was there, or before its reference was. What others hold is skipped: they
-- are at it. The caller holds the call's row. Returns how many there were.
CREATE OR REPLACE FUNCTION once.call_match(p_call once.call) RETURNS int LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_notice once.call_notice;
    v_call once.call := p_call;
    v_count int := 0;
BEGIN
    FOR v_notice IN
        SELECT * FROM once.call_notice n WHERE n.provider = p_call.provider AND n.call_id IS NULL
          AND (n.provider_key = p_call.id::text OR n.reference = p_call.reference)
        ORDER BY n.received_at, n.notice_id FOR UPDATE SKIP LOCKED
    LOOP
        IF v_count > 0 THEN
            SELECT * INTO STRICT v_call FROM once.call c WHERE c.id = p_call.id;
        END IF;
        PERFORM once.apply_notice(v_notice, v_call);
        v_count := v_count + 1;
    END LOOP;
    RETURN v_count;
END $$;
