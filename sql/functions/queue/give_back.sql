-- Gives jobs back that this worker holds and did not begin: they are ready again, and the attempt does not count. Those
-- that it does not hold any more are passed over; returns how many went back.
CREATE OR REPLACE FUNCTION once.give_back(p_job_ids bigint[], p_claim_ids uuid[])
RETURNS int LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_material = off AS $$
DECLARE
    v_count int := once.check_jobs(p_job_ids, p_claim_ids);
    v_back int := 0;
    v_job once.job;
BEGIN
    FOR v_job IN
        SELECT j.* FROM unnest(p_job_ids, p_claim_ids) e (id, claim_id) JOIN once.job j ON j.id = e.id
        WHERE j.claim_id = e.claim_id ORDER BY j.id FOR UPDATE OF j
    LOOP
        IF v_job.cancel THEN
            PERFORM once.end_jobs(ARRAY[v_job.id], 'cancelled', NULL);
        ELSE
            PERFORM once.put_back(v_job, v_job.attempts - 1, interval '0', NULL);
        END IF;
        v_back := v_back + 1;
    END LOOP;
    RETURN v_back;
END $$;
