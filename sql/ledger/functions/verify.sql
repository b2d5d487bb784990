-- Computes every balance anew from the entries, and every group from its lines; a row a difference, none where all is
-- well. One statement, so one snapshot: it may run beside postings. Reads the whole ledger, or one account of it and
-- the groups that touch it.
CREATE OR REPLACE FUNCTION once_ledger.verify(p_account text DEFAULT NULL, p_tenant text DEFAULT NULL, p_limit int DEFAULT 1000)
RETURNS TABLE (finding text, tenant text, account text, source text, operation text, expected text, found text)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    WITH asked AS (
        SELECT a.id, a.tenant, a.account, a.balance, a.entries FROM once_ledger.account a
        WHERE (p_account IS NULL OR a.account = p_account) AND (p_tenant IS NULL OR a.tenant = p_tenant)
    ), computed AS (
        SELECT e.account_id, sum(e.amount) AS balance, count(*) AS entries, max(e.number) AS last
        FROM once_ledger.entry e WHERE (p_account IS NULL AND p_tenant IS NULL) OR e.account_id IN (SELECT a.id FROM asked a)
        GROUP BY e.account_id
    ), running AS (
        SELECT e.account_id, e.number, e.balance,
            e.amount + coalesce(lag(e.balance) OVER (PARTITION BY e.account_id ORDER BY e.number), 0)::numeric AS expected
        FROM once_ledger.entry e WHERE (p_account IS NULL AND p_tenant IS NULL) OR e.account_id IN (SELECT a.id FROM asked a)
    ), groups AS (
        SELECT e.posting_id, array_agg(a.account::text ORDER BY e.line) AS accounts, array_agg(e.amount ORDER BY e.line) AS amounts,
            array_agg(a.currency::text ORDER BY e.line) AS currencies, bool_and(a.tenant = p.tenant) AS is_of_tenant
        FROM once_ledger.entry e JOIN once_ledger.posting p ON p.id = e.posting_id JOIN once_ledger.account a ON a.id = e.account_id
        WHERE (p_account IS NULL AND p_tenant IS NULL)
           OR e.posting_id IN (SELECT o.posting_id FROM once_ledger.entry o WHERE o.account_id IN (SELECT i.id FROM asked i))
        GROUP BY e.posting_id
    ), differences AS (
        SELECT 'balance' AS finding, a.tenant, a.account, NULL::text AS source, NULL::text AS operation,
            coalesce(c.balance, 0)::text AS expected, a.balance::text AS found
        FROM asked a LEFT JOIN computed c ON c.account_id = a.id WHERE a.balance <> coalesce(c.balance, 0)
        UNION ALL
        SELECT 'entries', a.tenant, a.account, NULL, NULL, concat(c.entries, ' up to ', c.last), a.entries::text
        FROM asked a LEFT JOIN computed c ON c.account_id = a.id
        WHERE a.entries <> coalesce(c.entries, 0) OR a.entries <> coalesce(c.last, 0)
        UNION ALL
        SELECT 'running balance', a.tenant, a.account, NULL, concat('entry ', r.number), r.expected::text, r.balance::text
        FROM running r LEFT JOIN once_ledger.account a ON a.id = r.account_id WHERE r.balance <> r.expected
        UNION ALL
        SELECT 'account missing', NULL, NULL, NULL, NULL, concat('account ', c.account_id), NULL
        FROM computed c WHERE NOT EXISTS (SELECT FROM once_ledger.account a WHERE a.id = c.account_id)
        UNION ALL
        SELECT 'group missing', NULL, NULL, NULL, concat('group ', e.posting_id), 'a group', NULL
        FROM once_ledger.entry e
        WHERE p_account IS NULL AND NOT EXISTS (SELECT FROM once_ledger.posting p WHERE p.id = e.posting_id)
        UNION ALL
        SELECT 'sum', p.tenant, NULL, p.source, p.operation, '0', concat(s.total, ' ', s.currency)
        FROM groups g JOIN once_ledger.posting p ON p.id = g.posting_id,
            LATERAL (SELECT l.currency, sum(l.amount) AS total FROM unnest(g.amounts, g.currencies) l (amount, currency)
                     GROUP BY l.currency HAVING sum(l.amount) <> 0) s
        UNION ALL
        SELECT 'hash', p.tenant, NULL, p.source, p.operation, encode(p.entries_hash, 'hex'),
            encode(once_ledger.entries_hash(g.accounts, g.amounts, g.currencies), 'hex')
        FROM groups g JOIN once_ledger.posting p ON p.id = g.posting_id
        WHERE p.entries_hash <> once_ledger.entries_hash(g.accounts, g.amounts, g.currencies) OR NOT g.is_of_tenant
        UNION ALL
        SELECT 'no entries', p.tenant, NULL, p.source, p.operation, 'entries', NULL FROM once_ledger.posting p
        WHERE p_account IS NULL AND (p_tenant IS NULL OR p.tenant = p_tenant)
          AND NOT EXISTS (SELECT FROM once_ledger.entry e WHERE e.posting_id = p.id)
    )
    SELECT d.finding, d.tenant, d.account, d.source, d.operation, d.expected, d.found FROM differences d LIMIT p_limit $$;
