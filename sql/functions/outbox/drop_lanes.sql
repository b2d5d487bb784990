-- A relay gives lanes back, with nothing under way in them. NULL: all of its, and it says goodbye.
CREATE OR REPLACE FUNCTION once.drop_lanes(p_sink text, p_relay text, p_lanes smallint[] DEFAULT NULL)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM FROM once.sink s WHERE s.sink = p_sink FOR UPDATE;
    UPDATE once.lane l SET owner = NULL, claim_id = NULL, leased_until = NULL, updated_at = once.clock()
    WHERE l.sink = p_sink AND l.owner = p_relay AND (p_lanes IS NULL OR l.lane = ANY (p_lanes));
    IF p_lanes IS NULL THEN
        DELETE FROM once.relay r WHERE r.sink = p_sink AND r.relay = p_relay;
    END IF;
END $$;
