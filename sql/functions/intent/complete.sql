-- Writes an outcome into the intent's row, fenced by the claim id: the whole of fail, and of succeed
-- wherever there may be a row already. p_lost is raised to a caller that does not own the claim.
CREATE OR REPLACE FUNCTION once.complete(
    p_tenant text, p_scope text, p_key text, p_claim_id uuid, p_status once.intent_status, p_lost text,
    p_response_code int, p_response_headers jsonb, p_response_body bytea, p_result_type text, p_result_id text,
    p_failure_code text, p_failure_message text)
RETURNS void LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_now timestamptz := once.clock();
    v_stash text := once.stashed(p_claim_id, once.lock_key(p_tenant, p_scope, p_key));
    v_policy once.scope;
    v_owner uuid;
BEGIN
    IF v_stash IS NOT NULL THEN
        -- An atomic claim: make the row, unless the claim took over one that is there. Where a rival
        -- committed after our snapshot, ON CONFLICT raises 40001 by itself (traps 4 and 24).
        INSERT INTO once.intent (claim_id, created_at, status, attempt_count, tenant, scope, key, fingerprint)
        VALUES (p_claim_id, v_now, 'failed_retryable', 1, p_tenant, p_scope, p_key, decode(substr(v_stash, 53, 64), 'hex'))
        ON CONFLICT DO NOTHING;
    END IF;
    SELECT * INTO v_policy FROM once.policy(p_tenant, p_scope);
    UPDATE once.intent i SET
        status = CASE WHEN p_status = 'failed_retryable' AND i.attempt_count >= v_policy.attempts_max
                      THEN 'failed_final' ELSE p_status END,
        updated_at = v_now, locked_until = NULL,
        completed_at = CASE WHEN p_status <> 'failed_retryable' OR i.attempt_count >= v_policy.attempts_max THEN v_now END,
        expires_at = v_now + v_policy.retention,
        tombstone_until = CASE WHEN p_status = 'succeeded' THEN v_now + v_policy.retention + v_policy.tombstone END,
        response_code = CASE WHEN v_policy.response <> 'error' THEN p_response_code END,
        result_type = CASE WHEN v_policy.response IN ('full', 'reference') THEN p_result_type END,
        result_id = CASE WHEN v_policy.response IN ('full', 'reference') THEN p_result_id END,
        response_headers = CASE WHEN v_policy.response = 'full' THEN p_response_headers END,
        response_body = CASE WHEN v_policy.response = 'full' THEN p_response_body END,
        failure_code = p_failure_code,
        failure_message = CASE WHEN v_policy.response <> 'error' THEN p_failure_message END
    WHERE i.tenant = p_tenant AND i.scope = p_scope AND i.key = p_key AND i.claim_id = p_claim_id
      AND (i.status = 'processing' OR (v_stash IS NOT NULL AND i.status = 'failed_retryable'));
    IF FOUND THEN
        PERFORM once.unstash(v_stash);
        RETURN;
    END IF;
    SELECT i.claim_id INTO v_owner FROM once.intent i
        WHERE i.tenant = p_tenant AND i.scope = p_scope AND i.key = p_key;
    IF v_stash IS NOT NULL AND v_owner IS DISTINCT FROM p_claim_id THEN
        RAISE EXCEPTION 'another transaction settled this intent first' USING ERRCODE = '40001',
            DETAIL = 'The effect of this transaction is rolled back with it.',
            HINT = 'Run the whole transaction again: the claim will then observe the outcome.';
    END IF;
    RAISE EXCEPTION 'this call does not own the claim' USING ERRCODE = p_lost,
        DETAIL = 'The lease was lost, the claim id is not the current one, or the intent is settled already.',
        HINT = 'Roll back: whatever this transaction did must not stay. Claim again to see the outcome.';
END $$;
