-- What a message may be; says what is wrong with it.
CREATE OR REPLACE FUNCTION once.check_emit(p_topic text, p_type text, p_payload jsonb, p_ordering_key text,
    p_aggregate_type text, p_aggregate_id text, p_headers jsonb, p_tenant text)
RETURNS void LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    v_wrong text := CASE
        WHEN (octet_length(p_topic) BETWEEN 1 AND 255) IS NOT TRUE THEN 'its topic is missing or longer than 255 bytes'
        WHEN (octet_length(p_type) BETWEEN 1 AND 255) IS NOT TRUE THEN 'its type is missing or longer than 255 bytes'
        WHEN p_payload IS NULL THEN 'it has no payload'
        WHEN pg_column_size(p_payload) > 16777216 THEN 'its payload is larger than 16 MiB'
        WHEN p_tenant IS NULL OR octet_length(p_tenant) > 255 THEN 'its tenant is NULL or longer than 255 bytes'
        WHEN (octet_length(p_ordering_key) BETWEEN 1 AND 255) IS FALSE THEN 'its ordering key is empty or longer than 255 bytes'
        WHEN p_aggregate_type = '' OR p_aggregate_id = '' OR octet_length(p_aggregate_type) + octet_length(p_aggregate_id) > 254
            THEN 'its aggregate''s type or id is empty, or they are longer than 254 bytes together'
        WHEN p_aggregate_type IS NULL <> (p_aggregate_id IS NULL) THEN 'its aggregate has a type or an id but not both'
        WHEN jsonb_typeof(p_headers) <> 'object' THEN 'its headers are not a JSON object'
        WHEN pg_column_size(p_headers) > 65536 THEN 'its headers are larger than 64 KiB'
        WHEN EXISTS (SELECT FROM jsonb_each(CASE jsonb_typeof(p_headers) WHEN 'object' THEN p_headers END) h
                     WHERE jsonb_typeof(h.value) <> 'string' OR h.key !~ '^[a-zA-Z0-9_.-]{1,128}$' OR h.value::text ~ '\\[rnu]')
            THEN 'its headers are not texts of one line under names of letters, digits, ".", "_" and "-"'
        WHEN EXISTS (SELECT FROM jsonb_object_keys(CASE jsonb_typeof(p_headers) WHEN 'object' THEN p_headers END) h
                     WHERE once.is_reserved_header(h))
            THEN 'one of its headers is not the emitter''s to set: it belongs to the event, the broker or the request'
        END;
BEGIN
    IF v_wrong IS NOT NULL THEN
        RAISE EXCEPTION 'the message cannot be emitted: %', v_wrong USING ERRCODE = 'P4040',
            DETAIL = 'Nothing was added to the outbox.', HINT = 'See docs/reference/sql.md, emit.';
    END IF;
END $$;
