-- once.claim_batch for one intent, without its arrays: the straight paths are a live success and a free key; all else
-- is once.claim_apart. A batch of one comes here, too: the set-based statements cost more to start than they save.
CREATE OR REPLACE FUNCTION once.claim_alone(
    p_tenant text, p_scope text, p_key text, p_fingerprint bytea, p_claim_id uuid, p_claimed_by text DEFAULT NULL)
RETURNS once.claim_answer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_row once.intent;
    v_policy once.scope;
    v_now timestamptz := once.clock(); -- as a value: a function of the clock is not inlined
BEGIN
    SELECT * INTO v_row FROM once.intent i WHERE i.tenant = p_tenant AND i.scope = p_scope AND i.key = p_key;
    IF FOUND THEN
        IF v_row.status = 'succeeded' AND v_row.fingerprint = p_fingerprint AND NOT v_row.stripped
           AND (v_row.expires_at IS NULL OR v_row.expires_at > v_now) THEN
            RETURN ROW(1, NULL, NULL, 'replay_success', NULL, v_row.attempt_count, v_row.response_code,
                v_row.response_headers, v_row.response_body, v_row.result_type, v_row.result_id, v_row.failure_code,
                v_row.failure_message, NULL, NULL, v_row.expires_at, NULL, NULL,
                once.expires_in_ms(v_row.expires_at, v_now))::once.claim_answer;
        END IF;
        RETURN once.claim_apart(1, p_tenant, p_scope, p_key, p_fingerprint, p_claim_id, p_claimed_by);
    END IF;
    SELECT * INTO v_policy FROM once.policy(p_tenant, p_scope);
    IF p_claim_id IS NULL OR v_policy.key_pattern IS NOT NULL
       OR once.well_formed(p_tenant, p_scope, p_key, p_fingerprint) IS NOT TRUE THEN
        RETURN once.claim_apart(1, p_tenant, p_scope, p_key, p_fingerprint, p_claim_id, p_claimed_by);
    END IF;
    IF NOT pg_try_advisory_xact_lock(once.lock_key(p_tenant, p_scope, p_key)) THEN
        RETURN ROW(1, NULL, NULL, 'processing_active', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
            100, NULL, NULL, NULL, NULL)::once.claim_answer; -- see once.claim_apart
    END IF;
    INSERT INTO once.intent (claim_id, created_at, status, attempt_count, locked_until, fence,
                             tenant, scope, key, fingerprint, claimed_by)
    VALUES (p_claim_id, v_now, 'processing', 1, v_now + v_policy.lease, nextval('once.fence_seq'),
            p_tenant, p_scope, p_key, p_fingerprint, p_claimed_by)
    ON CONFLICT DO NOTHING
    RETURNING locked_until, fence INTO v_row.locked_until, v_row.fence;
    IF NOT FOUND THEN
        -- A rival committed between the look and the lock.
        RETURN once.claim_apart(1, p_tenant, p_scope, p_key, p_fingerprint, p_claim_id, p_claimed_by);
    END IF;
    RETURN ROW(1, NULL, NULL, 'new_claim', p_claim_id, 1, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
        v_row.locked_until, NULL, NULL, v_row.fence, date_part('epoch', v_policy.lease) * 1000, NULL)::once.claim_answer;
END $$;
