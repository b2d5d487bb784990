-- Says which part of an answer is over its limit. Nothing of it is in the message.
CREATE OR REPLACE FUNCTION once.check_answer(p_body bytea, p_headers jsonb, p_result_type text, p_result_id text)
RETURNS void LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF NOT once.answer_fits(p_body, p_headers, p_result_type, p_result_id) THEN
        RAISE EXCEPTION '%', CASE
                WHEN octet_length(p_body) > 16777216 THEN 'the response is larger than 16 MiB'
                WHEN pg_column_size(p_headers) > 262144 THEN 'the response headers are larger than 256 KiB'
                WHEN octet_length(p_result_type) > 255 THEN 'the result type is longer than 255 bytes'
                ELSE 'the result id is longer than 1024 bytes' END
            USING ERRCODE = 'P4005', DETAIL = 'Nothing was recorded.',
                HINT = 'Store a reference (result_type, result_id) and rebuild the answer from it.';
    END IF;
END $$;
