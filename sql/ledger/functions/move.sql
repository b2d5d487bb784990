-- Moves the balances of a group's accounts, and writes its entries. They come sorted by account: that is the order of
-- locks. Several entries of one account are one UPDATE, and its overdraft is judged by what they come to together.
CREATE OR REPLACE FUNCTION once_ledger.move(
    p_posting bigint, p_accounts text[], p_amounts bigint[], p_currencies text[], p_open boolean, p_tenant text)
RETURNS once_ledger.posted LANGUAGE plpgsql AS $$
DECLARE
    v_posted once_ledger.posted;
    v_ids bigint[];
    v_numbers bigint[];
    v_after bigint[];
    v_count int := cardinality(p_accounts);
    v_first int := 1;
    v_last int;
    v_delta bigint;
    v_id bigint;
    v_balance bigint;
    v_number bigint;
BEGIN
    v_posted.posting_id := p_posting;
    v_posted.kind := 'posted';
    WHILE v_first <= v_count LOOP
        v_last := v_first;
        v_delta := p_amounts[v_first];
        WHILE v_last < v_count AND p_accounts[v_last + 1] = p_accounts[v_first] LOOP
            v_last := v_last + 1;
            v_delta := v_delta + p_amounts[v_last];
        END LOOP;
        LOOP
            UPDATE once_ledger.account a SET balance = a.balance + v_delta, entries = a.entries + 1 + v_last - v_first
                WHERE a.tenant = p_tenant AND a.account = p_accounts[v_first]
                  AND a.currency = p_currencies[v_first] AND a.currency = p_currencies[v_last]
                  AND once_ledger.is_covered(a.balance, a.overdraft, a.side, v_delta)
                RETURNING a.id, a.balance, a.entries INTO v_id, v_balance, v_number;
            EXIT WHEN FOUND;
            PERFORM once_ledger.not_moved(p_accounts[v_first], c, v_delta, p_open, p_tenant)
                FROM unnest(p_currencies[v_first : v_last]) c; -- several: one of them is not the account's
        END LOOP;
        v_posted.accounts := v_posted.accounts || p_accounts[v_first];
        v_posted.balances := v_posted.balances || v_balance;
        FOR v_line IN REVERSE v_last..v_first LOOP
            v_ids[v_line] := v_id;
            v_numbers[v_line] := v_number - v_last + v_line;
            v_after[v_line] := v_balance;
            v_balance := v_balance - p_amounts[v_line];
        END LOOP;
        v_first := v_last + 1;
    END LOOP;
    INSERT INTO once_ledger.entry (posting_id, account_id, number, amount, balance, line)
    SELECT p_posting, e.account, e.number, e.amount, e.balance, e.line
    FROM unnest(v_ids, v_numbers, p_amounts, v_after) WITH ORDINALITY e (account, number, amount, balance, line);
    RETURN v_posted;
END $$;
