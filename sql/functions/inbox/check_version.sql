-- Limits of what names a version of an entity.
CREATE OR REPLACE FUNCTION once.check_version(p_tenant text, p_consumer text, p_entity text, p_version bigint)
RETURNS void LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    PERFORM once.check_stream(p_tenant, p_consumer, 'source');
    IF p_entity IS NULL OR octet_length(p_entity) NOT BETWEEN 1 AND 255 OR p_entity ~ '[[:cntrl:]]' THEN
        RAISE EXCEPTION 'entity is missing, longer than 255 bytes, or has control characters'
            USING ERRCODE = 'P4001', HINT = 'An entity names the thing whose versions are counted, for example order/17.';
    END IF;
    IF p_version IS NULL OR p_version < 0 THEN
        RAISE EXCEPTION 'version is missing or negative' USING ERRCODE = 'P4020', HINT = 'Versions count up from 0 or 1.';
    END IF;
END $$;
