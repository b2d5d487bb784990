-- once.peek for many intents at once: what a claim would observe, without claiming or writing. kind is NULL where
-- it could be owned; another payload is P4002 in error.
CREATE OR REPLACE FUNCTION once.peek_batch(
    p_tenants text[], p_scopes text[], p_keys text[], p_fingerprints bytea[])
RETURNS SETOF once.claim_answer
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_now timestamptz := once.clock(); -- as a value: a function of the clock is not inlined
    v_row once.intent;
    v_result once.claim_result;
BEGIN
    IF once.check_batch(cardinality(p_keys), once.shape(p_keys), once.shape(p_tenants), once.shape(p_scopes),
                        once.shape(p_fingerprints)) = 1 THEN -- alone: a plain look is cheaper
        SELECT * INTO v_row FROM once.intent i
            WHERE i.tenant = p_tenants[1] AND i.scope = p_scopes[1] AND i.key = p_keys[1];
        IF v_row.fingerprint IS NULL OR v_row.fingerprint = p_fingerprints[1] THEN
            IF FOUND THEN
                v_result := once.observe(v_row, p_fingerprints[1]);
            END IF;
            RETURN QUERY SELECT 1, NULL::text, NULL::text, (v_result).*,
                                once.expires_in_ms(v_result.expires_at, v_now);
            RETURN;
        END IF;
    END IF;
    RETURN QUERY
    SELECT a.ordinal::int, c.error, CASE WHEN c.error IS NOT NULL THEN 'key was used before with another payload' END,
           o.*, once.expires_in_ms(o.expires_at, v_now)
    FROM unnest(p_tenants, p_scopes, p_keys, p_fingerprints)
        WITH ORDINALITY AS a (tenant, scope, key, fingerprint, ordinal)
    LEFT JOIN LATERAL (
        SELECT i AS row FROM once.intent i
        WHERE i.tenant = a.tenant AND i.scope = a.scope AND i.key = a.key OFFSET 0) i ON true
    CROSS JOIN LATERAL (
        SELECT CASE WHEN (i.row).fingerprint <> a.fingerprint AND NOT once.is_gone(i.row, v_now)
                    THEN 'P4002' END AS error) c
    -- Only the row of the same payload: another is not shown, whatever it says.
    CROSS JOIN LATERAL once.observe(CASE WHEN (i.row).fingerprint = a.fingerprint THEN i.row END, a.fingerprint) o;
END $$;
