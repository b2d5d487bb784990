-- The whole of claim: look, decide, own or wait, and look again, in a bounded loop. Two statements and
-- not one: each takes a new snapshot, so a rival's commit or a purge in between is seen (traps 5 and 13).
CREATE OR REPLACE FUNCTION once.claim_any(
    p_scope text, p_key text, p_fingerprint bytea, p_mode text, p_claimed_by text, p_lease interval,
    p_wait interval, p_tenant text, p_claim_id uuid DEFAULT NULL)
RETURNS once.claim_result LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_row once.intent;
    v_policy once.scope;
    v_result once.claim_result;
    v_lock bigint := once.lock_key(p_tenant, p_scope, p_key);
    v_started timestamptz := clock_timestamp();
    v_deadline timestamptz;
    v_goes_on boolean;
BEGIN
    SELECT * INTO v_policy FROM once.policy(p_tenant, p_scope);
    PERFORM once.check_intent(p_tenant, p_scope, p_key, p_fingerprint, v_policy.key_pattern);
    v_policy := once.override_policy(v_policy, p_mode, p_lease, p_wait);
    v_deadline := clock_timestamp() + v_policy.wait_max;
    FOR v_look IN 1 .. 10000 LOOP
        SELECT * INTO v_row FROM once.intent i
            WHERE i.tenant = p_tenant AND i.scope = p_scope AND i.key = p_key;
        v_result := NULL;
        IF FOUND THEN
            v_result := once.observe(v_row, p_fingerprint);
        END IF;
        IF v_result.kind IS NULL THEN -- there is ownership to be had
            IF strpos(current_setting('once.claims', true), lpad(to_hex(v_lock), 16, '0')) > 0 THEN
                RETURN once.in_progress(v_row); -- claimed before in this very transaction: waiting cannot help
            END IF;
            BEGIN
                IF pg_try_advisory_xact_lock(v_lock) THEN
                    v_result := once.own(v_row, v_policy, p_tenant, p_scope, p_key, p_fingerprint, v_lock, p_claimed_by,
                                         p_claim_id);
                ELSIF v_look > 20 OR NOT pg_try_advisory_xact_lock_shared(v_lock) THEN
                    v_result := once.in_progress(v_row);
                END IF; -- else only waiters that are just waking hold it, shared: look again
                IF v_result.kind IS NULL OR v_result.kind = 'processing_active' THEN
                    -- Who owns nothing must not keep others from owning it: give the lock back.
                    RAISE EXCEPTION USING ERRCODE = 'P4100';
                END IF;
            EXCEPTION WHEN SQLSTATE 'P4100' THEN NULL;
            END;
            CONTINUE WHEN v_result.kind IS NULL; -- the row changed before we had the lock
        END IF;
        IF v_result.kind <> 'processing_active' OR v_policy.in_progress <> 'wait' THEN
            RETURN v_result;
        END IF;
        v_goes_on := once.await_rival(v_lock, coalesce(v_row.locked_until > once.clock(), false), v_deadline,
                                      v_policy.waiters_max, v_look);
        -- For whoever measures: the caller's statement reads it beside the answer.
        PERFORM set_config('once.waited_ms', (extract(epoch FROM clock_timestamp() - v_started) * 1000)::bigint::text, true);
        IF NOT v_goes_on THEN
            RETURN v_result;
        END IF;
    END LOOP;
    RETURN once.in_progress(v_row);
END $$;
