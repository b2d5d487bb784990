-- What a job may be; says what is wrong with it.
CREATE OR REPLACE FUNCTION once.check_job(p_payload jsonb, p_priority int, p_available_at timestamptz, p_unique_key text,
    p_attempts_max int, p_key text)
RETURNS void LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF (octet_length(p_key) BETWEEN 1 AND 255) IS FALSE OR (octet_length(p_unique_key) BETWEEN 1 AND 255) IS FALSE
       OR p_key ~ '[[:cntrl:]]' OR p_unique_key ~ '[[:cntrl:]]' THEN
        RAISE EXCEPTION 'a job''s key or unique key is empty, longer than 255 bytes, or has control characters'
            USING ERRCODE = 'P4001', HINT = 'Leave it out where the job has none.';
    END IF;
    IF p_payload IS NULL OR p_priority IS NULL OR (p_attempts_max BETWEEN 1 AND 1000000) IS FALSE
       OR p_available_at IN ('infinity', '-infinity') THEN
        RAISE EXCEPTION 'a job''s payload or priority is NULL, its attempts_max is not from 1 to 1000000, or it is never available'
            USING ERRCODE = 'P4020', HINT = 'A job without a payload has ''null'' or ''{}''.';
    END IF;
    IF pg_column_size(p_payload) > 1048576 THEN
        RAISE EXCEPTION 'a job''s payload is larger than 1 MiB' USING ERRCODE = 'P4005',
            HINT = 'Store what it is about in a table of yours, and enqueue a reference.';
    END IF;
END $$;
