-- Limits of what is stored with a message. Messages never carry what was sent.
CREATE OR REPLACE FUNCTION once.check_stored(
    p_body bytea, p_topic text, p_type text, p_ordering_key text, p_entity text, p_version bigint, p_headers jsonb,
    p_content_type text) RETURNS void LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF p_body IS NULL OR octet_length(p_body) > 16777216 THEN
        RAISE EXCEPTION 'message body is missing or larger than 16 MiB'
            USING ERRCODE = 'P4005', HINT = 'Store large bodies elsewhere, and send a reference.';
    END IF;
    IF greatest(octet_length(p_topic), octet_length(p_type), octet_length(p_ordering_key), octet_length(p_entity),
                octet_length(p_content_type)) > 255 OR octet_length(p_headers::text) > 65536 THEN
        RAISE EXCEPTION 'topic, type, ordering key, entity or content type is longer than 255 bytes, or the headers than 64 KiB'
            USING ERRCODE = 'P4005', HINT = 'Nothing was stored.';
    END IF;
    IF p_version < 0 OR p_entity = '' OR p_ordering_key = '' OR (p_version IS NOT NULL AND p_entity IS NULL) THEN
        RAISE EXCEPTION 'a version is not negative, and belongs to an entity; entities and ordering keys are not empty' USING ERRCODE = 'P4020',
            HINT = 'Give p_entity with p_version; versions count up from 0 or 1.';
    END IF;
END $$;
