-- Raises: debits and credits of a currency are not equal.
CREATE OR REPLACE FUNCTION once_ledger.unbalanced() RETURNS void LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    RAISE EXCEPTION 'the entries do not balance' USING ERRCODE = 'P4091', DETAIL = 'Nothing was posted.',
        HINT = 'The amounts of each currency must add up to zero.';
END $$;
