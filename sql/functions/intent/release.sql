-- Gives a claim back as if it had never been made: nothing was done under it. A new intent disappears,
-- one that had failed before is retryable as before. An atomic claim's lock stays until its transaction ends.
CREATE OR REPLACE FUNCTION once.release(p_scope text, p_key text, p_claim_id uuid, p_tenant text DEFAULT '')
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_stash text;
    v_policy once.scope;
    v_row once.intent;
BEGIN
    v_stash := once.stashed(p_claim_id, once.lock_key(p_tenant, p_scope, p_key));
    SELECT * INTO v_row FROM once.intent i
        WHERE i.tenant = p_tenant AND i.scope = p_scope AND i.key = p_key AND i.claim_id = p_claim_id
        FOR UPDATE;
    IF v_stash IS NOT NULL AND v_row.status IS DISTINCT FROM 'succeeded' AND v_row.status IS DISTINCT FROM 'failed_final' THEN
        UPDATE once.intent i SET attempt_count = i.attempt_count - 1 -- it had failed before, and is as it was
            WHERE i.tenant = p_tenant AND i.scope = p_scope AND i.key = p_key AND i.claim_id = p_claim_id;
        PERFORM once.unstash(v_stash);
        RETURN;
    END IF;
    IF v_row.status IS DISTINCT FROM 'processing' THEN
        RAISE EXCEPTION 'this call does not own the claim' USING ERRCODE = 'P4012',
            DETAIL = 'The lease was lost, the claim id is not the current one, or the intent is settled already.',
            HINT = 'There is nothing to give back.';
    END IF;
    IF v_row.attempt_count = 1 THEN
        DELETE FROM once.intent i WHERE i.tenant = p_tenant AND i.scope = p_scope AND i.key = p_key;
        RETURN;
    END IF;
    SELECT * INTO v_policy FROM once.policy(p_tenant, p_scope);
    UPDATE once.intent i SET
        status = 'failed_retryable', claim_id = gen_random_uuid(), attempt_count = v_row.attempt_count - 1,
        locked_until = NULL, updated_at = once.clock(), expires_at = once.clock() + v_policy.retention,
        failure_code = coalesce(v_row.failure_code, 'released')
    WHERE i.tenant = p_tenant AND i.scope = p_scope AND i.key = p_key;
END $$;
