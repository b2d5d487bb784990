-- What a call may be; says what is wrong with it.
CREATE OR REPLACE FUNCTION once.check_call(p_operation text, p_path text, p_body bytea, p_method text, p_headers jsonb,
    p_content_type text, p_scope text, p_key text, p_tenant text, p_key_header text)
RETURNS void LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    v_wrong text := CASE
        WHEN (octet_length(p_operation) BETWEEN 1 AND 128) IS NOT TRUE OR p_operation ~ '[[:cntrl:]]'
            THEN 'its operation is missing, longer than 128 bytes, or has control characters'
        WHEN once.is_inside(p_path) IS NOT TRUE THEN 'its path does not begin with one slash, leaves the provider''s base, or has characters that are not to be in a URL'
        WHEN p_method IS NULL OR p_method NOT IN ('POST', 'PUT', 'PATCH', 'DELETE', 'GET') THEN 'its method is not one of POST, PUT, PATCH, DELETE and GET'
        WHEN octet_length(p_body) > 1048576 THEN 'its body is larger than 1 MiB'
        WHEN p_tenant IS NULL OR octet_length(p_tenant) > 255 OR p_tenant ~ '[[:cntrl:]]' THEN 'its tenant is NULL, longer than 255 bytes, or has control characters'
        WHEN p_scope IS NULL <> (p_key IS NULL) THEN 'its intent has a scope or a key but not both'
        WHEN (octet_length(p_scope) BETWEEN 1 AND 128) IS FALSE OR (octet_length(p_key) BETWEEN 1 AND 255) IS FALSE
            THEN 'its scope or key is empty or too long'
        WHEN octet_length(p_content_type) > 255 OR p_content_type ~ '[[:cntrl:]]' THEN 'its content type cannot be used'
        WHEN jsonb_typeof(p_headers) <> 'object' OR pg_column_size(p_headers) > 16384 THEN 'its headers are not a JSON object, or larger than 16 KiB'
        WHEN EXISTS (SELECT FROM jsonb_each(CASE jsonb_typeof(p_headers) WHEN 'object' THEN p_headers END) h
                     WHERE jsonb_typeof(h.value) <> 'string' OR h.key !~ '^[A-Za-z0-9-]{1,64}$' OR h.value::text ~ '\\[rnu]')
            THEN 'its headers are not texts of one line under names of letters, digits and "-"'
        -- What is stored can be read: secrets come from the worker's environment.
        WHEN EXISTS (SELECT FROM jsonb_object_keys(CASE jsonb_typeof(p_headers) WHEN 'object' THEN p_headers END) h
                     WHERE lower(h) IN ('authorization', 'proxy-authorization', 'cookie', 'host', 'connection', 'content-length',
                                        'transfer-encoding', 'content-type', lower(p_key_header)))
            THEN 'its headers name one that is not the caller''s to set: secrets belong into header_env'
        END;
BEGIN
    IF v_wrong IS NOT NULL THEN
        RAISE EXCEPTION 'the call cannot be made: %', v_wrong USING ERRCODE = 'P4063',
            DETAIL = 'Nothing was recorded, and nothing is sent.', HINT = 'See docs/reference/sql.md, call.';
    END IF;
END $$;
