-- What a client needs to know before it talks to this schema: the newest migration, and the newest that
-- older binaries must not work with.
CREATE OR REPLACE FUNCTION once.schema_version() RETURNS jsonb
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN (SELECT jsonb_build_object('version', max(m.version), 'breaking', max(m.version) FILTER (WHERE m.breaking))
            FROM once.migration m);
END $$;
