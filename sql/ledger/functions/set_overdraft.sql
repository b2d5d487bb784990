-- Changes how far beyond zero an account may go. One that is further already stays there, and can only come back.
CREATE OR REPLACE FUNCTION once_ledger.set_overdraft(p_account text, p_overdraft bigint, p_tenant text DEFAULT '')
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF p_overdraft < 0 THEN
        RAISE EXCEPTION 'an overdraft is zero or more, or NULL for any' USING ERRCODE = 'P4090';
    END IF;
    UPDATE once_ledger.account a SET overdraft = p_overdraft WHERE a.tenant = p_tenant AND a.account = p_account;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'an account is not there' USING ERRCODE = 'P4092', DETAIL = 'Nothing was changed.',
            HINT = 'once_ledger.open_account first.';
    END IF;
END $$;
