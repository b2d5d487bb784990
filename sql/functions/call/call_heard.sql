-- Records what became of a send: answered (with its status), lost (no answer, or broken off: it may have arrived) or
-- unsent (no byte of it went out). What it means is decided here; on_settled runs in this transaction. Under the fence of
-- the take. Returns the call's state.
CREATE OR REPLACE FUNCTION once.call_heard(
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
    IF v_call.state = 'requested' THEN
        RETURN v_call.state; -- said before, and its answer was lost
    END IF;
    SELECT * INTO STRICT v_policy FROM once.provider p WHERE p.provider = v_call.provider;
    v_verdict := CASE p_outcome WHEN 'unsent' THEN 'not_done' WHEN 'lost' THEN 'unclear'
        ELSE coalesce(p_verdict, once.judge_answer(v_policy, v_call.doubted, p_code)) END;
    v_reference := CASE WHEN v_verdict IN ('confirmed', 'pending') THEN coalesce(p_reference, once.json_field(p_body, v_policy.reference)) END;
    v_call.state := once.call_conclude(v_call, v_policy, v_verdict, 'answer', v_call.worker, p_code, p_headers, p_body,
        v_reference, p_note, p_delay);
    IF v_reference IS NOT NULL THEN
        SELECT * INTO v_call FROM once.call c WHERE c.id = p_id;
        PERFORM once.call_match(v_call); -- a notice that knows it by its reference may have been faster
        SELECT c.state INTO v_call.state FROM once.call c WHERE c.id = p_id;
    END IF;
    RETURN v_call.state;
END $$;
