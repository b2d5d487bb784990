-- A flag that is NULL says nothing, and would be taken for one of the two: for a final failure, or a purge that keeps nothing.
CREATE OR REPLACE FUNCTION once.check_flags(VARIADIC p_flags boolean[]) RETURNS void LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF array_position(p_flags, NULL) IS NOT NULL THEN
        RAISE EXCEPTION 'a flag is NULL' USING ERRCODE = 'P4020', DETAIL = 'Nothing was changed.',
            HINT = 'Say true or false.';
    END IF;
END $$;
