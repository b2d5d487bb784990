-- Makes the intent the caller's, under its advisory lock. p_row is what was seen before the lock.
-- NULL kind: what was seen is not there any more; look again. The claim id is the caller's choice, if it made one.
CREATE OR REPLACE FUNCTION once.own(
    p_row once.intent, p_policy once.scope, p_tenant text, p_scope text, p_key text, p_fingerprint bytea,
    p_lock bigint, p_claimed_by text, p_claim_id uuid DEFAULT NULL)
RETURNS once.claim_result LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_result once.claim_result;
BEGIN
    IF p_row.claim_id IS NOT NULL THEN
        v_result := once.own_existing(p_row, p_policy, p_claimed_by, p_claim_id);
        IF v_result.kind IS DISTINCT FROM 'new_claim' AND v_result.claim_id IS NULL THEN
            RETURN v_result; -- changed under us, being completed, or settled by policy without an owner
        END IF;
    ELSE
        v_result.kind := 'new_claim';
        v_result.attempt_count := 1;
    END IF;
    v_result.claim_id := coalesce(v_result.claim_id, p_claim_id, gen_random_uuid());
    IF p_policy.mode = 'leased' THEN
        v_result.lease_ms := extract(epoch FROM p_policy.lease) * 1000;
        IF v_result.kind = 'new_claim' THEN
            v_result.fence := nextval('once.fence_seq');
            v_result.locked_until := once.clock() + p_policy.lease;
            INSERT INTO once.intent (claim_id, created_at, status, attempt_count, locked_until, fence,
                                     tenant, scope, key, fingerprint, claimed_by)
            VALUES (v_result.claim_id, once.clock(), 'processing', 1, v_result.locked_until, v_result.fence,
                    p_tenant, p_scope, p_key, p_fingerprint, p_claimed_by)
            ON CONFLICT DO NOTHING;
            IF NOT FOUND THEN
                RETURN NULL;
            END IF;
        END IF;
        RETURN v_result;
    END IF;
    PERFORM once.stash(v_result.claim_id, p_lock, p_fingerprint, p_policy);
    RETURN v_result;
END $$;
