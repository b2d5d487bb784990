-- Adds a message to the outbox, in the caller's transaction: it exists if and only if the caller commits.
-- Call it after the aggregate's row was written: the position is taken here, under that row's lock, and so messages of
-- one aggregate are in commit order.
--
-- Where an intent is named, the id is derived from it, the type and the ordinal: the same in every attempt, and one a
-- type. Saying the same again is no second message; saying something else under the same id is an error, not a loss.
CREATE OR REPLACE FUNCTION once.emit(
    p_topic text, p_type text, p_payload jsonb, p_ordering_key text DEFAULT NULL, p_aggregate_type text DEFAULT NULL,
    p_aggregate_id text DEFAULT NULL, p_aggregate_version bigint DEFAULT NULL, p_headers jsonb DEFAULT NULL,
    p_scope text DEFAULT NULL, p_key text DEFAULT NULL, p_ordinal int DEFAULT 0, p_message_id uuid DEFAULT NULL,
    p_tenant text DEFAULT '')
RETURNS uuid LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_id uuid := p_message_id;
    v_position bigint;
BEGIN
    IF (pg_column_size(p_payload) <= 16777216) IS NOT TRUE OR (octet_length(p_tenant) <= 255) IS NOT TRUE OR (octet_length(p_topic) BETWEEN 1 AND 255) IS NOT TRUE
       OR (octet_length(p_type) BETWEEN 1 AND 255) IS NOT TRUE OR (octet_length(p_ordering_key) BETWEEN 1 AND 255) IS FALSE
       OR p_headers IS NOT NULL OR p_aggregate_type IS NOT NULL OR p_aggregate_id IS NOT NULL THEN
        PERFORM once.check_emit(p_topic, p_type, p_payload, p_ordering_key, p_aggregate_type, p_aggregate_id, p_headers, p_tenant);
    END IF;
    v_position := nextval('once.outbox_position');
    IF v_id IS NULL AND p_key IS NULL THEN
        v_id := gen_random_uuid();
        INSERT INTO once.outbox (segment, position, xid, at, message_id, aggregate_version, tenant, topic, type, ordering_key,
            aggregate_type, aggregate_id, headers, payload, made_up)
        VALUES ((v_position >> 40) & 15, v_position, pg_current_xact_id(), once.clock(), v_id, p_aggregate_version,
            p_tenant, p_topic, p_type, p_ordering_key, p_aggregate_type, p_aggregate_id, p_headers, p_payload, true);
        RETURN v_id;
    END IF;
    v_id := coalesce(v_id, once.message_id(p_tenant, p_scope, p_key, p_type, p_ordinal));
    INSERT INTO once.outbox (segment, position, xid, at, message_id, aggregate_version, tenant, topic, type, ordering_key,
        aggregate_type, aggregate_id, scope, key, headers, payload)
    VALUES ((v_position >> 40) & 15, v_position, pg_current_xact_id(), once.clock(), v_id, p_aggregate_version,
        p_tenant, p_topic, p_type, p_ordering_key, p_aggregate_type, p_aggregate_id, p_scope, p_key, p_headers, p_payload)
    ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        PERFORM once.check_repeated(v_id, p_tenant, p_topic, p_type, p_payload);
    END IF;
    RETURN v_id;
END $$;
