-- Gives a job up that will not go better: it is kept, with its reason, for somebody to look at (once.jobs_buried). The next
-- of its key goes on. One that was asked to stop is cancelled. Returns what it is now.
CREATE OR REPLACE FUNCTION once.bury(p_job_id bigint, p_claim_id uuid, p_error text DEFAULT NULL)
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_job once.job := once.hold_job(p_job_id, p_claim_id);
    v_end once.job_end := CASE WHEN v_job.cancel THEN 'cancelled' ELSE 'buried' END;
BEGIN
    PERFORM once.end_jobs(ARRAY[p_job_id], v_end, p_error);
    RETURN v_end;
END $$;
