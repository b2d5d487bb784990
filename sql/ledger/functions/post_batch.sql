-- once_ledger.post for many groups of one tenant, all or none: for whoever posts several in one transaction. Two
-- transactions that post one group after the other may wait for each other's accounts in a circle, and one of them ends in
-- 40P01; batches do not: all groups are written first, in the order of their names, then all accounts are locked, then
-- balances move, in the order given.
--
-- p_postings: [{"source", "operation", "description", "entries": [{"account", "amount", "currency"}]}], up to 1000. A row
-- a group, in the order given.
CREATE OR REPLACE FUNCTION once_ledger.post_batch(p_postings jsonb, p_open boolean DEFAULT false, p_tenant text DEFAULT '')
RETURNS TABLE (ordinal int, posting_id bigint, kind text, accounts text[], balances bigint[])
LANGUAGE plpgsql ROWS 100 SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_groups once_ledger.batch_group[] := once_ledger.read_batch(p_postings, p_tenant);
    v_group once_ledger.batch_group;
    v_written bigint[];
    v_id bigint;
BEGIN
    FOR v_group IN SELECT g.* FROM unnest(v_groups) g ORDER BY g.source COLLATE "C", g.operation COLLATE "C", g.ordinal LOOP
        INSERT INTO once_ledger.posting (at, tenant, source, operation, entries_hash, description)
            VALUES (once.clock(), p_tenant, v_group.source, v_group.operation, v_group.entries_hash, v_group.description)
            ON CONFLICT DO NOTHING RETURNING id INTO v_id;
        v_written[v_group.ordinal] := v_id; -- NULL: it was there before
    END LOOP;
    PERFORM once_ledger.lock_accounts(v_groups, v_written, p_open, p_tenant);
    FOREACH v_group IN ARRAY v_groups LOOP
        IF v_written[v_group.ordinal] IS NOT NULL THEN
            PERFORM once_ledger.move(v_written[v_group.ordinal], v_group.accounts, v_group.amounts, v_group.currencies, p_open, p_tenant);
        END IF;
    END LOOP;
    RETURN QUERY
    SELECT g.ordinal, b.posting_id, CASE WHEN v_written[g.ordinal] IS NULL THEN 'already' ELSE 'posted' END, b.accounts, b.balances
    FROM unnest(v_groups) g,
        LATERAL (SELECT (p).* FROM once_ledger.posted_before(NULL, g.source, g.operation, g.entries_hash, p_tenant) p) b
    ORDER BY g.ordinal;
END $$;
