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
    v_numbers bigint[];
BEGIN
    PERFORM once.check_parallel(cardinality(p_message_ids), once.shape(p_message_ids), coalesce(once.shape(p_bodies), ''),
        once.shape(p_topics), once.shape(p_types), once.shape(p_ordering_keys), once.shape(p_entities),
        once.shape(p_versions), once.shape(p_headers), once.shape(p_content_types));
    PERFORM once.check_stream(p_tenant, p_consumer, p_source);
    PERFORM once.check_message(m.id, coalesce(sha256(m.body), '\x00')),
            once.check_stored(m.body, m.topic, m.type, m.lane, m.entity, m.version, m.headers, m.content_type)
        FROM unnest(p_message_ids, p_bodies, p_topics, p_types, p_ordering_keys, p_entities, p_versions, p_headers,
                    p_content_types) m (id, body, topic, type, lane, entity, version, headers, content_type);
    -- The number that each would have, in the order given; of one id twice in the batch, only the first has one.
    SELECT array_agg(CASE WHEN o.is_first THEN nextval('once.inbox_id_seq') END) INTO v_numbers FROM (
        SELECT row_number() OVER (PARTITION BY m.id COLLATE "C" ORDER BY m.place) = 1 AS is_first
        FROM unnest(p_message_ids) WITH ORDINALITY m (id, place) ORDER BY m.place OFFSET 0) o;
    LOOP
        INSERT INTO once.inbox (id, received_at, next_at, version, tenant, consumer, source, message_id, body_hash,
                                topic, type, ordering_key, entity, content_type, headers, body)
        SELECT m.number, once.clock(), once.clock(), m.version, p_tenant, p_consumer, p_source, m.id, sha256(m.body),
               m.topic, m.type, m.lane, m.entity, m.content_type, m.headers, m.body
        FROM unnest(p_message_ids, p_bodies, p_topics, p_types, p_ordering_keys, p_entities, p_versions, p_headers,
                    p_content_types, v_numbers)
                 m (id, body, topic, type, lane, entity, version, headers, content_type, number)
        WHERE m.number IS NOT NULL ORDER BY m.id COLLATE "C"
        ON CONFLICT DO NOTHING;
        -- A statement of its own: its snapshot is younger than what rivals committed while we waited for them.
        EXIT WHEN NOT EXISTS (
            SELECT 1 FROM unnest(p_message_ids) m (id) LEFT JOIN LATERAL (
                SELECT i.id FROM once.inbox i WHERE i.tenant = p_tenant AND i.consumer = p_consumer AND i.source = p_source
                                                AND i.message_id = m.id OFFSET 0) i ON true
            WHERE i.id IS NULL); -- else purge came between
    END LOOP;
    RETURN QUERY
    SELECT m.place::int, m.id, CASE WHEN i.id = m.number THEN 'new'
                                    WHEN i.body_hash = sha256(m.body) THEN 'duplicate' ELSE 'conflict' END
    FROM unnest(p_message_ids, p_bodies, v_numbers) WITH ORDINALITY m (id, body, number, place)
    -- OFFSET 0: one look into the index a message, whatever the planner thinks that the table holds.
    CROSS JOIN LATERAL (SELECT i.id, i.body_hash FROM once.inbox i WHERE i.tenant = p_tenant AND i.consumer = p_consumer
                            AND i.source = p_source AND i.message_id = m.id OFFSET 0) i
    ORDER BY m.place;
END $$;
