-- The job, locked, if the caller holds it; else raises.
CREATE OR REPLACE FUNCTION once.hold_job(p_job_id bigint, p_claim_id uuid) RETURNS once.job LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_job once.job;
BEGIN
    SELECT * INTO v_job FROM once.job j WHERE j.id = p_job_id AND j.claim_id = p_claim_id FOR UPDATE;
    IF NOT FOUND THEN
        PERFORM once.job_lost(ARRAY[p_job_id]);
    END IF;
    RETURN v_job;
END $$;
