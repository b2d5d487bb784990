-- A person's decision about a call: confirmed, failed, retry (it is sent again, under the same key) or ask (the provider
-- is asked again). Audited, with a reason. What has its verdict stays; a worker that is at it is waited for, not cut.
-- on_settled runs in this transaction, and what it raises, this raises.
CREATE OR REPLACE FUNCTION once.call_settle(p_id uuid, p_verdict text, p_actor text, p_reason text, p_reference text DEFAULT NULL)
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_call once.call;
    v_new once.call;
    v_policy once.provider;
BEGIN
    PERFORM once.check_decision(p_actor, p_reason);
    IF p_verdict IS NULL OR p_verdict NOT IN ('confirmed', 'failed', 'retry', 'ask') OR octet_length(p_reference) > 255 THEN
        RAISE EXCEPTION 'settling a call needs a verdict' USING ERRCODE = 'P4013',
            HINT = 'Verdicts are confirmed, failed, retry and ask; a reference has at most 255 bytes.';
    END IF;
    SELECT * INTO v_call FROM once.call c WHERE c.id = p_id FOR UPDATE;
    IF NOT FOUND OR v_call.state IN ('confirmed', 'failed') OR v_call.leased_until > once.clock()
       OR (p_verdict = 'ask' AND v_call.attempts = 0) THEN
        RAISE EXCEPTION 'there is nothing to settle' USING ERRCODE = 'P4013',
            DETAIL = CASE WHEN v_call.id IS NULL THEN 'No such call.'
                          WHEN v_call.state IN ('confirmed', 'failed') THEN 'It has its verdict already.'
                          WHEN p_verdict = 'ask' THEN 'It was never sent.'
                          ELSE 'A worker is at it.' END,
            HINT = 'pgonce calls show tells its state.';
    END IF;
    SELECT * INTO STRICT v_policy FROM once.provider p WHERE p.provider = v_call.provider;
    v_new := v_call;
    v_new.reference := coalesce(p_reference, v_call.reference);
    v_new.last_note := p_reason;
    v_new.leased_until := NULL;
    v_new.next_at := once.clock();
    IF p_verdict IN ('confirmed', 'failed') THEN
        v_new.state := p_verdict::once.call_state;
        v_new.settled_at := once.clock();
        v_new.settled_as := v_new.state;
        IF v_policy.on_settled IS NOT NULL AND v_call.settled_as IS DISTINCT FROM v_new.state THEN
            PERFORM once.run_on_settled(v_policy.on_settled, v_call.id, p_verdict, v_new.reference);
        END IF;
    ELSIF p_verdict = 'retry' THEN
        v_new.state := 'requested';
        v_new.attempts := 0;
    ELSE
        v_new.state := 'unknown';
        v_new.unknown_since := once.clock();
        v_new.doubted := true;
    END IF;
    -- A vanished sender's call is unknown first: nobody knows whether it went out.
    IF v_call.state = 'sent' AND v_new.state = 'requested' THEN
        v_new.doubted := true;
    END IF;
    INSERT INTO once.call_evidence (call_id, at, kind, source, verdict, state, note)
        VALUES (p_id, once.clock(), 'operator', p_actor, p_verdict, v_new.state, p_reason);
    INSERT INTO once.audit (actor, action, tenant, scope, key, from_status, to_status, from_claim, reason)
        VALUES (p_actor, 'call_settle:' || p_verdict, v_call.tenant, v_call.provider, v_call.id::text, v_call.state::text,
            v_new.state::text, v_call.claim_id, p_reason);
    RETURN once.call_move(v_call, v_new);
END $$;
