-- Notes the size of the intent table, at most once an hour, for once.growth.
CREATE OR REPLACE FUNCTION once.sample_size() RETURNS void LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF NOT EXISTS (SELECT 1 FROM once.size_sample WHERE at > once.clock() - interval '1 hour') THEN
        INSERT INTO once.size_sample (at, rows, table_bytes, index_bytes)
        SELECT once.clock(), greatest(c.reltuples, 0)::bigint, pg_table_size(c.oid), pg_indexes_size(c.oid)
        FROM pg_class c WHERE c.oid = 'once.intent'::regclass
        ON CONFLICT DO NOTHING;
    END IF;
END $$;
