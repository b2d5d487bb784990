-- The rules for an intent: the tenant's own for the scope, else the scope's, else the defaults.
-- Inlined into its callers.
CREATE OR REPLACE FUNCTION once.policy(p_tenant text, p_scope text) RETURNS SETOF once.scope
LANGUAGE sql STABLE ROWS 1 AS $$
    SELECT s.* FROM once.scope s
    WHERE (s.scope = p_scope AND s.tenant = p_tenant) OR (s.scope = p_scope AND s.tenant = '') OR s.scope = ''
    ORDER BY s.scope DESC, s.tenant DESC LIMIT 1 $$;
