-- Gives back what once.provider_admit gave and nobody used, in the same transaction.
CREATE OR REPLACE FUNCTION once.provider_return(p_policy once.provider, p_admitted int, p_used int) RETURNS void LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF p_used < p_admitted THEN
        UPDATE once.provider_state s SET
            tokens = CASE WHEN p_policy.rate_per_second IS NULL THEN s.tokens ELSE least(s.tokens + p_admitted - p_used, p_policy.rate_per_second) END,
            opened_until = CASE WHEN p_used = 0 AND s.opened_until IS NOT NULL THEN once.clock() ELSE s.opened_until END
        WHERE s.provider = p_policy.provider AND (p_policy.rate_per_second IS NOT NULL OR s.opened_until IS NOT NULL);
    END IF;
END $$;
