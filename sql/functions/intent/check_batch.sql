-- The arrays of a batch belong together, and their number is limited: everything has a limit.
CREATE OR REPLACE FUNCTION once.check_batch(VARIADIC p_lengths int[]) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF (p_lengths[1] = ALL (p_lengths)) IS NOT TRUE THEN
        RAISE EXCEPTION 'the arrays of a batch are not of one length, or one is missing'
            USING ERRCODE = 'P4020', HINT = 'Give every intent its element in each array; NULL where it has none.';
    END IF;
    IF p_lengths[1] > 1000 THEN
        RAISE EXCEPTION 'a batch has more than 1000 intents'
            USING ERRCODE = 'P4020', HINT = 'Send several.';
    END IF;
END $$;
