-- Inserts the claims of intents that had no row when looked for: each under the same advisory lock as in
-- once.claim, taken without waiting, and all in one statement. Sorted, so that batches with the same keys meet
-- in the same order. What could not be inserted (a rival was faster, or the same key twice in the batch) is left
-- for once.claim_as, as are keys whose format their scope declares.
CREATE OR REPLACE FUNCTION once.own_batch(
    p_tenants text[], p_scopes text[], p_keys text[], p_fingerprints bytea[], p_claim_ids uuid[], p_absent int[],
    p_claimed_by text, OUT o_answers once.claim_answer[], OUT o_rest int[])
LANGUAGE plpgsql VOLATILE SET plan_cache_mode = force_generic_plan SET enable_nestloop = off SET jit = off AS $$
BEGIN
    WITH asked AS MATERIALIZED (
        SELECT a.* FROM unnest(p_tenants, p_scopes, p_keys, p_fingerprints, p_claim_ids)
            WITH ORDINALITY AS a (tenant, scope, key, fingerprint, claim_id, ordinal)
        WHERE a.ordinal = ANY (p_absent)
    ), rules AS MATERIALIZED (
        SELECT d.tenant, d.scope, p.lease, p.key_pattern
        FROM (SELECT DISTINCT a.tenant, a.scope FROM asked a) d CROSS JOIN LATERAL once.policy(d.tenant, d.scope) p
    ), tried AS MATERIALIZED (
        SELECT s.*, CASE WHEN s.key_pattern IS NULL
                         THEN pg_try_advisory_xact_lock(once.lock_key(s.tenant, s.scope, s.key)) END AS locked
        FROM (
            SELECT a.*, r.lease, r.key_pattern FROM asked a JOIN rules r ON r.tenant = a.tenant AND r.scope = a.scope
            ORDER BY a.tenant COLLATE "C", a.scope COLLATE "C", a.key COLLATE "C", a.ordinal OFFSET 0) s
    ), inserted AS (
        INSERT INTO once.intent (claim_id, created_at, status, attempt_count, locked_until, fence,
                                 tenant, scope, key, fingerprint, claimed_by)
        SELECT t.claim_id, once.clock(), 'processing', 1, once.clock() + t.lease, nextval('once.fence_seq'),
               t.tenant, t.scope, t.key, t.fingerprint, p_claimed_by
        FROM tried t WHERE t.locked
        ORDER BY t.tenant COLLATE "C", t.scope COLLATE "C", t.key COLLATE "C", t.ordinal
        ON CONFLICT DO NOTHING
        RETURNING claim_id, tenant, scope, key, locked_until, fence
    )
    SELECT
        array_agg(CASE WHEN t.locked THEN
            ROW(t.ordinal, NULL, NULL, 'new_claim', n.claim_id, 1, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
                n.locked_until, NULL, NULL, n.fence, date_part('epoch', t.lease) * 1000, NULL)::once.claim_answer
        ELSE -- somebody is at it this very moment: see once.claim_batch
            ROW(t.ordinal, NULL, NULL, 'processing_active', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
                NULL, 100, NULL, NULL, NULL, NULL)::once.claim_answer END)
            FILTER (WHERE n.claim_id IS NOT NULL OR NOT t.locked),
        array_agg(t.ordinal ORDER BY t.ordinal) FILTER (WHERE n.claim_id IS NULL AND t.locked IS DISTINCT FROM false)
    INTO o_answers, o_rest
    FROM tried t
    LEFT JOIN inserted n ON n.claim_id = t.claim_id AND n.tenant = t.tenant AND n.scope = t.scope AND n.key = t.key;
END $$;
