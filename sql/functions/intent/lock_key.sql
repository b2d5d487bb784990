-- The advisory lock that serialises rivals for one intent. It only serialises: the primary key is what
-- guarantees, so a collision costs waiting and nothing else. 64 bits: hashtext collides in practice.
CREATE OR REPLACE FUNCTION once.lock_key(p_tenant text, p_scope text, p_key text) RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$
    SELECT pg_catalog.hashtextextended(p_key COLLATE "C",
           pg_catalog.hashtextextended(p_scope COLLATE "C",
           pg_catalog.hashtextextended(p_tenant COLLATE "C", 7306))) $$;
