-- Which messages a take may hand out, oldest first, locked: with the lease that they get, and whether their attempts are
-- used up. They are found without a lock: what another worker took meanwhile is not due any more, or is skipped.
CREATE OR REPLACE FUNCTION once.inbox_pick(p_consumer text, p_tenant text, p_limit int, p_lease interval)
RETURNS TABLE (id bigint, lease interval, spent boolean) LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    v_now timestamptz := once.clock();
    v_due bigint[] := once.inbox_heads(p_consumer, p_tenant, p_limit, v_now) || ARRAY(
        SELECT m.id FROM once.inbox m
        WHERE m.consumer = p_consumer AND (p_tenant IS NULL OR m.tenant = p_tenant) AND m.ordering_key IS NULL
          AND m.state IN ('received', 'failed_retryable', 'processing') AND coalesce(m.leased_until, m.next_at) <= v_now
        ORDER BY m.id LIMIT p_limit * 4);
BEGIN
    RETURN QUERY
    SELECT m.id, coalesce(p_lease, p.lease), m.attempts >= p.attempts_max
    FROM once.inbox m CROSS JOIN LATERAL once.consumer_policy(m.tenant, m.consumer) p
    WHERE m.id = ANY (v_due) AND m.state IN ('received', 'failed_retryable', 'processing')
      AND coalesce(m.leased_until, m.next_at) <= v_now
    ORDER BY m.id LIMIT p_limit FOR UPDATE OF m SKIP LOCKED;
END $$;
