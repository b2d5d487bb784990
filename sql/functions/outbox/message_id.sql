-- The id of an intent's message: the same in every attempt, from every language. SHA-256 of the length-prefixed parts,
-- written as a UUID of version 8.
CREATE OR REPLACE FUNCTION once.message_id(p_tenant text, p_scope text, p_key text, p_type text, p_ordinal int)
RETURNS uuid LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    RETURN overlay(overlay(encode(substr(sha256(convert_to(concat(octet_length(p_tenant), ':', p_tenant,
        octet_length(p_scope), ':', p_scope, octet_length(p_key), ':', p_key, octet_length(p_type), ':', p_type, p_ordinal),
        'UTF8')), 1, 16), 'hex') PLACING '8' FROM 13 FOR 1) PLACING '9' FROM 17 FOR 1)::uuid;
END $$;
