-- Ends a job that this worker holds, in the transaction of its effect: both commit, or neither. A stale worker's call
-- raises, and so takes its effect back. A result, if there is one, is kept for as long as the queue says (a day, if nothing).
CREATE OR REPLACE FUNCTION once.finish(p_job_id bigint, p_claim_id uuid, p_result jsonb DEFAULT NULL)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM once.finish_batch(ARRAY[p_job_id], ARRAY[p_claim_id], CASE WHEN p_result IS NOT NULL THEN ARRAY[p_result] END);
END $$;
