-- What became of a job: its state (ready, parked, delayed, running, succeeded, buried, cancelled), and its result. No row:
-- it never was, or it succeeded, and its queue keeps nothing of that.
CREATE OR REPLACE FUNCTION once.look_job(p_job_id bigint, p_tenant text DEFAULT '')
RETURNS TABLE (state text, attempts int, result jsonb, last_error text, enqueued_at timestamptz, ended_at timestamptz)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    -- One statement, so that a job that is moved just now is in one of both.
    RETURN QUERY
    SELECT j.state, j.attempts, NULL::jsonb, j.last_error, j.enqueued_at, NULL::timestamptz
    FROM once.jobs j WHERE j.id = p_job_id AND j.tenant = p_tenant
    UNION ALL
    SELECT e.state::text, e.attempts, e.result, e.last_error, e.enqueued_at, e.ended_at
    FROM once.job_ended e WHERE e.id = p_job_id AND e.tenant = p_tenant;
END $$;
