-- The first look of claim_batch: which intents are answered already (live successes of the same payload), which
-- have no row and may simply be inserted, and which are for once.claim_as. One probe each, no lock, no write.
-- Large answers go one by one: an array holds at most 1 GB. Seq scans are off for the plan that is kept:
-- it may be made while the table is small, and used when it is not.
CREATE OR REPLACE FUNCTION once.look_batch(
    p_tenants text[], p_scopes text[], p_keys text[], p_fingerprints bytea[], p_claim_ids uuid[],
    OUT o_answers once.claim_answer[], OUT o_absent int[], OUT o_rest int[])
LANGUAGE plpgsql VOLATILE SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_now timestamptz := once.clock();
BEGIN
    SELECT
        array_agg(ROW(s.ordinal, NULL, NULL, 'replay_success', NULL, s.attempt_count, s.response_code,
            s.response_headers, s.response_body, s.result_type, s.result_id, s.failure_code, s.failure_message,
            NULL, NULL, s.expires_at, NULL, NULL, once.expires_in_ms(s.expires_at, v_now))::once.claim_answer)
            FILTER (WHERE s.class = 'replay'),
        array_agg(s.ordinal) FILTER (WHERE s.class = 'absent'),
        array_agg(s.ordinal) FILTER (WHERE s.class = 'rest')
    INTO o_answers, o_absent, o_rest
    FROM (
        SELECT a.ordinal::int, i.attempt_count, i.response_code, i.response_headers, i.response_body, i.result_type,
            i.result_id, i.failure_code, i.failure_message, i.expires_at,
            CASE
                WHEN i.claim_id IS NULL AND a.claim_id IS NOT NULL
                     AND once.well_formed(a.tenant, a.scope, a.key, a.fingerprint) THEN 'absent'
                WHEN i.status = 'succeeded' AND i.fingerprint = a.fingerprint AND NOT i.stripped
                     AND (i.expires_at IS NULL OR i.expires_at > v_now)
                     AND (i.response_body IS NULL OR octet_length(i.response_body) <= 65536) THEN 'replay'
                ELSE 'rest' END AS class
        FROM unnest(p_tenants, p_scopes, p_keys, p_fingerprints, p_claim_ids)
            WITH ORDINALITY AS a (tenant, scope, key, fingerprint, claim_id, ordinal)
        LEFT JOIN LATERAL (
            SELECT * FROM once.intent i
            WHERE i.tenant = a.tenant AND i.scope = a.scope AND i.key = a.key OFFSET 0) i ON true) s;
END $$;
