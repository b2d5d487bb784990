-- Takes a group back by a new one with the opposite entries, once. Overdrafts hold for it like for any other.
CREATE OR REPLACE FUNCTION once_ledger.reverse(
    p_source text, p_operation text, p_original_source text, p_original_operation text,
    p_description text DEFAULT NULL, p_tenant text DEFAULT '')
RETURNS once_ledger.posted LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_original bigint := (SELECT p.id FROM once_ledger.posting p
        WHERE p.tenant = p_tenant AND p.source = p_original_source AND p.operation = p_original_operation);
    v_entries record;
BEGIN
    IF v_original IS NULL THEN
        RAISE EXCEPTION 'the group to reverse is not there' USING ERRCODE = 'P4095',
            DETAIL = 'Nothing was posted.', HINT = 'Name it by the source and the operation that it was posted with.';
    END IF;
    SELECT array_agg(a.account::text) AS accounts, array_agg(-e.amount) AS amounts, array_agg(a.currency::text) AS currencies
        INTO v_entries FROM once_ledger.entry e JOIN once_ledger.account a ON a.id = e.account_id WHERE e.posting_id = v_original;
    PERFORM once_ledger.check_posting(p_source, p_operation, v_entries.accounts, v_entries.amounts, v_entries.currencies,
        p_description, p_tenant);
    v_entries := once_ledger.sort_entries(v_entries.accounts, v_entries.amounts, v_entries.currencies);
    RETURN once_ledger.write_group(v_original, p_source, p_operation, v_entries.p_accounts, v_entries.p_amounts,
        v_entries.p_currencies, p_description, false, p_tenant);
END $$;
