-- The form of an array: [1:3] for three elements counted from one, 0 for none, NULL for no array.
CREATE OR REPLACE FUNCTION once.shape(p_array anyarray) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT coalesce(pg_catalog.array_dims(p_array), pg_catalog.cardinality(p_array)::text) $$;
