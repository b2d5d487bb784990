-- A whole number that fits, or NULL. A cast would raise, with the number in its message.
CREATE OR REPLACE FUNCTION once_ledger.read_amount(p_amount text) RETURNS bigint LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF p_amount ~ '^-?[0-9]{1,19}$' AND abs(p_amount::numeric) <= 9223372036854775807 THEN
        RETURN p_amount::bigint;
    END IF;
    RETURN NULL;
END $$;
