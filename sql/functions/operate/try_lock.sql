-- A lock for a logical resource that has no row of its own (an import file, a merchant's day),
-- held to the end of the transaction. False: somebody else has it.
CREATE OR REPLACE FUNCTION once.try_lock(p_resource text, p_tenant text DEFAULT '') RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF p_resource IS NULL OR octet_length(p_resource) NOT BETWEEN 1 AND 1024 THEN
        RAISE EXCEPTION 'resource name is missing or longer than 1024 bytes'
            USING ERRCODE = 'P4001', HINT = 'Name the thing to lock, for example import:2026-11-15.csv.';
    END IF;
    RETURN pg_try_advisory_xact_lock(
        hashtextextended(p_resource COLLATE "C", hashtextextended(coalesce(p_tenant, '') COLLATE "C", 9127)));
END $$;
