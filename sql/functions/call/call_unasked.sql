-- An unknown call whose provider cannot be asked. The caller holds the row.
CREATE OR REPLACE FUNCTION once.call_unasked(p_call once.call, p_policy once.provider) RETURNS void LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_now timestamptz := once.clock();
    v_new once.call := p_call;
BEGIN
    IF p_policy.resend AND p_call.attempts < p_policy.attempts_max THEN
        v_new.state := 'requested';
        v_new.next_at := v_now + once.call_backoff(p_policy, p_call.attempts);
        v_new.last_note := 'sent again under the same key';
    ELSIF p_policy.resend OR p_call.unknown_since + p_policy.escalate_after <= v_now THEN
        v_new.state := 'escalated';
        v_new.last_note := CASE WHEN p_policy.resend THEN format('%s attempts, none was answered', p_call.attempts)
            ELSE 'nobody told what became of it, and nobody can be asked' END;
    ELSE
        v_new.next_at := p_call.unknown_since + p_policy.escalate_after;
    END IF;
    IF v_new.state <> p_call.state THEN
        INSERT INTO once.call_evidence (call_id, at, kind, verdict, state, note)
            VALUES (p_call.id, v_now, 'clock', 'unclear', v_new.state, v_new.last_note);
    END IF;
    PERFORM once.call_move(p_call, v_new);
END $$;
