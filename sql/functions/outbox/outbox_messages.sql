-- The messages at these places of the log, in position order.
CREATE OR REPLACE FUNCTION once.outbox_messages(p_positions bigint[], p_xids bigint[])
RETURNS TABLE ("position" bigint, message_id uuid, at text, tenant text, topic text, type text, ordering_key text,
    aggregate_type text, aggregate_id text, aggregate_version bigint, headers jsonb, payload text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
-- One plan for ever: a place is looked up in its own segment.
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    IF cardinality(p_positions) > 10000 OR cardinality(p_positions) <> cardinality(p_xids) THEN
        RAISE EXCEPTION 'at most 10000 messages at a time, each with its xid' USING ERRCODE = 'P4040';
    END IF;
    RETURN QUERY
    SELECT o.position, o.message_id, once.message_time(o.at), o.tenant::text, o.topic::text, o.type::text, o.ordering_key, o.aggregate_type,
           o.aggregate_id, o.aggregate_version, o.headers, o.payload::text
    FROM unnest(p_positions, p_xids) AS w (position, xid)
    JOIN once.outbox o ON o.segment = ((w.position >> 40) & 15)::smallint AND o.xid = w.xid::text::xid8 AND o.position = w.position
    ORDER BY o.position;
END $$;
