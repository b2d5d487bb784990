-- Hands out calls that are to be sent, each under a lease of the provider's timeout and grace, with a claim id that every
-- later word about it must carry. They are sent from here on: commit before the first byte goes out, so that whatever
-- happens afterwards leaves an unknown call, and never one that looks as if nobody had touched it.
-- Not more than a provider takes; none of a provider that is paused or broken. What others hold is skipped.
CREATE OR REPLACE FUNCTION once.call_take(
    p_worker text DEFAULT NULL, p_limit int DEFAULT 1, p_provider text DEFAULT NULL, p_custom text[] DEFAULT '{}')
RETURNS TABLE (id uuid, claim_id uuid, provider text, operation text, tenant text, method text, path text, headers jsonb,
               content_type text, body bytea, attempts int, reference text, base_url text, key_header text, header_env jsonb,
               timeout_ms int, grace_ms int)
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
          AND (p.base_url IS NOT NULL OR p.provider = ANY (p_custom))
          AND EXISTS (SELECT FROM once.call c WHERE c.provider = p.provider AND c.state = 'requested' AND c.next_at <= once.clock())
        ORDER BY random()
    LOOP
        EXIT WHEN v_left < 1;
        v_admitted := once.provider_admit(v_policy, v_left);
        v_used := 0;
        FOR v_call IN
            SELECT * FROM once.call c WHERE c.provider = v_policy.provider AND c.state = 'requested' AND c.next_at <= once.clock()
            ORDER BY c.next_at LIMIT v_admitted FOR UPDATE SKIP LOCKED
        LOOP
            -- A notice that came before the call was visible to it says that there is nothing to be sent.
            IF once.call_match(v_call) > 0 THEN
                SELECT * INTO v_call FROM once.call c WHERE c.id = v_call.id;
                CONTINUE WHEN v_call.state <> 'requested';
            END IF;
            v_new := v_call;
            v_new.state := 'sent';
            v_new.attempts := v_call.attempts + 1;
            v_new.sent_at := once.clock();
            v_new.leased_until := v_new.sent_at + v_policy.timeout + v_policy.grace;
            v_new.claim_id := gen_random_uuid();
            v_new.worker := p_worker;
            PERFORM once.call_move(v_call, v_new);
            v_used := v_used + 1;
            RETURN QUERY SELECT v_new.id, v_new.claim_id, v_new.provider::text, v_new.operation::text, v_new.tenant::text,
                v_new.method::text, v_new.path, v_new.headers, v_new.content_type, v_new.body, v_new.attempts, v_new.reference,
                v_policy.base_url, v_policy.key_header, v_policy.header_env,
                (extract(epoch FROM v_policy.timeout) * 1000)::int, (extract(epoch FROM v_policy.grace) * 1000)::int;
        END LOOP;
        PERFORM once.provider_return(v_policy, v_admitted, v_used);
        v_left := v_left - v_used;
    END LOOP;
END $$;
