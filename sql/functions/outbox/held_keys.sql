-- The keys of these lanes that have something held: whatever comes for them queues behind it.
CREATE OR REPLACE FUNCTION once.held_keys(p_sink text, p_lanes smallint[])
RETURNS TABLE (tenant text, lane_key text) LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN QUERY SELECT DISTINCT h.tenant, h.lane_key FROM once.held h WHERE h.sink = p_sink AND h.lane = ANY (p_lanes);
END $$;
