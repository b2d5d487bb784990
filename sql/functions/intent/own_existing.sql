-- Ownership of an intent that has a row: gone, failed retryable, or processing with its lease over.
-- Called under the advisory lock. NULL: the row is not what was seen; kind without a claim id: decided
-- without an owner; new_claim without one: the row is out of the way.
CREATE OR REPLACE FUNCTION once.own_existing(
    p_seen once.intent, p_policy once.scope, p_claimed_by text, p_claim_id uuid DEFAULT NULL)
RETURNS once.claim_result LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_row once.intent;
    v_result once.claim_result;
    v_class text;
BEGIN
    -- An owner in the middle of its completion holds the row: that is "in progress", not stale (trap 1).
    SELECT * INTO v_row FROM once.intent i
        WHERE i.tenant = p_seen.tenant AND i.scope = p_seen.scope AND i.key = p_seen.key
        FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        PERFORM 1 FROM once.intent i
            WHERE i.tenant = p_seen.tenant AND i.scope = p_seen.scope AND i.key = p_seen.key;
        RETURN CASE WHEN FOUND THEN once.in_progress(p_seen) END;
    END IF;
    IF v_row.claim_id <> p_seen.claim_id OR v_row.status <> p_seen.status
       OR v_row.locked_until IS DISTINCT FROM p_seen.locked_until THEN
        RETURN NULL;
    END IF;
    IF once.is_gone(v_row, once.clock()) THEN
        DELETE FROM once.intent i WHERE i.tenant = v_row.tenant AND i.scope = v_row.scope AND i.key = v_row.key;
        v_result.kind := 'new_claim';
        v_result.attempt_count := 1;
        RETURN v_result;
    END IF;
    IF v_row.status NOT IN ('processing', 'failed_retryable') THEN
        RETURN NULL; -- gone for the first look and live for this one: a clock that was set back
    END IF;
    v_result.kind := CASE v_row.status WHEN 'processing' THEN 'processing_stale' ELSE 'retryable_failure' END;
    IF v_row.status = 'processing' THEN
        v_class := once.sort_stale(v_row, p_policy, coalesce(p_claimed_by, 'claim'));
        IF v_class <> 'safe_to_retry' THEN
            -- Decided without an owner. Told from here and not by another look: where the scope keeps
            -- nothing (retention none) that look would find nothing, and run again what is known to be done.
            SELECT * INTO v_row FROM once.intent i
                WHERE i.tenant = p_seen.tenant AND i.scope = p_seen.scope AND i.key = p_seen.key;
            RETURN once.observed(CASE v_row.status WHEN 'succeeded' THEN 'replay_success'
                                 WHEN 'failed_final' THEN 'final_failure' ELSE 'uncertain' END, v_row);
        END IF;
    END IF;
    v_result.claim_id := coalesce(p_claim_id, gen_random_uuid());
    v_result.attempt_count := v_row.attempt_count + 1;
    v_result.failure_code := v_row.failure_code;
    v_result.failure_message := v_row.failure_message;
    IF p_policy.mode = 'leased' THEN
        v_result.fence := nextval('once.fence_seq');
        v_result.locked_until := once.clock() + p_policy.lease;
    END IF;
    -- An atomic claim leaves the row claimable: if its transaction commits without an outcome, nothing is stuck.
    UPDATE once.intent i SET
        claim_id = v_result.claim_id, attempt_count = v_result.attempt_count, claimed_by = p_claimed_by,
        fence = coalesce(v_result.fence, i.fence), updated_at = once.clock(),
        status = CASE p_policy.mode WHEN 'leased' THEN 'processing' ELSE i.status END,
        expires_at = CASE p_policy.mode WHEN 'leased' THEN NULL ELSE i.expires_at END,
        locked_until = CASE p_policy.mode WHEN 'leased' THEN v_result.locked_until ELSE i.locked_until END
    WHERE i.tenant = v_row.tenant AND i.scope = v_row.scope AND i.key = v_row.key;
    IF v_row.status = 'processing' THEN
        INSERT INTO once.audit (actor, action, tenant, scope, key, from_status, to_status, from_claim, to_claim)
        VALUES (coalesce(p_claimed_by, 'claim'), 'takeover', v_row.tenant, v_row.scope, v_row.key,
                'processing', 'processing', v_row.claim_id, v_result.claim_id);
    END IF;
    RETURN v_result;
END $$;
