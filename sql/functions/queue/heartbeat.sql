-- Prolongs the lease of a job that this worker holds: returns its new end. Raises where the job is lost.
CREATE OR REPLACE FUNCTION once.heartbeat(p_job_id bigint, p_claim_id uuid, p_lease interval DEFAULT NULL)
RETURNS timestamptz LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_verdict text;
    v_until timestamptz;
BEGIN
    SELECT h.verdict, h.leased_until INTO v_verdict, v_until
        FROM once.heartbeat_batch(ARRAY[p_job_id], ARRAY[p_claim_id], p_lease) h;
    IF v_verdict = 'lost' THEN
        PERFORM once.job_lost(ARRAY[p_job_id]);
    END IF;
    RETURN v_until;
END $$;
