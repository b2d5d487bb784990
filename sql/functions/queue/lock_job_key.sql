-- The advisory lock of a key, for takes: it only serialises; a collision makes a take pass over a job, once.
CREATE OR REPLACE FUNCTION once.lock_job_key(p_queue int, p_tenant text, p_key text) RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$
    SELECT pg_catalog.hashtextextended(p_key COLLATE "C",
           pg_catalog.hashtextextended(p_tenant COLLATE "C", 5306::bigint << 32 | p_queue)) $$;
