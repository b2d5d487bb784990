-- Hands out jobs, by priority and then in their order, each under a lease; the claim id is the fence that every later word
-- about them must carry, one for all jobs of the call. Attempts are counted here, before anything can go wrong. What others
-- hold is skipped, never waited for. Call it in a short transaction of its own.
-- p_tenant NULL: of every tenant.
CREATE OR REPLACE FUNCTION once.take(
    p_queue text, p_worker text DEFAULT NULL, p_limit int DEFAULT 1, p_lease interval DEFAULT NULL, p_tenant text DEFAULT NULL)
RETURNS TABLE (id bigint, claim_id uuid, tenant text, key text, priority int, payload jsonb, attempts int, attempts_max int,
               enqueued_at timestamptz, leased_until timestamptz)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET jit = off SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    v_queue once.queue;
    v_tids tid[];
    v_claim uuid := gen_random_uuid();
    v_until timestamptz;
    v_leave boolean; -- they leave their line at once
BEGIN
    PERFORM once.check_take(p_queue, p_worker, p_limit, p_lease, p_tenant);
    SELECT * INTO v_queue FROM once.queue q WHERE q.queue = p_queue AND p_queue <> '';
    IF NOT FOUND THEN
        RETURN;
    END IF;
    v_tids := once.choose_jobs(v_queue, p_tenant, p_limit);
    IF cardinality(v_tids) = 0 THEN
        RETURN;
    END IF;
    v_until := once.clock() + coalesce(p_lease, v_queue.lease);
    -- Small takes are of slow jobs: others should not walk over those, and a note for each take would be more work.
    v_leave := v_queue.running_max IS NOT NULL OR cardinality(v_tids) < 100;
    RETURN QUERY
    WITH taken AS (
        -- One that stays in its line is changed on its page: no index is written.
        UPDATE once.job j SET
            state = CASE WHEN v_leave OR j.key IS NOT NULL THEN 'running' ELSE j.state END,
            rescue_at = CASE WHEN v_leave OR j.key IS NOT NULL THEN v_until END,
            attempts = j.attempts + 1, claim_id = v_claim, worker = p_worker, leased_until = v_until
        WHERE j.ctid = ANY (v_tids)
        RETURNING j.id, j.tenant, j.key, j.priority, j.position, j.payload, j.attempts, j.attempts_max, j.enqueued_at
    ), noted AS (
        INSERT INTO once.job_take (queue, until, claim_id, ids)
        SELECT v_queue.id, v_until, v_claim, CASE l.last - l.first WHEN l.count - 1
            THEN int8multirange(int8range(l.first, l.last, '[]'))
            ELSE (SELECT range_agg(int8range(t.id, t.id, '[]')) FROM taken t WHERE t.key IS NULL) END
        FROM (SELECT min(t.id), max(t.id), count(*) FROM taken t WHERE t.key IS NULL) l (first, last, count)
        WHERE NOT v_leave AND l.count > 0
    )
    SELECT t.id, v_claim, t.tenant, t.key, t.priority, t.payload, t.attempts, t.attempts_max, t.enqueued_at, v_until
    FROM taken t ORDER BY t.priority DESC, t.position, t.id;
END $$;
