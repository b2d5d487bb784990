-- Looks again for the calls of notices that had none: a transaction that made the call, or learned its reference, may
-- have been under way when the notice came, neither seeing the other. Workers call it. What others hold is skipped, never
-- waited for. Returns how many found their call.
CREATE OR REPLACE FUNCTION once.call_sweep(p_limit int DEFAULT 100)
RETURNS int LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_notice once.call_notice;
    v_call once.call;
    v_count int := 0;
BEGIN
    FOR v_notice IN
        SELECT * FROM once.call_notice n WHERE n.call_id IS NULL AND n.look_at <= once.clock()
        ORDER BY n.look_at LIMIT greatest(0, least(p_limit, 1000)) FOR UPDATE SKIP LOCKED
    LOOP
        SELECT * INTO v_call FROM once.find_notified(v_notice, false);
        IF FOUND THEN
            PERFORM once.apply_notice(v_notice, v_call);
            v_count := v_count + 1;
        ELSE
            UPDATE once.call_notice n SET looked = n.looked + 1,
                look_at = once.clock() + least(interval '5 minutes', interval '1 second' * power(2, least(n.looked, 20)))
            WHERE n.provider = v_notice.provider AND n.notice_id = v_notice.notice_id;
        END IF;
    END LOOP;
    RETURN v_count;
END $$;
