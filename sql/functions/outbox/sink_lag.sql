-- What a sink has not got yet: how many messages, and how old the oldest is; and what it did not take. Counts up to a limit: a backlog of
-- millions is told as that many or more.
CREATE OR REPLACE FUNCTION once.sink_lag(p_sink text, p_limit int DEFAULT 100000)
RETURNS TABLE (messages bigint, seconds double precision, failing bigint, parked bigint, behind bigint)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
-- One plan for ever, by index: segments are empty when it is made, and full of rows later.
SET enable_seqscan = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_now pg_snapshot := pg_current_snapshot();
    v_xmax xid8 := (SELECT min(pg_snapshot_xmax(l.delivered)::text::bigint)::text::xid8 FROM once.lane l WHERE l.sink = p_sink);
    v_open xid8[] := ARRAY(SELECT DISTINCT x FROM once.lane l, pg_snapshot_xip(l.delivered) x WHERE l.sink = p_sink AND x < v_xmax);
BEGIN
    RETURN QUERY
    SELECT count(*), coalesce(extract(epoch FROM once.clock() - min(late.at)), 0)::double precision,
        (SELECT count(*) FROM once.held h WHERE h.sink = p_sink AND h.state = 'failing'),
        (SELECT count(*) FROM once.held h WHERE h.sink = p_sink AND h.state = 'parked'),
        (SELECT count(*) FROM once.held h WHERE h.sink = p_sink AND h.state = 'behind')
    FROM (
        SELECT o.at FROM once.outbox_wanted(p_sink, v_xmax, v_open, v_now, -1) w
        JOIN once.lane l ON l.sink = p_sink AND l.lane = w.lane
        JOIN once.outbox o ON o.segment = ((w.position >> 40) & 15)::smallint AND o.xid = w.xid AND o.position = w.position
        WHERE NOT pg_visible_in_snapshot(w.xid, l.delivered)
          AND (l.target IS NULL OR w.position > l.position OR NOT pg_visible_in_snapshot(w.xid, l.target))
        LIMIT p_limit) late;
END $$;
