-- Stores a message for processing later, once: 'new' or 'duplicate'. When it has committed, the delivery may be
-- acknowledged. Rivals and snapshots as in once.admit; another body under the same id raises P4050.
CREATE OR REPLACE FUNCTION once.receive(
    p_consumer text, p_source text, p_message_id text, p_body bytea, p_topic text DEFAULT NULL, p_type text DEFAULT NULL,
    p_ordering_key text DEFAULT NULL, p_entity text DEFAULT NULL, p_version bigint DEFAULT NULL,
    p_headers jsonb DEFAULT NULL, p_content_type text DEFAULT NULL, p_tenant text DEFAULT '')
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_hash bytea := sha256(p_body);
    v_stored bytea;
BEGIN
    PERFORM once.check_stream(p_tenant, p_consumer, p_source), once.check_message(p_message_id, coalesce(v_hash, '\x00')),
        once.check_stored(p_body, p_topic, p_type, p_ordering_key, p_entity, p_version, p_headers, p_content_type);
    LOOP
        INSERT INTO once.inbox (received_at, next_at, version, tenant, consumer, source, message_id, body_hash, topic, type,
                                ordering_key, entity, content_type, headers, body)
        VALUES (once.clock(), once.clock(), p_version, p_tenant, p_consumer, p_source, p_message_id, v_hash, p_topic, p_type,
                p_ordering_key, p_entity, p_content_type, p_headers, p_body)
        ON CONFLICT DO NOTHING;
        IF FOUND THEN
            RETURN 'new';
        END IF;
        -- A statement of its own: its snapshot is younger than the rival's commit.
        SELECT m.body_hash INTO v_stored FROM once.inbox m
            WHERE m.tenant = p_tenant AND m.consumer = p_consumer AND m.source = p_source AND m.message_id = p_message_id;
        EXIT WHEN FOUND; -- else purge came between
    END LOOP;
    IF v_stored <> v_hash THEN
        RAISE EXCEPTION 'the message id was used before with another body' USING ERRCODE = 'P4050',
            DETAIL = 'This delivery is not a duplicate of the first, and was not stored.',
            HINT = 'Ids must be unique at their source: ask the producer.';
    END IF;
    RETURN 'duplicate';
END $$;
