-- The fingerprint of a payload that is not JSON, or whose exact bytes matter. Each part has its length in
-- front of it (8 bytes, big-endian): no two different triples can be the same input to the hash.
CREATE OR REPLACE FUNCTION once.fingerprint_bytes(
    p_payload bytea, p_operation text DEFAULT '', p_version text DEFAULT '')
RETURNS bytea LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_operation bytea := convert_to(coalesce(p_operation, ''), 'UTF8');
    v_version bytea := convert_to(coalesce(p_version, ''), 'UTF8');
BEGIN
    IF p_payload IS NULL THEN
        RAISE EXCEPTION 'payload is NULL: there is nothing to take a fingerprint of' USING ERRCODE = 'P4003',
            HINT = 'An empty payload is an empty bytea; JSON null is ''null''::jsonb.';
    END IF;
    RETURN sha256(int8send(octet_length(p_payload)) || p_payload
        || int8send(octet_length(v_operation)) || v_operation
        || int8send(octet_length(v_version)) || v_version);
END $$;
