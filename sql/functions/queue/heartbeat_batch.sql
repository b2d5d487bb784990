-- Prolongs the leases of jobs that this worker holds, a row a job, in the order given:
--   held    it goes on; leased_until is the new end. Where somebody has the row locked just now, such as this worker's
--           own finish, nothing is waited for, and the end is the old one;
--   cancel  as held, and it was asked to stop: drop the work, and call once.bury or once.retry, which cancel it;
--   lost    it belongs to somebody else, or has ended: stop the work, nothing of it will be accepted.
CREATE OR REPLACE FUNCTION once.heartbeat_batch(p_job_ids bigint[], p_claim_ids uuid[], p_lease interval DEFAULT NULL)
RETURNS TABLE (ordinal int, job_id bigint, verdict text, leased_until timestamptz)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_material = off AS $$
#variable_conflict use_column
DECLARE
    v_now timestamptz := once.clock();
    v_locked bigint[];
BEGIN
    PERFORM once.check_jobs(p_job_ids, p_claim_ids);
    IF (p_lease BETWEEN interval '10 milliseconds' AND interval '1 day') IS FALSE THEN
        RAISE EXCEPTION 'lease out of range' USING ERRCODE = 'P4020', HINT = 'A lease lasts 10 ms to 1 day.';
    END IF;
    v_locked := ARRAY(SELECT j.id FROM unnest(p_job_ids, p_claim_ids) e (id, claim_id) JOIN once.job j ON j.id = e.id
        WHERE j.claim_id = e.claim_id FOR UPDATE OF j SKIP LOCKED);
    -- Whatever lasts this long goes to the line running: takes need not walk over it any more.
    UPDATE once.job j SET state = 'running', leased_until = greatest(j.leased_until, v_now + coalesce(p_lease, q.lease)),
        rescue_at = greatest(j.leased_until, v_now + coalesce(p_lease, q.lease))
        FROM once.queue q WHERE j.id = ANY (v_locked) AND q.id = j.queue;
    RETURN QUERY
    SELECT e.place::int, e.id, CASE WHEN j.id IS NULL THEN 'lost' WHEN j.cancel THEN 'cancel' ELSE 'held' END, j.leased_until
    FROM unnest(p_job_ids, p_claim_ids) WITH ORDINALITY e (id, claim_id, place)
    LEFT JOIN once.job j ON j.id = e.id AND j.claim_id = e.claim_id
    ORDER BY e.place;
END $$;
