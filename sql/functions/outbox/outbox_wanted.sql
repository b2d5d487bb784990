-- The rows of a difference that a sink wants. Two scans of the same index: the xids that were not given out before, and
-- those that were open then.
CREATE OR REPLACE FUNCTION once.outbox_wanted(p_sink text, p_xmax xid8, p_open xid8[], p_target pg_snapshot, p_after bigint)
RETURNS TABLE ("position" bigint, xid xid8, lane smallint) LANGUAGE sql STABLE AS $$
    SELECT o.position, o.xid, once.lane_of(o.tenant, coalesce(o.ordering_key, o.message_id::text))
    FROM once.sink s, once.outbox o
    WHERE s.sink = p_sink AND o.xid >= p_xmax AND o.xid < pg_catalog.pg_snapshot_xmax(p_target)
      AND pg_catalog.pg_visible_in_snapshot(o.xid, p_target) AND o.position > p_after
      AND once.wants(s, o.topic, o.type, o.tenant)
    UNION ALL
    SELECT o.position, o.xid, once.lane_of(o.tenant, coalesce(o.ordering_key, o.message_id::text))
    FROM once.sink s, once.outbox o
    WHERE s.sink = p_sink AND o.xid = ANY (p_open)
      AND pg_catalog.pg_visible_in_snapshot(o.xid, p_target) AND o.position > p_after
      AND once.wants(s, o.topic, o.type, o.tenant) $$;
