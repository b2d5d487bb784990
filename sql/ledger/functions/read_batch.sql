-- The groups of a batch, each checked and sorted.
CREATE OR REPLACE FUNCTION once_ledger.read_batch(p_postings jsonb, p_tenant text)
RETURNS once_ledger.batch_group[] LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_groups once_ledger.batch_group[] := '{}';
    v_group record;
    v_sorted record;
BEGIN
    IF jsonb_typeof(p_postings) IS DISTINCT FROM 'array' OR jsonb_array_length(p_postings) > 1000
       OR jsonb_path_exists(p_postings, '$[*] ? (@.entries.type() != "array")') THEN
        RAISE EXCEPTION 'this cannot be posted: it is not an array of up to 1000 groups with entries' USING ERRCODE = 'P4090',
            DETAIL = 'Nothing was posted.', HINT = 'See docs/reference/sql.md, once_ledger.post_batch.';
    END IF;
    FOR v_group IN
        SELECT g.place::int AS ordinal, g.value ->> 'source' AS source, g.value ->> 'operation' AS operation,
            g.value ->> 'description' AS description, e.accounts, e.amounts, e.currencies
        FROM jsonb_array_elements(p_postings) WITH ORDINALITY g (value, place), LATERAL (
            SELECT array_agg(l.value ->> 'account' ORDER BY l.place) AS accounts,
                array_agg(once_ledger.read_amount(l.value ->> 'amount') ORDER BY l.place) AS amounts,
                array_agg(l.value ->> 'currency' ORDER BY l.place) AS currencies
            FROM jsonb_array_elements(g.value -> 'entries') WITH ORDINALITY l (value, place)) e
        ORDER BY g.place
    LOOP
        PERFORM once_ledger.check_posting(v_group.source, v_group.operation, v_group.accounts, v_group.amounts,
            v_group.currencies, v_group.description, p_tenant);
        v_sorted := once_ledger.sort_entries(v_group.accounts, v_group.amounts, v_group.currencies);
        v_groups := v_groups || (v_group.ordinal, v_group.source, v_group.operation, v_group.description,
            v_sorted.p_accounts, v_sorted.p_amounts, v_sorted.p_currencies,
            once_ledger.entries_hash(v_sorted.p_accounts, v_sorted.p_amounts, v_sorted.p_currencies))::once_ledger.batch_group;
    END LOOP;
    RETURN v_groups;
END $$;
