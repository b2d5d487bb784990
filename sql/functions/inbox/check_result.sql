-- Limits of a message's result and its reference.
CREATE OR REPLACE FUNCTION once.check_result(p_result text, p_result_type text, p_result_id text) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF p_result IS NULL OR p_result NOT IN ('applied', 'ignored', 'failed_final') THEN
        RAISE EXCEPTION 'a message has no such result' USING ERRCODE = 'P4020',
            HINT = 'Results are applied, ignored and failed_final.';
    END IF;
    IF octet_length(p_result_type) > 255 OR octet_length(p_result_id) > 1024 THEN
        RAISE EXCEPTION 'the reference is too long' USING ERRCODE = 'P4005',
            HINT = 'A type has at most 255 bytes, an id 1024.';
    END IF;
END $$;
