-- Opens an account, and says its id. Opening it again is no error, as long as it is the same account: same currency,
-- same side. The overdraft of one that is there is not touched: that is once_ledger.set_overdraft.
CREATE OR REPLACE FUNCTION once_ledger.open_account(
    p_account text, p_currency text, p_overdraft bigint DEFAULT NULL, p_side text DEFAULT 'debit', p_tenant text DEFAULT '')
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_side smallint := CASE p_side WHEN 'debit' THEN 1 WHEN 'credit' THEN -1 END;
    v_found record;
    v_wrong text := CASE
        WHEN (octet_length(p_account) BETWEEN 1 AND 255 AND p_account !~ '[[:cntrl:]]') IS NOT TRUE
            THEN 'its name is missing, longer than 255 bytes, or has control characters'
        WHEN (octet_length(p_tenant) <= 255 AND p_tenant !~ '[[:cntrl:]]') IS NOT TRUE
            THEN 'its tenant is NULL, longer than 255 bytes, or has control characters'
        WHEN v_side IS NULL THEN 'its side is neither debit nor credit'
        WHEN p_overdraft < 0 THEN 'its overdraft is less than zero'
        WHEN NOT EXISTS (SELECT FROM once_ledger.currency c WHERE c.code = p_currency)
            THEN 'its currency is not known: once_ledger.define_currency'
        END;
BEGIN
    IF v_wrong IS NOT NULL THEN
        RAISE EXCEPTION 'the account cannot be opened: %', v_wrong USING ERRCODE = 'P4090',
            DETAIL = 'Nothing was opened.', HINT = 'See docs/reference/sql.md, once_ledger.open_account.';
    END IF;
    INSERT INTO once_ledger.account (tenant, account, currency, overdraft, side, opened_at)
        VALUES (p_tenant, p_account, p_currency, p_overdraft, v_side, once.clock())
        ON CONFLICT DO NOTHING RETURNING id, currency, side INTO v_found;
    IF NOT FOUND THEN
        SELECT a.id, a.currency, a.side INTO v_found FROM once_ledger.account a
            WHERE a.tenant = p_tenant AND a.account = p_account;
    END IF;
    IF v_found.currency <> p_currency OR v_found.side <> v_side THEN
        RAISE EXCEPTION 'the account is there with another currency or side' USING ERRCODE = 'P4092',
            DETAIL = 'Nothing was changed.', HINT = 'An account keeps both for ever: choose another name.';
    END IF;
    RETURN v_found.id;
END $$;
