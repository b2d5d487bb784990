-- Insert-or-observe for one intent: the only door to running an effect.
--
-- This is the straight path, kept free of further calls because every protected write pays for them:
-- a replay is one index look, no lock, no write; an absent key in atomic mode takes the intent's advisory
-- lock without waiting and writes nothing (succeed inserts the row, already terminal, in the same
-- transaction). Everything else, and every refusal, is once.claim_any.
-- There is no second look after the lock: a rival that commits in between makes succeed raise 40001
-- (trap 24), which costs that one caller a retry in place of costing everybody a look.
CREATE OR REPLACE FUNCTION once.claim(
    p_scope text, p_key text, p_fingerprint bytea, p_mode text DEFAULT NULL, p_claimed_by text DEFAULT NULL,
    p_lease interval DEFAULT NULL, p_wait interval DEFAULT NULL, p_tenant text DEFAULT '')
RETURNS once.claim_result
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_row once.intent;
    v_policy once.scope;
    v_lock bigint;
    v_claim uuid;
BEGIN
    SELECT * INTO v_row FROM once.intent i
        WHERE i.tenant = p_tenant AND i.scope = p_scope AND i.key = p_key;
    IF FOUND THEN
        IF v_row.status = 'succeeded' AND v_row.fingerprint = p_fingerprint AND NOT v_row.stripped
           AND (v_row.expires_at IS NULL OR v_row.expires_at > once.clock()) THEN
            RETURN once.observed('replay_success', v_row);
        END IF;
    ELSIF once.well_formed(p_tenant, p_scope, p_key, p_fingerprint) AND p_lease IS NULL
          AND (p_wait IS NULL OR p_wait BETWEEN interval '0' AND interval '5 minutes') THEN
        SELECT * INTO v_policy FROM once.scope s WHERE s.scope = p_scope AND s.tenant = p_tenant;
        IF FOUND AND v_policy.key_pattern IS NULL AND coalesce(p_mode, v_policy.mode) = 'atomic' THEN
            v_lock := once.lock_key(p_tenant, p_scope, p_key);
            IF coalesce(current_setting('once.claims', true), '') = '' AND pg_try_advisory_xact_lock(v_lock) THEN
                v_claim := gen_random_uuid();
                PERFORM once.stash(v_claim, v_lock, p_fingerprint, v_policy);
                RETURN ROW('new_claim', v_claim, 1, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
                           NULL)::once.claim_result;
            END IF;
        END IF;
    END IF;
    RETURN once.claim_any(p_scope, p_key, p_fingerprint, p_mode, p_claimed_by, p_lease, p_wait, p_tenant);
END $$;
