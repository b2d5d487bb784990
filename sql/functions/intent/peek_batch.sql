-- once.peek for many intents at once: what a claim would observe, without claiming or writing. kind is NULL where
-- it could be owned; another payload is P4002 in error.
CREATE OR REPLACE FUNCTION once.peek_batch(
    p_tenants text[], p_scopes text[], p_keys text[], p_fingerprints bytea[])
RETURNS SETOF once.claim_answer
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
BEGIN
    PERFORM once.check_batch(cardinality(p_keys), cardinality(p_tenants), cardinality(p_scopes),
        cardinality(p_fingerprints));
    RETURN QUERY
    SELECT a.ordinal::int, c.error, CASE WHEN c.error IS NOT NULL THEN 'key was used before with another payload' END,
           o.*, once.expires_in_ms(o.expires_at, once.clock())
    FROM unnest(p_tenants, p_scopes, p_keys, p_fingerprints)
        WITH ORDINALITY AS a (tenant, scope, key, fingerprint, ordinal)
    LEFT JOIN LATERAL (
        SELECT i AS row FROM once.intent i
        WHERE i.tenant = a.tenant AND i.scope = a.scope AND i.key = a.key OFFSET 0) i ON true
    CROSS JOIN LATERAL (
        SELECT CASE WHEN (i.row).fingerprint <> a.fingerprint AND NOT once.is_gone(i.row, once.clock())
                    THEN 'P4002' END AS error) c
    -- Only the row of the same payload: another is not shown, whatever it says.
    CROSS JOIN LATERAL once.observe(CASE WHEN (i.row).fingerprint = a.fingerprint THEN i.row END, a.fingerprint) o;
END $$;
