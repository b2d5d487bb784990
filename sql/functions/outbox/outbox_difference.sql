-- What a snapshot sees and the one before did not: where the next messages of these lanes are, in position order, after a
-- position. p_target NULL: the snapshot of this call, which every row repeats.
--
-- Late committers are in it, whatever their xid and position (trap 14): their xid was not visible before, and is now. An open
-- transaction elsewhere is in neither snapshot and holds up nothing. A real snapshot, never one cut at some xid: a
-- transaction with a higher xid may have committed first, and its message comes first.
CREATE OR REPLACE FUNCTION once.outbox_difference(p_sink text, p_lanes smallint[], p_delivered pg_snapshot,
    p_target pg_snapshot, p_after bigint, p_limit int)
RETURNS TABLE (target text, "position" bigint, xid bigint, lane smallint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
-- One plan for ever, by index: segments are empty when it is made, and full of rows later.
SET enable_seqscan = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_target pg_snapshot := coalesce(p_target, pg_current_snapshot());
    v_xmax xid8 := pg_snapshot_xmax(p_delivered);
    v_open xid8[] := ARRAY(SELECT pg_snapshot_xip(p_delivered));
BEGIN
    IF pg_current_xact_id_if_assigned() IS NOT NULL THEN
        RAISE EXCEPTION 'the outbox is not read in a transaction that has written' USING ERRCODE = '25001',
            DETAIL = 'A snapshot counts its own transaction as seen, before it has committed.', HINT = 'Read in a transaction of its own.';
    END IF;
    RETURN QUERY
    SELECT v_target::text, d.position, d.xid::text::bigint, d.lane
    FROM once.outbox_wanted(p_sink, v_xmax, v_open, v_target, p_after) d
    WHERE d.lane = ANY (p_lanes)
    ORDER BY d.position LIMIT least(p_limit, 1000000);
    IF NOT FOUND THEN -- the snapshot is told all the same
        RETURN QUERY SELECT v_target::text, NULL::bigint, NULL::bigint, NULL::smallint;
    END IF;
END $$;
