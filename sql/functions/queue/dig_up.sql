-- Removes buried jobs from the ended ones, for an operator who says who and why, and returns them.
CREATE OR REPLACE FUNCTION once.dig_up(
    p_queue text, p_actor text, p_reason text, p_ids bigint[], p_limit int, p_tenant text, p_action text)
RETURNS once.job_ended[] LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_queue int;
    v_ids bigint[];
    v_gone once.job_ended[];
BEGIN
    PERFORM once.check_decision(p_actor, p_reason);
    IF p_limit IS NULL OR p_limit NOT BETWEEN 1 AND 10000 OR cardinality(p_ids) > 10000 THEN
        RAISE EXCEPTION 'limit out of range' USING ERRCODE = 'P4020', HINT = 'At most 10000 jobs at once.';
    END IF;
    SELECT q.id INTO v_queue FROM once.queue q WHERE q.queue = p_queue;
    v_ids := ARRAY(SELECT e.id FROM once.job_ended e
        WHERE e.queue = v_queue AND e.state = 'buried' AND (p_ids IS NULL OR e.id = ANY (p_ids))
          AND (p_tenant IS NULL OR e.tenant = p_tenant) ORDER BY e.id LIMIT p_limit FOR UPDATE);
    WITH gone AS (DELETE FROM once.job_ended e WHERE e.id = ANY (v_ids) RETURNING e AS job)
    SELECT array_agg(g.job) INTO v_gone FROM gone g;
    INSERT INTO once.audit (actor, action, tenant, scope, key, from_status, to_status, reason)
    SELECT p_actor, p_action, g.tenant, p_queue, g.id::text, 'buried', CASE p_action WHEN 'retry_buried' THEN 'ready' END, p_reason
    FROM unnest(v_gone) g;
    RETURN v_gone;
END $$;
