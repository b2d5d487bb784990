-- Records that everything of these lanes up to here was delivered, or is held: fenced, all or nothing. p_position NULL: the
-- whole difference is dealt with, and its snapshot becomes the cursor. What the sink did not take comes along as
-- p_held: {position, xid, state, error, delay_ms} each, and is copied from the log in the same transaction.
CREATE OR REPLACE FUNCTION once.advance_lanes(p_sink text, p_lanes smallint[], p_claims uuid[], p_target pg_snapshot,
    p_position bigint, p_held jsonb DEFAULT NULL)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_now timestamptz := once.clock();
    v_moved int;
BEGIN
    UPDATE once.lane l SET updated_at = v_now,
        delivered = CASE WHEN p_position IS NULL THEN p_target ELSE l.delivered END,
        target = CASE WHEN p_position IS NOT NULL THEN p_target END,
        position = p_position
    FROM unnest(p_lanes, p_claims) AS c (lane, claim_id)
    WHERE l.sink = p_sink AND l.lane = c.lane AND l.claim_id = c.claim_id;
    GET DIAGNOSTICS v_moved = ROW_COUNT;
    IF v_moved <> cardinality(p_lanes) THEN
        RAISE EXCEPTION 'this relay does not hold the lanes any more' USING ERRCODE = 'P4071',
            DETAIL = 'Another relay took them over; nothing was recorded by this call. What was sent may be sent again, under the same ids.',
            HINT = 'Call once.hold_lanes to see which lanes are held.';
    END IF;
    IF p_held IS NOT NULL THEN
        PERFORM once.hold_back(p_sink, p_held, v_now);
    END IF;
END $$;
