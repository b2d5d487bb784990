-- What makes jobs ready that are not: those whose time has come, those whose worker's lease is over, those parked behind
-- something that has ended. Of each at most p_limit, what others hold skipped. Takes do it when they find too little, and
-- now and then; one at a time. True: something may be ready now. p_due, p_lease: from where on to look.
CREATE OR REPLACE FUNCTION once.ready_more(p_queue int, p_limit int, p_due timestamptz, p_lease timestamptz)
RETURNS boolean LANGUAGE plpgsql VOLATILE
SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
    v_now timestamptz := once.clock();
    v_due bigint[];
    v_over bigint[];
    v_queues int[];
    v_tenants text[];
    v_keys text[];
BEGIN
    v_due := ARRAY(SELECT j.id FROM once.job j
        WHERE j.queue = p_queue AND j.available_at >= p_due AND j.available_at <= v_now
        ORDER BY j.available_at LIMIT p_limit FOR UPDATE SKIP LOCKED);
    UPDATE once.job j SET state = 'ready', available_at = NULL, position = once.front(j.queue, j.priority, j.position)
        WHERE j.id = ANY (v_due) AND cardinality(v_due) > 0;
    v_over := ARRAY(SELECT j.id FROM once.job j
        WHERE j.queue = p_queue AND j.state = 'running' AND j.rescue_at >= p_lease AND j.rescue_at <= v_now
        ORDER BY j.rescue_at LIMIT p_limit FOR UPDATE SKIP LOCKED) || once.over_takes(p_queue, 10 * p_limit, p_lease);
    IF cardinality(v_over) > 0 THEN
        PERFORM once.rescue_jobs(v_over);
    END IF;
    WITH gone AS (
        DELETE FROM once.job_wake w WHERE w.id = ANY (ARRAY(
            SELECT o.id FROM once.job_wake o WHERE o.queue = p_queue ORDER BY o.id LIMIT p_limit FOR UPDATE SKIP LOCKED))
        RETURNING w.queue, w.tenant, w.key
    )
    SELECT array_agg(g.queue), array_agg(g.tenant), array_agg(g.key) INTO v_queues, v_tenants, v_keys FROM gone g;
    PERFORM once.wake_keys(v_queues, v_tenants, v_keys);
    RETURN cardinality(v_due) > 0 OR cardinality(v_over) > 0 OR v_keys IS NOT NULL;
END $$;
