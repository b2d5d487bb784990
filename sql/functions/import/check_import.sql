-- Whether an import can be named so.
CREATE OR REPLACE FUNCTION once.check_import(
    p_content bytea, p_options jsonb, p_target text, p_name text, p_owner text, p_actor text, p_lease interval, p_tenant text)
RETURNS void LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF p_tenant IS NULL OR octet_length(p_tenant) > 255 OR p_tenant ~ '[[:cntrl:]]' THEN
        RAISE EXCEPTION 'tenant is missing, too long or has control characters' USING ERRCODE = 'P4004',
            HINT = 'At most 255 bytes; the empty string is the tenant without a name.';
    END IF;
    IF (octet_length(p_content) = 32) IS NOT TRUE OR (jsonb_typeof(p_options) = 'object') IS NOT TRUE
       OR (octet_length(p_options::text) <= 1048576) IS NOT TRUE
       OR (octet_length(p_target) BETWEEN 1 AND 255) IS NOT TRUE OR (octet_length(p_name) BETWEEN 1 AND 4096) IS NOT TRUE
       OR (octet_length(p_owner) BETWEEN 1 AND 255) IS NOT TRUE OR (octet_length(p_actor) BETWEEN 1 AND 255) IS NOT TRUE
       OR (p_lease BETWEEN interval '1 second' AND interval '1 day') IS NOT TRUE THEN
        RAISE EXCEPTION 'an import needs the SHA-256 of its content, its options, a target, a name, an owner and a lease'
            USING ERRCODE = 'P4080', HINT = 'Options are an object of at most 1 MiB; a lease is from 1 second to 1 day; texts have at most 255 bytes, a name 4096.';
    END IF;
END $$;
