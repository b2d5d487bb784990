-- What a group says, whatever order it was said in: its entries are sorted before. verify computes it anew.
CREATE OR REPLACE FUNCTION once_ledger.entries_hash(p_accounts text[], p_amounts bigint[], p_currencies text[])
RETURNS bytea LANGUAGE sql STABLE AS $$
    SELECT pg_catalog.sha256(pg_catalog.convert_to(p_accounts::text || p_amounts::text || p_currencies::text, 'UTF8')) $$;
