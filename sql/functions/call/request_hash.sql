-- What makes two requests the same one.
CREATE OR REPLACE FUNCTION once.request_hash(p_method text, p_path text, p_headers jsonb, p_content_type text, p_body bytea)
RETURNS bytea LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    RETURN sha256(convert_to(jsonb_build_array(p_method, p_path, p_headers, p_content_type)::text, 'UTF8')
        || coalesce('\x01' || p_body, '\x00'));
END $$;
