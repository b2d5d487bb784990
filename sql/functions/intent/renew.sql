-- Extends a lease that is still running. A lease that is over cannot be renewed: it may be somebody's already.
CREATE OR REPLACE FUNCTION once.renew(
    p_scope text, p_key text, p_claim_id uuid, p_lease interval DEFAULT NULL, p_tenant text DEFAULT '')
RETURNS timestamptz LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_until timestamptz;
    v_policy once.scope;
BEGIN
    SELECT * INTO v_policy FROM once.policy(p_tenant, p_scope);
    v_policy := once.override_policy(v_policy, NULL, p_lease, NULL);
    UPDATE once.intent i SET locked_until = once.clock() + v_policy.lease
        WHERE i.tenant = p_tenant AND i.scope = p_scope AND i.key = p_key AND i.claim_id = p_claim_id
          AND i.locked_until > once.clock() -- and so processing: see intent_shape
        RETURNING i.locked_until INTO v_until;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'this call does not own the claim' USING ERRCODE = 'P4012',
            DETAIL = 'The lease is over, the claim id is not the current one, or the intent is settled already.',
            HINT = 'Stop the work: somebody else may be at it.';
    END IF;
    RETURN v_until;
END $$;
