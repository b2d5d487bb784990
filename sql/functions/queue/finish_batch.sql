-- once.finish for many jobs: all of them, or none. A claim id is there while a job runs, and only then: it is the fence.
CREATE OR REPLACE FUNCTION once.finish_batch(p_job_ids bigint[], p_claim_ids uuid[], p_results jsonb[] DEFAULT NULL)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
    v_count int := once.check_jobs(p_job_ids, p_claim_ids);
    v_gone bigint[];
    v_fences uuid[];
    v_named once.job[];  -- those that have a key, or a unique key until now
BEGIN
    IF p_results IS NOT NULL OR EXISTS (SELECT FROM once.queue q WHERE q.keep IS NOT NULL) THEN
        PERFORM once.keep_jobs(p_job_ids, p_claim_ids, p_results);
    END IF;
    IF v_count >= 100 AND p_claim_ids[1] = ALL (p_claim_ids) AND once.finish_plain(p_job_ids, p_claim_ids[1]) THEN
        RETURN;
    END IF;
    -- In the order of ids, as everybody locks them.
    WITH gone AS (
        DELETE FROM once.job j WHERE j.id = ANY (p_job_ids) AND j.claim_id = ANY (p_claim_ids)
        RETURNING j.id, j.claim_id, CASE WHEN j.key IS NOT NULL OR j.unique_scope = 'alive' THEN j END AS named
    )
    SELECT array_agg(g.id), array_agg(g.claim_id), array_agg(g.named) FILTER (WHERE (g.named).id IS NOT NULL)
    INTO v_gone, v_fences, v_named FROM gone g;
    -- Each by its own claim id, and none twice. Where there is one claim id for all, counting them says so.
    IF v_count > coalesce(cardinality(v_gone), 0) OR v_count > 0 AND p_claim_ids[1] <> ANY (p_claim_ids) AND EXISTS (
        SELECT * FROM unnest(p_job_ids, p_claim_ids) EXCEPT SELECT * FROM unnest(v_gone, v_fences)) THEN
        PERFORM once.job_lost(ARRAY(SELECT e.id FROM unnest(p_job_ids, p_claim_ids) e (id, claim_id)
            EXCEPT SELECT g.id FROM unnest(v_gone, v_fences) g (id, claim_id)
                   JOIN unnest(p_job_ids, p_claim_ids) e (id, claim_id) ON e.id = g.id AND e.claim_id = g.claim_id));
    END IF;
    IF v_named IS NOT NULL THEN
        PERFORM once.free_names(v_named);
    END IF;
END $$;
