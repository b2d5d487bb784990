-- How many calls are under way, by provider and state: for workers, who may not read the views.
CREATE OR REPLACE FUNCTION once.call_open(p_provider text DEFAULT NULL)
RETURNS TABLE (provider text, state text, calls bigint)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY SELECT c.provider::text, c.state::text, count(*) FROM once.call c
        WHERE c.state IN ('requested', 'sent', 'unknown', 'escalated') AND (p_provider IS NULL OR c.provider = p_provider)
        GROUP BY c.provider, c.state ORDER BY 1, 2;
END $$;
