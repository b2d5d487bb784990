-- Limits of a take, and the isolation level that it needs: with a snapshot of the whole transaction, two takes could each
-- not see what the other has taken of a key.
CREATE OR REPLACE FUNCTION once.check_take(p_queue text, p_worker text, p_limit int, p_lease interval, p_tenant text)
RETURNS void LANGUAGE plpgsql STABLE AS $$
BEGIN
    PERFORM once.check_queue(coalesce(p_tenant, ''), p_queue);
    IF p_limit IS NULL OR p_limit NOT BETWEEN 1 AND 10000 OR octet_length(p_worker) > 255
       OR (p_lease BETWEEN interval '10 milliseconds' AND interval '1 day') IS FALSE THEN
        RAISE EXCEPTION 'limit, lease or worker out of range' USING ERRCODE = 'P4020',
            HINT = 'Take 1 to 10000 jobs, for 10 ms to 1 day; a worker''s name has at most 255 bytes.';
    END IF;
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE EXCEPTION 'jobs are taken in READ COMMITTED only' USING ERRCODE = 'P4064',
            HINT = 'Begin the transaction of the take with BEGIN ISOLATION LEVEL READ COMMITTED; finish may be called in any level.';
    END IF;
END $$;
