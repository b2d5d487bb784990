-- Posts a group of entries that balance, in the caller's transaction, once for tenant + source + operation:
--   posted   it is there now: the entries, and the balances of their accounts;
--   already  it was there before, with the same entries; nothing is written.
-- The same operation with other entries raises P4094. Debits are positive, credits negative, in minor units.
--
-- Two entries in one currency, the usual case, are written here, by as few statements and expressions as it takes: each
-- is made ready anew in every transaction. What is written, and in which order, is as in once_ledger.write_group.
CREATE OR REPLACE FUNCTION once_ledger.post(
    p_source text, p_operation text, p_accounts text[], p_amounts bigint[], p_currencies text[],
    p_description text DEFAULT NULL, p_open boolean DEFAULT false, p_tenant text DEFAULT '')
RETURNS once_ledger.posted LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_posting bigint;
    v_id bigint;       v_id2 bigint;
    v_balance bigint;  v_balance2 bigint;
    v_number bigint;   v_number2 bigint;
BEGIN
    IF once_ledger.is_plain(p_source, p_operation, p_accounts, p_amounts, p_currencies, p_tenant, p_description) IS NOT TRUE THEN
        RETURN once_ledger.post_any(p_source, p_operation, p_accounts, p_amounts, p_currencies, p_description, p_open, p_tenant);
    END IF;
    INSERT INTO once_ledger.posting (at, tenant, source, operation, entries_hash, description)
        VALUES (once.clock(), p_tenant, p_source, p_operation,
                once_ledger.entries_hash(p_accounts, p_amounts, ARRAY[p_currencies[1], p_currencies[1]]), p_description)
        ON CONFLICT DO NOTHING RETURNING id INTO v_posting;
    IF NOT FOUND THEN
        RETURN once_ledger.post_any(p_source, p_operation, p_accounts, p_amounts, p_currencies, p_description, p_open, p_tenant);
    END IF;
    LOOP
        UPDATE once_ledger.account a SET balance = a.balance + p_amounts[1], entries = a.entries + 1
            WHERE a.tenant = p_tenant AND a.account = p_accounts[1] AND a.currency = p_currencies[1]
              AND once_ledger.is_covered(a.balance, a.overdraft, a.side, p_amounts[1])
            RETURNING a.id, a.balance, a.entries INTO v_id, v_balance, v_number;
        EXIT WHEN FOUND;
        PERFORM once_ledger.not_moved(p_accounts[1], p_currencies[1], p_amounts[1], p_open, p_tenant);
    END LOOP;
    LOOP
        UPDATE once_ledger.account a SET balance = a.balance + p_amounts[2], entries = a.entries + 1
            WHERE a.tenant = p_tenant AND a.account = p_accounts[2] AND a.currency = p_currencies[1]
              AND once_ledger.is_covered(a.balance, a.overdraft, a.side, p_amounts[2])
            RETURNING a.id, a.balance, a.entries INTO v_id2, v_balance2, v_number2;
        EXIT WHEN FOUND;
        PERFORM once_ledger.not_moved(p_accounts[2], p_currencies[1], p_amounts[2], p_open, p_tenant);
    END LOOP;
    INSERT INTO once_ledger.entry (posting_id, account_id, number, amount, balance, line)
        VALUES (v_posting, v_id, v_number, p_amounts[1], v_balance, 1), (v_posting, v_id2, v_number2, p_amounts[2], v_balance2, 2);
    RETURN (v_posting, 'posted', p_accounts, ARRAY[v_balance, v_balance2])::once_ledger.posted;
END $$;
