-- Before jobs are finished: keeps those that have a result, or whose queue keeps all. What the caller does not hold is for
-- once.finish_batch to refuse, and this goes with it.
CREATE OR REPLACE FUNCTION once.keep_jobs(p_job_ids bigint[], p_claim_ids uuid[], p_results jsonb[]) RETURNS void
LANGUAGE plpgsql VOLATILE SET jit = off SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_material = off AS $$
DECLARE
    v_now timestamptz := once.clock();
BEGIN
    IF p_results IS NOT NULL THEN
        PERFORM once.check_parallel(cardinality(p_job_ids), once.shape(p_results));
        IF EXISTS (SELECT FROM unnest(p_results) r WHERE pg_column_size(r) > 1048576) THEN
            RAISE EXCEPTION 'a job''s result is larger than 1 MiB' USING ERRCODE = 'P4005', HINT = 'Store it, and return a reference.';
        END IF;
    END IF;
    -- Locked here already: a rival that ends the same job waits, and is refused, rather than meet in the other table.
    PERFORM FROM once.job j WHERE j.id = ANY (p_job_ids) ORDER BY j.id FOR UPDATE;
    INSERT INTO once.job_ended (id, ended_at, expires_at, enqueued_at, queue, priority, attempts, attempts_max, state, tenant,
                                key, unique_key, worker, payload, result)
    SELECT j.id, v_now, v_now + coalesce(q.keep, interval '1 day'), j.enqueued_at, j.queue, j.priority, j.attempts,
           j.attempts_max, 'succeeded', j.tenant, j.key, j.unique_key, j.worker, j.payload, e.result
    FROM unnest(p_job_ids, p_claim_ids, p_results) e (id, claim_id, result) JOIN once.job j ON j.id = e.id
    JOIN once.queue q ON q.id = j.queue
    WHERE j.claim_id = e.claim_id AND (q.keep IS NOT NULL OR e.result IS NOT NULL)
    ON CONFLICT DO NOTHING;
END $$;
