-- The messages of a selection that a sink has got already, after a position.
CREATE OR REPLACE FUNCTION once.replayable(p_sink text, p_selection jsonb, p_after bigint)
RETURNS TABLE ("position" bigint, xid xid8, at timestamptz) LANGUAGE sql STABLE AS $$
    SELECT o.position, o.xid, o.at FROM once.sink s, once.outbox o
    JOIN once.lane l ON l.sink = p_sink AND l.lane = once.lane_of(o.tenant, coalesce(o.ordering_key, o.message_id::text))
    WHERE s.sink = p_sink AND once.wants(s, o.topic, o.type, o.tenant) AND o.position > p_after
      AND (pg_catalog.pg_visible_in_snapshot(o.xid, l.delivered)
           OR o.position <= l.position AND pg_catalog.pg_visible_in_snapshot(o.xid, l.target))
      AND NOT EXISTS (SELECT FROM once.held h WHERE h.sink = p_sink AND h.position = o.position)
      AND (p_selection ->> 'from_position' IS NULL OR o.position >= (p_selection ->> 'from_position')::bigint)
      AND (p_selection ->> 'to_position' IS NULL OR o.position <= (p_selection ->> 'to_position')::bigint)
      AND (p_selection ->> 'from_time' IS NULL OR o.at >= (p_selection ->> 'from_time')::timestamptz)
      AND (p_selection ->> 'to_time' IS NULL OR o.at < (p_selection ->> 'to_time')::timestamptz)
      AND (p_selection ->> 'topic' IS NULL OR o.topic LIKE p_selection ->> 'topic')
      AND (p_selection ->> 'type' IS NULL OR o.type LIKE p_selection ->> 'type')
      AND (p_selection ->> 'ordering_key' IS NULL OR o.ordering_key = p_selection ->> 'ordering_key')
      AND (p_selection ->> 'tenant' IS NULL OR o.tenant = p_selection ->> 'tenant')
      AND (p_selection ->> 'message_id' IS NULL OR o.message_id = (p_selection ->> 'message_id')::uuid) $$;
