-- Writes a group that was checked, its entries sorted, and moves the balances of their accounts.
--
-- The group's row comes first: a rival with the same operation waits for it, holding nothing, and is then told
-- "already" (or posts, where this one rolled back). Accounts come after it, one UPDATE each in the order of their names:
-- so groups that share accounts wait for each other, and never in a circle.
CREATE OR REPLACE FUNCTION once_ledger.write_group(
    p_reverses bigint, p_source text, p_operation text, p_accounts text[], p_amounts bigint[], p_currencies text[],
    p_description text, p_open boolean, p_tenant text)
RETURNS once_ledger.posted LANGUAGE plpgsql AS $$
DECLARE
    v_posted once_ledger.posted;
    v_hash bytea := once_ledger.entries_hash(p_accounts, p_amounts, p_currencies);
BEGIN
    INSERT INTO once_ledger.posting (at, reverses, tenant, source, operation, entries_hash, description)
        VALUES (once.clock(), p_reverses, p_tenant, p_source, p_operation, v_hash, p_description)
        ON CONFLICT DO NOTHING RETURNING id INTO v_posted.posting_id;
    IF NOT FOUND THEN
        RETURN once_ledger.posted_before(p_reverses, p_source, p_operation, v_hash, p_tenant);
    END IF;
    RETURN once_ledger.move(v_posted.posting_id, p_accounts, p_amounts, p_currencies, p_open, p_tenant);
END $$;
