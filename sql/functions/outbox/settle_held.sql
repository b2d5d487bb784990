-- What became of a held message: delivered (it goes, and the next of its key comes up), failing (again after a while) or
-- parked. Fenced by the lane. Returns whether the key has anything left.
CREATE OR REPLACE FUNCTION once.settle_held(p_sink text, p_position bigint, p_claim_id uuid, p_state text,
    p_error text DEFAULT NULL, p_delay_ms bigint DEFAULT NULL)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_row once.held;
BEGIN
    SELECT h.* INTO v_row FROM once.held h JOIN once.lane l ON l.sink = h.sink AND l.lane = h.lane
    WHERE h.sink = p_sink AND h.position = p_position AND l.claim_id = p_claim_id FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'this relay does not hold the message''s lane any more' USING ERRCODE = 'P4071',
            DETAIL = 'Nothing was recorded by this call.', HINT = 'Call once.hold_lanes to see which lanes are held.';
    END IF;
    IF p_state = 'delivered' THEN
        DELETE FROM once.held h WHERE h.sink = p_sink AND h.position = p_position;
        RETURN once.wake_held(p_sink, v_row.tenant, v_row.lane_key);
    END IF;
    UPDATE once.held h SET state = p_state, attempts = h.attempts + 1, last_error = left(p_error, 2000),
        next_at = CASE p_state WHEN 'failing' THEN once.clock() + p_delay_ms * interval '1 millisecond' END
    WHERE h.sink = p_sink AND h.position = p_position;
    RETURN true;
END $$;
