-- The entries in the one order in which accounts are locked and hashes are made, each with its currency. Raises where
-- they do not balance. Sums are numeric: no order of adding overflows.
CREATE OR REPLACE FUNCTION once_ledger.sort_entries(INOUT p_accounts text[], INOUT p_amounts bigint[], INOUT p_currencies text[])
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    v_one text := CASE cardinality(p_currencies) WHEN 1 THEN p_currencies[1] END;
BEGIN
    IF EXISTS (SELECT FROM unnest(p_amounts, p_currencies) e (amount, currency)
               GROUP BY coalesce(v_one, e.currency) HAVING sum(e.amount) <> 0) THEN
        PERFORM once_ledger.unbalanced();
    END IF;
    SELECT array_agg(e.account), array_agg(e.amount), array_agg(e.currency) INTO p_accounts, p_amounts, p_currencies
    FROM (SELECT g.account, g.amount, coalesce(v_one, g.currency) AS currency
          FROM unnest(p_accounts, p_amounts, p_currencies) g (account, amount, currency)
          ORDER BY g.account COLLATE "C", coalesce(v_one, g.currency) COLLATE "C", g.amount) e;
END $$;
