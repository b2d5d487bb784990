-- The safe boundary for an atomic failure: after the effect's transaction rolled back, one call in a new
-- one claims the intent again and records the failure, if nobody else has taken or settled it meanwhile.
-- Returns what the claim saw: new_claim, retryable_failure or processing_stale mean that it is recorded.
CREATE OR REPLACE FUNCTION once.record_failure(
    p_scope text, p_key text, p_fingerprint bytea, p_retryable boolean, p_code text, p_message text DEFAULT NULL,
    p_tenant text DEFAULT '')
RETURNS once.claim_result LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_claim once.claim_result;
BEGIN
    PERFORM once.check_flags(p_retryable);
    v_claim := once.claim(p_scope => p_scope, p_key => p_key, p_fingerprint => p_fingerprint, p_mode => 'atomic',
                          p_wait => interval '0', p_tenant => p_tenant);
    IF v_claim.claim_id IS NOT NULL THEN
        PERFORM once.fail(p_scope => p_scope, p_key => p_key, p_claim_id => v_claim.claim_id,
            p_retryable => p_retryable, p_code => p_code, p_message => p_message, p_tenant => p_tenant);
    END IF;
    RETURN v_claim;
END $$;
