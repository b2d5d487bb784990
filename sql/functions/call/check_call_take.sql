-- Limits of a take of calls.
CREATE OR REPLACE FUNCTION once.check_call_take(p_worker text, p_limit int) RETURNS void LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF p_limit IS NULL OR p_limit NOT BETWEEN 1 AND 1000 OR octet_length(p_worker) > 255 THEN
        RAISE EXCEPTION 'limit or worker out of range' USING ERRCODE = 'P4020',
            HINT = 'Take 1 to 1000 calls; a worker''s name has at most 255 bytes.';
    END IF;
END $$;
