-- Hands out unknown calls whose provider is to be asked about them, each under a lease. Where nobody can be asked: a
-- provider that knows calls by their key gets it again, under the same key; else a notice is waited for, and at last a
-- person is. What others hold is skipped.
CREATE OR REPLACE FUNCTION once.call_doubts(
    p_worker text DEFAULT NULL, p_limit int DEFAULT 1, p_provider text DEFAULT NULL, p_custom text[] DEFAULT '{}')
RETURNS TABLE (id uuid, claim_id uuid, provider text, operation text, tenant text, asked int, reference text, how text,
               path text, base_url text, key_header text, header_env jsonb, timeout_ms int, grace_ms int)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_policy once.provider;
    v_call once.call;
    v_new once.call;
    v_left int := p_limit;
    v_admitted int;
    v_used int;
BEGIN
    PERFORM once.check_call_take(p_worker, p_limit);
    FOR v_policy IN
        SELECT * FROM once.provider p WHERE p.provider <> '' AND (p_provider IS NULL OR p.provider = p_provider)
          AND (p.reconcile <> 'worker' OR p.provider = ANY (p_custom))
          AND EXISTS (SELECT FROM once.call c WHERE c.provider = p.provider AND c.state = 'unknown' AND c.next_at <= once.clock())
        ORDER BY random()
    LOOP
        EXIT WHEN v_left < 1;
        -- Only what goes over the wire is the provider's to limit.
        v_admitted := CASE WHEN v_policy.reconcile IN ('http', 'worker') THEN once.provider_admit(v_policy, v_left) ELSE v_left END;
        v_used := 0;
        FOR v_call IN
            SELECT * FROM once.call c WHERE c.provider = v_policy.provider AND c.state = 'unknown' AND c.next_at <= once.clock()
              AND (c.leased_until IS NULL OR c.leased_until <= once.clock())
            ORDER BY c.next_at LIMIT v_admitted FOR UPDATE SKIP LOCKED
        LOOP
            IF once.call_match(v_call) > 0 THEN
                SELECT * INTO v_call FROM once.call c WHERE c.id = v_call.id;
                CONTINUE WHEN v_call.state <> 'unknown';
            END IF;
            IF v_policy.reconcile = 'none' THEN
                PERFORM once.call_unasked(v_call, v_policy);
                CONTINUE;
            END IF;
            v_new := v_call;
            v_new.leased_until := once.clock() + v_policy.timeout + v_policy.grace;
            v_new.claim_id := gen_random_uuid();
            v_new.worker := p_worker;
            PERFORM once.call_move(v_call, v_new);
            v_used := v_used + 1;
            RETURN QUERY SELECT v_new.id, v_new.claim_id, v_new.provider::text, v_new.operation::text, v_new.tenant::text,
                v_new.asked, v_new.reference, v_policy.reconcile, v_policy.reconcile_rule ->> 'path', v_policy.base_url,
                v_policy.key_header, v_policy.header_env, (extract(epoch FROM v_policy.timeout) * 1000)::int,
                (extract(epoch FROM v_policy.grace) * 1000)::int;
        END LOOP;
        IF v_policy.reconcile IN ('http', 'worker') THEN
            PERFORM once.provider_return(v_policy, v_admitted, v_used);
        END IF;
        v_left := v_left - v_used;
    END LOOP;
END $$;
