-- A group that is there already, if it is the same: its id, and the balances that its accounts had after it.
CREATE OR REPLACE FUNCTION once_ledger.posted_before(
    p_reverses bigint, p_source text, p_operation text, p_hash bytea, p_tenant text)
RETURNS once_ledger.posted LANGUAGE plpgsql AS $$
DECLARE
    v_posted once_ledger.posted;
    v_found record;
BEGIN
    -- Statements of their own: their snapshots are younger than the rival's commit.
    SELECT p.id, p.entries_hash, p.reverses INTO v_found FROM once_ledger.posting p
        WHERE p.tenant = p_tenant AND p.source = p_source AND p.operation = p_operation;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'the group was reversed before, by another operation' USING ERRCODE = 'P4095',
            DETAIL = 'Nothing was posted.', HINT = 'A group is taken back once. To book it again, post a new operation.';
    END IF;
    IF v_found.entries_hash <> p_hash OR v_found.reverses IS DISTINCT FROM p_reverses THEN
        RAISE EXCEPTION 'this operation was posted before with other entries' USING ERRCODE = 'P4094',
            DETAIL = 'This one was not posted; the first one stays as it is.',
            HINT = 'One operation is one group of entries: give a correction an operation of its own.';
    END IF;
    v_posted.posting_id := v_found.id;
    v_posted.kind := 'already';
    SELECT array_agg(e.account), array_agg(e.balance) INTO v_posted.accounts, v_posted.balances
    FROM (SELECT DISTINCT ON (a.account) a.account::text, n.balance FROM once_ledger.entry n
          JOIN once_ledger.account a ON a.id = n.account_id
          WHERE n.posting_id = v_found.id ORDER BY a.account, n.line DESC) e;
    RETURN v_posted;
END $$;
