-- Records success under the claim's fence, in the caller's transaction: the effect and this commit together.
-- An atomic claim's row is written here for the first and only time. What is kept of the answer is the
-- scope's policy (response). Raises P4010 to anyone who does not own the claim, 40001 to an atomic claim
-- that a rival overtook: both abort the transaction, and the effect with it.
CREATE OR REPLACE FUNCTION once.succeed(
    p_scope text, p_key text, p_claim_id uuid, p_response jsonb DEFAULT NULL, p_response_body bytea DEFAULT NULL,
    p_response_code int DEFAULT NULL, p_response_headers jsonb DEFAULT NULL,
    p_result_type text DEFAULT NULL, p_result_id text DEFAULT NULL, p_tenant text DEFAULT '')
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_stash text := current_setting('once.claims', true);
    v_at int := coalesce(strpos(v_stash, p_claim_id::text), 0); -- never NULL: NULL AND … goes on to the lock
    v_lock bigint := once.lock_key(p_tenant, p_scope, p_key);
    v_response text;
    v_now timestamptz := once.clock();
    v_expires timestamptz;
BEGIN
    IF p_response IS NOT NULL AND p_response_body IS NULL THEN
        p_response_body := convert_to(p_response::text, 'UTF8');
    END IF;
    IF NOT once.answer_fits(p_response_body, p_response_headers, p_result_type, p_result_id) THEN
        PERFORM once.check_answer(p_response_body, p_response_headers, p_result_type, p_result_id);
    END IF;
    -- The stash entry says that this transaction made the claim; the lock came with it, and taking it again
    -- is free. While we have it, and with a snapshot taken after we got it, nobody can come between
    -- NOT EXISTS and INSERT. An older snapshot (REPEATABLE READ) takes the other path, where ON CONFLICT guards.
    IF v_at > 0 AND substr(v_stash, v_at + 36, 16) = lpad(to_hex(v_lock), 16, '0')
       AND current_setting('transaction_isolation') = 'read committed' AND pg_try_advisory_xact_lock(v_lock) THEN
        v_stash := substr(v_stash, v_at + 52);
        v_expires := v_now + nullif(split_part(substr(v_stash, 65), '|', 1), '')::interval;
        v_response := split_part(v_stash, '|', 3);
        INSERT INTO once.intent (claim_id, created_at, expires_at, status, attempt_count, response_code,
            tombstone_until, tenant, scope, key, fingerprint, result_type, result_id, response_headers, response_body)
        SELECT p_claim_id, v_now, v_expires, 'succeeded', 1,
            CASE WHEN v_response <> 'error' THEN p_response_code END,
            v_expires + nullif(split_part(v_stash, '|', 2), '')::interval,
            p_tenant, p_scope, p_key, decode(left(v_stash, 64), 'hex'),
            CASE WHEN v_response IN ('full', 'reference') THEN p_result_type END,
            CASE WHEN v_response IN ('full', 'reference') THEN p_result_id END,
            CASE WHEN v_response = 'full' THEN p_response_headers END,
            CASE WHEN v_response = 'full' THEN p_response_body END
        WHERE NOT EXISTS (SELECT 1 FROM once.intent i
                          WHERE i.tenant = p_tenant AND i.scope = p_scope AND i.key = p_key);
        IF FOUND THEN
            RETURN;
        END IF;
    END IF;
    PERFORM once.complete(p_tenant, p_scope, p_key, p_claim_id, 'succeeded', 'P4010', p_response_code,
        p_response_headers, p_response_body, p_result_type, p_result_id, NULL, NULL);
END $$;
