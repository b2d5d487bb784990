-- The arrays of a batch of words about jobs belong together: an id and a claim id each. Returns their number.
CREATE OR REPLACE FUNCTION once.check_jobs(p_job_ids bigint[], p_claim_ids uuid[]) RETURNS int LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    v_count int := once.check_parallel(cardinality(p_job_ids), once.shape(p_job_ids), coalesce(once.shape(p_claim_ids), ''));
BEGIN
    IF array_position(p_job_ids, NULL) IS NOT NULL OR array_position(p_claim_ids, NULL) IS NOT NULL THEN
        RAISE EXCEPTION 'a job''s id or claim id is NULL' USING ERRCODE = 'P4020', HINT = 'once.take returned both.';
    END IF;
    RETURN v_count;
END $$;
