-- Stops a job: one that does not run ends as cancelled at once; one that runs is told so by its next heartbeat, and ends
-- then, unless its finish comes first. Returns cancelled, asked, or NULL where no such job is alive.
CREATE OR REPLACE FUNCTION once.cancel_job(p_job_id bigint, p_tenant text DEFAULT '')
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_job once.job;
BEGIN
    SELECT * INTO v_job FROM once.job j WHERE j.id = p_job_id AND j.tenant = p_tenant FOR UPDATE;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    IF v_job.claim_id IS NOT NULL THEN
        UPDATE once.job j SET cancel = true WHERE j.id = p_job_id;
        RETURN 'asked';
    END IF;
    PERFORM once.end_jobs(ARRAY[p_job_id], 'cancelled', NULL);
    RETURN 'cancelled';
END $$;
