-- What became of a claim whose COMMIT was never answered (trap 11). Waits for the lost transaction to be
-- over (it holds the advisory lock, or the row), then asks the row. True: it committed; false: it did not
-- and never will; NULL: cannot be told (below). 55P03: it is still open; ask again. pg_xact_status is no
-- substitute: it can lie after a crash or failover.
CREATE OR REPLACE FUNCTION once.resolve(
    p_scope text, p_key text, p_claim_id uuid, p_wait interval DEFAULT '5 seconds', p_tenant text DEFAULT '')
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_before text := current_setting('lock_timeout');
    v_owner uuid;
    v_status once.intent_status;
    v_policy once.scope;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'resolve needs a snapshot younger than its wait' USING ERRCODE = '25001',
            HINT = 'Call it in READ COMMITTED.';
    END IF;
    PERFORM set_config('lock_timeout', greatest(1, extract(epoch FROM p_wait) * 1000)::int::text, true);
    PERFORM pg_advisory_xact_lock(once.lock_key(p_tenant, p_scope, p_key));
    SELECT i.claim_id, i.status INTO v_owner, v_status FROM once.intent i
        WHERE i.tenant = p_tenant AND i.scope = p_scope AND i.key = p_key FOR UPDATE;
    PERFORM set_config('lock_timeout', v_before, true);
    IF v_owner = p_claim_id THEN
        -- A leased claim that is still processing: its completion may be on its way, holding no lock yet.
        -- Complete again under the same claim id: one of the two gets through, and the other raises.
        RETURN CASE WHEN v_status <> 'processing' THEN true END;
    END IF;
    SELECT * INTO v_policy FROM once.policy(p_tenant, p_scope);
    IF v_policy.retention < interval '1 minute' THEN
        RETURN NULL; -- the row may have come and gone: its absence proves nothing
    END IF;
    RETURN false;
END $$;
