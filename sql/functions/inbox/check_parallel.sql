-- The arrays of a batch of messages (their once.shape; NULL: not given) belong together, and their number is limited.
-- Returns the number.
CREATE OR REPLACE FUNCTION once.check_parallel(p_count int, VARIADIC p_shapes text[]) RETURNS int
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF p_count IS NULL
       OR (CASE p_count WHEN 0 THEN '0' ELSE '[1:' || p_count || ']' END <> ANY (array_remove(p_shapes, NULL))) THEN
        RAISE EXCEPTION 'the arrays of a batch are not of one form, or one is missing'
            USING ERRCODE = 'P4020', HINT = 'Give every message its element in each array; NULL where it has none.';
    END IF;
    IF p_count > 10000 THEN
        RAISE EXCEPTION 'a batch has more than 10000 messages' USING ERRCODE = 'P4020', HINT = 'Send several.';
    END IF;
    RETURN p_count;
END $$;
