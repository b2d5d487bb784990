-- Records what the provider said when it was asked about a call, and settles the call by it, asks again later, or
-- escalates. Under the fence of once.call_doubts. A verdict of the worker's own counts in place of the rule's.
CREATE OR REPLACE FUNCTION once.call_asked(
    p_id uuid, p_claim_id uuid, p_outcome text, p_code int DEFAULT NULL, p_headers jsonb DEFAULT NULL, p_body bytea DEFAULT NULL,
    p_note text DEFAULT NULL, p_delay interval DEFAULT NULL, p_verdict text DEFAULT NULL, p_reference text DEFAULT NULL)
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_call once.call := once.hold_call(p_id, p_claim_id);
    v_policy once.provider;
    v_verdict text;
    v_reference text;
BEGIN
    PERFORM once.check_heard(p_outcome, p_code, p_verdict, p_delay);
    IF v_call.state = 'requested' OR (v_call.state = 'unknown' AND v_call.leased_until IS NULL) THEN
        RETURN v_call.state; -- said before, and its answer was lost
    END IF;
    SELECT * INTO STRICT v_policy FROM once.provider p WHERE p.provider = v_call.provider;
    v_verdict := CASE WHEN p_outcome <> 'answered' THEN 'unclear'
        ELSE coalesce(p_verdict, once.judge_asked(v_policy.reconcile_rule, p_code, p_body)) END;
    v_reference := CASE WHEN v_verdict IN ('confirmed', 'pending') THEN
        coalesce(p_reference, once.json_field(p_body, coalesce(v_policy.reconcile_rule ->> 'reference', v_policy.reference))) END;
    RETURN once.call_conclude(v_call, v_policy, v_verdict, 'asked', v_call.worker, p_code, p_headers, p_body, v_reference, p_note, p_delay);
END $$;
