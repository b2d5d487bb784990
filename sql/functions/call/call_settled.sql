-- A call with its verdict, and what the application does about it: on_settled runs here, in the same transaction. If that
-- raises, the verdict does not stay without it: the call is unknown again, and is asked about later.
CREATE OR REPLACE FUNCTION once.call_settled(p_call once.call, p_policy once.provider, p_verdict once.call_state)
RETURNS once.call LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_new once.call := p_call;
BEGIN
    v_new.state := p_verdict;
    v_new.settled_at := once.clock();
    v_new.settled_as := p_verdict;
    v_new.leased_until := NULL;
    IF p_policy.on_settled IS NOT NULL AND p_call.settled_as IS DISTINCT FROM p_verdict THEN
        PERFORM once.run_on_settled(p_policy.on_settled, p_call.id, p_verdict::text, v_new.reference);
    END IF;
    RETURN v_new;
EXCEPTION WHEN OTHERS THEN
    IF SQLSTATE IN ('40001', '40P01') THEN
        RAISE;
    END IF;
    v_new := p_call;
    v_new.state := 'unknown';
    v_new.doubted := true;
    v_new.leased_until := NULL;
    v_new.unknown_since := coalesce(p_call.unknown_since, once.clock());
    v_new.next_at := once.clock() + once.call_backoff(p_policy, p_call.asked);
    v_new.last_note := format('on_settled raised %s: it is %s, and not settled here', SQLSTATE, p_verdict);
    RETURN v_new;
END $$;
