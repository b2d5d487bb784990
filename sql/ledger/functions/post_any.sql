-- once_ledger.post for every group: checks it, sorts it and writes it, or says what was written before.
CREATE OR REPLACE FUNCTION once_ledger.post_any(
    p_source text, p_operation text, p_accounts text[], p_amounts bigint[], p_currencies text[],
    p_description text, p_open boolean, p_tenant text)
RETURNS once_ledger.posted LANGUAGE plpgsql AS $$
DECLARE
    v_sorted record;
BEGIN
    PERFORM once_ledger.check_posting(p_source, p_operation, p_accounts, p_amounts, p_currencies, p_description, p_tenant);
    v_sorted := once_ledger.sort_entries(p_accounts, p_amounts, p_currencies);
    RETURN once_ledger.write_group(NULL, p_source, p_operation, v_sorted.p_accounts, v_sorted.p_amounts, v_sorted.p_currencies,
        p_description, p_open, p_tenant);
END $$;
