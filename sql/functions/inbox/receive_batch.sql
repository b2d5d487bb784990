-- once.receive for many messages of one source: a row a message, in the order given, with its verdict: new, duplicate
-- or conflict (the id was used with another body: not stored, and the caller's to report). Arrays that are left out are
-- NULL for every message. Rows are inserted in the order of the message ids, so that batches wait for each other and
-- never deadlock; their place in the inbox is the order given.
CREATE OR REPLACE FUNCTION once.receive_batch(
    p_consumer text, p_source text, p_message_ids text[], p_bodies bytea[], p_topics text[] DEFAULT NULL,
    p_types text[] DEFAULT NULL, p_ordering_keys text[] DEFAULT NULL, p_entities text[] DEFAULT NULL,
    p_versions bigint[] DEFAULT NULL, p_headers jsonb[] DEFAULT NULL, p_content_types text[] DEFAULT NULL,
    p_tenant text DEFAULT '')
RETURNS TABLE (ordinal int, message_id text, verdict text)
LANGUAGE plpgsql ROWS 500 SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_first bigint[];
    v_more bigint[];
    v_new bigint[] := '{}';
BEGIN
    PERFORM once.check_parallel(cardinality(p_message_ids), once.shape(p_message_ids), coalesce(once.shape(p_bodies), ''),
        once.shape(p_topics), once.shape(p_types), once.shape(p_ordering_keys), once.shape(p_entities),
        once.shape(p_versions), once.shape(p_headers), once.shape(p_content_types));
    PERFORM once.check_stream(p_tenant, p_consumer, p_source);
    PERFORM once.check_message(m.id, coalesce(sha256(m.body), '\x00')),
            once.check_stored(m.body, m.topic, m.type, m.lane, m.entity, m.version, m.headers, m.content_type)
        FROM unnest(p_message_ids, p_bodies, p_topics, p_types, p_ordering_keys, p_entities, p_versions, p_headers,
                    p_content_types) m (id, body, topic, type, lane, entity, version, headers, content_type);
    -- Of one id twice in the batch, the first: its place.
    SELECT array_agg(f.place) INTO v_first
        FROM (SELECT DISTINCT ON (m.id COLLATE "C") m.place FROM unnest(p_message_ids) WITH ORDINALITY m (id, place)
              ORDER BY m.id COLLATE "C", m.place) f;
    LOOP
        WITH numbered AS MATERIALIZED (
            SELECT m.*, nextval('once.inbox_id_seq') AS number
            FROM (SELECT m.* FROM unnest(p_message_ids, p_bodies, p_topics, p_types, p_ordering_keys, p_entities, p_versions,
                      p_headers, p_content_types) WITH ORDINALITY
                      m (id, body, topic, type, lane, entity, version, headers, content_type, place)
                  JOIN unnest(v_first) f (place) ON f.place = m.place ORDER BY m.place OFFSET 0) m
        ), inserted AS (
            INSERT INTO once.inbox AS i (id, received_at, next_at, version, tenant, consumer, source, message_id, body_hash,
                                         topic, type, ordering_key, entity, content_type, headers, body)
            SELECT n.number, once.clock(), once.clock(), n.version, p_tenant, p_consumer, p_source, n.id, sha256(n.body),
                   n.topic, n.type, n.lane, n.entity, n.content_type, n.headers, n.body
            FROM numbered n ORDER BY n.id COLLATE "C"
            ON CONFLICT DO NOTHING RETURNING i.id
        )
        SELECT array_agg(n.place) INTO v_more FROM inserted i JOIN numbered n ON n.number = i.id;
        v_new := v_new || v_more;
        -- A statement of its own: its snapshot is younger than what rivals committed while we waited for them.
        SELECT array_agg(m.place) INTO v_first FROM unnest(p_message_ids) WITH ORDINALITY m (id, place)
            JOIN unnest(v_first) f (place) ON f.place = m.place
            WHERE NOT EXISTS (
                SELECT 1 FROM once.inbox i WHERE i.tenant = p_tenant AND i.consumer = p_consumer AND i.source = p_source
                                             AND i.message_id = m.id);
        EXIT WHEN v_first IS NULL; -- else purge came between
    END LOOP;
    RETURN QUERY
    SELECT m.place::int, m.id, CASE WHEN n.place IS NOT NULL THEN 'new'
                                    WHEN i.body_hash = sha256(m.body) THEN 'duplicate' ELSE 'conflict' END
    FROM unnest(p_message_ids, p_bodies) WITH ORDINALITY m (id, body, place)
    JOIN once.inbox i ON i.tenant = p_tenant AND i.consumer = p_consumer AND i.source = p_source AND i.message_id = m.id
    LEFT JOIN unnest(v_new) n (place) ON n.place = m.place
    ORDER BY m.place;
END $$;
