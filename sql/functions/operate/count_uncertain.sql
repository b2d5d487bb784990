-- How many intents are uncertain, counted up to p_limit: for a gauge, by whoever may not read the views.
CREATE OR REPLACE FUNCTION once.count_uncertain(p_limit int DEFAULT 100000) RETURNS bigint
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN (SELECT count(*) FROM (SELECT FROM once.intent i WHERE i.status = 'uncertain' LIMIT greatest(0, p_limit)) u);
END $$;
