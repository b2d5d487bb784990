-- The first of a key's queue comes up, if it waits behind one that is gone. False: nothing is held of the key.
CREATE OR REPLACE FUNCTION once.wake_held(p_sink text, p_tenant text, p_lane_key text) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    UPDATE once.held h SET state = 'failing', next_at = once.clock()
    WHERE h.state = 'behind' AND (h.sink, h.position) = (
        SELECT q.sink, q.position FROM once.held q
        WHERE q.sink = p_sink AND q.tenant = p_tenant AND q.lane_key = p_lane_key ORDER BY q.position LIMIT 1);
    RETURN EXISTS (SELECT FROM once.held h WHERE h.sink = p_sink AND h.tenant = p_tenant AND h.lane_key = p_lane_key);
END $$;
