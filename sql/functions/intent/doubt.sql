-- The owner does not know whether the effect happened: an answer that was lost, a time-out, an error from the other
-- side. Ends the claim at once by the scope's stale policy, as if its lease had run out (once.sort_stale): rerun
-- makes it claimable again, or final when the attempts are used up; probe asks; hold keeps it as uncertain.
-- Returns the new status. The claim id is spent: a completion under it that comes later raises. One that is under
-- way in another transaction holds the row and is waited for: if it commits, there is no doubt any more, and its
-- status is returned. Raises P4011 to anyone who does not own the claim.
CREATE OR REPLACE FUNCTION once.doubt(
    p_scope text, p_key text, p_claim_id uuid, p_code text, p_message text DEFAULT NULL, p_tenant text DEFAULT '')
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_row once.intent;
    v_policy once.scope;
    v_code text := left(coalesce(p_code, 'unspecified'), 100);
    v_message text;
    v_actor text;
BEGIN
    SELECT * INTO v_row FROM once.intent i
        WHERE i.tenant = p_tenant AND i.scope = p_scope AND i.key = p_key AND i.claim_id = p_claim_id
        FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'this call does not own the claim' USING ERRCODE = 'P4011',
            DETAIL = 'The lease was lost, or the claim id is not the current one.',
            HINT = 'Claim again, or peek, to see what became of it.';
    END IF;
    IF v_row.status <> 'processing' THEN
        RETURN v_row.status; -- recorded under this very claim
    END IF;
    SELECT * INTO v_policy FROM once.policy(p_tenant, p_scope);
    v_message := CASE WHEN v_policy.response <> 'error' THEN left(p_message, 2000) END;
    v_actor := coalesce(v_row.claimed_by, 'owner');
    IF once.sort_stale(v_row, v_policy, v_actor, v_code, v_message) = 'safe_to_retry' THEN
        PERFORM once.finish_row(v_row, v_policy, 'failed_retryable', v_actor, 'safe_to_retry', 'doubt: ' || v_code,
            p_failure_code => v_code, p_failure_message => v_message);
    END IF;
    SELECT i.status INTO v_row.status FROM once.intent i
        WHERE i.tenant = p_tenant AND i.scope = p_scope AND i.key = p_key;
    RETURN v_row.status;
END $$;
