-- Whether an answer is within its limits: the body's 16 MiB, the headers' 256 KiB, 255 bytes of a result's type and 1024 of
-- its id. Inlined; once.check_answer says which is not.
CREATE OR REPLACE FUNCTION once.answer_fits(p_body bytea, p_headers jsonb, p_result_type text, p_result_id text)
RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT (octet_length(p_body) > 16777216) IS NOT TRUE AND (pg_column_size(p_headers) > 262144) IS NOT TRUE
       AND (octet_length(p_result_type) > 255) IS NOT TRUE AND (octet_length(p_result_id) > 1024) IS NOT TRUE $$;
