-- One claim of a batch that needs more than a look or an insert, under the claim id that its caller chose.
-- A row that is processing under that id is the caller's already: the answer to an earlier sending was lost.
-- Nothing was begun under it, so its lease starts anew, also where it was over and nobody came.
CREATE OR REPLACE FUNCTION once.claim_as(
    p_tenant text, p_scope text, p_key text, p_fingerprint bytea, p_claim_id uuid, p_claimed_by text)
RETURNS once.claim_result LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_row once.intent;
    v_policy once.scope;
BEGIN
    IF p_claim_id IS NULL THEN
        RAISE EXCEPTION 'claim id is missing'
            USING ERRCODE = 'P4020', HINT = 'Choose a new random UUID for every claim, and repeat it when sending again.';
    END IF;
    -- A row with a lease is processing (intent_shape). Not to be had: somebody is taking over or completing it, and once.claim_any says so.
    SELECT * INTO v_row FROM once.intent i
        WHERE i.tenant = p_tenant AND i.scope = p_scope AND i.key = p_key AND i.claim_id = p_claim_id
          AND i.locked_until IS NOT NULL AND i.fingerprint = p_fingerprint
        FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN once.claim_any(p_scope, p_key, p_fingerprint, 'leased', p_claimed_by, NULL, interval '0', p_tenant, p_claim_id);
    END IF;
    SELECT * INTO v_policy FROM once.policy(p_tenant, p_scope);
    UPDATE once.intent i SET locked_until = once.clock() + v_policy.lease
        WHERE i.tenant = p_tenant AND i.scope = p_scope AND i.key = p_key
        RETURNING i.locked_until INTO v_row.locked_until;
    RETURN ROW(
        CASE WHEN v_row.attempt_count = 1 THEN 'new_claim'
             WHEN EXISTS (SELECT 1 FROM once.audit a WHERE a.tenant = p_tenant AND a.scope = p_scope AND a.key = p_key
                          AND a.to_claim = p_claim_id AND a.action = 'takeover') THEN 'processing_stale'
             ELSE 'retryable_failure' END,
        p_claim_id, v_row.attempt_count, NULL, NULL, NULL, NULL, NULL, v_row.failure_code, v_row.failure_message,
        v_row.locked_until, NULL, NULL, v_row.fence, extract(epoch FROM v_policy.lease) * 1000)::once.claim_result;
END $$;
