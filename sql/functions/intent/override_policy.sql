-- The scope's rules with what this one call asks for, checked; and the default that depends on the mode:
-- an atomic rival is gone in milliseconds, so one waits; a leased one may take its whole lease.
CREATE OR REPLACE FUNCTION once.override_policy(p_policy once.scope, p_mode text, p_lease interval, p_wait interval)
RETURNS once.scope LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF p_mode IS NOT NULL THEN
        IF p_mode NOT IN ('atomic', 'leased') THEN
            RAISE EXCEPTION 'unknown mode' USING ERRCODE = 'P4020', HINT = 'Modes are atomic and leased.';
        END IF;
        p_policy.mode := p_mode;
    END IF;
    IF p_lease IS NOT NULL THEN
        IF p_lease < interval '10 milliseconds' OR p_lease > interval '1 day' THEN
            RAISE EXCEPTION 'a lease is between 10 milliseconds and 1 day' USING ERRCODE = 'P4020';
        END IF;
        p_policy.lease := p_lease;
    END IF;
    IF p_wait IS NOT NULL THEN
        IF p_wait < interval '0' OR p_wait > interval '5 minutes' THEN
            RAISE EXCEPTION 'a wait is between 0 and 5 minutes' USING ERRCODE = 'P4020';
        END IF;
        p_policy.in_progress := CASE WHEN p_wait = interval '0' THEN 'refuse' ELSE 'wait' END;
        p_policy.wait_max := p_wait;
    END IF;
    IF p_policy.in_progress IS NULL THEN
        p_policy.in_progress := CASE p_policy.mode WHEN 'atomic' THEN 'wait' ELSE 'refuse' END;
    END IF;
    RETURN p_policy;
END $$;
