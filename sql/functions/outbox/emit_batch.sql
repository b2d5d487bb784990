-- once.emit for many messages of one tenant, and of one intent where it is named, in one statement: their ids, in the order
-- given. Arrays of one length; those that are NULL are so for every message. Positions follow the order given; rows
-- are inserted in the order of their ids, so that two batches with the same messages wait for each other, and do not
-- deadlock. Without p_ordinals the messages of a type are numbered 0, 1, 2 … in their order.
CREATE OR REPLACE FUNCTION once.emit_batch(
    p_topics text[], p_types text[], p_payloads jsonb[], p_ordering_keys text[] DEFAULT NULL, p_aggregate_types text[] DEFAULT NULL,
    p_aggregate_ids text[] DEFAULT NULL, p_aggregate_versions bigint[] DEFAULT NULL, p_headers jsonb[] DEFAULT NULL,
    p_scope text DEFAULT NULL, p_key text DEFAULT NULL, p_ordinals int[] DEFAULT NULL, p_message_ids uuid[] DEFAULT NULL,
    p_tenant text DEFAULT '')
RETURNS TABLE (ordinal int, message_id uuid)
LANGUAGE plpgsql ROWS 100 SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_shape text := once.shape(p_topics);
    v_ids uuid[];
    v_inserted bigint;
BEGIN
    PERFORM once.check_parallel(cardinality(p_topics), v_shape, coalesce(once.shape(p_types), ''), coalesce(once.shape(p_payloads), ''),
        coalesce(once.shape(p_ordering_keys), v_shape), coalesce(once.shape(p_aggregate_types), v_shape),
        coalesce(once.shape(p_aggregate_ids), v_shape), coalesce(once.shape(p_aggregate_versions), v_shape),
        coalesce(once.shape(p_headers), v_shape), coalesce(once.shape(p_ordinals), v_shape), coalesce(once.shape(p_message_ids), v_shape));
    PERFORM once.check_emit(m.topic, m.type, m.payload, m.ordering_key, m.aggregate_type, m.aggregate_id, m.headers, p_tenant)
        FROM unnest(p_topics, p_types, p_payloads, p_ordering_keys, p_aggregate_types, p_aggregate_ids, p_headers)
            m (topic, type, payload, ordering_key, aggregate_type, aggregate_id, headers);
    SELECT array_agg(coalesce(m.id, CASE WHEN p_key IS NOT NULL THEN once.message_id(p_tenant, p_scope, p_key, m.type, m.ordinal) END,
                              gen_random_uuid()) ORDER BY m.place) INTO v_ids
    FROM (SELECT u.type, u.id, u.place, CASE WHEN p_ordinals IS NULL THEN row_number() OVER (PARTITION BY u.type ORDER BY u.place) - 1
                                             ELSE coalesce(u.ordinal, 0) END::int AS ordinal
          FROM unnest(p_types, p_ordinals, p_message_ids) WITH ORDINALITY u (type, ordinal, id, place)) m;
    INSERT INTO once.outbox (segment, position, xid, at, message_id, aggregate_version, tenant, topic, type, ordering_key,
        aggregate_type, aggregate_id, scope, key, headers, payload, made_up)
    SELECT (m.position >> 40) & 15, m.position, pg_current_xact_id(), once.clock(), m.id, m.version, p_tenant, m.topic, m.type,
        m.ordering_key, m.aggregate_type, m.aggregate_id, CASE WHEN p_key IS NOT NULL THEN p_scope END, p_key, m.headers, m.payload,
        CASE WHEN p_key IS NULL AND m.given IS NULL THEN true END
    FROM (SELECT u.*, nextval('once.outbox_position') AS position
          FROM (SELECT n.* FROM unnest(v_ids, p_topics, p_types, p_payloads, p_ordering_keys, p_aggregate_types, p_aggregate_ids,
                        p_aggregate_versions, p_headers, p_message_ids) WITH ORDINALITY
                    n (id, topic, type, payload, ordering_key, aggregate_type, aggregate_id, version, headers, given, place)
                ORDER BY n.place OFFSET 0) u OFFSET 0) m
    ORDER BY m.id
    ON CONFLICT DO NOTHING;
    GET DIAGNOSTICS v_inserted = ROW_COUNT;
    IF v_inserted < cardinality(v_ids) THEN
        PERFORM once.check_repeated(m.id, p_tenant, m.topic, m.type, m.payload)
            FROM unnest(v_ids, p_topics, p_types, p_payloads) m (id, topic, type, payload);
    END IF;
    RETURN QUERY SELECT m.place::int, m.id FROM unnest(v_ids) WITH ORDINALITY m (id, place);
END $$;
