-- Locks the accounts of the groups that were written, one by one in the order of their names; those that are not there
-- are opened in the same order, where the caller said so, for an opened one is a lock, too.
CREATE OR REPLACE FUNCTION once_ledger.lock_accounts(
    p_groups once_ledger.batch_group[], p_written bigint[], p_open boolean, p_tenant text)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_account record;
BEGIN
    FOR v_account IN
        SELECT DISTINCT ON (e.account COLLATE "C") e.account, e.currency
        FROM unnest(p_groups) g, unnest(g.accounts, g.currencies) e (account, currency)
        WHERE p_written[g.ordinal] IS NOT NULL ORDER BY e.account COLLATE "C"
    LOOP
        PERFORM FROM once_ledger.account a WHERE a.tenant = p_tenant AND a.account = v_account.account FOR NO KEY UPDATE;
        IF NOT FOUND AND p_open THEN
            PERFORM once_ledger.open_account(v_account.account, v_account.currency, p_tenant => p_tenant);
        END IF;
    END LOOP;
END $$;
