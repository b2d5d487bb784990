-- What workers notice of a provider: that it failed (no answer, or a status from 500 on), that it answered, that it asks
-- to be left alone for a while (Retry-After). p_failed NULL: neither. Breaker and pause are everybody's.
CREATE OR REPLACE FUNCTION once.provider_heard(p_provider text, p_failed boolean DEFAULT NULL, p_pause interval DEFAULT NULL)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    UPDATE once.provider_state s SET
        failures = CASE WHEN p_failed THEN s.failures + 1 WHEN NOT p_failed THEN 0 ELSE s.failures END,
        opened_until = CASE WHEN p_failed AND s.failures + 1 >= p.breaker_failures THEN once.clock() + p.breaker_open_for
                            WHEN NOT p_failed THEN NULL ELSE s.opened_until END,
        paused_until = CASE WHEN p_pause IS NULL THEN s.paused_until
                            ELSE greatest(s.paused_until, once.clock() + least(greatest(p_pause, interval '0'), interval '1 day')) END
    FROM once.provider p
    WHERE s.provider = p_provider AND p.provider = s.provider
      -- A provider that is well costs no write.
      AND (p_failed OR p_pause IS NOT NULL OR (NOT p_failed AND (s.failures > 0 OR s.opened_until IS NOT NULL)));
END $$;
