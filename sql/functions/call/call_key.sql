-- A call's id, which is the provider's idempotency key, too: the same in every attempt at the intent, from every
-- language. SHA-256 of the length-prefixed parts, written as a UUID of version 8.
CREATE OR REPLACE FUNCTION once.call_key(p_tenant text, p_provider text, p_scope text, p_key text, p_operation text, p_ordinal int)
RETURNS uuid LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN overlay(overlay(encode(substr(sha256(convert_to(concat('4:call', octet_length(p_tenant), ':', p_tenant,
        octet_length(p_provider), ':', p_provider, octet_length(p_scope), ':', p_scope, octet_length(p_key), ':', p_key,
        octet_length(p_operation), ':', p_operation, p_ordinal),
        'UTF8')), 1, 16), 'hex') PLACING '8' FROM 13 FOR 1) PLACING '9' FROM 17 FOR 1)::uuid;
END $$;
