-- Calls whose sender vanished: nobody can say whether they went out, so they are unknown. Returns how many.
CREATE OR REPLACE FUNCTION once.call_recover(p_limit int DEFAULT 100)
RETURNS int LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_policy once.provider;
    v_call once.call;
    v_count int := 0;
BEGIN
    FOR v_policy IN SELECT * FROM once.provider p WHERE p.provider <> '' LOOP
        FOR v_call IN
            SELECT * FROM once.call c WHERE c.provider = v_policy.provider AND c.state = 'sent' AND c.leased_until <= once.clock()
            ORDER BY c.leased_until LIMIT greatest(0, least(p_limit, 1000) - v_count) FOR UPDATE SKIP LOCKED
        LOOP
            PERFORM once.call_conclude(v_call, v_policy, 'unclear', 'clock', v_call.worker,
                p_note => 'its sender did not say what became of it');
            v_count := v_count + 1;
        END LOOP;
    END LOOP;
    RETURN v_count;
END $$;
