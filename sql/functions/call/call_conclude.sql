-- What follows from something that was said about a call, with the evidence. Verdicts: confirmed, failed; pending (it is
-- not done yet), unclear (nobody could tell), absent (the provider does not know it), not_done (it was not taken, for now).
-- The caller holds the row. Returns the state that the call has now.
CREATE OR REPLACE FUNCTION once.call_conclude(
    p_call once.call, p_policy once.provider, p_verdict text, p_kind text, p_source text, p_code int DEFAULT NULL,
    p_headers jsonb DEFAULT NULL, p_body bytea DEFAULT NULL, p_reference text DEFAULT NULL, p_note text DEFAULT NULL,
    p_delay interval DEFAULT NULL)
RETURNS once.call_state LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_now timestamptz := once.clock();
    v_new once.call := p_call;
    v_note text := p_note;
    v_is_verdict boolean := p_verdict IN ('confirmed', 'failed');
BEGIN
    v_new.reference := coalesce(p_call.reference, left(p_reference, 255));
    IF p_kind = 'asked' THEN
        v_new.asked := p_call.asked + 1;
        v_new.leased_until := NULL;
    END IF;
    IF p_call.state IN ('confirmed', 'failed') THEN
        -- Nothing is overwritten. Two references are two of them at the provider, which one call must not be.
        IF v_is_verdict AND (p_verdict <> p_call.state::text OR left(p_reference, 255) <> p_call.reference) THEN
            v_new.state := 'escalated';
            v_new.contradicted := true;
            v_new.settled_at := NULL;
            v_note := concat_ws('; ', v_note, format('contradicts %s', p_call.state));
        END IF;
    ELSIF p_call.contradicted AND p_call.state = 'escalated' THEN
        NULL; -- a person has to settle it; whatever is said is kept for them
    ELSIF v_is_verdict THEN
        v_new := once.call_settled(v_new, p_policy, p_verdict::once.call_state);
        IF v_new.state = 'unknown' THEN
            v_note := concat_ws('; ', v_note, v_new.last_note);
        END IF;
    ELSIF p_call.state IN ('sent', 'unknown') AND p_kind <> 'notice' THEN
        v_new := once.call_doubt(v_new, p_policy, p_verdict, p_kind, p_delay);
        v_note := concat_ws('; ', v_note, CASE WHEN v_new.state = 'escalated' THEN v_new.last_note END);
    END IF;
    v_new.last_note := coalesce(nullif(v_note, ''), CASE WHEN p_code IS NOT NULL THEN 'status ' || p_code END, p_verdict);
    INSERT INTO once.call_evidence (call_id, at, kind, source, verdict, state, code, headers, body, note)
    VALUES (p_call.id, v_now, p_kind, left(p_source, 255), p_verdict, v_new.state, p_code, p_headers,
        substr(p_body, 1, 65536), left(nullif(v_note, ''), 2000));
    RETURN once.call_move(p_call, v_new);
END $$;
