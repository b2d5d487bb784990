-- Hands out jobs, by priority and then in their order, each under a lease; the claim id is the fence that every later word
-- about them must carry, one for all jobs of the call. Attempts are counted here, before anything can go wrong. What others
-- hold is skipped, never waited for. Call it in a short transaction of its own.
-- p_tenant NULL: of every tenant.
CREATE OR REPLACE FUNCTION once.take(
    p_queue text, p_worker text DEFAULT NULL, p_limit int DEFAULT 1, p_lease interval DEFAULT NULL, p_tenant text DEFAULT NULL)
RETURNS TABLE (id bigint, claim_id uuid, tenant text, key text, priority int, payload jsonb, attempts int, attempts_max int,
               enqueued_at timestamptz, leased_until timestamptz)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT t.id, t.claim_id, t.tenant, t.key, t.priority, t.payload, t.attempts, t.attempts_max, t.enqueued_at, t.leased_until
    FROM once.take_unsorted(p_queue, p_worker, p_limit, p_lease, p_tenant) t
    ORDER BY t.priority DESC, t.place, t.id;
END $$;
