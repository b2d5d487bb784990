-- What is to be tried again now, oldest first: one message a key, the first of its queue.
CREATE OR REPLACE FUNCTION once.held_due(p_sink text, p_lanes smallint[], p_limit int DEFAULT 100)
RETURNS TABLE ("position" bigint, lane smallint, message_id uuid, tenant text, attempts int, message jsonb, payload text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN QUERY
    SELECT h.position, h.lane, h.message_id, h.tenant, h.attempts, h.message - 'payload', (h.message -> 'payload')::text
    FROM once.held h
    WHERE h.sink = p_sink AND h.lane = ANY (p_lanes) AND h.state = 'failing' AND h.next_at <= once.clock()
    ORDER BY h.next_at LIMIT least(p_limit, 1000);
END $$;
