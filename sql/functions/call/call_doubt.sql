-- A call that was sent and has no verdict: what to do next. Not taken and never in doubt: it is sent again later. Anything
-- else is unknown until the provider was asked; after its limits a person is.
CREATE OR REPLACE FUNCTION once.call_doubt(p_call once.call, p_policy once.provider, p_verdict text, p_kind text, p_delay interval)
RETURNS once.call LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_now timestamptz := once.clock();
    v_new once.call := p_call;
    v_is_believed boolean := p_verdict = 'absent' AND p_call.sent_at + p_policy.absent_after <= v_now;
BEGIN
    v_new.leased_until := NULL;
    IF v_is_believed AND p_policy.absent = 'failed' THEN
        RETURN once.call_settled(v_new, p_policy, 'failed');
    ELSIF (p_verdict = 'not_done' AND NOT p_call.doubted) OR (v_is_believed AND p_policy.absent = 'resend') THEN
        IF p_call.attempts < p_policy.attempts_max THEN
            v_new.state := 'requested';
            v_new.next_at := v_now + greatest(once.call_backoff(p_policy, p_call.attempts), p_delay);
            RETURN v_new;
        END IF;
        v_new.state := 'escalated';
        v_new.last_note := format('%s attempts, none got through', p_call.attempts);
        RETURN v_new;
    END IF;
    v_new.doubted := true;
    v_new.unknown_since := coalesce(p_call.unknown_since, v_now);
    IF p_kind = 'asked' AND (v_is_believed OR v_new.unknown_since + p_policy.escalate_after <= v_now) THEN
        v_new.state := 'escalated';
        v_new.last_note := format('asked %s times, never settled', p_call.asked);
        RETURN v_new;
    END IF;
    v_new.state := 'unknown';
    v_new.next_at := v_now + CASE WHEN p_kind = 'asked' THEN once.call_backoff(p_policy, p_call.asked) ELSE p_policy.reconcile_after END;
    IF p_verdict = 'absent' AND p_call.sent_at + p_policy.absent_after BETWEEN v_now AND v_new.next_at THEN
        v_new.next_at := p_call.sent_at + p_policy.absent_after;
    END IF;
    v_new.next_at := greatest(v_new.next_at, v_now + p_delay);
    RETURN v_new;
END $$;
