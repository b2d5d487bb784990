-- Removes what is over: ended jobs whose time is up (never buried ones: they wait for somebody), and windows of uniqueness.
-- At most p_limit of each, skipping locked ones; returns how many went, call it until 0.
CREATE OR REPLACE FUNCTION once.purge_jobs(p_limit int DEFAULT 10000)
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_now timestamptz := once.clock();
    v_limit int := greatest(0, least(p_limit, 100000));
    v_ended bigint;
    v_windows bigint;
BEGIN
    DELETE FROM once.job_ended d WHERE d.id = ANY (ARRAY(
        SELECT e.id FROM once.job_ended e WHERE e.expires_at <= v_now ORDER BY e.expires_at LIMIT v_limit FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS v_ended = ROW_COUNT;
    DELETE FROM once.job_unique d WHERE d.ctid = ANY (ARRAY(
        SELECT u.ctid FROM once.job_unique u WHERE u.until <= v_now ORDER BY u.until LIMIT v_limit FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS v_windows = ROW_COUNT;
    RETURN v_ended + v_windows;
END $$;
