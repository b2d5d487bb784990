-- A random pause up to the provider's backoff, doubled each time, and at least half of it.
CREATE OR REPLACE FUNCTION once.call_backoff(p_policy once.provider, p_times int) RETURNS interval LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    RETURN (0.5 + random() / 2) * least(p_policy.backoff_max, p_policy.backoff * power(2, least(greatest(p_times - 1, 0), 30)));
END $$;
