-- Why an account did not move: raises, unless it moves now. One that is not there is opened where the caller said so.
CREATE OR REPLACE FUNCTION once_ledger.not_moved(p_account text, p_currency text, p_amount bigint, p_open boolean, p_tenant text)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_account record;
BEGIN
    SELECT a.currency, a.balance, a.overdraft, a.side INTO v_account FROM once_ledger.account a
        WHERE a.tenant = p_tenant AND a.account = p_account;
    IF NOT FOUND AND p_open THEN
        PERFORM once_ledger.open_account(p_account, p_currency, p_tenant => p_tenant);
    ELSIF NOT FOUND THEN
        RAISE EXCEPTION 'an account is not there' USING ERRCODE = 'P4092', DETAIL = 'Nothing was posted.',
            HINT = 'once_ledger.open_account first, or p_open => true.';
    ELSIF v_account.currency <> p_currency THEN
        RAISE EXCEPTION 'an account has another currency than its entry' USING ERRCODE = 'P4092',
            DETAIL = 'Nothing was posted.', HINT = 'An account has one currency: open one for each.';
    ELSIF NOT once_ledger.is_covered(v_account.balance, v_account.overdraft, v_account.side, p_amount) THEN
        RAISE EXCEPTION 'an account would go beyond its overdraft' USING ERRCODE = 'P4093',
            DETAIL = 'Nothing was posted.', HINT = 'Refuse the operation, or raise the limit: once_ledger.set_overdraft.';
    END IF;
END $$;
