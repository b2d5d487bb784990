-- The first ready jobs of a queue, locked, what others hold skipped. Priorities that have a hint are looked at from their
-- hint on (0: from the beginning), the ranges between them whole: what was never seen there left nothing behind. hinted:
-- which of the hints led to the first one.
CREATE OR REPLACE FUNCTION once.pick_jobs(
    p_queue int, p_tenant text, p_limit int, p_skip bigint[], p_priorities int[], p_lows bigint[])
RETURNS TABLE (ids bigint[], tids tid[], plain boolean, hinted int) LANGUAGE plpgsql VOLATILE
SET jit = off SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off AS $$
DECLARE
    v_above bigint := 2147483648;
    v_any CONSTANT boolean := cardinality(p_skip) = 0; -- for each row, an empty array is not free
    v_ids bigint[];
    v_tids tid[];
    v_plain boolean;
BEGIN
    ids := '{}';
    tids := '{}';
    plain := true;
    FOR i IN 1 .. cardinality(p_priorities) + 1 LOOP
        SELECT array_agg(c.id), array_agg(c.tid), bool_and(c.plain) INTO v_ids, v_tids, v_plain FROM (
            SELECT j.id, j.ctid AS tid, j.key IS NULL AND j.unique_scope IS DISTINCT FROM 'waiting' AS plain
            FROM once.job j
            WHERE j.queue = p_queue AND j.state = 'ready' AND j.claim_id IS NULL AND j.priority < v_above
              AND j.priority > coalesce(p_priorities[i], -2147483649)
              AND (p_tenant IS NULL OR j.tenant = p_tenant) AND (v_any OR j.id <> ALL (p_skip))
            ORDER BY j.priority DESC, j.position, j.id LIMIT p_limit - cardinality(ids) FOR UPDATE SKIP LOCKED) c;
        IF v_ids IS NOT NULL THEN
            ids := ids || v_ids; tids := tids || v_tids; plain := plain AND v_plain;
        END IF;
        EXIT WHEN cardinality(ids) >= p_limit OR i > cardinality(p_priorities);
        SELECT array_agg(c.id), array_agg(c.tid), bool_and(c.plain) INTO v_ids, v_tids, v_plain FROM (
            SELECT j.id, j.ctid AS tid, j.key IS NULL AND j.unique_scope IS DISTINCT FROM 'waiting' AS plain
            FROM once.job j
            WHERE j.queue = p_queue AND j.state = 'ready' AND j.claim_id IS NULL AND j.priority = p_priorities[i] AND j.position >= p_lows[i]
              AND (p_tenant IS NULL OR j.tenant = p_tenant) AND (v_any OR j.id <> ALL (p_skip))
            ORDER BY j.priority DESC, j.position, j.id LIMIT p_limit - cardinality(ids) FOR UPDATE SKIP LOCKED) c;
        IF v_ids IS NOT NULL THEN
            hinted := CASE cardinality(ids) WHEN 0 THEN i ELSE hinted END;
            ids := ids || v_ids; tids := tids || v_tids; plain := plain AND v_plain;
        END IF;
        EXIT WHEN cardinality(ids) >= p_limit;
        v_above := p_priorities[i];
    END LOOP;
    RETURN NEXT;
END $$;
