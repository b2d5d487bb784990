-- The advisory lock of something that one take at a time does for a queue ('limit', 'upkeep').
CREATE OR REPLACE FUNCTION once.lock_queue(p_queue int, p_what text) RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$
    SELECT pg_catalog.hashtextextended(p_what COLLATE "C", 5307::bigint << 32 | p_queue) $$;
