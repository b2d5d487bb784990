-- Whether tenant, scope, key and fingerprint are within their limits. Inlined into claim;
-- once.check_intent says which one is not.
CREATE OR REPLACE FUNCTION once.well_formed(p_tenant text, p_scope text, p_key text, p_fingerprint bytea)
RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT octet_length(p_key) BETWEEN 1 AND 255 AND p_key !~ '[[:cntrl:]]'
       AND octet_length(p_scope) BETWEEN 1 AND 128 AND p_scope !~ '[[:cntrl:]]'
       AND octet_length(p_tenant) <= 255 AND p_tenant !~ '[[:cntrl:]]'
       AND octet_length(p_fingerprint) = 32 $$;
