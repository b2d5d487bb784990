-- Rows as ranges: a million that follow each other take as much room as one.
CREATE OR REPLACE FUNCTION once.import_ranges(p_rows bigint[]) RETURNS int8multirange
LANGUAGE sql IMMUTABLE AS $$
    SELECT pg_catalog.range_agg(pg_catalog.int8range(r, r + 1)) FROM pg_catalog.unnest(p_rows) r $$;
