-- Puts buried jobs back, with no attempts counted, by their ids or oldest first. A job keeps its id, and so its place in
-- its key; its unique key is not asked for again. Audited.
CREATE OR REPLACE FUNCTION once.retry_buried(
    p_queue text, p_actor text, p_reason text, p_ids bigint[] DEFAULT NULL, p_limit int DEFAULT 1000, p_tenant text DEFAULT NULL)
RETURNS TABLE (id bigint, tenant text, last_error text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_gone once.job_ended[] := once.dig_up(p_queue, p_actor, p_reason, p_ids, p_limit, p_tenant, 'retry_buried');
BEGIN
    INSERT INTO once.job (id, position, enqueued_at, queue, priority, attempts_max, state, tenant, key, unique_key, last_error, payload)
    SELECT g.id, once.front(g.queue, g.priority, g.id), g.enqueued_at, g.queue, g.priority, g.attempts_max, 'ready',
           g.tenant, g.key, g.unique_key, g.last_error, g.payload
    FROM unnest(v_gone) g;
    RETURN QUERY SELECT g.id, g.tenant, g.last_error FROM unnest(v_gone) g ORDER BY g.id;
END $$;
