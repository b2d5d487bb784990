-- Deals with messages that wait for a version: those whose missing one is there (a baseline, a rival with an old snapshot)
-- are received again; those that waited longer than the consumer's gap_max become failed_final, with the reason.
-- Leases that are over need nobody: once.inbox_take takes them over.
CREATE OR REPLACE FUNCTION once.inbox_recover(p_limit int DEFAULT 100)
RETURNS TABLE (id bigint, tenant text, consumer text, state text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH due AS MATERIALIZED (
        SELECT m.id, m.version <= e.last + 1 AS is_next
        FROM once.inbox m
        LEFT JOIN once.entity_version e ON e.tenant = m.tenant AND e.consumer = m.consumer AND e.entity = m.entity
        WHERE m.state = 'waiting' AND (m.next_at <= once.clock() OR m.version <= e.last + 1)
        ORDER BY m.id LIMIT greatest(0, least(p_limit, 10000)) FOR UPDATE OF m SKIP LOCKED
    )
    UPDATE once.inbox m SET
        state = CASE WHEN d.is_next THEN 'received' ELSE 'failed_final' END::once.inbox_state,
        next_at = once.clock(),
        result = CASE WHEN d.is_next THEN NULL ELSE 'failed_final'::once.message_result END,
        finished_at = CASE WHEN d.is_next THEN NULL ELSE once.clock() END,
        last_error = CASE WHEN d.is_next THEN m.last_error
            ELSE 'gap: the version before this one did not come within gap_max; find it at the source, then replay this one' END
    FROM due d WHERE m.id = d.id
    RETURNING m.id, m.tenant::text, m.consumer::text, m.state::text;
END $$;
