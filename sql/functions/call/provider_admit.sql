-- How many requests may go to a provider now, up to p_wanted, all workers together; they count as used. None while it
-- asked to be left alone, while the breaker is open, or while another worker is just asking here: nobody waits. After the
-- breaker's time one is let through, and the others wait another round.
CREATE OR REPLACE FUNCTION once.provider_admit(p_policy once.provider, p_wanted int) RETURNS int LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_state once.provider_state;
    v_now timestamptz := once.clock();
    v_tokens double precision;
    v_count int := p_wanted;
BEGIN
    SELECT * INTO v_state FROM once.provider_state s WHERE s.provider = p_policy.provider FOR UPDATE SKIP LOCKED;
    IF NOT FOUND OR v_state.paused_until > v_now OR v_state.opened_until > v_now THEN
        RETURN 0;
    END IF;
    IF v_state.opened_until IS NOT NULL THEN
        v_count := 1;
        v_state.opened_until := v_now + p_policy.breaker_open_for;
    END IF;
    IF p_policy.rate_per_second IS NOT NULL THEN
        -- A clock that went back refills nothing.
        v_tokens := least(p_policy.rate_per_second, v_state.tokens
            + p_policy.rate_per_second * greatest(0, extract(epoch FROM v_now - v_state.refilled_at)));
        v_count := least(v_count, floor(v_tokens)::int);
    ELSIF v_state.opened_until IS NULL THEN
        RETURN v_count; -- nothing to keep
    END IF;
    IF v_count < 1 THEN
        RETURN 0;
    END IF;
    UPDATE once.provider_state s SET tokens = coalesce(v_tokens - v_count, s.tokens), refilled_at = v_now, opened_until = v_state.opened_until
    WHERE s.provider = p_policy.provider;
    RETURN v_count;
END $$;
