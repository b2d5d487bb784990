-- The rules for a consumer: the tenant's own, else the consumer's, else the defaults. Inlined into its callers.
CREATE OR REPLACE FUNCTION once.consumer_policy(p_tenant text, p_consumer text) RETURNS SETOF once.consumer
LANGUAGE sql STABLE ROWS 1 AS $$
    SELECT c.* FROM once.consumer c
    WHERE (c.consumer = p_consumer AND c.tenant = p_tenant) OR (c.consumer = p_consumer AND c.tenant = '') OR c.consumer = ''
    ORDER BY c.consumer DESC, c.tenant DESC LIMIT 1 $$;
