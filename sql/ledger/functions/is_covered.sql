-- Whether an account may move so far. A movement to the better is never refused, however far the account is beyond. Inlined.
CREATE OR REPLACE FUNCTION once_ledger.is_covered(p_balance bigint, p_overdraft bigint, p_side smallint, p_amount bigint)
RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT p_overdraft IS NULL OR p_amount * p_side > 0 OR (p_balance + p_amount) * p_side >= -p_overdraft $$;
