-- Which of a sink's lanes a message is in: all messages of one ordering key are in one.
CREATE OR REPLACE FUNCTION once.lane_of(p_tenant text, p_lane_key text) RETURNS smallint
LANGUAGE sql IMMUTABLE AS $$
    SELECT (pg_catalog.hashtextextended(p_lane_key, pg_catalog.hashtextextended(p_tenant, 4711)) & 7)::smallint $$;
