-- Gives a unique key to the job p_id, and returns p_id; or returns, negated, the id of the job that has it. An uncommitted
-- rival is waited for: whether its job exists is not known before. A key that is taken while its job waits stays locked
-- until the caller has ended: so the job is not taken before, and will see what this transaction wrote.
CREATE OR REPLACE FUNCTION once.reserve_unique(
    p_queue int, p_tenant text, p_unique_key text, p_scope once.unique_scope, p_id bigint, p_window interval)
RETURNS bigint LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_now timestamptz := once.clock();
    v_until timestamptz := CASE WHEN p_scope = 'window' THEN v_now + p_window END;
    v_has bigint;
    v_has_until timestamptz;
BEGIN
    LOOP
        INSERT INTO once.job_unique (job_id, until, queue, tenant, unique_key)
            VALUES (p_id, v_until, p_queue, p_tenant, p_unique_key) ON CONFLICT DO NOTHING;
        IF FOUND THEN
            RETURN p_id;
        END IF;
        IF p_scope = 'waiting' THEN
            SELECT u.job_id, u.until INTO v_has, v_has_until FROM once.job_unique u
                WHERE u.queue = p_queue AND u.tenant = p_tenant AND u.unique_key = p_unique_key FOR KEY SHARE;
        ELSE
            SELECT u.job_id, u.until INTO v_has, v_has_until FROM once.job_unique u
                WHERE u.queue = p_queue AND u.tenant = p_tenant AND u.unique_key = p_unique_key;
        END IF;
        IF FOUND AND (v_has_until > v_now) IS NOT FALSE THEN
            RETURN -v_has;
        END IF;
        -- Its window is over: whoever replaces it first has it.
        UPDATE once.job_unique u SET job_id = p_id, until = v_until
            WHERE u.queue = p_queue AND u.tenant = p_tenant AND u.unique_key = p_unique_key AND u.until <= v_now;
        IF FOUND THEN
            RETURN p_id;
        END IF;
    END LOOP;
END $$;
