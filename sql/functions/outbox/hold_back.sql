-- Copies what a sink did not take out of the log: the first of a key to be tried again or parked, those after it behind it.
CREATE OR REPLACE FUNCTION once.hold_back(p_sink text, p_held jsonb, p_now timestamptz)
RETURNS void LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    INSERT INTO once.held (sink, position, lane, message_id, tenant, lane_key, state, attempts, next_at, last_error, held_at, message)
    SELECT p_sink, o.position, once.lane_of(o.tenant, coalesce(o.ordering_key, o.message_id::text)), o.message_id, o.tenant,
           coalesce(o.ordering_key, o.message_id::text), h.state, CASE h.state WHEN 'behind' THEN 0 ELSE 1 END,
           CASE h.state WHEN 'failing' THEN p_now + h.delay_ms * interval '1 millisecond' END, left(h.error, 2000), p_now,
           jsonb_strip_nulls(jsonb_build_object('at', once.message_time(o.at), 'topic', o.topic, 'type', o.type,
               'ordering_key', o.ordering_key, 'aggregate_type', o.aggregate_type, 'aggregate_id', o.aggregate_id,
               'aggregate_version', o.aggregate_version, 'headers', o.headers)) || jsonb_build_object('payload', o.payload)
    FROM jsonb_to_recordset(p_held) AS h (position bigint, xid bigint, state text, error text, delay_ms bigint)
    JOIN once.outbox o ON o.segment = ((h.position >> 40) & 15)::smallint AND o.xid = h.xid::text::xid8 AND o.position = h.position
    -- Held already by an owner before us, who did not live to move the cursor: it stays as it is.
    ON CONFLICT DO NOTHING;
    -- What a relay thought to be in front of them may be gone (an operator let it go): then the first of them is first.
    PERFORM once.wake_held(p_sink, k.tenant, k.lane_key) FROM (
        SELECT DISTINCT n.tenant, n.lane_key FROM once.held n
        JOIN jsonb_to_recordset(p_held) AS h (position bigint, state text) ON n.position = h.position
        WHERE n.sink = p_sink AND h.state = 'behind') k;
END $$;
