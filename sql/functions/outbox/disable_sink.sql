-- Stops a sink's work, with the reason, until once.resume_sink. What it has not got stays.
CREATE OR REPLACE FUNCTION once.disable_sink(p_sink text, p_reason text)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    UPDATE once.sink s SET disabled = left(coalesce(nullif(btrim(p_reason), ''), 'disabled'), 2000) WHERE s.sink = p_sink;
END $$;
