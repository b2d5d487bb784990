-- An amount as people write it: 123456 of EUR is 1234.56, of JPY 123456, of KWD 123.456.
CREATE OR REPLACE FUNCTION once_ledger.format_amount(p_amount bigint, p_currency text) RETURNS text
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_digits int := (SELECT c.digits FROM once_ledger.currency c WHERE c.code = p_currency);
BEGIN
    RETURN round(p_amount / (10::numeric ^ v_digits), v_digits)::text;
END $$;
