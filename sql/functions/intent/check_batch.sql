-- The arrays of a batch (their once.shape) belong together, one element an intent, and their number is limited:
-- everything has a limit. Returns the number.
CREATE OR REPLACE FUNCTION once.check_batch(p_count int, VARIADIC p_shapes text[]) RETURNS int
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF (CASE p_count WHEN 0 THEN '0' ELSE '[1:' || p_count || ']' END = ALL (p_shapes)) IS NOT TRUE THEN
        RAISE EXCEPTION 'the arrays of a batch are not of one form, or one is missing'
            USING ERRCODE = 'P4020', HINT = 'Give every intent its element in each array; NULL where it has none.';
    END IF;
    IF p_count > 1000 THEN
        RAISE EXCEPTION 'a batch has more than 1000 intents' USING ERRCODE = 'P4020', HINT = 'Send several.';
    END IF;
    RETURN p_count;
END $$;
