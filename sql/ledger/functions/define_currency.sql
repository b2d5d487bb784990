-- Adds a currency that ISO 4217 does not know (points, hours). Its digits stay what they are: amounts were meant so.
CREATE OR REPLACE FUNCTION once_ledger.define_currency(p_code text, p_digits int) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF (p_code ~ '^[A-Z0-9]{3,12}$' AND p_digits BETWEEN 0 AND 18) IS NOT TRUE THEN
        RAISE EXCEPTION 'a currency is 3 to 12 capital letters or digits, with 0 to 18 digits behind the point' USING ERRCODE = 'P4090';
    END IF;
    INSERT INTO once_ledger.currency (code, digits) VALUES (p_code, p_digits) ON CONFLICT DO NOTHING;
    IF NOT EXISTS (SELECT FROM once_ledger.currency c WHERE c.code = p_code AND c.digits = p_digits) THEN
        RAISE EXCEPTION 'the currency is there with other digits' USING ERRCODE = 'P4092',
            DETAIL = 'Nothing was changed.', HINT = 'Amounts are stored in its minor unit: choose another code.';
    END IF;
END $$;
