-- once.finish for many jobs: all of them, or none.
CREATE OR REPLACE FUNCTION once.finish_batch(p_job_ids bigint[], p_claim_ids uuid[], p_results jsonb[] DEFAULT NULL)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
    v_count int := once.check_jobs(p_job_ids, p_claim_ids);
    v_now timestamptz := once.clock();
    v_gone bigint[];
    v_named once.job[];  -- those that have a key, or a unique key until now
BEGIN
    IF p_results IS NOT NULL THEN
        PERFORM once.check_parallel(v_count, once.shape(p_results));
        IF EXISTS (SELECT FROM unnest(p_results) r WHERE pg_column_size(r) > 1048576) THEN
            RAISE EXCEPTION 'a job''s result is larger than 1 MiB' USING ERRCODE = 'P4005', HINT = 'Store it, and return a reference.';
        END IF;
    END IF;
    WITH gone AS (
        DELETE FROM once.job j USING unnest(p_job_ids, p_claim_ids, p_results) e (id, claim_id, result)
        WHERE j.id = e.id AND j.claim_id = e.claim_id AND j.state = 'running'
        RETURNING j AS job, e.result
    ), kept AS (
        INSERT INTO once.job_ended (id, ended_at, expires_at, enqueued_at, queue, priority, attempts, attempts_max, state, tenant,
                                    key, unique_key, worker, payload, result)
        SELECT (g.job).id, v_now, v_now + coalesce(q.keep, interval '1 day'), (g.job).enqueued_at, (g.job).queue, (g.job).priority,
               (g.job).attempts, (g.job).attempts_max, 'succeeded', (g.job).tenant, (g.job).key, (g.job).unique_key,
               (g.job).worker, (g.job).payload, g.result
        FROM gone g JOIN once.queue q ON q.id = (g.job).queue WHERE q.keep IS NOT NULL OR g.result IS NOT NULL
    )
    SELECT array_agg((g.job).id), array_agg(g.job) FILTER (WHERE (g.job).key IS NOT NULL OR (g.job).unique_scope = 'alive')
    INTO v_gone, v_named FROM gone g;
    IF v_count > 0 AND cardinality(v_gone) IS DISTINCT FROM v_count THEN
        PERFORM once.job_lost(ARRAY(SELECT e FROM unnest(p_job_ids) e WHERE e <> ALL (coalesce(v_gone, '{}'))));
    END IF;
    IF v_named IS NOT NULL THEN
        PERFORM once.free_names(v_named);
    END IF;
END $$;
